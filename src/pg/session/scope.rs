//! The ends of transactions and savepoints, and the lifetime of state that belongs to one.
//!
//! A module with such state has a function `on_transaction_event`. `crate::transaction_end` calls all of them, and
//! whatever else must be done when a transaction ends, in order. This module calls `transaction_end`.

use crate::errors::Report;
use crate::pg::call::raise;
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::c_void;

/// The subtransaction id of a savepoint, or of the transaction itself.
pub type SavepointId = pg_sys::SubTransactionId;

/// How a transaction ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The transaction was committed. Its changes are visible and its locks are released next.
    Committed,
    /// The transaction was rolled back; or it was prepared, so that its locks no longer belong to this session.
    Other,
}

/// An event at the end of a transaction or a savepoint. Postgres can no longer stop at this point, so code that runs
/// then must not raise.
#[derive(Clone, Copy)]
pub enum TransactionEvent {
    /// The commit record is written next.
    CommitBegins,
    /// The transaction is over, or prepared. Its changes are visible, and its locks are still held.
    Ended(Ending),
    /// The locks are released: those of the transaction or, if it goes on, those of the savepoint that was rolled back.
    LocksReleased,
    /// A savepoint was rolled back; its locks are released next.
    SavepointRolledBack(SavepointId),
}

impl TransactionEvent {
    /// Returns true if state that this savepoint has made survives the event.
    ///
    /// Ids grow within a transaction, and savepoints are nested. So a rollback undoes what was done under its savepoint's
    /// id and all later ones: in it, or in savepoints within it, released or not. A release changes nothing.
    pub fn survives(self, savepoint: SavepointId) -> bool {
        match self {
            TransactionEvent::Ended(_) => false,
            TransactionEvent::SavepointRolledBack(undone) => savepoint < undone,
            TransactionEvent::CommitBegins | TransactionEvent::LocksReleased => true,
        }
    }
}

/// Functions to call at the ends of transactions and savepoints.
#[derive(Clone, Copy)]
pub struct Listener {
    /// Called when the transaction can still write or fail. The argument is true for PREPARE.
    pub before_commit: fn(bool) -> Result<(), Report>,
    /// Called at each later event.
    pub at: fn(TransactionEvent),
}

thread_local! {
    static LISTENER: Cell<Option<Listener>> = const { Cell::new(None) };
}

/// Registers the listener. Called once, when the library is loaded.
pub fn register(listener: Listener) {
    LISTENER.set(Some(listener));
    // SAFETY: registered once; the functions raise only if the transaction can still fail.
    unsafe {
        pg_sys::RegisterXactCallback(Some(transaction_event), std::ptr::null_mut());
        pg_sys::RegisterSubXactCallback(Some(savepoint_event), std::ptr::null_mut());
        pg_sys::RegisterResourceReleaseCallback(Some(release_event), std::ptr::null_mut());
    }
}

fn report(event: TransactionEvent) {
    if let Some(listener) = LISTENER.get() {
        (listener.at)(event);
    }
}

unsafe extern "C-unwind" fn transaction_event(event: pg_sys::XactEvent::Type, _: *mut c_void) {
    use pg_sys::XactEvent as X;
    match event {
        X::XACT_EVENT_PRE_COMMIT => {
            before_commit(false);
            report(TransactionEvent::CommitBegins);
        }
        X::XACT_EVENT_PRE_PREPARE => before_commit(true),
        X::XACT_EVENT_COMMIT => report(TransactionEvent::Ended(Ending::Committed)),
        X::XACT_EVENT_PARALLEL_COMMIT
        | X::XACT_EVENT_ABORT
        | X::XACT_EVENT_PARALLEL_ABORT
        | X::XACT_EVENT_PREPARE => report(TransactionEvent::Ended(Ending::Other)),
        _ => {}
    }
}

/// Raises the listener's error, which aborts the transaction as an error of a deferred trigger does.
fn before_commit(prepares: bool) {
    let Some(listener) = LISTENER.get() else { return };
    if let Err(error) = raise::caught(|| (listener.before_commit)(prepares)) {
        // SAFETY: nothing is left to drop when this leaves.
        unsafe { raise::throw(error) }
    }
}

unsafe extern "C-unwind" fn savepoint_event(
    event: pg_sys::SubXactEvent::Type,
    savepoint: SavepointId,
    _parent: SavepointId,
    _: *mut c_void,
) {
    if event == pg_sys::SubXactEvent::SUBXACT_EVENT_ABORT_SUB {
        report(TransactionEvent::SavepointRolledBack(savepoint));
    }
}

unsafe extern "C-unwind" fn release_event(
    phase: pg_sys::ResourceReleasePhase::Type,
    commit: bool,
    transaction_is_over: bool,
    _: *mut c_void,
) {
    // Only now are a commit's changes visible and its locks released. The locks of a released savepoint pass to its
    // parent.
    let after = phase == pg_sys::ResourceReleasePhase::RESOURCE_RELEASE_AFTER_LOCKS;
    if after && (transaction_is_over || !commit) {
        report(TransactionEvent::LocksReleased);
    }
}
