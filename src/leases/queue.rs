//! The queue of those who wait for a lease: who is in it, and when its head is woken.
//!
//! The queue is the lock manager's own: waiters ask for one lock per lease and are served in the order they
//! came. The holder of that lock is the head, the only one who looks; it sleeps until something can have
//! changed. A transaction that changed the lease finds the head by the lock and wakes it once its change is
//! visible and its own locks are gone.

use crate::pg::locks::lock::LockTag;
use crate::pg::session::scope::{Moment, SavepointId};
use crate::pg::session::xact;
use pg_fence_rules::locks::{HEAD_OF_QUEUE, SOMEBODY_WAITS};
use std::cell::RefCell;

thread_local! {
    /// Leases that this transaction has changed or guarded.
    static CHANGED: RefCell<Vec<Changed>> = const { RefCell::new(Vec::new()) };
}

/// The heads are woken when the locks are gone: now they would find the leases locked.
pub fn follow(moment: Moment) {
    CHANGED.with_borrow_mut(|all| {
        for changed in all {
            changed.is_over |= !moment.spares(&mut changed.savepoint);
        }
    });
}

/// A lease that was changed or guarded.
struct Changed {
    queue: LockTag,
    /// The savepoint that did it, whose rollback gives its locks back.
    savepoint: SavepointId,
    /// That one was rolled back, or the transaction is over: its locks go next.
    is_over: bool,
}

/// Does somebody wait for this lease?
pub fn somebody_waits(name: &[u8]) -> bool {
    LockTag::queue(name).has_conflicts(SOMEBODY_WAITS.mode)
}

/// Wakes the head of the queue now.
pub fn wake(name: &[u8]) {
    LockTag::queue(name).wake(HEAD_OF_QUEUE.mode);
}

/// This transaction has changed the lease, or guards it: its end wakes the head of the queue.
pub fn changed(name: &[u8]) {
    let (queue, savepoint) = (LockTag::queue(name), xact::savepoint());
    CHANGED.with_borrow_mut(|all| {
        // The same lease is mostly changed many times in a row.
        let is_it = |last: &Changed| last.queue.key() == queue.key() && last.savepoint == savepoint;
        if !all.last().is_some_and(is_it) {
            all.push(Changed { queue, savepoint, is_over: false });
        }
    });
}

/// Wakes the heads of the queues of leases whose locks are gone: with the transaction, or with a savepoint that was rolled
/// back.
pub fn wake_heads() {
    CHANGED.with_borrow_mut(|all| {
        for changed in all.extract_if(.., |changed| changed.is_over) {
            changed.queue.wake(HEAD_OF_QUEUE.mode);
        }
    });
}
