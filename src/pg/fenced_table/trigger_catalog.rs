//! The triggers that call a function, as pg_trigger has them.

use crate::pg::call::args::text_bytes;
use pgrx::pg_sys;

/// A trigger and the arguments that it was made with.
pub struct Trigger {
    pub oid: pg_sys::Oid,
    pub arguments: Vec<Vec<u8>>,
}

/// Those that call the function: of one table, or of all. Seen as a statement of this transaction would see them.
pub fn triggers_calling(function: pg_sys::Oid, table: Option<pg_sys::Oid>) -> Vec<Trigger> {
    let mut found = Vec::new();
    // SAFETY: a catalog scan, by table along its index, else over the whole; what is kept of a row is copied before the
    // next one is read, and the snapshot is registered for as long as the scan runs.
    unsafe {
        let catalog = pg_sys::table_open(pg_sys::TriggerRelationId, pg_sys::AccessShareLock as i32);
        let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetTransactionSnapshot());
        let mut key = pg_sys::ScanKeyData::default();
        let (column, value) = match table {
            Some(table) => (pg_sys::Anum_pg_trigger_tgrelid, table),
            None => (pg_sys::Anum_pg_trigger_tgfoid, function),
        };
        pg_sys::ScanKeyInit(
            &mut key,
            column as i16,
            pg_sys::BTEqualStrategyNumber as u16,
            pg_sys::F_OIDEQ.into(),
            value.into(),
        );
        let scan = pg_sys::systable_beginscan(
            catalog,
            pg_sys::TriggerRelidNameIndexId.into(),
            table.is_some(),
            snapshot,
            1,
            &mut key,
        );
        loop {
            let tuple = pg_sys::systable_getnext(scan);
            if tuple.is_null() {
                break;
            }
            let form = &*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_trigger>();
            if form.tgfoid == function {
                let arguments = arguments(tuple, (*catalog).rd_att, form.tgnargs);
                found.push(Trigger { oid: form.oid, arguments });
            }
        }
        pg_sys::systable_endscan(scan);
        pg_sys::UnregisterSnapshot(snapshot);
        pg_sys::table_close(catalog, pg_sys::AccessShareLock as i32);
    }
    found
}

/// # Safety
/// The tuple must be a row of pg_trigger.
unsafe fn arguments(
    tuple: pg_sys::HeapTuple,
    columns: pg_sys::TupleDesc,
    count: i16,
) -> Vec<Vec<u8>> {
    let mut null = false;
    // SAFETY: the caller's promise; tgargs is a bytea, never NULL, in which each argument ends in a zero byte.
    unsafe {
        let column = pg_sys::Anum_pg_trigger_tgargs as i32;
        let all = text_bytes(pg_sys::heap_getattr(tuple, column, columns, &mut null));
        all.split(|byte| *byte == 0).take(count as usize).map(<[u8]>::to_vec).collect()
    }
}
