//! Looking up the triggers that call a function, in pg_trigger.

use crate::pg::call::args::Text;
use crate::pg::table_scan;
use pgrx::pg_sys;

/// A trigger with the arguments of CREATE TRIGGER.
pub struct Trigger {
    pub oid: pg_sys::Oid,
    /// The arguments, each followed by a NUL byte.
    all: Text,
    count: usize,
}

impl Trigger {
    /// The arguments in their order.
    pub fn arguments(&self) -> impl Iterator<Item = &[u8]> {
        self.all.bytes().split(|byte| *byte == 0).take(self.count)
    }
}

/// The triggers of one table, or of all, that call the function, as a statement of this transaction would see them.
pub fn triggers_calling(function: pg_sys::Oid, table: Option<pg_sys::Oid>) -> Vec<Trigger> {
    let (column, value) = match table {
        Some(table) => (pg_sys::Anum_pg_trigger_tgrelid, table),
        None => (pg_sys::Anum_pg_trigger_tgfoid, function),
    };
    let wanted = [(column as i16, pg_sys::F_OIDEQ.into(), value.into())];
    let index = table.map(|_| pg_sys::TriggerRelidNameIndexId.into());
    let mut found = Vec::new();
    // SAFETY: the index is by table; values kept of a row are copied, and the snapshot is registered during the scan.
    unsafe {
        let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetTransactionSnapshot());
        let catalog = pg_sys::TriggerRelationId;
        table_scan::each_catalog_row(catalog, index, wanted, snapshot, |tuple, columns| {
            let form = &*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_trigger>();
            if form.tgfoid == function {
                let (column, mut null) = (pg_sys::Anum_pg_trigger_tgargs as i32, false);
                // The column is a bytea, and never NULL.
                let all = pg_sys::heap_getattr(tuple, column, columns, &mut null);
                let all = Text(pg_sys::pg_detoast_datum_copy(all.cast_mut_ptr()).into());
                found.push(Trigger { oid: form.oid, all, count: form.tgnargs as usize });
            }
        });
        pg_sys::UnregisterSnapshot(snapshot);
    }
    found
}
