//! Tables and catalogs read without the planner.

use crate::pg::memory::Scratch;
use pgrx::pg_sys::{self, AttrNumber, Datum, HeapTuple, Oid, RegProcedure, Snapshot, TupleDesc};

/// Shows every row that is committed now, or that this transaction has written, until one is refused. What Postgres
/// allocates while a row is shown is given back before the next one.
///
/// # Safety
/// The relation must be an open table; a row must not be used after it was shown.
pub unsafe fn each_row<E>(
    table: pg_sys::Relation,
    show: impl FnMut(pg_sys::HeapTuple) -> Result<(), E>,
) -> Result<(), E> {
    // SAFETY: the caller's promise.
    unsafe { each_row_of(table, pg_sys::GetLatestSnapshot(), show) }
}

/// The same, of the rows that a snapshot shows.
///
/// # Safety
/// As `each_row`.
pub unsafe fn each_row_of<E>(
    table: pg_sys::Relation,
    snapshot: Snapshot,
    mut show: impl FnMut(pg_sys::HeapTuple) -> Result<(), E>,
) -> Result<(), E> {
    // SAFETY: the caller's promise; the snapshot outlives the scan.
    unsafe {
        let snapshot = pg_sys::RegisterSnapshot(snapshot);
        let none = std::ptr::null_mut();
        let scan = pg_sys::systable_beginscan(table, pg_sys::InvalidOid, false, snapshot, 0, none);
        let scratch = Scratch::new();
        let result = loop {
            pgrx::check_for_interrupts!();
            let tuple = pg_sys::systable_getnext(scan);
            if tuple.is_null() {
                break Ok(());
            }
            let shown = scratch.turn(|| show(tuple));
            if shown.is_err() {
                break shown;
            }
        };
        pg_sys::systable_endscan(scan);
        pg_sys::UnregisterSnapshot(snapshot);
        result
    }
}

/// Shows every row of a catalog whose columns are equal to these values, each with its equality function: along the index,
/// where one is given. Without a snapshot, as a look-up of the catalog sees it now.
///
/// # Safety
/// The index must be the catalog's and begin with those columns; a row must not be used after it was shown.
pub unsafe fn each_catalog_row<const N: usize>(
    catalog: Oid,
    index: Option<Oid>,
    wanted: [(AttrNumber, RegProcedure, Datum); N],
    snapshot: Snapshot,
    mut show: impl FnMut(HeapTuple, TupleDesc),
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
            show(tuple, (*catalog).rd_att);
        }
        pg_sys::systable_endscan(scan);
        pg_sys::table_close(catalog, pg_sys::AccessShareLock as i32);
    }
}
