//! A table read from one end to the other, without the planner.

use crate::pg::memory::Scratch;
use pgrx::pg_sys;

/// Shows every row that is committed now, or that this transaction has written, until one is refused. What Postgres
/// allocates while a row is shown is given back before the next one.
///
/// # Safety
/// The relation must be an open table; a row must not be used after it was shown.
pub unsafe fn each_row<E>(
    table: pg_sys::Relation,
    mut show: impl FnMut(pg_sys::HeapTuple) -> Result<(), E>,
) -> Result<(), E> {
    // SAFETY: the caller's promise; the snapshot outlives the scan.
    unsafe {
        let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot());
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
