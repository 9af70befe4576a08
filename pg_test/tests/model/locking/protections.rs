//! What keeps grants of one lease apart while their locks are taken one by one, piece by piece, so that a test can
//! take one away.

/// The protections, all of which the extension has.
#[derive(Clone, Copy, Debug)]
pub struct Protections {
    /// An exclusive acquire locks every slot that has a row, not slot 0 alone.
    pub own_every_slot: bool,
    /// It reads the rows again once it has these locks.
    pub read_again_under_all: bool,
    /// A shared or slot acquire excludes exclusive ones, on slot 0.
    pub exclude_alone: bool,
    /// Shared acquires and those of slots exclude each other.
    pub shape: bool,
    /// A shared or slot acquire locks the slot that it takes.
    pub take_slot: bool,
    /// What cannot be locked because somebody relies on it, and excludes the new grant, is a lost try.
    pub relied_on_is_lost: bool,
    /// A shared or slot acquire looks again whether all is as it chose.
    pub settle: bool,
    /// The grants of another mode that are over are ended by the new one.
    pub end_others: bool,
    /// A row that an open transaction is deleting counts as taken.
    pub see_deletions: bool,
    /// The number of slots is compared once more after the row is written.
    pub compare_number: bool,
    /// A grant that is over, but guarded, counts in that comparison.
    pub compare_guarded: bool,
    /// A grant's locks are kept to the end of its transaction.
    pub keep_to_commit: bool,
    /// A guard locks the grant.
    pub guard_lock: bool,
    /// A prune locks the row's slot.
    pub prune_locks: bool,
    /// A prune looks again, under the lock, whether the row is one to delete.
    pub prune_reads_again: bool,
}

impl Protections {
    /// As the extension is.
    pub const ALL: Protections = Protections {
        own_every_slot: true,
        read_again_under_all: true,
        exclude_alone: true,
        shape: true,
        take_slot: true,
        relied_on_is_lost: true,
        settle: true,
        end_others: true,
        see_deletions: true,
        compare_number: true,
        compare_guarded: true,
        keep_to_commit: true,
        guard_lock: true,
        prune_locks: true,
        prune_reads_again: true,
    };
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
