//! Heavyweight locks: what `rules::locks::Lock` names, as tags of the server's lock manager.
//!
//! They live in lock tags of our own (`field4`), which no SQL function can reach, cost no multixact, show in
//! `pg_locks` as advisory locks with this `objsubid`, go with a rolled-back savepoint and survive
//! PREPARE TRANSACTION. A backend never conflicts with itself.

use crate::errors::{self, Refusal};
use crate::pg::compat;
use crate::pg::locks::lock_count;
use crate::pg::raw;
use pg_fence_rules::locks::{Lock, LockMode, ACQUIRE_ALONE, TAKE_SLOT};
use pgrx::pg_sys;
use std::ffi::c_int;

/// The `objsubid` that `pg_locks` shows for a kind of lock. 0x504c is `session_lock`'s.
const fn kind(lock: Lock) -> u16 {
    match lock {
        Lock::Grant => 0x5046,
        Lock::SharedOrSlots => 0x5047,
        Lock::Queue => 0x5048,
        Lock::Move => 0x5049,
        Lock::Guarded => 0x504a,
        Lock::Statistics => 0x504d,
    }
}

/// A tag of ours, in this database.
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

// The rules' table is written in PostgreSQL's numbers; another number would have other conflicts.
const _: () = {
    assert!(LockMode::AccessShare.number() == pg_sys::AccessShareLock as i32);
    assert!(LockMode::RowShare.number() == pg_sys::RowShareLock as i32);
    assert!(LockMode::RowExclusive.number() == pg_sys::RowExclusiveLock as i32);
    assert!(LockMode::ShareUpdateExclusive.number() == pg_sys::ShareUpdateExclusiveLock as i32);
    assert!(LockMode::Share.number() == pg_sys::ShareLock as i32);
    assert!(LockMode::Exclusive.number() == pg_sys::ExclusiveLock as i32);
    assert!(LockMode::AccessExclusive.number() == pg_sys::AccessExclusiveLock as i32);
};

/// The object of a lock of the server's lock manager, in the manager's own form.
#[derive(Clone, Copy)]
pub struct LockTag(pg_sys::LOCKTAG);

/// How often to ask for a lock that nobody has, and that is not to be had.
const MOST_LOOKS: usize = 100;

/// As long as this lives, locks are taken for the transaction or its innermost savepoint, to which also belongs
/// what is written under them. (Within a cursor they would be the cursor's, and go when that fails in a later
/// savepoint, or stay when an earlier one is rolled back.)
pub(in crate::pg) struct TransactionOwns(pg_sys::ResourceOwner);

impl TransactionOwns {
    pub(in crate::pg) fn now() -> Self {
        // SAFETY: globals of this thread; put back on drop.
        unsafe {
            let before = pg_sys::CurrentResourceOwner;
            pg_sys::CurrentResourceOwner = pg_sys::CurTransactionResourceOwner;
            TransactionOwns(before)
        }
    }
}

impl Drop for TransactionOwns {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { pg_sys::CurrentResourceOwner = self.0 };
    }
}

impl LockTag {
    /// The lock on the move of the database's token sequence.
    pub fn token_move() -> Self {
        LockTag::by_key(Lock::Move, 0)
    }

    /// The lock on making a segment in which a database counts: one for the server.
    pub fn statistics() -> Self {
        let mut tag = LockTag::by_key(Lock::Statistics, 0);
        tag.0.locktag_field1 = 0;
        tag
    }

    pub(in crate::pg) fn by_key(lock: Lock, key: u64) -> Self {
        // Not the method of users' locks: DISCARD ALL gives those back in mid-transaction.
        LockTag(tag(kind(lock), key, pg_sys::DEFAULT_LOCKMETHOD))
    }

