//! What ALTER ROLE … SET and ALTER DATABASE … SET have recorded (pg_db_role_setting).

use crate::pg::call::args::texts_of;
use pgrx::pg_sys::{self, Datum, Oid};
use std::ffi::CStr;

/// catalog/pg_db_role_setting.h; pgrx binds neither.
const RELATION: Oid = Oid::from_u32(2964);
const INDEX: Oid = Oid::from_u32(2965);
/// The numbers of its columns.
const SETDATABASE: i16 = 1;
const SETROLE: i16 = 2;
const SETCONFIG: i32 = 3;

/// The value recorded for a database and a role, either of them InvalidOid for all.
pub fn setting(database: Oid, role: Oid, name: &CStr) -> Option<Vec<u8>> {
    // SAFETY: a catalog scan by its key; the values are copied before the scan ends.
    unsafe {
        let lock = pg_sys::AccessShareLock as i32;
        let rel = pg_sys::table_open(RELATION, lock);
        let mut keys = [pg_sys::ScanKeyData::default(); 2];
        for (key, (column, value)) in
            keys.iter_mut().zip([(SETDATABASE, database), (SETROLE, role)])
        {
            let equal = pg_sys::BTEqualStrategyNumber as u16;
            pg_sys::ScanKeyInit(key, column, equal, pg_sys::F_OIDEQ.into(), Datum::from(value));
        }
        let scan = pg_sys::systable_beginscan(
            rel,
            INDEX,
            true,
            std::ptr::null_mut(),
            2,
            keys.as_mut_ptr(),
        );
        let tuple = pg_sys::systable_getnext(scan);
        let mut texts = Vec::new();
        if !tuple.is_null() {
            let mut null = false;
            let array = pg_sys::heap_getattr(tuple, SETCONFIG, (*rel).rd_att, &mut null);
            if !null {
                texts = texts_of(array);
            }
        }
        pg_sys::systable_endscan(scan);
        pg_sys::table_close(rel, lock);
        texts.into_iter().flatten().find_map(|text| value_of(&text, name.to_bytes()))
    }
}

/// The value of `name=value`, where that is the name; names of settings have no case.
fn value_of(text: &[u8], name: &[u8]) -> Option<Vec<u8>> {
    let (known, value) = text.split_at_checked(name.len())?;
    known.eq_ignore_ascii_case(name).then(|| value.strip_prefix(b"=")).flatten().map(<[u8]>::to_vec)
}
