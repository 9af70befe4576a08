//! A relation of the state, opened under its lock.
//!
//! Nobody reads or writes a relation of the state without one of these, and none can be had without the lock. A reader
//! of a page may change it even without the lock (it prunes old versions, or sets hint bits). Another session may have
//! dropped the file meanwhile: then the log has a change of a dropped file, at which every standby stops for good.
//!
//! A session that queues for a relation's lock behind a REINDEX that itself queues behind an open transaction waits as
//! long as that transaction likes. A try must not: it waits for those who have the lock (then maintenance is at work,
//! and ends), and takes the lease for taken where they merely wait for it.

use crate::errors;
use crate::pg::call::raise;
use crate::pg::compat;
use crate::pg::raw;
use crate::pg::state::relation;
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::c_int;

/// The way to deal with a lock that cannot be had at once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum IfLocked {
    /// Queue for it, behind those that came first.
    Queue,
    /// Wait if another session holds a conflicting lock; give up if sessions only wait for one.
    WaitForHolders,
    /// Give up: somebody has a lock that conflicts, or waits for one.
    GiveUp,
}

/// An open relation and its lock. Both are given back when this goes; who has written keeps the lock until the
/// transaction ends, as every writer does (CREATE INDEX and pg_repack rely on that).
pub struct Opened {
    /// Open and locked for as long as this lives.
    pub(in crate::pg) relation: pg_sys::Relation,
    mode: c_int,
    keeps_lock: Cell<bool>,
    /// The owner of the reference, for which it is given back.
    owner: pg_sys::ResourceOwner,
}

impl Opened {
    /// Takes the lock, as every statement does, and opens the relation.
    /// Raises 55000 where it was dropped meanwhile.
    pub fn queued(oid: pg_sys::Oid, mode: u32) -> Self {
        // SAFETY: a lock by oid, as any; it goes with the transaction at the latest.
        unsafe { compat::guarded(|| raw::LockRelationOid(oid, mode as c_int)) };
        Opened::locked(oid, mode as c_int)
    }

    /// Takes the lock and opens the relation; None where the lock is not to be had that way.
    pub fn open(oid: pg_sys::Oid, mode: u32, if_locked: IfLocked) -> Option<Self> {
        if if_locked == IfLocked::Queue {
            return Some(Opened::queued(oid, mode));
        }
        lock(oid, mode as c_int, if_locked).then(|| Opened::locked(oid, mode as c_int))
    }

    /// Opens a relation that is locked. While its lock was waited for, the extension may have been dropped.
    fn locked(oid: pg_sys::Oid, mode: c_int) -> Self {
        if !relation::is_there(oid) {
            raise::now(errors::dropped());
        }
        // SAFETY: the relation is locked; the reference is given back on drop.
        let relation =
            unsafe { compat::guarded(|| raw::relation_open(oid, pg_sys::NoLock as c_int)) };
        // SAFETY: reads a global of this thread.
        let owner = unsafe { pg_sys::CurrentResourceOwner };
        Opened { relation, mode, keeps_lock: Cell::new(false), owner }
    }

    /// Is it a heap, and are its first columns of these types?
    pub fn is_heap_with(&self, types: &[pg_sys::Oid]) -> bool {
        // SAFETY: an open relation; the columns' number is checked first.
        unsafe {
            let (class, columns) = (&*(*self.relation).rd_rel, (*self.relation).rd_att);
            class.relkind as u8 == pg_sys::RELKIND_RELATION
                && class.relam == pg_sys::HEAP_TABLE_AM_OID
                && (*columns).natts as usize >= types.len()
                && types.iter().enumerate().all(|(n, known)| {
                    let column = &*compat::attribute(columns, n);
                    column.atttypid == *known && !column.attisdropped
                })
        }
    }

    /// Keeps the lock until the transaction ends.
    pub fn keep_lock(&self) {
        self.keeps_lock.set(true);
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // An error's clean-up gives both back by itself.
        if std::thread::panicking() {
            return;
        }
        let mode = if self.keeps_lock.get() { pg_sys::NoLock as c_int } else { self.mode };
        // SAFETY: opened within the same call, which the owner outlives.
        unsafe {
            let current = pg_sys::CurrentResourceOwner;
            pg_sys::CurrentResourceOwner = self.owner;
            compat::guarded(|| raw::relation_close(self.relation, mode));
            pg_sys::CurrentResourceOwner = current;
        }
    }
}

/// How often to look whether the lock is to be had where nobody has one that conflicts, a millisecond apart:
/// when it changes hands, nobody may have it for an instant.
const QUICK_LOOKS: u32 = 5;

/// Takes a relation's lock without queueing behind maintenance; false when it is not to be had that way.
pub fn lock(relation: pg_sys::Oid, mode: c_int, if_locked: IfLocked) -> bool {
    let mut looks = 0;
    loop {
        pgrx::check_for_interrupts!();
        // SAFETY: a lock by oid, as any; it goes with the transaction at the latest.
        if unsafe { compat::guarded(|| raw::ConditionalLockRelationOid(relation, mode)) } {
            return true;
        }
        match first_holder(relation, mode) {
            _ if if_locked != IfLocked::WaitForHolders => return false,
            // SAFETY: waits for the end of a transaction, as CREATE INDEX CONCURRENTLY does: `lock_timeout`,
            // cancel and the deadlock detector end it.
            Some(holder) => unsafe {
                pg_sys::VirtualXactLock(holder, true);
                looks = 0;
            },
            None if looks == QUICK_LOOKS => return false,
            None => {
                looks += 1;
                // SAFETY: sleeps.
                unsafe { pg_sys::pg_usleep(1_000) };
            }
        }
    }
}

/// A transaction that has a lock on the relation which conflicts with this mode. Transactions that wait for one do
/// not count.
fn first_holder(relation: pg_sys::Oid, mode: c_int) -> Option<pg_sys::VirtualTransactionId> {
    let tag = pg_sys::LOCKTAG {
        // SAFETY: set once when the backend starts.
        locktag_field1: unsafe { pg_sys::MyDatabaseId }.to_u32(),
        locktag_field2: relation.to_u32(),
        locktag_type: pg_sys::LockTagType::LOCKTAG_RELATION as u8,
        locktag_lockmethodid: pg_sys::DEFAULT_LOCKMETHOD as u8,
        ..Default::default()
    };
    let mut count: c_int = 0;
    // SAFETY: gives back `count` entries.
    unsafe {
        let found = pg_sys::GetLockConflicts(&tag, mode, &mut count);
        let first = (count > 0).then(|| *found);
        pg_sys::pfree(found.cast());
        first
    }
}
