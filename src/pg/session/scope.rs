//! What lasts as long as a transaction, or a savepoint of it: one mechanism for all that is kept that long.
//!
//! Whoever keeps something implements `OfTransaction` for it and registers it once (`follow`), when the library is loaded. Then
//! it is told when a savepoint is released or rolled back, when the transaction ends, and when the locks are gone.

use crate::pg::call::errors::Refusal;
use crate::pg::call::raise;
use crate::pg::session::commit;
use pgrx::pg_sys;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::OnceLock;
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

/// Something that lasts as long as the transaction. Nothing here may raise: Postgres is past the point where it
/// could stop.
pub trait OfTransaction: OfSavepoint {
    /// The transaction is over, or prepared; its locks are still held.
    fn transaction_ended(&mut self, ending: Ending);

    /// The locks of the transaction are gone, or, where it goes on, those of the savepoint that was rolled back.
    fn locks_gone(&mut self, _transaction_is_over: bool) {}
}

/// Something that is kept, in a thread-local of the module that keeps it. It is asked in every transaction, so each of
/// these is one call.
trait Registered {
    fn savepoint_released(&self, savepoint: SavepointId, parent: SavepointId);
    fn savepoint_rolled_back(&self, savepoint: SavepointId);
    fn transaction_ended(&self, ending: Ending);
    fn locks_gone(&self, transaction_is_over: bool);
}

impl<T: OfTransaction> Registered for &'static LocalKey<RefCell<T>> {
    fn savepoint_released(&self, savepoint: SavepointId, parent: SavepointId) {
        self.with_borrow_mut(|kept| kept.savepoint_released(savepoint, parent));
    }

    fn savepoint_rolled_back(&self, savepoint: SavepointId) {
        self.with_borrow_mut(|kept| {
            kept.survives_rollback(savepoint);
        });
    }

    fn transaction_ended(&self, ending: Ending) {
        self.with_borrow_mut(|kept| kept.transaction_ended(ending));
    }

    fn locks_gone(&self, transaction_is_over: bool) {
        self.with_borrow_mut(|kept| kept.locks_gone(transaction_is_over));
    }
}

/// What is done before a commit, and before a PREPARE TRANSACTION (then it is passed true).
#[derive(Clone, Copy)]
pub struct BeforeCommit {
    /// Is there something to do? Most transactions end without.
    pub is_due: fn() -> bool,
    /// The work, done where some such work is due.
    pub work: fn(bool) -> Result<(), Refusal>,
}

thread_local! {
    static REGISTERED: RefCell<Vec<Box<dyn Registered>>> = const { RefCell::new(Vec::new()) };
    static BEFORE_COMMIT: RefCell<Vec<BeforeCommit>> = const { RefCell::new(Vec::new()) };
}

/// Tells this of the ends of transactions and savepoints; called once for each, when the library is loaded.
pub fn follow<T: OfTransaction + 'static>(follower: &'static LocalKey<RefCell<T>>) {
    REGISTERED.with_borrow_mut(|all| all.push(Box::new(follower)));
}

/// Has work done at the last moment at which a transaction can still write, or refuse to commit; called once for
/// each, when the library is loaded. The first is done first.
pub fn before_commit(work: BeforeCommit) {
    BEFORE_COMMIT.with_borrow_mut(|before| before.push(work));
}

/// What is done whenever a transaction is over, or prepared, however it ended.
static WHEN_OVER: OnceLock<fn()> = OnceLock::new();

/// Has work done whenever a transaction is over, or prepared: after its changes are visible, before its locks go.
/// Nothing in it may raise. Called once, when the library is loaded.
pub fn when_over(work: fn()) {
    let first = WHEN_OVER.set(work);
    assert!(first.is_ok(), "there is room for one");
}

fn each_follower(work: impl Fn(&dyn Registered)) {
    REGISTERED.with_borrow(|all| all.iter().for_each(|follower| work(&**follower)));
}

/// Listens to the ends of transactions and savepoints; called once, when the library is loaded.
pub fn register() {
    // SAFETY: registered once; the functions raise only where a transaction can still fail.
    unsafe {
        pg_sys::RegisterXactCallback(Some(transaction_event), std::ptr::null_mut());
        pg_sys::RegisterSubXactCallback(Some(savepoint_event), std::ptr::null_mut());
        pg_sys::RegisterResourceReleaseCallback(Some(release_event), std::ptr::null_mut());
    }
}

unsafe extern "C-unwind" fn transaction_event(event: pg_sys::XactEvent::Type, _: *mut c_void) {
    use pg_sys::XactEvent as E;
    match event {
        E::XACT_EVENT_COMMIT
        | E::XACT_EVENT_PARALLEL_COMMIT
        | E::XACT_EVENT_ABORT
        | E::XACT_EVENT_PARALLEL_ABORT
        | E::XACT_EVENT_PREPARE => {
            let committed = event == E::XACT_EVENT_COMMIT;
            commit::restore(committed);
            if let Some(work) = WHEN_OVER.get() {
                work();
            }
            let ending = if committed { Ending::Committed } else { Ending::Other };
            each_follower(|follower| follower.transaction_ended(ending));
        }
        E::XACT_EVENT_PRE_COMMIT => {
            do_before_commit(false);
            commit::relax();
        }
        E::XACT_EVENT_PRE_PREPARE => do_before_commit(true),
        _ => {}
    }
}

/// Raises what the work refuses: an error here aborts the transaction, as one of a deferred trigger would.
fn do_before_commit(prepares: bool) {
    if !BEFORE_COMMIT.with_borrow(|all| all.iter().any(|before| (before.is_due)())) {
        return;
    }
    // Not borrowed while the work is done: triggers may fire in it.
    let nth = |n: usize| BEFORE_COMMIT.with_borrow(|all| all.get(n).copied());
    let mut all = (0..).map_while(nth);
    let outcome = raise::caught(|| all.try_for_each(|before| (before.work)(prepares)));
    if let Err(error) = outcome {
        // SAFETY: nothing is left to drop when it leaves.
        unsafe { raise::throw(error) }
    }
}

unsafe extern "C-unwind" fn savepoint_event(
    event: pg_sys::SubXactEvent::Type,
    mine: SavepointId,
    parent: SavepointId,
    _: *mut c_void,
) {
    match event {
        pg_sys::SubXactEvent::SUBXACT_EVENT_COMMIT_SUB => {
            each_follower(|follower| follower.savepoint_released(mine, parent))
        }
        pg_sys::SubXactEvent::SUBXACT_EVENT_ABORT_SUB => {
            each_follower(|follower| follower.savepoint_rolled_back(mine))
        }
        _ => {}
    }
}

unsafe extern "C-unwind" fn release_event(
    phase: pg_sys::ResourceReleasePhase::Type,
    commit: bool,
    top_level: bool,
    _: *mut c_void,
) {
    // A commit's change is visible and its locks are gone only now; a released savepoint's pass to its parent.
    let after = phase == pg_sys::ResourceReleasePhase::RESOURCE_RELEASE_AFTER_LOCKS;
    if after && (top_level || !commit) {
        each_follower(|follower| follower.locks_gone(top_level));
    }
}
