//! Heavyweight locks on grants, on the line of waiters and on the jump.
//!
//! They live in lock tags of our own (`field4`), which no SQL function can reach, cost no multixact, show in
//! `pg_locks` as advisory locks with this `objsubid`, go with a rolled-back savepoint and survive
//! PREPARE TRANSACTION. A backend never conflicts with itself.

use super::{compat, lock_count};
use pgrx::pg_sys;
use std::ffi::c_int;

/// What a tag is for.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Kind {
    /// A grant: a lease's name and slot.
    Grant = 0x5046,
    /// Shared or slots: which of the two a lease's live grants are.
    Shape = 0x5047,
    /// The line of those who wait for a lease.
    Queue = 0x5048,
    /// The jump of the token sequence.
    Jump = 0x5049,
    /// That a grant is guarded, and nothing else: a lease's name and slot.
    Guarded = 0x504a,
    /// A place where the commits of a lease's guarded transactions are noted.
    GuardedCommit = 0x504b,
}

/// Modes, chosen by what they conflict with.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Mode {
    /// AccessShare: a shared or slot grant is being added; excludes `Own` only.
    Anchor = 1,
    /// RowShare: who is putting a grant there? Excludes `Replace` and `Own` only. Never taken.
    Making = 2,
    /// RowExclusive: an open transaction relies on the grant; excludes `Probe`, `Replace`, `Own`. Also taken on
    /// the tag `guarded`, where only probes meet it.
    Guard = 3,
    /// ShareUpdateExclusive: the grant is being renewed or closed; excludes itself and all below.
    Change = 4,
    /// Share: is it guarded, does somebody wait? Excludes `Guard`, `Change`, `Replace`, `Own`, not itself.
    Probe = 5,
    /// Exclusive: another grant is put in this slot; excludes all but `Anchor`.
    Replace = 7,
    /// AccessExclusive: the lease is granted to one alone; excludes all.
    Own = 8,
}

/// A lock's identity.
#[derive(Clone, Copy)]
pub struct Tag(pg_sys::LOCKTAG);

impl PartialEq for Tag {
    fn eq(&self, other: &Self) -> bool {
        let key = |t: &Tag| (t.0.locktag_field2, t.0.locktag_field3, t.0.locktag_field4);
        key(self) == key(other)
    }
}

impl Eq for Tag {}

/// As long as this lives, locks are taken for the transaction or its innermost savepoint, to which also belongs
/// what is written under them. (Within a cursor they would be the cursor's, and go when that fails in a later
/// savepoint, or stay when an earlier one is rolled back.)
pub(super) struct TransactionOwns(pg_sys::ResourceOwner);

