//! The transaction: isolation, snapshots, savepoints.

use crate::pg::call::args::bytes_of;
use crate::pg::call::raise;
use crate::pg::compat;
use crate::pg::raw;
use pg_fence_rules::Instant;
use pgrx::pg_sys;
// By its full path: from 18 on `pg_sys` has another one of that name, which nothing defines.
use pgrx::pg_sys::htup::HeapTupleHeaderGetXmin;
use pgrx::{PgSqlErrorCode, PgTryBuilder};
use std::ffi::CStr;
use std::panic::AssertUnwindSafe;

pub use crate::pg::session::scope::SavepointId;

/// REPEATABLE READ or above?
pub fn keeps_snapshot() -> bool {
    // SAFETY: reads a setting of the transaction.
    unsafe { pg_sys::XactIsoLevel >= pg_sys::XACT_REPEATABLE_READ as i32 }
}

/// Is it a transaction of several statements, as far as is known by now?
pub fn is_block() -> bool {
    // SAFETY: reads transaction state.
    unsafe { pg_sys::IsTransactionBlock() }
}

/// When the client sent the present statement; another one has another time.
pub fn statement_started_at() -> Instant {
    // SAFETY: reads transaction state.
    Instant::from_micros(unsafe { pg_sys::GetCurrentStatementStartTimestamp() })
}

/// Is there a transaction in which catalogs and tables can be read?
pub fn may_look_up() -> bool {
    // SAFETY: reads transaction state.
    unsafe { pg_sys::IsTransactionState() }
}

/// Raises 25006 in a read-only transaction and on a standby.
pub fn writable(function: &CStr) {
    // SAFETY: raise or return.
    unsafe {
        compat::guarded(|| {
            raw::PreventCommandIfReadOnly(function.as_ptr());
            raw::PreventCommandDuringRecovery(function.as_ptr());
        });
    }
}

/// Raises what a cancel or a termination raises.
pub fn serve_interrupts() {
    pgrx::check_for_interrupts!();
}

/// Has this transaction written anything?
pub fn has_written() -> bool {
    // SAFETY: reads transaction state.
    unsafe { pg_sys::GetTopTransactionIdIfAny() != pg_sys::InvalidTransactionId }
}

/// A transaction by its whole number, which no later one has.
#[derive(Clone, Copy)]
pub struct TransactionId(u64);

/// What has become of a transaction.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It is open, or prepared.
    Open,
    /// It was committed.
    Committed,
    /// It was rolled back, or is so old that nobody knows.
    Other,
}

/// This transaction; None as long as it has written nothing.
pub fn id() -> Option<TransactionId> {
    // SAFETY: reads transaction state.
    let id = unsafe { pg_sys::GetTopFullTransactionIdIfAny() };
    (id.value != 0).then_some(TransactionId(id.value))
}

impl TransactionId {
    /// What has become of it.
    pub fn outcome(self) -> Outcome {
        let id = Some(pg_sys::Datum::from(self.0));
        // SAFETY: a function of the server, with the argument that it declares; it answers a text, or NULL.
        let told = unsafe {
            let told = pgrx::direct_function_call_as_datum(pg_sys::pg_xact_status, &[id]);
            told.map(|text| bytes_of(text).to_vec())
        };
        match told.as_deref() {
            Some(b"in progress") => Outcome::Open,
            Some(b"committed") => Outcome::Committed,
            _ => Outcome::Other,
        }
    }
}

/// Lets later reads of this transaction see what it has just written.
pub fn see_own_changes() {
    // SAFETY: as any volatile function may.
    unsafe { pg_sys::CommandCounterIncrement() };
}

/// The innermost savepoint, or the transaction itself where it has none.
pub fn savepoint() -> SavepointId {
    // SAFETY: reads transaction state.
    unsafe { raw::GetCurrentSubTransactionId() }
}

/// Was this row version written by the running transaction?
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

/// Is the commit of the transaction that has written this row version known to be on disk? The server notes the place in
/// the log of each commit that has not waited, for it asks the same before it marks a row as committed.
///
/// # Safety
/// The tuple must be valid, and its writer committed or the running transaction.
pub unsafe fn is_on_disk(tuple: pg_sys::HeapTuple) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let xmin = HeapTupleHeaderGetXmin((*tuple).t_data);
        !raw::TransactionIdIsCurrentTransactionId(xmin)
            && !pg_sys::XLogNeedsFlush(pg_sys::TransactionIdGetCommitLSN(xmin))
    }
}

/// May a savepoint be begun, and a sequence be set?
pub fn may_begin_savepoint() -> bool {
    // SAFETY: reads transaction state.
    !is_parallel() && unsafe { !pg_sys::XactReadOnly }
}

/// Is a parallel query running, in which no savepoint can be begun?
pub fn is_parallel() -> bool {
    // SAFETY: reads transaction state.
    unsafe { pg_sys::IsInParallelMode() }
}

/// A savepoint of the server's own making, with what was current when it began.
#[derive(Clone, Copy)]
pub(in crate::pg) struct Savepoint {
    context: pg_sys::MemoryContext,
    owner: pg_sys::ResourceOwner,
}

impl Savepoint {
    /// Begins one. Either end of it must follow, in the function that has begun it.
    pub(in crate::pg) fn begin() -> Savepoint {
        // SAFETY: reads globals of this thread.
        let (context, owner) =
            unsafe { (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner) };
        // SAFETY: the caller ends it.
        unsafe { pg_sys::BeginInternalSubTransaction(std::ptr::null()) };
        Savepoint { context, owner }
    }

    /// Ends it: what was done, and the locks that were taken, pass to what is around it.
    pub(in crate::pg) fn release(self) {
        // SAFETY: it is the innermost.
        unsafe { pg_sys::ReleaseCurrentSubTransaction() };
        self.restore();
    }

    /// Undoes it, after its work has raised an error.
    pub(in crate::pg) fn undo(self) {
        // SAFETY: the work has raised, so it is still the innermost.
        unsafe { pg_sys::RollbackAndReleaseCurrentSubTransaction() };
        self.restore();
    }

    fn restore(self) {
        // SAFETY: both outlive the savepoint; each use of one puts them back.
        unsafe {
            pg_sys::MemoryContextSwitchTo(self.context);
            pg_sys::CurrentResourceOwner = self.owner;
        }
    }
}

/// Does work in a savepoint of its own. None where it failed, and was undone; only a cancel goes on its way.
pub fn in_savepoint<T>(work: impl FnOnce() -> T) -> Option<T> {
    try_in_savepoint(work).ok()
}

/// As `in_savepoint`, and tells the error.
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

/// The transaction that has written this row version, where that is another one and open.
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

/// Waits until another transaction has ended, as one waits for a row that it has changed: `lock_timeout`,
/// `statement_timeout`, cancel and the deadlock detector end the wait.
pub fn wait_for(other: pg_sys::TransactionId) {
    let (none, nowhere) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the other is not this transaction; no place is to be shown.
    unsafe { pg_sys::XactLockTableWait(other, none, nowhere, pg_sys::XLTW_Oper::XLTW_None) };
}
