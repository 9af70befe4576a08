//! The protections that keep the grants of one lease apart while their locks are taken one by one. A test can take one
//! away.

use crate::search::protections;

protections! {
    /// An exclusive acquire locks every slot that has a row, or asks for its lock if the grant is closed, not slot 0
    /// alone.
    own_every_slot,
    /// An exclusive acquire reads the rows again once it has these locks.
    read_again_under_all,
    /// A shared or slot acquire excludes exclusive ones, on slot 0.
    exclude_alone,
    /// Shared and slot acquires take turns.
    turn,
    /// They see the rows that others have written and not committed.
    see_under_way,
    /// A grant that is over counts as guarded if another transaction has its lock.
    ask_for_locks,
    /// A shared or slot acquire locks the slot that it takes.
    take_slot,
    /// A shared or slot acquire checks again that the rows have not changed since its choice.
    settle,
    /// A new grant ends the expired grants of another mode.
    end_others,
    /// A row that an open transaction is deleting counts as taken.
    see_deletions,
    /// A grant's locks are held to the end of its transaction.
    keep_to_commit,
    /// A guard locks the grant.
    guard_lock,
    /// A prune locks the row's slot.
    prune_locks,
    /// A prune checks again, under the lock, that the row is to be deleted.
    prune_reads_again,
}

/// The bounds of the model: how often each kind of event may happen. It may happen at any time.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// The kind of acquire of each client.
    pub kinds: &'static [super::state::Kind],
    /// The number of calls of all clients together.
    pub calls: u8,
    /// Seconds that may pass. A grant lasts two.
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
    /// Grants are revoked.
    pub revocations: bool,
}
