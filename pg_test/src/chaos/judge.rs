//! Judges a run by its evidence.

mod ended;
mod holds;
mod jumps;
mod losses;
mod order;
mod rows;
mod sessions;
#[cfg(test)]
mod tests;
mod transaction;

use super::evidence::Evidence;
use super::kind::Kind;
use super::nemesis::Disturbance;
use super::record::{Outcome, What};
use std::collections::HashMap;
use std::fmt;
use transaction::Transaction;

/// What is counted in a run, in the words of the summary.
pub const TOKENS: &str = "tokens seen";
pub const GRANTS: &str = "grants acknowledged";
/// Grants that others may live beside.
pub const SHARED: &str = "  of them shared, or of slots";
pub const ADOPTIONS: &str = "adoptions of what a lock service has granted";
pub const WRITES: &str = "writes acknowledged";
/// Whatever became of them then.
pub const PREPARED: &str = "writes prepared";
/// Their token was stale or did not speak.
pub const REFUSED: &str = "stale writes refused";
pub const PASSED_ON: &str = "leases passed on before their time, as a session had ended";
pub const ROW_CHANGES: &str = "committed changes of rows that are leases";
pub const CLAIMS: &str = "  of them claims";
/// The deadline before had passed, and nobody had written the row since.
pub const TAKE_OVERS: &str = "    of which over a claim that was over";
/// By its holder, when others might have come and had not.
pub const LATE_WRITES: &str = "  of them by their holder, late";
/// Held by another, or the token was no longer the row's.
pub const ROW_REFUSED: &str = "transactions on such rows refused";
pub const UNKNOWN: &str = "outcomes unknown";
/// Acknowledged ones.
pub const LOST_IN_FAILOVER: &str = "transactions lost to asynchronous failovers";

const COUNTED: [&str; 15] = [
    TOKENS,
    GRANTS,
    SHARED,
    ADOPTIONS,
    WRITES,
    PREPARED,
    REFUSED,
    PASSED_ON,
    ROW_CHANGES,
    CLAIMS,
    TAKE_OVERS,
    LATE_WRITES,
    ROW_REFUSED,
    UNKNOWN,
    LOST_IN_FAILOVER,
];

/// The verdict on a run.
#[derive(Debug, Clone, Default)]
pub struct Findings {
    /// Promises that were broken.
    pub violations: Vec<String>,
    counts: HashMap<&'static str, usize>,
}

impl Findings {
    /// Adds those of a further run.
    pub fn add(&mut self, further: Findings) {
        self.violations.extend(further.violations);
        for (what, more) in further.counts {
            *self.counts.entry(what).or_default() += more;
        }
    }

    /// How many of these there were.
    pub fn number(&self, what: &str) -> usize {
        self.counts.get(what).copied().unwrap_or(0)
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }
}

/// Compares what was asked and seen with every promise, and says which were broken.
pub fn judge(evidence: &Evidence) -> Findings {
    let transactions = transaction::all(evidence);
    let mut findings = Findings::default();
    for transaction in transactions.values() {
        findings.look_at(transaction);
    }
    order::tokens_rise(evidence, &mut findings);
    order::grants_in_order(evidence, &mut findings);
    order::writes_in_order(evidence, &mut findings);
    losses::nothing_lost(evidence, &transactions, &mut findings);
    holds::no_more_than_may(evidence, &transactions, &mut findings);
    sessions::end_their_grants(evidence, &transactions, &mut findings);
    ended::nothing_is_accepted(evidence, &transactions, &mut findings);
    jumps::silence(evidence, &transactions, &mut findings);
    rows::are_leases(evidence, &transactions, &mut findings);
    findings.violations.extend_from_slice(&evidence.upkeep.findings);
    findings.violations.extend_from_slice(&evidence.crashes);
    findings
}

impl fmt::Display for Findings {
    /// All that was counted, how many promises were broken, and the first of them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for what in COUNTED {
            writeln!(f, "{:>8}  {what}", self.number(what))?;
        }
        write!(f, "{:>8}  violations", self.violations.len())?;
        self.violations.iter().take(10).try_for_each(|what| write!(f, "\n          {what}"))
    }
}

impl Findings {
    fn violated(&mut self, what: String) {
        self.violations.push(what);
    }

    fn look_at(&mut self, transaction: &Transaction) {
        let what = transaction.what;
        if transaction.prepared.is_some() {
            self.count(PREPARED);
        }
        match &transaction.outcome {
            Some(Outcome::Committed) if what == What::Adopt => self.count(ADOPTIONS),
            Some(Outcome::Committed) if what.acquires() => {
                self.count(GRANTS);
                let kind = Kind::of(transaction.lease);
                let alone =
                    kind == Kind::Exclusive || kind == Kind::Shared && what == What::Acquire;
                if !alone {
                    self.count(SHARED);
                }
            }
            Some(Outcome::Committed) if what.writes() => self.count(WRITES),
            // What a worker shows was drawn, and what it writes names the fence only with a token.
            Some(Outcome::Refused(state))
                if what == What::Row && (state == "PF002" || state == "PF003") =>
            {
                self.violated(format!(
                    "worker {} was refused {what:?} with {state}",
                    transaction.worker
                ));
            }
            Some(Outcome::Refused(state)) if what == What::Row && state.starts_with("PF") => {
                self.count(ROW_REFUSED);
            }
            Some(Outcome::Refused(state)) if state == "PF001" || state == "PF004" => {
                self.count(REFUSED);
            }
            // An internal error, or a corrupted table or index.
            Some(Outcome::Refused(why)) if why.starts_with("XX") || is_deadlock_of_leases(why) => {
                self.violated(format!(
                    "worker {} was refused {what:?} with {why}",
                    transaction.worker
                ));
            }
            Some(Outcome::Unknown) | None => self.count(UNKNOWN),
            _ => {}
        }
    }
}

/// Whether leases alone were waited for in a circle. One that a row or a table is part of is PostgreSQL's to end: a write
/// that adopts first has the lease and wants the row, while a stale write of a bound table has the row and wants the
/// lease; and maintenance locks several tables.
fn is_deadlock_of_leases(why: &str) -> bool {
    let waits: Vec<&str> = why.lines().filter(|line| line.contains(" waits for ")).collect();
    !waits.is_empty() && waits.iter().all(|wait| wait.contains(" on advisory lock "))
}

/// Whether the server's clock was stepped between these times.
fn stepped(evidence: &Evidence, from: i64, to: i64) -> bool {
    let steps = |kind| matches!(kind, Disturbance::StepClock | Disturbance::FailOver);
    // A process that was frozen as it read the clock uses what it has read later.
    evidence.disturbances.iter().any(|f| steps(f.kind) && f.ended + 2_000_000 >= from && f.at <= to)
}
