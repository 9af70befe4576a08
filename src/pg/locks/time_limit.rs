//! An end to a wait in the lock manager, by which no cancel and no timeout is lost.
//!
//! Postgres leaves such a wait early only by an error. That of `lock_timeout` stands for all that has come by then: a
//! cancel or `statement_timeout` raises none beside it, and code that catches it has lost them. So the time is kept by
//! a timeout of our own, which ends the wait as a cancel does, but without a signal. Whatever else ends a statement
//! sends this process SIGINT. That is noted on its way to Postgres's handler, and never caught.
//!
//! Without that a cancel would be lost that comes after our timeout and before the wait ends: of both there is one flag,
//! which Postgres lowers before it raises, and nothing of ours runs in between.

use crate::pg::compat;
use crate::pg::session::signal::{self, SigintNoted};
use crate::pg::session::xact::Savepoint;
use pgrx::pg_sys;
use pgrx::pg_sys::panic::CaughtError;
use pgrx::{PgSqlErrorCode, PgTryBuilder};
use std::ffi::c_int;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

/// Does what waits in the lock manager, for so many milliseconds of the server's clock at most. None where they are
/// over and nothing else has come; then it is undone.
pub fn at_most<T>(ms: c_int, wait: impl FnOnce() -> T) -> Option<T> {
    let savepoint = Savepoint::begin();
    let limit = Limit::begin(ms);
    PgTryBuilder::new(AssertUnwindSafe(|| {
        // Serves a cancel that came before signals were noted.
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

struct Limit {
    sigint: SigintNoted,
}

impl Limit {
    fn begin(ms: c_int) -> Self {
        REACHED.store(false, SeqCst);
        let limit = Limit { sigint: SigintNoted::begin() };
        // SAFETY: one that was registered; it is stopped before the signal is no longer noted.
        unsafe { compat::enable_timeout_after(timeout(), ms) };
        limit
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
        if !self.sigint.any() {
            return is_cancel(error);
        }
        match pending {
            Some(pending) => pending.rethrow(),
            None => false,
        }
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
    if !signal::has_come() {
        REACHED.store(true, SeqCst);
        // SAFETY: flags that are there for handlers of signals to set.
        unsafe {
            pg_sys::InterruptPending = 1;
            pg_sys::QueryCancelPending = 1;
        }
    }
}
