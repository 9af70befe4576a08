//! Judges a run by its evidence.

mod ended;
mod holds;
mod losses;
mod order;
mod sessions;
mod stale;
#[cfg(test)]
mod tests;
mod transaction;

use super::evidence::Evidence;
use super::kind::Kind;
use super::nemesis::Disturbance;
use super::record::{Outcome, What};
use std::fmt;
use transaction::Transaction;

/// The verdict on a run.
#[derive(Debug, Clone, Default)]
pub struct Findings {
    /// Promises that were broken.
    pub violations: Vec<String>,
    /// Acknowledged transactions that an asynchronous failover has lost.
    pub lost_in_failover: usize,
    /// Grants made and acknowledged.
    pub grants: usize,
    /// Grants that others may live beside.
    pub multi_holder: usize,
    /// Adoptions acknowledged.
    pub adoptions: usize,
    /// Writes made and acknowledged.
    pub writes: usize,
    /// Writes that were prepared, whatever became of them then.
    pub prepared: usize,
    /// Writes refused because their token was stale or did not speak.
    pub refused: usize,
    /// Writes by an older number than one that a failover, which may lose what was committed, has lost.
    pub let_pass: usize,
    /// Leases that passed on before their time because a session had ended.
    pub passed_on: usize,
    /// Transactions whose outcome nobody knows.
    pub unknown: usize,
    /// Tokens that some client has seen.
    pub tokens: usize,
}

impl Findings {
    /// Adds those of a further run.
    pub fn add(&mut self, further: Findings) {
        self.violations.extend(further.violations);
        for (all, more) in [
            (&mut self.lost_in_failover, further.lost_in_failover),
            (&mut self.grants, further.grants),
            (&mut self.multi_holder, further.multi_holder),
            (&mut self.adoptions, further.adoptions),
            (&mut self.writes, further.writes),
            (&mut self.prepared, further.prepared),
            (&mut self.refused, further.refused),
            (&mut self.let_pass, further.let_pass),
            (&mut self.passed_on, further.passed_on),
            (&mut self.unknown, further.unknown),
            (&mut self.tokens, further.tokens),
        ] {
            *all += more;
        }
    }
}

/// Compares what was asked and seen with every promise, and says which were broken.
pub fn judge(evidence: &Evidence) -> Findings {
    let transactions = transaction::all(evidence);
    let mut findings = Findings::default();
    for transaction in transactions.values() {
        findings.count(transaction);
    }
    order::tokens_rise(evidence, &mut findings);
    order::grants_in_order(evidence, &mut findings);
    order::writes_in_order(evidence, &mut findings);
    losses::nothing_lost(evidence, &transactions, &mut findings);
    holds::no_more_than_may(evidence, &transactions, &mut findings);
    stale::none_commits(evidence, &transactions, &mut findings);
    sessions::end_their_grants(evidence, &transactions, &mut findings);
    ended::nothing_is_accepted(evidence, &transactions, &mut findings);
    findings.violations.extend_from_slice(&evidence.upkeep.findings);
    findings.violations.extend_from_slice(&evidence.crashes);
    findings
}

impl Findings {
    /// How many promises were broken, and the first of them.
    pub fn write_violations(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>8}  violations", self.violations.len())?;
        self.violations.iter().take(10).try_for_each(|what| write!(f, "\n          {what}"))
    }

    fn violated(&mut self, what: String) {
        self.violations.push(what);
    }

    fn count(&mut self, transaction: &Transaction) {
        let what = transaction.what;
        self.prepared += usize::from(transaction.prepared.is_some());
        match &transaction.outcome {
            Some(Outcome::Committed) if what == What::Adopt => self.adoptions += 1,
            Some(Outcome::Committed) if what.acquires() => {
                self.grants += 1;
                let alone = Kind::of(transaction.lease) == Kind::Exclusive
                    || Kind::of(transaction.lease) == Kind::Shared && what == What::Acquire;
                self.multi_holder += usize::from(!alone);
            }
            Some(Outcome::Committed) if what.writes() => self.writes += 1,
            Some(Outcome::Refused(state)) if state == "PF001" || state == "PF004" => {
                self.refused += 1;
            }
            // An internal error, or a corrupted table or index.
            Some(Outcome::Refused(why)) if why.starts_with("XX") || is_deadlock_of_leases(why) => {
                self.violated(format!(
                    "worker {} was refused {what:?} with {why}",
                    transaction.worker
                ));
            }
            Some(Outcome::Unknown) | None => self.unknown += 1,
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
