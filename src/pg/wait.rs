//! Sleeping, and waiting for a lock no longer than one likes.

use super::compat;
use super::lock::{Mode, Tag};
use super::server;
use crate::protocol::Micros;
use pgrx::pg_sys;
use pgrx::{PgSqlErrorCode, PgTryBuilder};

/// A setting changed for as long as this lives.
struct LockTimeout(i32);

impl LockTimeout {
    fn set(ms: i32) -> Self {
        // SAFETY: an int that Postgres reads on this thread when it starts to wait for a lock.
        unsafe {
            let before = pg_sys::LockTimeout;
            pg_sys::LockTimeout = ms;
            LockTimeout(before)
        }
    }
}

impl Drop for LockTimeout {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { pg_sys::LockTimeout = self.0 };
    }
}

/// Takes a lock, waiting until the deadline at most. `lock_timeout`, where it is shorter, `statement_timeout`,
/// cancel and the deadlock detector end the wait with their own errors.
pub fn take_until(tag: &Tag, mode: Mode, deadline: Micros) -> bool {
    let left_ms = (deadline - server::now()).max(0) / 1_000 + 1;
    let left_ms = i32::try_from(left_ms).unwrap_or(i32::MAX);
    // SAFETY: as in LockTimeout::set.
    let users = unsafe { pg_sys::LockTimeout };
    if users > 0 && users <= left_ms {
        return tag.take(mode, true);
    }
    let shorter = LockTimeout::set(left_ms);
    // SAFETY: reads globals of this thread.
    let (context, owner) = unsafe { (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner) };
    // SAFETY: both outlive the savepoint; whoever uses one puts them back.
    let restore = || unsafe {
        pg_sys::MemoryContextSwitchTo(context);
        pg_sys::CurrentResourceOwner = owner;
    };
    // SAFETY: the savepoint undoes a wait that times out; either end of it follows below.
    unsafe { pg_sys::BeginInternalSubTransaction(std::ptr::null()) };
    let undo = || {
        // SAFETY: the wait has raised, so the savepoint is still the innermost.
        unsafe { pg_sys::RollbackAndReleaseCurrentSubTransaction() };
        restore();
    };
    let taken = PgTryBuilder::new(|| {
        tag.take(mode, true);
        // The time may have run out with the lock just granted: that would be told later, as an error.
        pgrx::check_for_interrupts!();
        // SAFETY: the savepoint is the innermost; its lock passes to what is around it.
        unsafe { pg_sys::ReleaseCurrentSubTransaction() };
        restore();
        true
    })
    .catch_when(PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE, |_| {
        undo();
        false
    })
    .catch_others(|error| {
        undo();
        error.rethrow()
    })
    .execute();
    drop(shorter);
    taken
}

/// Forgets wake-ups so far.
pub fn reset() {
    // SAFETY: this process's latch.
    unsafe { pg_sys::ResetLatch(pg_sys::MyLatch) };
}

/// Sleeps until then, or until `lock_timeout` (counted from `started`), or until woken; raises what cancel
/// and timeouts raise.
pub fn sleep_until(at: Micros, started: Micros) {
    // SAFETY: reads a setting.
    let lock_timeout = Micros::from(unsafe { pg_sys::LockTimeout }) * 1_000;
    let at = if lock_timeout > 0 { at.min(started + lock_timeout) } else { at };
    let ms = ((at - server::now()).max(0) + 999) / 1_000;
    let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
    // SAFETY: this process's latch; interrupts are served where no lock of ours is half taken.
    unsafe {
        pg_sys::WaitLatch(pg_sys::MyLatch, events as i32, ms, pg_sys::PG_WAIT_EXTENSION);
        pgrx::check_for_interrupts!();
    }
}

/// `lock_timeout` counts for the whole wait.
pub fn check_lock_timeout(started: Micros, now: Micros) {
    // SAFETY: reads a setting.
    let lock_timeout = Micros::from(unsafe { pg_sys::LockTimeout }) * 1_000;
    if lock_timeout > 0 && now - started >= lock_timeout {
        pgrx::ereport!(
            ERROR,
            PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE,
            "canceling statement due to lock timeout"
        );
    }
}

/// Ends the session when its client has gone: nobody would get the lease.
pub fn check_client() {
    // SAFETY: asks the socket; the flags are those that Postgres's own check sets.
    unsafe {
        if !pg_sys::MyProcPort.is_null() && !compat::guarded(|| compat::pq_check_connection()) {
            pg_sys::ClientConnectionLost = 1;
            pg_sys::InterruptPending = 1;
            pgrx::check_for_interrupts!();
        }
    }
}
