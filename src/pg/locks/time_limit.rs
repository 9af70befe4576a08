//! A time limit for waits in the lock manager that loses no cancel and no other timeout.
//!
//! Postgres ends such a wait early only by an error. If `lock_timeout` fires, a pending cancel or `statement_timeout`
//! is swallowed with it, so code that catches the error loses them. Therefore the limit is a timeout of our own. It
//! ends the wait as a cancel does, but without a signal. Everything else that ends a statement sends SIGINT to this
//! process; the signal is noted on its way to Postgres's handler, and such a cancel is never caught.
//!
//! Noting the signal is needed for a cancel that comes between our timeout and the end of the wait: both set the same
//! flag, which Postgres clears before it raises, and none of our code runs in between.

use crate::pg::compat;
use crate::pg::session::signal::{self, SigintNoted};
use crate::pg::session::xact::Savepoint;
use pgrx::pg_sys;
use pgrx::pg_sys::panic::CaughtError;
use pgrx::{PgSqlErrorCode, PgTryBuilder};
use std::ffi::c_int;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

/// Runs `wait`, which waits in the lock manager, for at most `ms` milliseconds of the server's clock. If only the time
/// limit ends the wait, undoes it and returns `None`.
pub fn at_most<T>(ms: c_int, wait: impl FnOnce() -> T) -> Option<T> {
    let (savepoint, timeout) = (Savepoint::begin(), timeout());
    REACHED.store(false, SeqCst);
    let _noted = SigintNoted::begin();
    // SAFETY: a registered timeout; it is stopped before the signal is no longer noted.
    unsafe { compat::enable_timeout_after(timeout, ms) };
    // SAFETY: as above.
    let stop = || unsafe { compat::disable_timeout(timeout, false) };
    PgTryBuilder::new(AssertUnwindSafe(|| {
        // Handles a cancel that came before signals were noted.
        pgrx::check_for_interrupts!();
        let done = wait();
        stop();
        // The limit may have been reached just after the wait; its cancel must not hit a later statement.
        pgrx::check_for_interrupts!();
        savepoint.release();
        Some(done)
    }))
    .catch_others(|error| {
        stop();
        savepoint.undo();
        if is_of_limit(&error) {
            return None;
        }
        error.rethrow()
    })
    .execute()
}

/// True if the limit was reached and has requested a cancel.
static REACHED: AtomicBool = AtomicBool::new(false);

/// Returns true if only the limit can have raised this error. Also handles a cancel that the limit has requested, so that
/// no later statement is cancelled.
fn is_of_limit(error: &CaughtError) -> bool {
    if !REACHED.load(SeqCst) {
        return false;
    }
    let pending = PgTryBuilder::new(|| {
        pgrx::check_for_interrupts!();
        None
    })
    .catch_others(Some)
    .execute();
    match pending {
        _ if !signal::has_come() => is_cancel(error),
        Some(pending) => pending.rethrow(),
        None => false,
    }
}

fn is_cancel(error: &CaughtError) -> bool {
    matches!(error, CaughtError::PostgresError(error)
        if error.sql_error_code() == PgSqlErrorCode::ERRCODE_QUERY_CANCELED)
}

/// The timeout of this session, registered before the first wait.
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
    // After a real cancel nothing else is needed to end the wait.
    if !signal::has_come() {
        REACHED.store(true, SeqCst);
        // SAFETY: these flags are made to be set by signal handlers.
        unsafe {
            pg_sys::InterruptPending = 1;
            pg_sys::QueryCancelPending = 1;
        }
    }
}
