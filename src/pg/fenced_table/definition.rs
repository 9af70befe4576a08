//! Whether the transaction's snapshot shows the present definition of a table.
//!
//! PL/pgSQL reads the catalogs by a snapshot. At REPEATABLE READ and above that may be older than the lock of the table,
//! so another session may have changed the definition in between.

use crate::pg::session::xact;
use crate::pg::state::row::RowVersion;
use crate::pg::table_scan;
use pgrx::pg_sys::{self, AttrNumber, Oid};

/// The catalogs with rows of a table, each with its index by the table's oid, and the column with that oid.
const CATALOGS: [(Oid, u32, u32); 3] = [
    (pg_sys::RelationRelationId, pg_sys::ClassOidIndexId, pg_sys::Anum_pg_class_oid),
    (
        pg_sys::AttributeRelationId,
        pg_sys::AttributeRelidNumIndexId,
        pg_sys::Anum_pg_attribute_attrelid,
    ),
    (pg_sys::TriggerRelationId, pg_sys::TriggerRelidNameIndexId, pg_sys::Anum_pg_trigger_tgrelid),
];

/// Returns true if the transaction's snapshot shows the table, its columns and its triggers as they are now.
pub fn is_shown(table: Oid) -> bool {
    if !xact::keeps_snapshot() {
        return true;
    }
    // SAFETY: within a transaction; the catalog's own snapshot is the present.
    unsafe {
        let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetTransactionSnapshot());
        let shown = versions(table, snapshot) == versions(table, std::ptr::null_mut());
        pg_sys::UnregisterSnapshot(snapshot);
        shown
    }
}

/// The versions of the catalog rows of a table.
///
/// # Safety
/// As for `each_catalog_row`.
unsafe fn versions(table: Oid, snapshot: pg_sys::Snapshot) -> Vec<RowVersion> {
    let mut found = Vec::new();
    for (catalog, index, column) in CATALOGS {
        let wanted = [(column as AttrNumber, pg_sys::F_OIDEQ.into(), table.into())];
        // SAFETY: the caller's promise; the index begins with this column.
        unsafe {
            table_scan::each_catalog_row(
                catalog,
                Some(index.into()),
                wanted,
                snapshot,
                |tuple, _| {
                    found.push(RowVersion::of(tuple));
                },
            );
        }
    }
    found
}
