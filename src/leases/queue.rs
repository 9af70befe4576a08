//! The queue of sessions that wait for a lease, and when its head is woken.
//!
//! The lock manager is the queue: waiters ask for one lock per lease and get it in the order in which they came. The
//! session that holds the lock is the head. It alone tries to acquire, and sleeps until something can have changed. A
//! transaction that has changed the lease finds the head by that lock, and wakes it once its change is visible and its
//! own locks are released.

use crate::pg::locks::lock::LockTag;
use crate::pg::session::scope::{SavepointId, TransactionEvent};
use crate::pg::session::xact;
use pg_fence_rules::locks::{HEAD_OF_QUEUE, SOMEBODY_WAITS};
use std::cell::RefCell;

thread_local! {
    /// Leases that this transaction has changed or guarded.
    static CHANGED: RefCell<Vec<Changed>> = const { RefCell::new(Vec::new()) };
}

/// Marks the leases whose locks go with this event. Their heads are woken later, since they would still find the leases
/// locked.
pub fn on_transaction_event(event: TransactionEvent) {
    CHANGED.with_borrow_mut(|all| {
        for changed in all {
            changed.is_over |= !event.survives(changed.savepoint);
        }
    });
}

/// A lease that this transaction changed or guarded.
struct Changed {
    queue: LockTag,
    /// The savepoint that changed the lease; its rollback releases the locks.
    savepoint: SavepointId,
    /// True once the savepoint is rolled back or the transaction is over: its locks go next.
    is_over: bool,
}

/// Returns true if a session waits for this lease, or has announced that it adopts the lease.
pub fn somebody_waits(name: &[u8]) -> bool {
    LockTag::queue(name).has_conflicts(SOMEBODY_WAITS.mode)
}

/// Wakes the head of the queue now.
pub fn wake(name: &[u8]) {
    LockTag::queue(name).wake(HEAD_OF_QUEUE.mode);
}

/// Notes that this transaction has changed or guarded the lease, so that its end wakes the head of the queue.
pub fn changed(name: &[u8]) {
    let (queue, savepoint) = (LockTag::queue(name), xact::savepoint());
    CHANGED.with_borrow_mut(|all| {
        // Repeated changes of the same lease need one entry.
        let is_it = |last: &Changed| last.queue.key() == queue.key() && last.savepoint == savepoint;
        if !all.last().is_some_and(is_it) {
            all.push(Changed { queue, savepoint, is_over: false });
        }
    });
}

/// Wakes the heads of the queues whose leases' locks are released: at the end of the transaction, or at the rollback of
/// a savepoint.
pub fn wake_heads() {
    CHANGED.with_borrow_mut(|all| {
        for changed in all.extract_if(.., |changed| changed.is_over) {
            changed.queue.wake(HEAD_OF_QUEUE.mode);
        }
    });
}
