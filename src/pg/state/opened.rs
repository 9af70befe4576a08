//! Relations of the extension, opened under their locks.
//!
//! Relations of the extension are read and written only through this type, which takes the lock. Even a reader may
//! change a page (it prunes old versions, or sets hint bits). Without a lock, another session might have dropped the
//! file; then the WAL would have a change of a dropped file, at which every standby stops for good.
//!
//! A session that queues for a relation's lock may queue behind a REINDEX that waits for an open transaction, and so
//! wait as long as that transaction likes. A try must not. It waits for holders of a conflicting lock (then maintenance
//! is at work, and ends), but takes the lease for taken if sessions only wait for such a lock.

use crate::errors;
use crate::pg::call::raise;
use crate::pg::compat;
use crate::pg::locks::lock;
use crate::pg::memory::Owner;
use crate::pg::raw;
use crate::pg::state::relation;
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::c_int;

/// What to do if the lock is not free.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum IfLocked {
    /// Queue for the lock, behind those that came first.
    Queue,
    /// Wait if another session holds a conflicting lock; give up if sessions only wait for one.
    WaitForHolders,
    /// Give up, both if another session holds a conflicting lock and if it waits for one.
    GiveUp,
}

/// An open relation with its lock. Dropping it closes the relation and releases the lock, except after a write: a
/// writer holds the lock until the transaction ends (CREATE INDEX and pg_repack rely on that).
pub struct Opened {
    /// The relation, open and locked as long as this value lives.
    pub(in crate::pg) relation: pg_sys::Relation,
    mode: c_int,
    keeps_lock: Cell<bool>,
    /// The resource owner of the reference, which must be current when the reference is released.
    owner: pg_sys::ResourceOwner,
}

impl Opened {
    /// Takes the lock, queueing as every statement does, and opens the relation. Raises 55000 if the relation was
    /// dropped meanwhile.
    pub fn queued(oid: pg_sys::Oid, mode: u32) -> Self {
        // SAFETY: an ordinary lock by oid, released with the transaction at the latest.
        unsafe { compat::guarded(|| raw::LockRelationOid(oid, mode as c_int)) };
        Opened::locked(oid, mode as c_int)
    }

    /// Takes the lock and opens the relation. Returns `None` if the lock is not free and `if_locked` forbids waiting.
    pub fn open(oid: pg_sys::Oid, mode: u32, if_locked: IfLocked) -> Option<Self> {
        if if_locked == IfLocked::Queue {
            return Some(Opened::queued(oid, mode));
        }
        lock(oid, mode as c_int, if_locked).then(|| Opened::locked(oid, mode as c_int))
    }

    /// Opens a locked relation. The extension may have been dropped during the wait for the lock.
    fn locked(oid: pg_sys::Oid, mode: c_int) -> Self {
        if !relation::is_there(oid) {
            raise::error(errors::dropped());
        }
        // SAFETY: the relation is locked; the reference is released on drop.
        let relation =
            unsafe { compat::guarded(|| raw::relation_open(oid, pg_sys::NoLock as c_int)) };
        // SAFETY: reads a global of this thread.
        let owner = unsafe { pg_sys::CurrentResourceOwner };
        Opened { relation, mode, keeps_lock: Cell::new(false), owner }
    }

    /// Returns true if the relation is a heap whose first columns have these types.
    pub fn is_heap_with(&self, types: &[pg_sys::Oid]) -> bool {
        // SAFETY: an open relation; the number of columns is checked first.
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

    /// Holds the lock until the transaction ends.
    pub fn keep_lock(&self) {
        self.keeps_lock.set(true);
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // The clean-up after an error releases both by itself.
        if std::thread::panicking() {
            return;
        }
        let mode = if self.keeps_lock.get() { pg_sys::NoLock as c_int } else { self.mode };
        let _owner = Owner::is(self.owner);
        // SAFETY: opened within the same call, which the owner outlives.
        unsafe { compat::guarded(|| raw::relation_close(self.relation, mode)) };
    }
}

/// Number of 1 ms retries while no conflicting holder is seen: a lock that is being handed over has no holder for a
/// moment.
const QUICK_RETRIES: u32 = 5;

/// Takes a relation's lock without queueing behind maintenance. Returns false if the lock is not free and `if_locked`
/// forbids waiting.
fn lock(relation: pg_sys::Oid, mode: c_int, if_locked: IfLocked) -> bool {
    let mut retries = 0;
    loop {
        pgrx::check_for_interrupts!();
        // SAFETY: an ordinary lock by oid, released with the transaction at the latest.
        if unsafe { compat::guarded(|| raw::ConditionalLockRelationOid(relation, mode)) } {
            return true;
        }
        match first_holder(relation, mode) {
            _ if if_locked != IfLocked::WaitForHolders => return false,
            // SAFETY: waits for the end of a transaction, as CREATE INDEX CONCURRENTLY does: `lock_timeout`,
            // cancel and the deadlock detector end it.
            Some(holder) => unsafe {
                pg_sys::VirtualXactLock(holder, true);
                retries = 0;
            },
            None if retries == QUICK_RETRIES => return false,
            None => {
                retries += 1;
                // SAFETY: only sleeps.
                unsafe { pg_sys::pg_usleep(1_000) };
            }
        }
    }
}

/// A transaction that holds a conflicting lock on the relation. Transactions that wait for one do not count.
fn first_holder(relation: pg_sys::Oid, mode: c_int) -> Option<pg_sys::VirtualTransactionId> {
    let tag = pg_sys::LOCKTAG {
        // SAFETY: set once when the backend starts.
        locktag_field1: unsafe { pg_sys::MyDatabaseId }.to_u32(),
        locktag_field2: relation.to_u32(),
        locktag_type: pg_sys::LockTagType::LOCKTAG_RELATION as u8,
        locktag_lockmethodid: pg_sys::DEFAULT_LOCKMETHOD as u8,
        ..Default::default()
    };
    lock::holders(&tag, mode).first().copied()
}
