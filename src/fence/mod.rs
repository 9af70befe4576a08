//! The fence: the trigger that lets a write land only with a token that is not stale.
//!
//! `trigger` judges a row, by what `plan` has read from the trigger's arguments once for the statement. `binding` makes the
//! name of a row's lease, `row_lease` judges the rows that are leases of their own, `row_moves` knows rows again that change their partition, `written` under which tokens rows were
//! written. `hint` says what a refused write has tried. `declared` tells the SQL of `fence_protect` and `fence_audit` what
//! the triggers of tables say.

mod binding;
mod declared;
mod hint;
mod plan;
mod row_lease;
mod row_moves;
mod trigger;
mod written;

pub use declared::{audit, protect, unprotect};
pub use trigger::fenced;

use crate::pg::session::scope::Moment;

/// Forgets this transaction's rows when it ends.
pub fn follow(moment: Moment) {
    row_moves::follow(moment);
    written::follow(moment);
}
