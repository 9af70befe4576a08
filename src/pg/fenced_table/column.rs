//! Reading the rows of a table without the planner. An index or a policy of the table's owner may call functions, and
//! none of these may run with the caller's rights.

use crate::pg::table_scan;
use pgrx::pg_sys;
use std::convert::Infallible;

/// The greatest value of a bigint column in the table itself. `None` if there is none, if the caller may not read every
/// row of the column, or if the table is gone.
pub fn max_value(relation: pg_sys::Oid, column: i16) -> Option<i64> {
    // SAFETY: the relation is locked and open while it is read, the snapshot is registered, and the column is checked
    // to exist and to be a bigint.
    unsafe {
        let user = pg_sys::GetUserId();
        let select = pg_sys::ACL_SELECT as pg_sys::AclMode;
        let ok = pg_sys::AclResult::ACLCHECK_OK;
        let gone = &mut false;
        if pg_sys::pg_class_aclcheck_ext(relation, user, select, gone) != ok
            && pg_sys::pg_attribute_aclcheck_ext(relation, column, user, select, gone) != ok
        {
            return None;
        }
        if pg_sys::check_enable_rls(relation, pg_sys::InvalidOid, true) == ROW_SECURITY_ON {
            return None;
        }
        let rel = pg_sys::try_relation_open(relation, pg_sys::AccessShareLock as i32);
        if rel.is_null() {
            return None;
        }
        let greatest = is_bigint_of_table(rel, column).then(|| scan(rel, column)).flatten();
        pg_sys::relation_close(rel, pg_sys::NoLock as i32);
        greatest
    }
}

const ROW_SECURITY_ON: i32 = pg_sys::CheckEnableRlsResult::RLS_ENABLED as i32;

/// # Safety
/// The relation must be open.
unsafe fn is_bigint_of_table(rel: pg_sys::Relation, column: i16) -> bool {
    // SAFETY: the caller's promise; the column's number is checked first.
    unsafe {
        (*(*rel).rd_rel).relkind as u8 == pg_sys::RELKIND_RELATION
            && (1..=(*(*rel).rd_att).natts).contains(&i32::from(column))
            && {
                let attribute = crate::pg::compat::attribute((*rel).rd_att, column as usize - 1);
                (*attribute).atttypid == pg_sys::INT8OID && !(*attribute).attisdropped
            }
    }
}

/// # Safety
/// The relation must be an open table, the column a bigint of it.
unsafe fn scan(rel: pg_sys::Relation, column: i16) -> Option<i64> {
    let mut greatest = None;
    // SAFETY: the caller's promise; a value is read before the next row replaces it.
    let Ok(()) = unsafe {
        table_scan::each_row(rel, |tuple| -> Result<(), Infallible> {
            let mut null = false;
            let value = pg_sys::heap_getattr(tuple, i32::from(column), (*rel).rd_att, &mut null);
            greatest = greatest.max((!null).then(|| value.value() as i64));
            Ok(())
        })
    };
    greatest
}
