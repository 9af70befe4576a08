//! What happens when a transaction or a savepoint ends: all of it, in order. `pg::session::scope` listens and calls.
//!
//! | moment | can still | what is done |
//! | --- | --- | --- |
//! | before the commit, or PREPARE | refuse, warn | `before_commit` |
//! | the commit's record comes next | | `commit_begins` |
//! | others see the changes, the locks are held | | `ended` |
//! | the locks are gone | | `locks_gone` |
//!
//! A rollback begins with `ended`. Nothing is written at any of them.

use crate::errors::Refusal;
use crate::fence;
use crate::leases::{guard, queue, session_leases};
use crate::pg::locks::lock_count;
use crate::pg::session::commit;
use crate::pg::session::scope::{Ending, Ends, Follower, SavepointId};
use crate::statistics;

/// What is kept for as long as a transaction. Each goes by itself: the order means nothing.
static KEPT: [&dyn Follower; 6] = [
    lock_count::TAKEN_ENTRIES,
    fence::WRITTEN_ROWS,
    fence::ROW_MOVES,
    session_leases::SESSION_LEASES,
    guard::TRANSACTION_GUARDS,
    queue::CHANGED_LEASES,
];

/// The steps, in the order of their moments.
pub struct TransactionEnd;

impl Ends for TransactionEnd {
    fn is_due() -> bool {
        session_leases::are_there() || guard::is_perhaps_in_vain()
    }

    fn before_commit(prepares: bool) -> Result<(), Refusal> {
        session_leases::check_prepare(prepares)?;
        guard::warn_if_in_vain();
        Ok(())
    }

    fn commit_begins() {
        commit::relax();
    }

    fn ended(ending: Ending) {
        // First, for it may wait for the disk: until then nobody may be told of anything.
        commit::restore(ending);
        statistics::flush();
        KEPT.iter().for_each(|kept| kept.transaction_ended(ending));
    }

    fn locks_gone(transaction_is_over: bool) {
        queue::wake_heads(transaction_is_over);
    }

    fn savepoint_released(savepoint: SavepointId, parent: SavepointId) {
        KEPT.iter().for_each(|kept| kept.savepoint_released(savepoint, parent));
    }

    fn savepoint_rolled_back(savepoint: SavepointId) {
        KEPT.iter().for_each(|kept| kept.savepoint_rolled_back(savepoint));
    }
}
