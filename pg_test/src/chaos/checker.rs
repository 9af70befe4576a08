//! The checker of a run's history.

mod ended;
mod holds;
mod losses;
mod new_epochs;
mod order;
mod rows;
mod sessions;
#[cfg(test)]
mod tests;
mod transaction;

use super::history::History;
use super::lease_kind::LeaseKind;
use super::nemesis::Disturbance;
use super::record::{Outcome, Purpose};
use std::collections::HashMap;
use std::fmt;
use transaction::Transaction;

/// What is counted in a run, as named in the summary.
pub const TOKENS: &str = "tokens seen";
pub const GRANTS: &str = "grants acknowledged";
/// Grants that others may coexist with.
pub const SHARED: &str = "  of them shared, or of slots";
pub const ADOPTIONS: &str = "adoptions of what a lock service has granted";
pub const WRITES: &str = "writes acknowledged";
/// Prepared writes, whatever their outcome.
pub const PREPARED: &str = "writes prepared";
/// Writes whose token was stale or did not speak.
pub const REFUSED: &str = "stale writes refused";
pub const PASSED_ON: &str = "leases passed on before their time, as a session had ended";
pub const ROW_CHANGES: &str = "committed changes of rows that are leases";
pub const CLAIMS: &str = "  of them claims";
/// Claims after the deadline of another claim, with no write in between.
pub const TAKE_OVERS: &str = "    of which over a claim that was over";
/// Late writes of a holder whose row nobody had claimed meanwhile.
pub const LATE_WRITES: &str = "  of them by their holder, late";
/// Writes to a row held by another, or with a token that was no longer the row's.
pub const ROW_REFUSED: &str = "transactions on such rows refused";
pub const UNKNOWN: &str = "outcomes unknown";
/// Acknowledged transactions.
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

/// The result of the check.
#[derive(Debug, Clone, Default)]
pub struct Findings {
    /// The requirements that were violated.
    pub violations: Vec<String>,
    counts: HashMap<&'static str, usize>,
}

impl Findings {
    /// Adds the findings of another run.
    pub fn add(&mut self, further: Findings) {
        self.violations.extend(further.violations);
        for (what, more) in further.counts {
            *self.counts.entry(what).or_default() += more;
        }
    }

    /// The number of these events.
    pub fn number(&self, what: &str) -> usize {
        self.counts.get(what).copied().unwrap_or(0)
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }
}

/// Compares all requests and answers with every requirement, and reports violations.
pub fn check(history: &History) -> Findings {
    let transactions = transaction::all(history);
    let mut findings = Findings::default();
    for transaction in transactions.values() {
        findings.look_at(transaction);
    }
    order::tokens_rise(history, &mut findings);
    order::grants_in_order(history, &mut findings);
    order::writes_in_order(history, &mut findings);
    losses::nothing_lost(history, &transactions, &mut findings);
    holds::no_more_than_may(history, &transactions, &mut findings);
    sessions::end_their_grants(history, &transactions, &mut findings);
    ended::nothing_is_accepted(history, &transactions, &mut findings);
    new_epochs::invalidated_tokens(history, &transactions, &mut findings);
    rows::are_leases(history, &transactions, &mut findings);
    findings.violations.extend_from_slice(&history.upkeep.findings);
    findings.violations.extend_from_slice(&history.crashes);
    findings
}

impl fmt::Display for Findings {
    /// Prints all counts, the number of violations, and the first of them.
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
        let purpose = transaction.purpose;
        if transaction.prepared.is_some() {
            self.count(PREPARED);
        }
        match &transaction.outcome {
            Some(Outcome::Committed) if purpose == Purpose::Adopt => self.count(ADOPTIONS),
            Some(Outcome::Committed) if purpose.acquires() => {
                self.count(GRANTS);
                let kind = LeaseKind::of(transaction.lease);
                let alone = kind == LeaseKind::Exclusive
                    || kind == LeaseKind::Shared && purpose == Purpose::Acquire;
                if !alone {
                    self.count(SHARED);
                }
            }
            Some(Outcome::Committed) if purpose.writes() => self.count(WRITES),
            // Workers present only tokens that were drawn, and name the fence only with a token.
            Some(Outcome::Refused(state))
                if purpose == Purpose::Row && (state == "PF002" || state == "PF003") =>
            {
                self.violated(format!(
                    "worker {} was refused {purpose:?} with {state}",
                    transaction.worker
                ));
            }
            Some(Outcome::Refused(state)) if purpose == Purpose::Row && state.starts_with("PF") => {
                self.count(ROW_REFUSED);
            }
            Some(Outcome::Refused(state)) if state == "PF001" || state == "PF004" => {
                self.count(REFUSED);
            }
            // An internal error, or a corrupted table or index.
            Some(Outcome::Refused(why)) if why.starts_with("XX") || is_deadlock_of_leases(why) => {
                self.violated(format!(
                    "worker {} was refused {purpose:?} with {why}",
                    transaction.worker
                ));
            }
            Some(Outcome::Unknown) | None => self.count(UNKNOWN),
            _ => {}
        }
    }
}

/// Returns true if all waits of a deadlock were for leases. If a row or a table is involved, PostgreSQL may end it: a
/// write that adopts first holds the lease and waits for the row, a stale write of a bound table holds the row and
/// waits for the lease, and maintenance locks several tables.
fn is_deadlock_of_leases(why: &str) -> bool {
    let waits: Vec<&str> = why.lines().filter(|line| line.contains(" waits for ")).collect();
    !waits.is_empty() && waits.iter().all(|wait| wait.contains(" on advisory lock "))
}

/// Returns true if the server's clock was stepped between these times.
fn stepped(history: &History, from: i64, to: i64) -> bool {
    let steps = |kind| matches!(kind, Disturbance::StepClock | Disturbance::FailOver);
    // A process that was frozen while it read the clock uses the time later.
    history.disturbances.iter().any(|f| steps(f.kind) && f.ended + 2_000_000 >= from && f.at <= to)
}
