//! The transaction: isolation, snapshots, savepoints and what happens when it ends.

use super::{lock_count, raise};
use crate::errors::Refusal;
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::c_void;

thread_local! {
    /// End of the WAL that this transaction has written, as long as it has written nothing but releases.
    static ONLY_RELEASES: Cell<u64> = const { Cell::new(0) };
    /// The setting to be put back after a commit that did not wait for the disk.
    static AWAITED: Cell<Option<i32>> = const { Cell::new(None) };
}

/// A savepoint (or the transaction itself), by number.
pub type SubTransaction = pg_sys::SubTransactionId;

/// REPEATABLE READ or above?
pub fn keeps_snapshot() -> bool {
    // SAFETY: reads a setting of the transaction.
    unsafe { pg_sys::XactIsoLevel >= pg_sys::XACT_REPEATABLE_READ as i32 }
}

/// Has no transaction that has written anything ended since the transaction's snapshot was taken?
pub fn sees_all_commits() -> bool {
    let moment = |snapshot: pg_sys::Snapshot| {
        // SAFETY: a snapshot of this transaction, read at once.
        unsafe { ((*snapshot).xmax, (*snapshot).xcnt) }
    };
    // SAFETY: in a transaction.
    unsafe { moment(pg_sys::GetLatestSnapshot()) == moment(pg_sys::GetTransactionSnapshot()) }
}

/// When the transaction began: not later than its snapshot.
pub fn started_at() -> i64 {
    // SAFETY: reads transaction state.
    unsafe { pg_sys::GetCurrentTransactionStartTimestamp() }
}

/// Is it a transaction of several statements, as far as is known by now?
pub fn is_block() -> bool {
    // SAFETY: reads transaction state.
    unsafe { pg_sys::IsTransactionBlock() }
}

/// When the client sent the present statement; another one has another time.
pub fn statement_started_at() -> i64 {
    // SAFETY: reads transaction state.
    unsafe { pg_sys::GetCurrentStatementStartTimestamp() }
}

/// Has this transaction written anything?
pub fn has_written() -> bool {
    // SAFETY: reads transaction state.
    unsafe { pg_sys::GetTopTransactionIdIfAny() != pg_sys::InvalidTransactionId }
}

/// The number of this transaction, which is given one if it has none.
pub fn id() -> u64 {
    // SAFETY: in a transaction that may write.
    unsafe { pg_sys::GetTopFullTransactionId().value }
}

/// Does a release, whose commit need not wait for the disk where the transaction writes nothing else: WAL
/// is in order, so whoever acquires next makes it durable too, and losing it in a crash only leaves the lease
/// taken until its deadline. (The closing token is not drawn again: the start moves the sequence on.)
pub fn release<R>(work: impl FnOnce() -> R) -> R {
    // SAFETY: reads where this transaction's last WAL record ends; 0 when there is none.
    let end = || unsafe { pg_sys::XactLastRecEnd };
    let alone = end() == 0 || end() == ONLY_RELEASES.get();
    let result = work();
    ONLY_RELEASES.set(if alone { end() } else { 0 });
    result
}

/// Called right before the commit record is written.
fn relax_commit() {
    let only = ONLY_RELEASES.take();
    // SAFETY: an int that the commit reads next on this thread; put back by `restore_commit`, whatever
    // comes of the commit.
    unsafe {
        if only != 0 && only == pg_sys::XactLastRecEnd {
            AWAITED.set(Some(pg_sys::synchronous_commit));
            pg_sys::synchronous_commit = pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_OFF as i32;
        }
    }
}

fn restore_commit() {
    ONLY_RELEASES.set(0);
    if let Some(before) = AWAITED.take() {
        // SAFETY: as above.
        unsafe { pg_sys::synchronous_commit = before };
    }
}

/// Lets later reads of this transaction see what it has just written.
pub fn see_own_changes() {
    // SAFETY: as any volatile function may.
    unsafe { pg_sys::CommandCounterIncrement() };
}

/// The innermost savepoint.
pub fn savepoint() -> SubTransaction {
    // SAFETY: reads transaction state.
    unsafe { pg_sys::GetCurrentSubTransactionId() }
}