    /// Takes the lock until the transaction (or the savepoint) ends. With `wait`, waits for it, which
    /// `lock_timeout`, `statement_timeout`, cancel and the deadlock detector end; without, tells whether it
    /// was to be had, and the server raises nothing. 53200 where the session has its share of the lock table already, or
    /// there is no room in it.
    pub fn take(&self, mode: LockMode, wait: bool) -> Result<bool, Refusal> {
        if wait {
            return lock_count::take(self.entry(), || {
                let _owner = TransactionOwns::now();
                // SAFETY: the tag is complete; the lock manager cleans up at the end of the transaction.
                unsafe { pg_sys::LockAcquire(&self.0, mode.number(), false, false) };
                true
            });
        }
        // The session in the way may have gone between the two looks, and another may have come.
        for _ in 0..MOST_LOOKS {
            if lock_count::take(self.entry(), || self.take_quietly(mode))? {
                return Ok(true);
            }
            if self.has_conflicts(mode) {
                return Ok(false);
            }
        }
        // Nobody has it: either somebody waits for it, or the table has no room for any lock.
        // SAFETY: set once when the process starts.
        let another = LockTag::by_key(Lock::Move, u64::from(unsafe { pg_sys::MyProcPid } as u32));
        if !another.take_quietly(mode) {
            return Err(errors::lock_table_full());
        }
        another.give_quietly(mode);
        Ok(false)
    }

    /// Takes the lock for an instant, if it is to be had at once. It is false, and no error, where the lock table is
    /// full: for what may be left undone.
    pub fn take_quietly(&self, mode: LockMode) -> bool {
        let _owner = TransactionOwns::now();
        compat::try_lock(&self.0, mode.number(), false)
    }

    /// Gives back what was taken quietly.
    pub fn give_quietly(&self, mode: LockMode) {
        let _owner = TransactionOwns::now();
        // SAFETY: only called for a lock that this transaction has taken.
        unsafe { pg_sys::LockRelease(&self.0, mode.number(), false) };
    }

    /// Gives back one `take`.
    pub fn give(&self, mode: LockMode) {
        self.give_quietly(mode);
        lock_count::given_back(self.entry());
    }

    /// Has another transaction a lock that keeps this one from being had in that mode? Nothing is taken to find that
    /// out, so that nobody is in anybody's way. It says nothing of those who only wait for a lock.
    pub fn has_conflicts(&self, mode: LockMode) -> bool {
        !self.conflicts(mode).is_empty()
    }

    /// Its entry in the lock table.
    pub(in crate::pg) fn entry(&self) -> lock_count::Entry {
        let key = u64::from(self.0.locktag_field2) << 32 | u64::from(self.0.locktag_field3);
        (self.0.locktag_field4, key)
    }

    /// Does another session, or a prepared transaction, hold a lock under which a new grant is written?
    pub fn others_write_grants() -> bool {
        let modes = 1 << TAKE_SLOT.mode.number() | 1 << ACQUIRE_ALONE.mode.number();
        // SAFETY: a copy of the lock table, with as many entries as it says.
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

    /// The holders of locks that conflict with this mode, but for this backend. Looks only.
    fn conflicts(&self, mode: LockMode) -> Vec<pg_sys::VirtualTransactionId> {
        let mut count: c_int = 0;
        // SAFETY: gives back `count` entries, with room for every session of the server.
        unsafe {
            let mut all = Vec::new();
            compat::guarded(|| {
                let found = raw::GetLockConflicts(&self.0, mode.number(), &mut count);
                all.extend_from_slice(std::slice::from_raw_parts(found, count as usize));
                raw::pfree(found.cast());
            });
            all
        }
    }

    /// As `conflicts`, as numbers, to be compared.
    pub fn conflicting(&self, mode: LockMode) -> Vec<(i32, u32)> {
        self.conflicts(mode).iter().map(compat::parts).collect()
    }

    /// The process ids behind `conflicts`; 0 for a prepared transaction.
    pub fn conflicting_pids(&self, mode: LockMode) -> Vec<i32> {
        self.conflicts(mode)
            .iter()
            // SAFETY: a PGPROC is shared memory that is never freed.
            .map(|vxid| compat::process_of(vxid).map_or(0, |p| unsafe { (*p).pid }))
            .collect()
    }

    /// Wakes the session that holds a lock that conflicts with this mode.
    pub fn wake(&self, mode: LockMode) {
        for vxid in self.conflicts(mode) {
            if let Some(process) = compat::process_of(&vxid) {
                // SAFETY: as above; setting the latch of a process that has moved on does no harm.
                unsafe { pg_sys::SetLatch(&mut (*process).procLatch) };
            }
        }
    }
}
