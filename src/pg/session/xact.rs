//! The state of the transaction: isolation level, snapshots, savepoints.

use crate::pg::call::raise;
use crate::pg::compat;
use crate::pg::raw;
use pg_fence_rules::Instant;
use pgrx::pg_sys;
// Imported by its full path: from 18 on `pg_sys` has another declaration of that name, without a definition.
use pgrx::pg_sys::htup::HeapTupleHeaderGetXmin;
use pgrx::{PgSqlErrorCode, PgTryBuilder};
use std::ffi::CStr;
use std::panic::AssertUnwindSafe;

pub use crate::pg::session::scope::SavepointId;

/// Returns true at REPEATABLE READ and above.
pub fn keeps_snapshot() -> bool {
    // SAFETY: reads a setting of the transaction.
    unsafe { pg_sys::XactIsoLevel >= pg_sys::XACT_REPEATABLE_READ as i32 }
}

/// Returns true if the transaction is a block of several statements, as far as is known by now.
pub fn is_block() -> bool {
    // SAFETY: reads transaction state.
    unsafe { pg_sys::IsTransactionBlock() }
}

/// The time at which the client sent the present statement, which differs for each statement.
pub fn statement_started_at() -> Instant {
    // SAFETY: reads transaction state.
    Instant::from_micros(unsafe { pg_sys::GetCurrentStatementStartTimestamp() })
}

/// Raises 25006 in a read-only transaction and on a standby.
pub fn writable(function: &CStr) {
    // SAFETY: these raise or return.
    unsafe {
        compat::guarded(|| {
            raw::PreventCommandIfReadOnly(function.as_ptr());
            raw::PreventCommandDuringRecovery(function.as_ptr());
        });
    }
}

/// Raises the error of a pending cancel or termination.
pub fn serve_interrupts() {
    pgrx::check_for_interrupts!();
}

/// Returns true if this transaction has written anything.
pub fn has_written() -> bool {
    // SAFETY: reads transaction state.
    unsafe { pg_sys::GetTopTransactionIdIfAny() != pg_sys::InvalidTransactionId }
}

/// Makes the changes of this statement visible to later reads in the transaction.
pub fn see_own_changes() {
    // SAFETY: as any volatile function may.
    unsafe { pg_sys::CommandCounterIncrement() };
}

/// The innermost savepoint, or the transaction itself if it has none.
pub fn savepoint() -> SavepointId {
    // SAFETY: reads transaction state.
    unsafe { raw::GetCurrentSubTransactionId() }
}

/// Returns true if the current transaction has written this row version.
///
/// # Safety
/// The tuple must be valid.
pub unsafe fn is_own(tuple: pg_sys::HeapTuple) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let xmin = HeapTupleHeaderGetXmin((*tuple).t_data);
        raw::TransactionIdIsCurrentTransactionId(xmin)
    }
}

/// Returns true if the commit of this row version's transaction is known to be on disk. The server records the WAL
/// position of each asynchronous commit, because it needs that itself before it marks a row as committed.
///
/// # Safety
/// The tuple must be valid, and its writer committed or the current transaction.
pub unsafe fn is_on_disk(tuple: pg_sys::HeapTuple) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let xmin = HeapTupleHeaderGetXmin((*tuple).t_data);
        !raw::TransactionIdIsCurrentTransactionId(xmin)
            && !pg_sys::XLogNeedsFlush(pg_sys::TransactionIdGetCommitLSN(xmin))
    }
}

/// Returns true during a parallel query, in which no savepoint can be begun.
pub fn is_parallel() -> bool {
    // SAFETY: reads transaction state.
    unsafe { pg_sys::IsInParallelMode() }
}

/// An internal savepoint, with the memory context and resource owner in which it began.
#[derive(Clone, Copy)]
pub(in crate::pg) struct Savepoint {
    context: pg_sys::MemoryContext,
    owner: pg_sys::ResourceOwner,
}

impl Savepoint {
    /// Begins a savepoint. The same function must release or undo it.
    pub(in crate::pg) fn begin() -> Savepoint {
        // SAFETY: reads globals of this thread.
        let (context, owner) =
            unsafe { (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner) };
        // SAFETY: the caller ends the savepoint.
        unsafe { pg_sys::BeginInternalSubTransaction(std::ptr::null()) };
        Savepoint { context, owner }
    }

    /// Ends the savepoint. Its changes and locks pass to its parent.
    pub(in crate::pg) fn release(self) {
        // SAFETY: the savepoint is the innermost.
        unsafe { pg_sys::ReleaseCurrentSubTransaction() };
        self.restore();
    }

    /// Rolls the savepoint back, after its work has raised an error.
    pub(in crate::pg) fn undo(self) {
        // SAFETY: the work has raised, so the savepoint is still the innermost.
        unsafe { pg_sys::RollbackAndReleaseCurrentSubTransaction() };
        self.restore();
    }

    fn restore(self) {
        // SAFETY: both outlive the savepoint; each user of one restores them.
        unsafe {
            pg_sys::MemoryContextSwitchTo(self.context);
            pg_sys::CurrentResourceOwner = self.owner;
        }
    }
}

/// Runs `work` in a savepoint. If it raises an error, rolls back and returns `None`; only a cancel is raised again.
pub fn in_savepoint<T>(work: impl FnOnce() -> T) -> Option<T> {
    try_in_savepoint(work).ok()
}

/// Runs `work` like `in_savepoint`, but returns the error's message.
pub fn try_in_savepoint<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    let savepoint = Savepoint::begin();
    PgTryBuilder::new(AssertUnwindSafe(|| {
        let done = work();
        savepoint.release();
        Ok(done)
    }))
    .catch_when(PgSqlErrorCode::ERRCODE_QUERY_CANCELED, |error| {
        savepoint.undo();
        error.rethrow()
    })
    .catch_others(|error| {
        savepoint.undo();
        Err(raise::message_of(&error))
    })
    .execute()
}

/// The transaction that has written this row version, if it is another one and still open.
///
/// # Safety
/// The tuple must be valid.
pub unsafe fn open_writer(tuple: pg_sys::HeapTuple) -> Option<pg_sys::TransactionId> {
    // SAFETY: the caller's promise.
    unsafe {
        let header = (*tuple).t_data;
        let xmin = HeapTupleHeaderGetXmin(header);
        let is_open = u32::from((*header).t_infomask) & pg_sys::HEAP_XMIN_COMMITTED == 0
            && !pg_sys::TransactionIdIsCurrentTransactionId(xmin)
            && pg_sys::TransactionIdIsInProgress(xmin);
        is_open.then_some(xmin)
    }
}

/// Waits for the end of another transaction, as for a row that it has changed: `lock_timeout`, `statement_timeout`, a
/// cancel and the deadlock detector end the wait.
pub fn wait_for(other: pg_sys::TransactionId) {
    let (none, nowhere) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the other is not this transaction; there is no tuple to report.
    unsafe { pg_sys::XactLockTableWait(other, none, nowhere, pg_sys::XLTW_Oper::XLTW_None) };
}
