//! An end to a wait in the lock manager, by which no cancel and no timeout is lost.
//!
//! Postgres leaves such a wait early only by an error. That of `lock_timeout` stands for all that has come by then: a
//! cancel or `statement_timeout` raises none beside it, and code that catches it has lost them. So the time is kept by
//! a timeout of our own, which ends the wait as a cancel does, but without a signal. Whatever else ends a statement
//! sends this process SIGINT. That is noted on its way to Postgres's handler, and never caught.

use crate::pg::compat;
use crate::pg::raw;
use crate::pg::session::xact::Savepoint;
use pgrx::pg_sys;
use pgrx::pg_sys::panic::CaughtError;
use pgrx::{PgSqlErrorCode, PgTryBuilder};
use std::ffi::{c_int, c_void};
use std::panic::AssertUnwindSafe;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering::SeqCst};

/// Does what waits in the lock manager, for so many milliseconds of the server's clock at most. None where they are
/// over and nothing else has come; then it is undone.
pub fn at_most<T>(ms: c_int, wait: impl FnOnce() -> T) -> Option<T> {
    let savepoint = Savepoint::begin();
    let limit = Limit::begin(ms);
    PgTryBuilder::new(AssertUnwindSafe(|| {
        // What came before signals were noted.
        pgrx::check_for_interrupts!();
        let done = wait();
        limit.stop();
        // The time may have run out when the wait was just over: that would be told later.
        pgrx::check_for_interrupts!();
        savepoint.release();
        Some(done)
    }))
    .catch_others(|error| {
        limit.stop();
        savepoint.undo();
        if limit.is_what_ended(&error) {
            return None;
        }
        error.rethrow()
    })
    .execute()
}

/// The limit was reached, and has asked for a cancel.
static REACHED: AtomicBool = AtomicBool::new(false);
/// A SIGINT has come.
static SIGNALLED: AtomicBool = AtomicBool::new(false);
/// Postgres's handler of SIGINT, or that of another extension before it.
static NEXT_HANDLER: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

// signal.h
const SIGINT: c_int = 2;
extern "C" {
    fn signal(number: c_int, handler: *mut c_void) -> *mut c_void;
}

/// SIGINT is noted as long as this lives.
struct Limit;

impl Limit {
    fn begin(ms: c_int) -> Self {
        REACHED.store(false, SeqCst);
        SIGNALLED.store(false, SeqCst);
        let noted: extern "C" fn(c_int) = note_signal;
        // SAFETY: a handler that lives as long as the process; the one before is put back on drop. The timeout is
        // stopped before that.
        unsafe {
            NEXT_HANDLER.store(signal(SIGINT, noted as *mut c_void), SeqCst);
            compat::enable_timeout_after(timeout(), ms);
        }
        Limit
    }

    /// From now on it is not reached.
    fn stop(&self) {
        // SAFETY: one that was registered.
        unsafe { compat::disable_timeout(timeout(), false) };
    }

    /// Nothing but the limit has raised this error. To be asked when it was stopped, for a cancel that it has asked for
    /// is served here: it must end nothing else.
    fn is_what_ended(&self, error: &CaughtError) -> bool {
        if !REACHED.load(SeqCst) {
            return false;
        }
        let pending = PgTryBuilder::new(|| {
            pgrx::check_for_interrupts!();
            None
        })
        .catch_others(Some)
        .execute();
        if !SIGNALLED.load(SeqCst) {
            return is_cancel(error);
        }
        match pending {
            Some(pending) => pending.rethrow(),
            None => false,
        }
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        // SAFETY: what was there before.
        unsafe { signal(SIGINT, NEXT_HANDLER.load(SeqCst)) };
    }
}

fn is_cancel(error: &CaughtError) -> bool {
    matches!(error, CaughtError::PostgresError(error)
        if error.sql_error_code() == PgSqlErrorCode::ERRCODE_QUERY_CANCELED)
}

/// A timeout of this session's, registered when it first waits.
fn timeout() -> u32 {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    if NUMBER.load(SeqCst) == 0 {
        // SAFETY: a handler that lives as long as the process.
        let number = unsafe { compat::RegisterTimeout(compat::USER_TIMEOUT, reach) };
        NUMBER.store(number, SeqCst);
    }
    NUMBER.load(SeqCst)
}

/// Called by Postgres's handler of SIGALRM, which also wakes this process.
extern "C" fn reach() {
    // A cancel ends the wait by itself.
    if !SIGNALLED.load(SeqCst) {
        REACHED.store(true, SeqCst);
        // SAFETY: flags that are there for handlers of signals to set.
        unsafe {
            pg_sys::InterruptPending = 1;
            pg_sys::QueryCancelPending = 1;
        }
    }
}

/// Handles SIGINT.
extern "C" fn note_signal(number: c_int) {
    SIGNALLED.store(true, SeqCst);
    // SAFETY: it is called as the system would.
    unsafe {
        match NEXT_HANDLER.load(SeqCst) {
            // Not known yet; or SIG_IGN, in a process whose owner did not think of statements that wait.
            next if next.addr() <= 1 => raw::StatementCancelHandler(number),
            next => {
                let next: unsafe extern "C" fn(c_int) = std::mem::transmute(next);
                next(number);
            }
        }
    }
}
