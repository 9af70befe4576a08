//! Rows that an UPDATE moves to another partition. Postgres executes this as a DELETE and an INSERT, for which the
//! triggers fire. The UPDATE has been checked, so its two halves are recognized and pass.

use crate::pg::fenced_table::trigger::RowId;
use crate::pg::session::scope::{SavepointId, TransactionEvent};
use crate::pg::session::xact;
use pg_fence_rules::Instant;
use pg_fence_rules::fence::Landing;
use std::cell::RefCell;

thread_local! {
    /// The row version whose UPDATE was accepted last, at each nesting depth of triggers. If the row moves, that
    /// version is deleted next, before the statement visits another row.
    static ACCEPTED: RefCell<Vec<Accepted>> = const { RefCell::new(Vec::new()) };
}

/// Forgets accepted rows at the end of their transaction, or at the rollback of their savepoint. The entries stay,
/// because their index is the depth.
pub fn on_transaction_event(event: TransactionEvent) {
    ACCEPTED.with_borrow_mut(|all| {
        for accepted in all {
            if !event.survives(accepted.savepoint) {
                *accepted = Accepted::default();
            }
        }
    });
}

/// The last accepted row at one nesting depth of triggers.
#[derive(Clone, Copy, Default)]
struct Accepted {
    /// The version that was updated, and the tokens of the update.
    row: Option<(RowId, Landing)>,
    /// The version whose DELETE was seen, and its tokens: the row is inserted into another partition next, unless a
    /// later trigger skips the DELETE.
    under_way: Option<(RowId, Landing)>,
    /// The new deadline of a row lease.
    deadline: Option<Instant>,
    /// The savepoint of the update; its rollback undoes the update.
    savepoint: SavepointId,
}

/// Remembers the version whose UPDATE was accepted, with its tokens.
pub fn accept(depth: usize, row: RowId, landing: Landing) {
    accept_held(depth, row, landing, None);
}

/// Remembers the same for a row lease, with its deadline.
pub fn accept_held(depth: usize, row: RowId, landing: Landing, deadline: Option<Instant>) {
    let (row, savepoint) = (Some((row, landing)), xact::savepoint());
    at_depth(depth, |last| *last = Accepted { row, under_way: None, deadline, savepoint });
}

/// Returns true if the UPDATE of this version was just accepted, so that its DELETE is the first half of a move. If the
/// other half is not seen, because the table is fenced on no INSERT, the next row that is seen is not taken for it.
pub fn leaves(depth: usize, row: RowId, sees_arriving: bool) -> bool {
    at_depth(depth, |accepted| {
        let moves = accepted.row.take().filter(|(id, _)| *id == row);
        accepted.under_way = moves.filter(|_| sees_arriving).or(accepted.under_way);
        moves.is_some()
    })
}

/// Takes the tokens of the row that is being inserted, as accepted in the old partition.
pub fn take_under_way(depth: usize) -> Option<Landing> {
    let left = at_depth(depth, |accepted| accepted.under_way.take());
    left.filter(|(id, _)| id.has_moved()).map(|(_, landing)| landing)
}

/// The deadline of the row that is being inserted, as accepted in the old partition.
pub fn deadline(depth: usize) -> Option<Instant> {
    at_depth(depth, |accepted| accepted.deadline)
}

/// Takes the tokens of the last accepted row, if its DELETE was not seen.
pub fn take_accepted(depth: usize) -> Option<Landing> {
    at_depth(depth, |accepted| accepted.row.take().map(|(_, landing)| landing))
}

/// Forgets the row at the end of its statement.
pub fn forget(depth: usize) {
    at_depth(depth, |accepted| *accepted = Accepted::default());
}

fn at_depth<T>(depth: usize, work: impl FnOnce(&mut Accepted) -> T) -> T {
    ACCEPTED.with_borrow_mut(|accepted| {
        if accepted.len() <= depth {
            accepted.resize(depth + 1, Accepted::default());
        }
        work(&mut accepted[depth])
    })
}
