//! The ends of transactions and savepoints, and how long data lasts that belongs to one.
//!
//! A module that keeps such data has a `follow`. `crate::transaction_end` calls all of them, and what else is done when a
//! transaction ends, in order; it is called from here.

use crate::errors::Refusal;
use crate::pg::call::raise;
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::c_void;

/// A savepoint (or the transaction itself), by number.
pub type SavepointId = pg_sys::SubTransactionId;

/// How a transaction ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It is committed: others see its changes as soon as its locks go.
    Committed,
    /// It is rolled back, or prepared, so that its locks are not this session's any more.
    Other,
}

/// The end of a transaction, or of a savepoint of it. Postgres is past the point where it could stop: nothing
/// that is done then may raise.
#[derive(Clone, Copy)]
pub enum Moment {
    /// The commit's record is written next.
    CommitBegins,
    /// The transaction is over, or prepared: its changes are visible, its locks are still held.
    Ended(Ending),
    /// The locks of the transaction are gone, or, where it goes on, those of the savepoint that was rolled back.
    LocksGone,
    /// A savepoint was released: what belongs to it, its locks too, belongs to its parent now.
    SavepointReleased {
        /// That one.
        savepoint: SavepointId,
        /// The savepoint around it, or the transaction.
        parent: SavepointId,
    },
    /// A savepoint was rolled back; its locks go next.
    SavepointRolledBack(SavepointId),
}

impl Moment {
    /// Does it leave alone what belongs to this savepoint, or to the transaction? Where that one was released, it belongs
    /// to the one around it from now on.
    pub fn spares(self, owner: &mut SavepointId) -> bool {
        match self {
            Moment::Ended(_) => false,
            Moment::SavepointRolledBack(savepoint) => *owner != savepoint,
            Moment::SavepointReleased { savepoint, parent } => {
                if *owner == savepoint {
                    *owner = parent;
                }
                true
            }
            Moment::CommitBegins | Moment::LocksGone => true,
        }
    }
}

/// Called at the ends of transactions and savepoints.
#[derive(Clone, Copy)]
pub struct Listener {
    /// The last moment at which a transaction can still write, or refuse to commit or (then it is true) to be prepared.
    pub before_commit: fn(bool) -> Result<(), Refusal>,
    /// All that comes after that.
    pub at: fn(Moment),
}

thread_local! {
    static LISTENER: Cell<Option<Listener>> = const { Cell::new(None) };
}

/// Lets it listen; called once, when the library is loaded.
pub fn register(listener: Listener) {
    LISTENER.set(Some(listener));
    // SAFETY: registered once; the functions raise only where a transaction can still fail.
    unsafe {
        pg_sys::RegisterXactCallback(Some(transaction_event), std::ptr::null_mut());
        pg_sys::RegisterSubXactCallback(Some(savepoint_event), std::ptr::null_mut());
        pg_sys::RegisterResourceReleaseCallback(Some(release_event), std::ptr::null_mut());
    }
}

fn tell(moment: Moment) {
    if let Some(listener) = LISTENER.get() {
        (listener.at)(moment);
    }
}

unsafe extern "C-unwind" fn transaction_event(event: pg_sys::XactEvent::Type, _: *mut c_void) {
    use pg_sys::XactEvent as X;
    match event {
        X::XACT_EVENT_PRE_COMMIT => {
            before_commit(false);
            tell(Moment::CommitBegins);
        }
        X::XACT_EVENT_PRE_PREPARE => before_commit(true),
        X::XACT_EVENT_COMMIT => tell(Moment::Ended(Ending::Committed)),
        X::XACT_EVENT_PARALLEL_COMMIT
        | X::XACT_EVENT_ABORT
        | X::XACT_EVENT_PARALLEL_ABORT
        | X::XACT_EVENT_PREPARE => tell(Moment::Ended(Ending::Other)),
        _ => {}
    }
}

/// Raises what is refused: an error here aborts the transaction, as one of a deferred trigger would.
fn before_commit(prepares: bool) {
    let Some(listener) = LISTENER.get() else { return };
    if let Err(error) = raise::caught(|| (listener.before_commit)(prepares)) {
        // SAFETY: nothing is left to drop when it leaves.
        unsafe { raise::throw(error) }
    }
}

unsafe extern "C-unwind" fn savepoint_event(
    event: pg_sys::SubXactEvent::Type,
    savepoint: SavepointId,
    parent: SavepointId,
    _: *mut c_void,
) {
    match event {
        pg_sys::SubXactEvent::SUBXACT_EVENT_COMMIT_SUB => {
            tell(Moment::SavepointReleased { savepoint, parent });
        }
        pg_sys::SubXactEvent::SUBXACT_EVENT_ABORT_SUB => {
            tell(Moment::SavepointRolledBack(savepoint));
        }
        _ => {}
    }
}

unsafe extern "C-unwind" fn release_event(
    phase: pg_sys::ResourceReleasePhase::Type,
    commit: bool,
    transaction_is_over: bool,
    _: *mut c_void,
) {
    // A commit's change is visible and its locks are gone only now; a released savepoint's pass to its parent.
    let after = phase == pg_sys::ResourceReleasePhase::RESOURCE_RELEASE_AFTER_LOCKS;
    if after && (transaction_is_over || !commit) {
        tell(Moment::LocksGone);
    }
}
