//! What others have added to a table of the state and PostgreSQL passes over when it writes rows as it writes its catalogs.

use crate::pg::compat;
use pgrx::pg_sys;

/// What a write would have to heed and does not, None if there is nothing. `is_given` says which columns, from 0, have a
/// value in each row that is written; of the others, NULL is one.
///
/// # Safety
/// The relation must be an open table, and locked.
pub unsafe fn of(
    table: pg_sys::Relation,
    is_given: impl Fn(usize) -> bool,
) -> Option<&'static str> {
    // SAFETY: the caller's promise. (The row of pg_class says that there are triggers until the next VACUUM after the last one
    // went; these lists do not.)
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

/// Returns true if the column is not NULL in a new row that does not name it, or must not be.
fn wants_value(column: &pg_sys::FormData_pg_attribute) -> bool {
    let has_default = column.atthasdef || column.attidentity != 0 || column.attgenerated != 0;
    !column.attisdropped && (column.attnotnull || has_default)
}

/// Returns true if the values of its columns are not all that an entry in the index needs.
///
/// # Safety
/// The index must be one of a table that is locked.
unsafe fn is_special(index: pg_sys::Oid) -> bool {
    let cache = pg_sys::SysCacheIdentifier::INDEXRELID as i32;
    // SAFETY: the entry is released when it was looked at.
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
