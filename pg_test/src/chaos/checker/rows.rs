//! Checks row leases by their own history.

use super::transaction::Transaction;
use super::{CLAIMS, Findings, LATE_WRITES, ROW_CHANGES, TAKE_OVERS, stepped};
use crate::chaos::history::{Change, History, Operation};
use crate::chaos::rows::Statement;
use std::collections::HashMap;

/// The state of a row after a part of its history.
#[derive(Default)]
struct RowHistory {
    exists: bool,
    fence: Option<i64>,
    /// The greatest fence that the row has had, also before it was deleted and inserted again.
    greatest: i64,
    /// The worker whose claim drew the fence.
    claimant: Option<u32>,
    /// True if another worker has written the row since that claim.
    written_since: bool,
    /// The transaction of the last write.
    id: i64,
}

/// Nobody writes a row that another holds. A holder's write lands only if nobody else has written the row since its
/// claim, and it was not given up. Tokens rise, and only claims draw them.
pub fn are_leases(
    history: &History,
    transactions: &HashMap<i64, Transaction>,
    findings: &mut Findings,
) {
    let mut rows: HashMap<i32, RowHistory> = HashMap::new();
    for change in &history.changes {
        let row = rows.entry(change.row).or_default();
        let transaction = transactions.get(&change.id);
        // If the clock goes back, a row may be held that was free when it was written.
        let clock_stood = transaction.is_none_or(|t| !stepped(history, t.requested, t.ended));
        count(change, findings);
        for harm in row.harm_of(change, clock_stood) {
            findings.violated(format!("row {}: {harm}: {change:?}", change.row));
        }
        row.take(change);
    }
    for stored in &history.runs {
        let row = rows.remove(&stored.row).unwrap_or_default();
        if !row.exists || row.fence != stored.fence {
            findings.violated(format!("{stored:?} is not what was written: {:?}", row.fence));
        }
    }
    for (number, _) in rows.iter().filter(|(_, row)| row.exists) {
        findings.violated(format!("row {number} is gone, and nobody has deleted it"));
    }
}

fn count(change: &Change, findings: &mut Findings) {
    findings.count(ROW_CHANGES);
    let was_over = change.held_us.is_some_and(|us| us < 0);
    if change.is_claim() {
        findings.count(CLAIMS);
        if was_over {
            findings.count(TAKE_OVERS);
        }
    } else if was_over && change.statement.shows_token() {
        findings.count(LATE_WRITES);
    }
}

impl Change {
    /// Returns true if the change has drawn a token.
    fn is_claim(&self) -> bool {
        self.now.is_some() && self.now != self.was
    }
}

impl RowHistory {
    /// The faults of a change of this row.
    fn harm_of(&self, change: &Change, clock_stood: bool) -> Vec<&'static str> {
        let Change { worker, statement, .. } = *change;
        let is_own = self.exists && self.id == change.id;
        let is_held = change.was.is_some() && change.held_us.is_some_and(|us| us > 0);
        // A row that its own transaction has given up or inserted is free.
        let is_open = !is_own || change.was.is_some() && change.held_us.is_some();
        let as_holder = statement.shows_token() && is_open;
        let may_draw = statement == Statement::Claim || statement.shows_token() && !is_open;
        let is_claimants = self.claimant == Some(worker);
        let is_evicted = statement == Statement::Evict;
        let all = [
            (
                self.exists == (change.op == Operation::Insert) || change.was != self.fence,
                "changed from what was not there",
            ),
            (
                is_held && clock_stood && !is_own && !as_holder && !is_evicted,
                "written while held by another",
            ),
            (as_holder && !is_claimants, "written by another's token"),
            (as_holder && self.written_since, "written by a holder after somebody else"),
            (as_holder && change.held_us.is_none(), "written by a token that was given up"),
            (as_holder && change.is_claim(), "a holder's write has drawn a token"),
            (change.is_claim() && !may_draw, "a token was drawn by no claim"),
            (
                change.is_claim() && change.now.is_some_and(|now| now <= self.greatest),
                "a token is not greater than those before",
            ),
            (
                change.op == Operation::Update && change.now.is_none() && change.was.is_some(),
                "the fence was lost",
            ),
        ];
        all.into_iter().filter_map(|(is_so, harm)| is_so.then_some(harm)).collect()
    }

    fn take(&mut self, change: &Change) {
        let worker = Some(change.worker);
        if change.op == Operation::Insert || change.is_claim() {
            self.claimant = worker.filter(|_| change.is_claim());
            self.written_since = false;
        } else {
            self.written_since |= self.claimant != worker;
        }
        self.exists = change.op != Operation::Delete;
        self.fence = change.now;
        self.greatest = self.greatest.max(change.now.unwrap_or(0));
        self.id = change.id;
    }
}
