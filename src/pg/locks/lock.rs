//! Heavyweight locks: the lock tags of `rules::locks::Lock` in the server's lock manager.
//!
//! The tags have a `field4` of our own, so no SQL function can take these locks. They write no multixact, appear in
//! `pg_locks` as advisory locks with this `objsubid`, are released when their savepoint is rolled back, and survive
//! PREPARE TRANSACTION. A backend never conflicts with itself.

use crate::errors::{self, Report};
use crate::pg::compat;
use crate::pg::locks::lock_count;
use crate::pg::memory::Owner;
use crate::pg::raw;
use pg_fence_rules::locks::{ACQUIRE_EXCLUSIVE, Lock, LockMode, TAKE_SLOT};
use pgrx::pg_sys;
use std::ffi::c_int;

/// The `objsubid` that `pg_locks` shows for each kind of lock. 0x504c is that of `session_lock`.
const fn kind(lock: Lock) -> u16 {
    match lock {
        Lock::Grant => 0x5046,
        Lock::Turn => 0x5047,
        Lock::Queue => 0x5048,
        Lock::Advance => 0x5049,
        Lock::Statistics => 0x504d,
    }
}

/// A lock tag of this extension, in this database.
pub(in crate::pg) fn tag(kind: u16, key: u64, method: u32) -> pg_sys::LOCKTAG {
    pg_sys::LOCKTAG {
        // SAFETY: set once when the backend starts.
        locktag_field1: unsafe { pg_sys::MyDatabaseId }.to_u32(),
        locktag_field2: (key >> 32) as u32,
        locktag_field3: key as u32,
        locktag_field4: kind,
        locktag_type: pg_sys::LockTagType::LOCKTAG_ADVISORY as u8,
        locktag_lockmethodid: method as u8,
    }
}

// The table of conflicts in `rules` uses PostgreSQL's numbers, so these must be the same.
const _: () = {
    assert!(LockMode::AccessShare.number() == pg_sys::AccessShareLock as i32);
    assert!(LockMode::RowExclusive.number() == pg_sys::RowExclusiveLock as i32);
    assert!(LockMode::ShareUpdateExclusive.number() == pg_sys::ShareUpdateExclusiveLock as i32);
    assert!(LockMode::Share.number() == pg_sys::ShareLock as i32);
    assert!(LockMode::Exclusive.number() == pg_sys::ExclusiveLock as i32);
    assert!(LockMode::AccessExclusive.number() == pg_sys::AccessExclusiveLock as i32);
};

/// A lock's tag in the format of the server's lock manager.
#[derive(Clone, Copy)]
pub struct LockTag(pg_sys::LOCKTAG);

/// Attempts before giving up on a lock that has no holder but is still not granted.
const MAX_ATTEMPTS: usize = 100;

/// While the value lives, locks belong to the transaction or its innermost savepoint, like the rows written under them.
/// In a cursor, they would belong to the cursor: they would be released if it fails in a later savepoint, and stay if an
/// earlier savepoint is rolled back.
pub(in crate::pg) fn owned_by_transaction() -> Owner {
    // SAFETY: reads a global of this thread.
    Owner::is(unsafe { pg_sys::CurTransactionResourceOwner })
}

/// The transactions that hold conflicting locks, except for this backend's. Those that only wait for one do not count.
/// Takes no lock.
pub(in crate::pg) fn holders(
    tag: &pg_sys::LOCKTAG,
    mode: c_int,
) -> Vec<pg_sys::VirtualTransactionId> {
    let (mut all, mut count) = (Vec::new(), 0);
    // SAFETY: returns `count` entries, with room for every session of the server.
    unsafe {
        compat::guarded(|| {
            let found = raw::GetLockConflicts(tag, mode, &mut count);
            all.extend_from_slice(std::slice::from_raw_parts(found, count as usize));
            raw::pfree(found.cast());
        });
    }
    all
}

impl LockTag {
    /// The lock of the database's token sequence while it advances.
    pub fn token_advance() -> Self {
        LockTag::by_key(Lock::Advance, 0)
    }

    /// The lock under which statistics segments are created, one for the server.
    pub fn statistics() -> Self {
        let mut tag = LockTag::by_key(Lock::Statistics, 0);
        tag.0.locktag_field1 = 0;
        tag
    }

    pub(in crate::pg) fn by_key(lock: Lock, key: u64) -> Self {
        // Not the lock method of users' advisory locks, which DISCARD ALL releases in the middle of a transaction.
        LockTag(tag(kind(lock), key, pg_sys::DEFAULT_LOCKMETHOD))
    }

