//! The work when a transaction or a savepoint ends: all of it, in order. `pg::session::scope` listens and calls.
//!
//! Before the commit, or PREPARE, a transaction can still be refused, or warned of. Then the commit's record comes; then
//! others see the changes, while the locks are held; at last the locks are gone. A rollback begins with its end. Nothing
//! is written at any of these moments.

use crate::errors::Refusal;
use crate::fence;
use crate::leases::{guard, queue, session_leases};
use crate::pg::locks::lock_count;
use crate::pg::session::commit;
use crate::pg::session::scope::{Listener, Moment};
use crate::statistics;

/// Called before a commit, and at each moment after.
pub const LISTENER: Listener = Listener { before_commit, at };

fn before_commit(prepares: bool) -> Result<(), Refusal> {
    session_leases::before_commit(prepares)?;
    guard::warn_if_in_vain();
    Ok(())
}

fn at(moment: Moment) {
    match moment {
        Moment::CommitBegins => return commit::relax(),
        Moment::Ended(ending) => {
            // First, for it may wait for the disk: until then nobody may be told of anything.
            commit::restore(ending);
            statistics::flush();
        }
        Moment::LocksGone => return queue::wake_heads(),
        Moment::SavepointReleased { .. } | Moment::SavepointRolledBack(_) => {}
    }
    // Data that is kept as long as a transaction: each goes by itself, and the order means nothing.
    lock_count::follow(moment);
    fence::follow(moment);
    session_leases::follow(moment);
    guard::follow(moment);
    queue::follow(moment);
}