/// Was this row version written by the running transaction?
///
/// # Safety
/// The tuple must be valid.
pub unsafe fn is_own(tuple: pg_sys::HeapTuple) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let xmin = pg_sys::HeapTupleHeaderGetXmin((*tuple).t_data);
        pg_sys::TransactionIdIsCurrentTransactionId(xmin)
    }
}

/// Does work at the transaction's end, where Postgres has no snapshot active any more: triggers, toasted values
/// and the server's own assertions ask for one. Deferred triggers of that work fire, too.
pub fn at_the_end(work: impl FnOnce() -> Result<(), Refusal>) -> Result<(), Refusal> {
    // SAFETY: as Postgres itself fires deferred triggers; an error gives the snapshot back by itself.
    unsafe {
        pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
        work()?;
        pg_sys::PopActiveSnapshot();
        raise::catch(|| pg_sys::AfterTriggerFireDeferred())?;
    }
    Ok(())
}

/// Was this row version written by another transaction, which is open?
///
/// # Safety
/// The tuple must be valid.
pub unsafe fn is_others_uncommitted(tuple: pg_sys::HeapTuple) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let header = (*tuple).t_data;
        let xmin = pg_sys::HeapTupleHeaderGetXmin(header);
        u32::from((*header).t_infomask) & pg_sys::HEAP_XMIN_COMMITTED == 0
            && !pg_sys::TransactionIdIsCurrentTransactionId(xmin)
            && pg_sys::TransactionIdIsInProgress(xmin)
    }
}

/// Ends of transactions and savepoints are told to the rooms that keep something for as long.
pub fn listen() {
    // SAFETY: registered once, when the library is loaded; the functions never raise.
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
            restore_commit();
            lock_count::transaction_ended();
            crate::leases::guard::transaction_ended();
            crate::fence::transaction_ended();
            if event == E::XACT_EVENT_COMMIT {
                crate::leases::session_leases::transaction_committed();
            } else {
                crate::leases::session_leases::transaction_rolled_back();
            }
        }
        E::XACT_EVENT_PRE_COMMIT => {
            before_commit(false);
            relax_commit();
        }
        E::XACT_EVENT_PRE_PREPARE => {
            stop_on(crate::leases::session_leases::before_prepare);
            before_commit(true);
        }
        _ => {}
    }
}

/// The last moment at which the transaction can still write.
fn before_commit(prepares: bool) {
    stop_on(|| crate::leases::guard::before_commit(prepares));
}

/// Raises what the work refuses: an error here aborts the transaction, as one of a deferred trigger would.
fn stop_on(work: impl FnOnce() -> Result<(), Refusal>) {
    let outcome = raise::caught(|| work().err().map(raise::stage));
    if let Some(staged) = outcome.unwrap_or_else(Some) {
        // SAFETY: nothing is left to drop when it leaves.
        unsafe { raise::throw(staged) }
    }
}

unsafe extern "C-unwind" fn savepoint_event(
    event: pg_sys::SubXactEvent::Type,
    mine: pg_sys::SubTransactionId,
    parent: pg_sys::SubTransactionId,
    _: *mut c_void,
) {
    match event {
        pg_sys::SubXactEvent::SUBXACT_EVENT_COMMIT_SUB => {
            lock_count::savepoint_released(mine, parent);
            crate::leases::guard::savepoint_released(mine, parent);
            crate::fence::savepoint_released(mine, parent);
            crate::leases::line::savepoint_released(mine, parent);
            crate::leases::session_leases::savepoint_released(mine, parent);
        }
        pg_sys::SubXactEvent::SUBXACT_EVENT_ABORT_SUB => {
            lock_count::savepoint_rolled_back(mine);
            crate::leases::guard::savepoint_rolled_back(mine);
            crate::fence::savepoint_rolled_back(mine);
            crate::leases::line::savepoint_rolled_back(mine);
            crate::leases::session_leases::savepoint_rolled_back(mine);
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
    if after && top_level {
        crate::leases::line::transaction_ended();
    } else if after && !commit {
        crate::leases::line::locks_released();
    }
}
