//! What happens when a transaction or a savepoint ends, in order. `pg::session::scope` calls this module.
//!
//! Before the commit or PREPARE the transaction can still be refused, or get a warning. Then the commit record is
//! written, the changes become visible while the locks are still held, and at last the locks are released. A rollback
//! begins with `Ended`. None of these steps writes to a table.

use crate::errors::Report;
use crate::fence;
use crate::leases::{guard, queue, session_leases};
use crate::pg::locks::lock_count;
use crate::pg::session::commit;
use crate::pg::session::scope::{Listener, TransactionEvent};
use crate::statistics;

/// Registered when the library is loaded.
pub const LISTENER: Listener = Listener { before_commit, at };

fn before_commit(prepares: bool) -> Result<(), Report> {
    session_leases::before_commit(prepares)?;
    guard::warn_if_in_vain();
    Ok(())
}

fn at(event: TransactionEvent) {
    match event {
        TransactionEvent::CommitBegins => return commit::allow_asynchronous(),
        TransactionEvent::Ended(ending) => {
            // First, because it may wait for the disk; before that nobody may learn of the commit.
            commit::restore(ending);
            statistics::flush();
        }
        TransactionEvent::LocksReleased => return queue::wake_heads(),
        TransactionEvent::SavepointRolledBack(_) => {}
    }
    // Per-transaction state. The order of these callbacks does not matter.
    lock_count::on_transaction_event(event);
    fence::on_transaction_event(event);
    session_leases::on_transaction_event(event);
    guard::on_transaction_event(event);
    queue::on_transaction_event(event);
}
