//! The fence: the trigger that lets a write land only if its token is not stale.
//!
//! `trigger` decides about each row, using the `plan` made once per statement from the trigger's arguments. `binding`
//! makes the name of a row's lease; `row_lease` decides about rows that are their own leases. `row_moves` recognizes
//! rows that move to another partition, and `written` remembers the tokens under which rows were written. `refusal`
//! makes the error of a refused write, and `hint` its hint. `replica` checks what an apply worker writes. `declared` gives the arguments of triggers to the SQL of
//! `fence_protect` and `fence_audit`.

mod binding;
mod declared;
mod hint;
mod plan;
mod refusal;
mod replica;
mod row_lease;
mod row_moves;
mod trigger;
mod written;

pub use declared::{audit, protect, unprotect};
pub use trigger::fenced;

use crate::pg::session::scope::TransactionEvent;

/// Forgets the rows of this transaction when it ends.
pub fn on_transaction_event(event: TransactionEvent) {
    row_moves::on_transaction_event(event);
    written::on_transaction_event(event);
}