    /// Takes the lock until the transaction ends or the savepoint is rolled back. With `wait`, waits for it;
    /// `lock_timeout`, `statement_timeout`, a cancel and the deadlock detector end the wait. Without `wait`, returns
    /// false if the lock is held, and the server raises nothing. Errors: 53200 if the session's share of the lock table
    /// is used up, or the table is full.
    pub fn take(&self, mode: LockMode, wait: bool) -> Result<bool, Report> {
        if wait {
            return lock_count::take(self.entry(), || {
                let _owner = owned_by_transaction();
                // SAFETY: the tag is complete; the lock manager cleans up at the end of the transaction.
                unsafe { pg_sys::LockAcquire(&self.0, mode.number(), false, false) };
                true
            });
        }
        // The holder may have released the lock between the two checks, and another one may have taken it.
        for _ in 0..MAX_ATTEMPTS {
            if lock_count::take(self.entry(), || self.try_take(mode))? {
                return Ok(true);
            }
            if self.has_conflicts(mode) {
                return Ok(false);
            }
        }
        // The lock has no holder, so either a session waits for it, or the lock table is full.
        // SAFETY: set once when the process starts.
        let another =
            LockTag::by_key(Lock::Advance, u64::from(unsafe { pg_sys::MyProcPid } as u32));
        if !another.try_take(mode) {
            return Err(errors::lock_table_full());
        }
        another.release_quietly(mode);
        Ok(false)
    }

    /// Takes the lock for a short time, if it is free. Returns false, without an error, also if the lock table is full.
    /// For work that can be skipped.
    pub fn try_take(&self, mode: LockMode) -> bool {
        let _owner = owned_by_transaction();
        compat::try_lock(&self.0, mode.number(), false)
    }

    /// Releases a lock taken with `try_take`.
    pub fn release_quietly(&self, mode: LockMode) {
        let _owner = owned_by_transaction();
        // SAFETY: only called for a lock that this transaction holds.
        unsafe { pg_sys::LockRelease(&self.0, mode.number(), false) };
    }

    /// Releases one `take`.
    pub fn release(&self, mode: LockMode) {
        self.release_quietly(mode);
        lock_count::released(self.entry());
    }

    /// Returns true if another transaction holds a conflicting lock. Takes no lock to find out, so that nobody is
    /// blocked meanwhile. Ignores sessions that only wait for a lock.
    pub fn has_conflicts(&self, mode: LockMode) -> bool {
        !holders(&self.0, mode.number()).is_empty()
    }

    /// The lock's entry in the lock table.
    pub(in crate::pg) fn entry(&self) -> lock_count::Entry {
        let key = u64::from(self.0.locktag_field2) << 32 | u64::from(self.0.locktag_field3);
        (self.0.locktag_field4, key)
    }

    /// Returns true if another session, or a prepared transaction, holds a lock under which new grants are written.
    pub fn others_write_grants() -> bool {
        let modes = 1 << TAKE_SLOT.mode.number() | 1 << ACQUIRE_EXCLUSIVE.mode.number();
        // SAFETY: a copy of the lock table, with the number of entries that it says.
        unsafe {
            let all = &*pg_sys::GetLockStatusData();
            (0..all.nelements as usize).map(|i| &*all.locks.add(i)).any(|lock| {
                lock.locktag.locktag_type == pg_sys::LockTagType::LOCKTAG_ADVISORY as u8
                    && lock.locktag.locktag_field4 == kind(Lock::Grant)
                    && lock.locktag.locktag_field1 == pg_sys::MyDatabaseId.to_u32()
                    && lock.holdMask & modes != 0
                    && lock.pid != pg_sys::MyProcPid
            })
        }
    }

    /// The process ids of the holders of conflicting locks; 0 for a prepared transaction.
    pub fn conflicting_pids(&self, mode: LockMode) -> Vec<i32> {
        holders(&self.0, mode.number())
            .iter()
            // SAFETY: a PGPROC is shared memory that is never freed.
            .map(|vxid| compat::process_of(vxid).map_or(0, |p| unsafe { (*p).pid }))
            .collect()
    }

    /// Wakes the session that holds a conflicting lock.
    pub fn wake(&self, mode: LockMode) {
        for vxid in holders(&self.0, mode.number()) {
            if let Some(process) = compat::process_of(&vxid) {
                // SAFETY: as above; setting the latch of a process that has continued does no harm.
                unsafe { pg_sys::SetLatch(&mut (*process).procLatch) };
            }
        }
    }
}
