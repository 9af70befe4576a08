//! Additions of others to a table of the extension that a write would bypass, because rows are written as PostgreSQL
//! writes its catalogs.

use crate::pg::compat;
use pgrx::pg_sys;

/// Returns an addition that a write would bypass, if there is one. `is_given` returns true for a column, counted from
/// 0, that has a value in each written row; in other columns NULL is a value.
///
/// # Safety
/// The relation must be an open table, and locked.
pub unsafe fn of(
    table: pg_sys::Relation,
    is_given: impl Fn(usize) -> bool,
) -> Option<&'static str> {
    // SAFETY: the caller's promise. (The row of pg_class claims triggers until the first VACUUM after the last one was
    // dropped; these lists do not.)
    unsafe {
        let (columns, triggers) = ((*table).rd_att, (*table).trigdesc.as_ref());
        let triggers = triggers.map_or(&[][..], |all| {
            std::slice::from_raw_parts(all.triggers, all.numtriggers as usize)
        });
        let mut enabled = triggers.iter().filter(|trigger| trigger.tgenabled as u8 != b'D');
        if let Some(trigger) = enabled.next() {
            return Some(if trigger.tgisinternal {
                "a foreign key or deferrable key"
            } else {
                "a trigger"
            });
        }
        if !(*table).rd_rules.is_null() {
            return Some("a rule");
        }
        if (*columns).constr.as_ref().is_some_and(|constraints| constraints.num_check > 0) {
            return Some("a CHECK constraint");
        }
        let mut others = (0..(*columns).natts as usize).filter(|n| !is_given(*n));
        if others.any(|n| wants_value(&*compat::attribute(columns, n))) {
            return Some("a column that is NOT NULL or has a default");
        }
        let indexes = pg_sys::RelationGetIndexList(table).as_ref().map_or(&[][..], |list| {
            std::slice::from_raw_parts(list.elements, list.length as usize)
        });
        let has_special = indexes.iter().any(|index| is_special(index.oid_value));
        has_special.then_some("an index with an expression, a condition or an exclusion")
    }
}

/// Returns true if the column must not be NULL, or gets a default in a row that does not name it.
fn wants_value(column: &pg_sys::FormData_pg_attribute) -> bool {
    let has_default = column.atthasdef || column.attidentity != 0 || column.attgenerated != 0;
    !column.attisdropped && (column.attnotnull || has_default)
}

/// Returns true if an index entry needs more than the values of its columns.
///
/// # Safety
/// The index must be one of a locked table.
unsafe fn is_special(index: pg_sys::Oid) -> bool {
    let cache = pg_sys::SysCacheIdentifier::INDEXRELID as i32;
    // SAFETY: the entry is released after it was read.
    unsafe {
        let entry = pg_sys::SearchSysCache1(cache, index.into());
        if entry.is_null() {
            return false;
        }
        let form = &*pg_sys::GETSTRUCT(entry).cast::<pg_sys::FormData_pg_index>();
        let is_special = form.indisexclusion
            || [pg_sys::Anum_pg_index_indexprs, pg_sys::Anum_pg_index_indpred]
                .iter()
                .any(|n| !pg_sys::heap_attisnull(entry, *n as i32, std::ptr::null_mut()));
        pg_sys::ReleaseSysCache(entry);
        is_special
    }
}
