//! A lock for each grant that ends with its session, held by that session for as long as it lives.
//!
//! It is one of users' advisory locks (`USER_LOCKMETHOD`), held for the session: so `DISCARD ALL`,
//! `pg_advisory_unlock_all()` and the end of the session give it back, as they do with any advisory lock. Its tag
//! (`field4`) is unreachable from SQL otherwise, and its key is the grant's first token itself: no two grants
//! share it, and one that is left behind keeps no later grant alive.

use crate::errors::{self, Refusal};
use crate::pg::compat;
use crate::pg::locks::{lock, lock_count};
use crate::pg::session::server;
use pg_fence_rules::Token;
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::c_int;

/// Sets these tags apart from those of `lock`.
const KIND: u16 = 0x504c;

/// The mode in which the session holds it; nobody ever asks for another.
const HELD: c_int = pg_sys::ExclusiveLock as c_int;

/// The lock of the grant whose first token this is.
pub struct SessionLock(pg_sys::LOCKTAG);

impl SessionLock {
    /// That of the grant with this first token.
    pub fn of(first: Token) -> Self {
        SessionLock(lock::tag(KIND, first.bigint() as u64, pg_sys::USER_LOCKMETHOD))
    }

    /// Takes it for this session. Nobody else can have it: the token was just drawn. 53200 where the session has its
    /// share of the lock table already, or there is no room in it.
    pub fn take(&self) -> Result<(), Refusal> {
        lock_count::require_one_more()?;
        if !compat::try_lock(&self.0, HELD, true) {
            return Err(errors::lock_table_full());
        }
        lock_count::session_entry_taken();
        Ok(())
    }

    /// Gives it back; the caller has made sure that this session holds it (`is_mine`).
    pub fn give(&self) {
        // SAFETY: as above.
        unsafe { pg_sys::LockRelease(&self.0, HELD, true) };
        lock_count::session_entries_gone(1);
    }

    /// Does this session hold it?
    pub fn is_mine(&self) -> bool {
        compat::lock_held_by_me(&self.0, HELD)
    }

    /// Does any session hold it? On a standby, where sessions of the primary cannot be seen, it counts as held. Nothing is
    /// taken to find that out: only who holds it ever asks for it.
    pub fn is_held(&self) -> bool {
        if server::in_recovery() {
            return true;
        }
        // SAFETY: the tag is complete; looks it up in the server's lock table.
        unsafe { pg_sys::LockWaiterCount(&self.0) > 0 }
    }
}

thread_local! {
    /// The work for when the session has ended.
    static AT_EXIT: Cell<Option<fn()>> = const { Cell::new(None) };
}

/// Lets `work` be called when the session has ended and its locks are gone, but shared memory is still there.
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
