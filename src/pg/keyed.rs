//! A table of the state, opened with the index that leads with the name of a lease.

use super::relation::state_oid;
use super::{compat, raw};
use crate::errors::Refusal;
use pgrx::pg_sys;
use std::ffi::{c_int, CStr};

/// Both, opened and locked.
pub struct Keyed {
    table: pg_sys::Relation,
    index: pg_sys::Relation,
}

impl Keyed {
    /// Opens them to be read, or to be written as well.
    pub fn open(table: &'static CStr, index: &'static CStr, write: bool) -> Result<Self, Refusal> {
        let mode = if write { pg_sys::RowExclusiveLock } else { pg_sys::AccessShareLock } as c_int;
        let open = |oid| {
            // SAFETY: opens and locks a relation; the reference is given back on drop.
            unsafe { compat::guarded(|| raw::relation_open(oid, mode)) }
        };
        let mut opened = Keyed { table: open(state_oid(table)?), index: std::ptr::null_mut() };
        // Not before the table is locked: until then another index may take its place.
        opened.index = open(state_oid(index)?);
        Ok(opened)
    }

    /// The table.
    pub fn table(&self) -> pg_sys::Relation {
        self.table
    }

    /// Shows the rows of a lease that a snapshot sees, in the order of the index, each while its page is
    /// pinned.
    ///
    /// # Safety
    /// To be called inside `compat::guarded`, with a text and a snapshot that is registered or static.
    pub unsafe fn each(
        &self,
        name: pg_sys::Datum,
        snapshot: pg_sys::Snapshot,
        mut show: impl FnMut(pg_sys::HeapTuple),
    ) {
        let mut key = pg_sys::ScanKeyData::default();
        // SAFETY: the key's type and collation are those of the index's first column.
        unsafe {
            let equal = pg_sys::BTEqualStrategyNumber as u16;
            raw::ScanKeyInit(&mut key, 1, equal, pg_sys::F_TEXTEQ.into(), name);
            let scan =
                raw::systable_beginscan_ordered(self.table, self.index, snapshot, 1, &mut key);
            loop {
                let forward = pg_sys::ScanDirection::ForwardScanDirection;
                let tuple = raw::systable_getnext_ordered(scan, forward);
                if tuple.is_null() {
                    break;
                }
                show(tuple);
            }
            raw::systable_endscan_ordered(scan);
        }
    }
}

impl Drop for Keyed {
    fn drop(&mut self) {
        // An error's clean-up gives the references back by itself.
        if !std::thread::panicking() {
            // SAFETY: opened by `open`; the locks stay until the transaction ends.
            unsafe {
                compat::guarded(|| {
                    for rel in [self.index, self.table] {
                        if !rel.is_null() {
                            raw::relation_close(rel, pg_sys::NoLock as c_int);
                        }
                    }
                });
            }
        }
    }
}
