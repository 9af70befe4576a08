//! The protections that keep grants of one lease apart while their locks are taken one by one, so that a test can
//! take one away.

use crate::search::protections;

protections! {
    /// An exclusive acquire locks every slot that has a row, not slot 0 alone.
    own_every_slot,
    /// It reads the rows again once it has these locks.
    read_again_under_all,
    /// A shared or slot acquire excludes exclusive ones, on slot 0.
    exclude_alone,
    /// Shared acquires and those of slots exclude each other.
    shape,
    /// A shared or slot acquire locks the slot that it takes.
    take_slot,
    /// A grant that cannot be locked because somebody relies on it, and excludes the new one, makes a lost try.
    relied_on_is_lost,
    /// A shared or slot acquire looks again whether all is as it chose.
    settle,
    /// The grants of another mode that are over are ended by the new one.
    end_others,
    /// A row that an open transaction is deleting counts as taken.
    see_deletions,
    /// The number of slots is compared once more after the row is written.
    compare_number,
    /// A grant that is over, but guarded, counts in that comparison.
    compare_guarded,
    /// A grant's locks are kept to the end of its transaction.
    keep_to_commit,
    /// A guard locks the grant.
    guard_lock,
    /// A prune locks the row's slot.
    prune_locks,
    /// A prune looks again, under the lock, whether the row is one to delete.
    prune_reads_again,
}

/// How far the model goes. Whatever happens at most so often may happen at any time.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// A client each: how it asks for the lease.
    pub kinds: &'static [super::state::Kind],
    /// Calls that are made, by all clients together.
    pub calls: u8,
    /// Seconds that may pass; a grant lasts two.
    pub seconds: u8,
    /// Times that the clock is set back by a second.
    pub steps_back: u8,
    /// Transactions that are rolled back.
    pub rollbacks: u8,
    /// Rows are pruned.
    pub prunes: bool,
    /// Holders guard their grants.
    pub guards: bool,
    /// Holders renew their grants.
    pub renewals: bool,
    /// Holders release their grants.
    pub releases: bool,
}
