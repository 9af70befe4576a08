//! Reading tables and catalogs without the planner.

use crate::pg::memory::Scratch;
use pgrx::pg_sys::{self, AttrNumber, Datum, HeapTuple, Oid, RegProcedure, Snapshot, TupleDesc};

/// Calls `visit` for every row that is committed now, or that this transaction has written, until one call fails. Memory
/// that Postgres allocates for a row is freed before the next.
///
/// # Safety
/// The relation must be an open table; a row must not be used after `visit` returns.
pub unsafe fn each_row<E>(
    table: pg_sys::Relation,
    mut visit: impl FnMut(HeapTuple) -> Result<(), E>,
) -> Result<(), E> {
    // SAFETY: the caller's promise; the snapshot outlives the scan.
    unsafe {
        let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot());
        let mut scratch = Scratch::new();
        let mut result = Ok(());
        scan(table, snapshot, |tuple| {
            result = scratch.run(|| visit(tuple));
            result.is_ok()
        });
        pg_sys::UnregisterSnapshot(snapshot);
        result
    }
}

/// Copies of the rows that a snapshot shows and for which `wants` returns true.
///
/// # Safety
/// The relation must be an open table, and the snapshot valid during the scan.
pub unsafe fn copies(
    table: pg_sys::Relation,
    snapshot: Snapshot,
    wants: impl Fn(HeapTuple) -> bool,
) -> Vec<HeapTuple> {
    let mut found = Vec::new();
    // SAFETY: the caller's promise.
    unsafe {
        scan(table, snapshot, |tuple| {
            if wants(tuple) {
                found.push(pg_sys::heap_copytuple(tuple));
            }
            true
        });
    }
    found
}

/// # Safety
/// As for `copies`.
unsafe fn scan(
    table: pg_sys::Relation,
    snapshot: Snapshot,
    mut goes_on: impl FnMut(HeapTuple) -> bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (heap, none) = (pg_sys::InvalidOid, std::ptr::null_mut());
        let scan = pg_sys::systable_beginscan(table, heap, false, snapshot, 0, none);
        loop {
            pgrx::check_for_interrupts!();
            let tuple = pg_sys::systable_getnext(scan);
            if tuple.is_null() || !goes_on(tuple) {
                break;
            }
        }
        pg_sys::systable_endscan(scan);
    }
}

/// Calls `visit` for each row of a catalog whose columns have these values, each compared by its equality function. Uses
/// the index if one is given, and the catalog's own snapshot if none is.
///
/// # Safety
/// The index must be the catalog's and begin with those columns; a row must not be used after `visit` returns.
pub unsafe fn each_catalog_row<const N: usize>(
    catalog: Oid,
    index: Option<Oid>,
    wanted: [(AttrNumber, RegProcedure, Datum); N],
    snapshot: Snapshot,
    mut visit: impl FnMut(HeapTuple, TupleDesc),
) {
    // SAFETY: the caller's promise; the keys outlive the scan.
    unsafe {
        let catalog = pg_sys::table_open(catalog, pg_sys::AccessShareLock as i32);
        let mut keys = [pg_sys::ScanKeyData::default(); N];
        for (key, (column, equality, value)) in keys.iter_mut().zip(wanted) {
            let equal = pg_sys::BTEqualStrategyNumber as u16;
            pg_sys::ScanKeyInit(key, column, equal, equality, value);
        }
        let (use_index, index) = (index.is_some(), index.unwrap_or(Oid::INVALID));
        let (count, keys) = (N as i32, keys.as_mut_ptr());
        let scan = pg_sys::systable_beginscan(catalog, index, use_index, snapshot, count, keys);
        loop {
            let tuple = pg_sys::systable_getnext(scan);
            if tuple.is_null() {
                break;
            }
            visit(tuple, (*catalog).rd_att);
        }
        pg_sys::systable_endscan(scan);
        pg_sys::table_close(catalog, pg_sys::AccessShareLock as i32);
    }
}
