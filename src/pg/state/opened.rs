//! A relation of the state, opened under its lock.
//!
//! Nobody reads or writes a relation of the state without one of these, and none can be had without the lock. Who reads
//! a page without the lock may still change it (it prunes old versions, or sets hint bits). Another session may have
//! dropped the file meanwhile: then the log has a change of a dropped file, at which every standby stops for good.

use crate::known_bugs;
use crate::pg::compat;
use crate::pg::locks::relation_lock::{self, IfLocked};
use crate::pg::raw;
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::c_int;

/// An open relation and its lock. Both are given back when this goes; who has written keeps the lock until the
/// transaction ends, as every writer does (CREATE INDEX and pg_repack rely on that).
pub struct Opened {
    relation: pg_sys::Relation,
    mode: c_int,
    keeps_lock: Cell<bool>,
    /// Whose the reference is; it is given back as its own.
    owner: pg_sys::ResourceOwner,
}

impl Opened {
    /// Takes the lock, as every statement does, and opens the relation.
    pub fn queued(oid: pg_sys::Oid, mode: u32) -> Self {
        let mode = taken(mode);
        // SAFETY: raises where there is no such relation; the reference is given back on drop.
        Opened::around(unsafe { compat::guarded(|| raw::relation_open(oid, mode)) }, mode)
    }

    /// Takes the lock and opens the relation; None where the lock is not to be had that way.
    pub fn open(oid: pg_sys::Oid, mode: u32, if_locked: IfLocked) -> Option<Self> {
        let (lock, none) = (taken(mode), pg_sys::NoLock as c_int);
        if if_locked == IfLocked::Queue || lock == none {
            return Some(Opened::queued(oid, mode));
        }
        relation_lock::take(oid, lock, if_locked).then(|| {
            // SAFETY: the relation is locked; the reference is given back on drop.
            Opened::around(unsafe { compat::guarded(|| raw::relation_open(oid, none)) }, lock)
        })
    }

    fn around(relation: pg_sys::Relation, mode: c_int) -> Self {
        // SAFETY: reads a global of this thread.
        let owner = unsafe { pg_sys::CurrentResourceOwner };
        Opened { relation, mode, keeps_lock: Cell::new(false), owner }
    }

    /// The relation, open and locked for as long as this lives.
    pub fn relation(&self) -> pg_sys::Relation {
        self.relation
    }

    /// Keeps the lock until the transaction ends.
    pub fn keep_lock(&self) {
        self.keeps_lock.set(true);
    }
}

/// The lock that is taken for this mode: that one, but with a known bug.
fn taken(mode: u32) -> c_int {
    let is_left_out = known_bugs::NO_TABLE_LOCK && mode == pg_sys::AccessShareLock;
    if is_left_out {
        pg_sys::NoLock as c_int
    } else {
        mode as c_int
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