impl TransactionOwns {
    pub(super) fn now() -> Self {
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

impl Tag {
    fn new(kind: Kind, key: u64) -> Self {
        Tag(pg_sys::LOCKTAG {
            // SAFETY: set once when the backend starts.
            locktag_field1: unsafe { pg_sys::MyDatabaseId }.to_u32(),
            locktag_field2: (key >> 32) as u32,
            locktag_field3: key as u32,
            locktag_field4: kind as u16,
            locktag_type: pg_sys::LockTagType::LOCKTAG_ADVISORY as u8,
            // Not that of users' locks: DISCARD ALL gives those back in mid-transaction.
            locktag_lockmethodid: pg_sys::DEFAULT_LOCKMETHOD as u8,
        })
    }

    /// The lock on a lease's grant in a slot.
    pub fn grant(name: &[u8], slot: i32) -> Self {
        Tag::new(Kind::Grant, hash(name, slot))
    }

    /// The lock that guards of a lease's grant in a slot have.
    pub fn guarded(name: &[u8], slot: i32) -> Self {
        Tag::new(Kind::Guarded, hash(name, slot))
    }

    /// The lock on what kind the live grants of a lease are.
    pub fn shape(name: &[u8]) -> Self {
        Tag::new(Kind::Shape, hash(name, 0))
    }

    /// The lock on a lease's line of waiters.
    pub fn queue(name: &[u8]) -> Self {
        Tag::new(Kind::Queue, hash(name, 0))
    }

    /// The lock on one of the places where the commits of a lease's guarded transactions are noted.
    pub fn guarded_commit(name: &[u8], place: i32) -> Self {
        Tag::new(Kind::GuardedCommit, hash(name, place))
    }

    /// The lock on the database's jump.
    pub fn jump() -> Self {
        Tag::new(Kind::Jump, 0)
    }

    /// Takes the lock until the transaction (or the savepoint) ends. With `wait`, waits for it, which
    /// `lock_timeout`, `statement_timeout`, cancel and the deadlock detector end; without, tells whether it
    /// was to be had.
    pub fn take(&self, mode: Mode, wait: bool) -> bool {
        if !self.is_taken_at_commit() {
            lock_count::require_room(self.entry());
        }
        let _owner = TransactionOwns::now();
        // SAFETY: the tag is complete; the lock manager cleans up at the end of the transaction.
        let result = unsafe { pg_sys::LockAcquire(&self.0, mode as c_int, false, !wait) };
        let taken = result != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL;
        if taken {
            lock_count::taken(self.entry());
        }
        taken
    }

    /// Gives back one `take`.
    pub fn give(&self, mode: Mode) {
        let _owner = TransactionOwns::now();
        // SAFETY: only called for a lock that this transaction has taken.
        unsafe { pg_sys::LockRelease(&self.0, mode as c_int, false) };
        lock_count::given_back(self.entry());
    }

    /// Its entry in the lock table.
    fn entry(&self) -> lock_count::Entry {
        let key = u64::from(self.0.locktag_field2) << 32 | u64::from(self.0.locktag_field3);
        (self.0.locktag_field4, key)
    }

    /// One at a time, and given back at once: a transaction that was let so far must not fail for it.
    fn is_taken_at_commit(&self) -> bool {
        self.0.locktag_field4 == Kind::GuardedCommit as u16
    }

    /// Does another session, or a prepared transaction, hold a lock under which a new grant is written?
    pub fn others_write_grants() -> bool {
        let modes = 1 << Mode::Replace as c_int | 1 << Mode::Own as c_int;
        // SAFETY: a copy of the lock table, with as many entries as it says.
        unsafe {
            let all = &*pg_sys::GetLockStatusData();
            (0..all.nelements as usize).map(|i| &*all.locks.add(i)).any(|lock| {
                lock.locktag.locktag_type == pg_sys::LockTagType::LOCKTAG_ADVISORY as u8
                    && lock.locktag.locktag_field4 == Kind::Grant as u16
                    && lock.locktag.locktag_field1 == pg_sys::MyDatabaseId.to_u32()
                    && lock.holdMask & modes != 0
                    && lock.pid != pg_sys::MyProcPid
            })
        }
    }

    /// Who holds a lock that conflicts with this mode, but for this backend.
    pub fn conflicts(&self, mode: Mode) -> Vec<pg_sys::VirtualTransactionId> {
        let mut count: c_int = 0;
        // SAFETY: gives back `count` entries, with room for every session of the server.
        unsafe {
            let found = pg_sys::GetLockConflicts(&self.0, mode as c_int, &mut count);
            let all = (0..count as usize).map(|i| *found.add(i)).collect();
            pg_sys::pfree(found.cast());
            all
        }
    }

    /// Is somebody changing the grant, or relying on it, and not just putting another one in its place?
    pub fn is_relied_on(&self) -> bool {
        let who = |vxid: &pg_sys::VirtualTransactionId| compat::parts(vxid);
        // In this order: who has finished in between is taken for one that relies on it.
        let all: Vec<_> = self.conflicts(Mode::Replace).iter().map(who).collect();
        let making: Vec<_> = self.conflicts(Mode::Making).iter().map(who).collect();
        all.iter().any(|one| !making.contains(one))
    }

    /// The process ids behind `conflicts`; 0 for a prepared transaction.
    pub fn conflicting_pids(&self, mode: Mode) -> Vec<i32> {
        self.conflicts(mode)
            .iter()
            // SAFETY: a PGPROC is shared memory that is never freed.
            .map(|vxid| compat::process_of(vxid).map_or(0, |p| unsafe { (*p).pid }))
            .collect()
    }

    /// Wakes whoever holds a lock that conflicts with this mode.
    pub fn wake(&self, mode: Mode) {
        for vxid in self.conflicts(mode) {
            if let Some(process) = compat::process_of(&vxid) {
                // SAFETY: as above; setting the latch of a process that has moved on does no harm.
                unsafe { pg_sys::SetLatch(&mut (*process).procLatch) };
            }
        }
    }
}

/// A 64-bit hash that every library version computes alike.
fn hash(name: &[u8], slot: i32) -> u64 {
    // SAFETY: reads `len` bytes.
    unsafe { compat::hash_bytes_extended(name.as_ptr(), name.len() as c_int, slot as u32 as u64) }
}
