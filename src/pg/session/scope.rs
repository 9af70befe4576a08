//! What lasts as long as a transaction, or a savepoint of it: one mechanism for all that is kept that long.
//!
//! A module that keeps something implements `OfTransaction` for it. `crate::transaction_end` lists all of them, and what
//! else is done when a transaction ends, in order; it is called from here.

use crate::errors::Refusal;
use crate::pg::call::raise;
use pgrx::pg_sys;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::thread::LocalKey;

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

/// Something that belongs to a savepoint.
pub trait OfSavepoint {
    /// A savepoint was released: what belongs to it, its locks too, belongs to its parent now.
    fn savepoint_released(&mut self, savepoint: SavepointId, parent: SavepointId);

    /// A savepoint was rolled back, and its locks go next. False where this goes with it.
    fn survives_rollback(&mut self, savepoint: SavepointId) -> bool;
}

impl OfSavepoint for SavepointId {
    fn savepoint_released(&mut self, savepoint: SavepointId, parent: SavepointId) {
        if *self == savepoint {
            *self = parent;
        }
    }

    fn survives_rollback(&mut self, savepoint: SavepointId) -> bool {
        *self != savepoint
    }
}

impl<T: OfSavepoint> OfSavepoint for Vec<T> {
    fn savepoint_released(&mut self, savepoint: SavepointId, parent: SavepointId) {
        self.iter_mut().for_each(|entry| entry.savepoint_released(savepoint, parent));
    }

    fn survives_rollback(&mut self, savepoint: SavepointId) -> bool {
        self.retain_mut(|entry| entry.survives_rollback(savepoint));
        !self.is_empty()
    }
}

impl<K, T: OfSavepoint, S> OfSavepoint for HashMap<K, T, S> {
    fn savepoint_released(&mut self, savepoint: SavepointId, parent: SavepointId) {
        self.values_mut().for_each(|entry| entry.savepoint_released(savepoint, parent));
    }

    fn survives_rollback(&mut self, savepoint: SavepointId) -> bool {
        self.retain(|_, entry| entry.survives_rollback(savepoint));
        !self.is_empty()
    }
}

/// Something that lasts as long as the transaction.
pub trait OfTransaction: OfSavepoint {
    /// The transaction is over, or prepared; its locks are still held. Nothing here may raise: Postgres is past the point
    /// where it could stop.
    fn transaction_ended(&mut self, ending: Ending);
}

/// Something that is kept, in a thread-local of the module that keeps it.
pub trait Follower: Sync {
    /// As of `OfSavepoint`.
    fn savepoint_released(&'static self, savepoint: SavepointId, parent: SavepointId);
    /// As `OfSavepoint::survives_rollback`.
    fn savepoint_rolled_back(&'static self, savepoint: SavepointId);
    /// As of `OfTransaction`.
    fn transaction_ended(&'static self, ending: Ending);
}

impl<T: OfTransaction + 'static> Follower for LocalKey<RefCell<T>> {
    fn savepoint_released(&'static self, savepoint: SavepointId, parent: SavepointId) {
        self.with_borrow_mut(|kept| kept.savepoint_released(savepoint, parent));
    }

    fn savepoint_rolled_back(&'static self, savepoint: SavepointId) {
        self.with_borrow_mut(|kept| {
            kept.survives_rollback(savepoint);
        });
    }

    fn transaction_ended(&'static self, ending: Ending) {
        self.with_borrow_mut(|kept| kept.transaction_ended(ending));
    }
}

/// What is done at the ends of transactions and savepoints. Only `before_commit` may raise: later Postgres is past the
/// point where it could stop.
pub trait Ends {
    /// Is there something to do before a commit? Most transactions end without.
    fn is_due() -> bool;

    /// The last moment at which a transaction can still write, or refuse to commit, or to be prepared.
    fn before_commit(prepares: bool) -> Result<(), Refusal>;

    /// The commit's record is written next.
    fn commit_begins();

    /// The transaction is over, or prepared: its changes are visible, its locks are still held.
    fn ended(ending: Ending);

    /// The locks of the transaction are gone, or, where it goes on, those of the savepoint that was rolled back.
    fn locks_gone(transaction_is_over: bool);

    /// A savepoint was released: what belongs to it belongs to its parent now.
    fn savepoint_released(savepoint: SavepointId, parent: SavepointId);

    /// A savepoint was rolled back; its locks go next.
    fn savepoint_rolled_back(savepoint: SavepointId);
}

/// Listens to the ends of transactions and savepoints; called once, when the library is loaded.
pub fn register<E: Ends>() {
    // SAFETY: registered once; the functions raise only where a transaction can still fail.
    unsafe {
        pg_sys::RegisterXactCallback(Some(transaction_event::<E>), std::ptr::null_mut());
        pg_sys::RegisterSubXactCallback(Some(savepoint_event::<E>), std::ptr::null_mut());
        pg_sys::RegisterResourceReleaseCallback(Some(release_event::<E>), std::ptr::null_mut());
    }
}

unsafe extern "C-unwind" fn transaction_event<E: Ends>(
    event: pg_sys::XactEvent::Type,
    _: *mut c_void,
) {
    use pg_sys::XactEvent as X;
    match event {
        X::XACT_EVENT_PRE_COMMIT => {
            do_before_commit::<E>(false);
            E::commit_begins();
        }
        X::XACT_EVENT_PRE_PREPARE => do_before_commit::<E>(true),
        X::XACT_EVENT_COMMIT => E::ended(Ending::Committed),
        X::XACT_EVENT_PARALLEL_COMMIT
        | X::XACT_EVENT_ABORT
        | X::XACT_EVENT_PARALLEL_ABORT
        | X::XACT_EVENT_PREPARE => E::ended(Ending::Other),
        _ => {}
    }
}

/// Raises what the work refuses: an error here aborts the transaction, as one of a deferred trigger would.
fn do_before_commit<E: Ends>(prepares: bool) {
    if !E::is_due() {
        return;
    }
    if let Err(error) = raise::caught(|| E::before_commit(prepares)) {
        // SAFETY: nothing is left to drop when it leaves.
        unsafe { raise::throw(error) }
    }
}

unsafe extern "C-unwind" fn savepoint_event<E: Ends>(
    event: pg_sys::SubXactEvent::Type,
    mine: SavepointId,
    parent: SavepointId,
    _: *mut c_void,
) {
    match event {
        pg_sys::SubXactEvent::SUBXACT_EVENT_COMMIT_SUB => E::savepoint_released(mine, parent),
        pg_sys::SubXactEvent::SUBXACT_EVENT_ABORT_SUB => E::savepoint_rolled_back(mine),
        _ => {}
    }
}

unsafe extern "C-unwind" fn release_event<E: Ends>(
    phase: pg_sys::ResourceReleasePhase::Type,
    commit: bool,
    top_level: bool,
    _: *mut c_void,
) {
    // A commit's change is visible and its locks are gone only now; a released savepoint's pass to its parent.
    let after = phase == pg_sys::ResourceReleasePhase::RESOURCE_RELEASE_AFTER_LOCKS;
    if after && (top_level || !commit) {
        E::locks_gone(top_level);
    }
}
