//! A lock for each session lease, which its session holds as long as it lives.
//!
//! It is a session-level advisory lock (`USER_LOCKMETHOD`), so `DISCARD ALL`, `pg_advisory_unlock_all()` and the end of
//! the session release it. Otherwise its tag (`field4`) is unreachable from SQL. Its key is the first token of the
//! grant: no two grants share a lock, and a lock that was left behind keeps no later grant alive.

use crate::errors::{self, Report};
use crate::pg::compat;
use crate::pg::locks::{lock, lock_count};
use crate::pg::session::server;
use pg_fence_rules::Token;
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::c_int;

/// Distinguishes these tags from those of `lock`.
const KIND: u16 = 0x504c;

/// The mode in which the session holds the lock. No other mode is ever used.
const HELD: c_int = pg_sys::ExclusiveLock as c_int;

/// The lock of the session lease with this first token.
pub struct SessionLock(pg_sys::LOCKTAG);

impl SessionLock {
    /// The lock of the grant with this first token.
    pub fn of(first: Token) -> Self {
        SessionLock(lock::tag(KIND, first.bigint() as u64, pg_sys::USER_LOCKMETHOD))
    }

    /// Takes the lock for this session. It is free, because the token was just drawn. Errors: 53200 if the session's
    /// share of the lock table is used up, or the table is full.
    pub fn take(&self) -> Result<(), Report> {
        lock_count::require_one_more()?;
        if !compat::try_lock(&self.0, HELD, true) {
            return Err(errors::lock_table_full());
        }
        lock_count::session_entry_taken();
        Ok(())
    }

    /// Releases the lock. The caller has checked that this session holds it (`is_mine`).
    pub fn release(&self) {
        // SAFETY: as above.
        unsafe { pg_sys::LockRelease(&self.0, HELD, true) };
        lock_count::session_entries_gone(1);
    }

    /// Returns true if this session holds the lock.
    pub fn is_mine(&self) -> bool {
        compat::lock_held_by_me(&self.0, HELD)
    }

    /// Returns true if any session holds the lock, and on a standby, which cannot see sessions of the primary. Takes no
    /// lock to find out: the waiters and holders can be counted, and only the holder ever asks for this lock.
    pub fn is_held(&self) -> bool {
        if server::in_recovery() {
            return true;
        }
        // SAFETY: the tag is complete; looks it up in the server's lock table.
        unsafe { pg_sys::LockWaiterCount(&self.0) > 0 }
    }
}

thread_local! {
    /// The function to call after the end of the session.
    static AT_EXIT: Cell<Option<fn()>> = const { Cell::new(None) };
}

/// Registers `work` to be called when the session has ended and its locks are released, but shared memory is still
/// attached.
pub fn at_exit(work: fn()) {
    if AT_EXIT.replace(Some(work)).is_none() {
        // SAFETY: registered once in each backend.
        unsafe { pg_sys::on_shmem_exit(Some(exiting), pg_sys::Datum::from(0)) };
    }
}

unsafe extern "C-unwind" fn exiting(_: c_int, _: pg_sys::Datum) {
    if let Some(work) = AT_EXIT.take() {
        work();
    }
}
