//! Rows that an UPDATE moves to another partition: a DELETE here and an INSERT there, of which the trigger fires for each.
//! The UPDATE has been judged, so its two halves are known again and let pass.

use crate::pg::fenced_table::trigger::RowId;
use crate::pg::session::scope::{Moment, SavepointId};
use crate::pg::session::xact;
use pg_fence_rules::fence::Landing;
use pg_fence_rules::Instant;
use std::cell::RefCell;

thread_local! {
    /// The row version whose UPDATE was accepted last, at each depth of triggers: moving it to another
    /// partition deletes that very version next, before another row of that statement is looked at.
    static ACCEPTED: RefCell<Vec<Accepted>> = const { RefCell::new(Vec::new()) };
}

/// Forgets accepted rows when their transaction ends, or their savepoint was rolled back. The places stay, for each tells
/// its depth.
pub fn follow(moment: Moment) {
    ACCEPTED.with_borrow_mut(|all| {
        for accepted in all {
            if !moment.spares(&mut accepted.savepoint) {
                *accepted = Accepted::default();
            }
        }
    });
}

/// The row that was accepted last at one depth of triggers.
#[derive(Clone, Copy, Default)]
struct Accepted {
    /// The version that was updated, and what it was updated with.
    row: Option<(RowId, Landing)>,
    /// The landing of an updated row that has left its partition and arrives in another next.
    under_way: Option<Landing>,
    /// The deadline that it lands with, if it is a lease of its own.
    deadline: Option<Instant>,
    /// The savepoint that it was accepted in, whose rollback undoes it.
    savepoint: SavepointId,
}

/// Remembers the version whose UPDATE was accepted, and what it lands with.
pub fn accept(depth: usize, row: RowId, landing: Landing) {
    accept_held(depth, row, landing, None);
}

/// The same of a row that is a lease of its own.
pub fn accept_held(depth: usize, row: RowId, landing: Landing, deadline: Option<Instant>) {
    let (row, savepoint) = (Some((row, landing)), xact::savepoint());
    at_depth(depth, |last| *last = Accepted { row, under_way: None, deadline, savepoint });
}

/// The DELETE of this version is the first half of a move if its UPDATE was just accepted: then it leaves.
pub fn leaves(depth: usize, row: RowId) -> bool {
    at_depth(depth, |accepted| {
        let moves = accepted.row.take().filter(|(id, _)| *id == row);
        accepted.under_way = moves.map(|(_, landing)| landing).or(accepted.under_way);
        moves.is_some()
    })
}

/// Takes the landing of the row that arrives, as it was judged where the row left.
pub fn take_under_way(depth: usize) -> Option<Landing> {
    at_depth(depth, |accepted| accepted.under_way.take())
}

/// The deadline of the row that arrives, as it was judged where the row left.
pub fn deadline(depth: usize) -> Option<Instant> {
    at_depth(depth, |accepted| accepted.deadline)
}

/// Takes the landing of the row whose UPDATE was accepted last, and that nobody has seen leave.
pub fn take_accepted(depth: usize) -> Option<Landing> {
    at_depth(depth, |accepted| accepted.row.take().map(|(_, landing)| landing))
}

/// The statement is over: no row of it is still on its way.
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
