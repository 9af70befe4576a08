//! Finding the extension's own objects.
//!
//! Objects are found through the extension's dependencies, not by name: a name can be reused by someone else, if a
//! superuser renames a schema, a table or a function, and a role then creates another one of the old name. The
//! extension itself is found by its name, which cannot be reused: no statement renames an extension, and only a
//! superuser may create one of this name.

use crate::pg::table_scan;
use pgrx::pg_sys::{self, Datum, Oid};
use std::ffi::CStr;

// From pg_depend and pg_language, the same in all versions; pgrx does not bind them.
const DEPEND: u32 = 2608;
const DEPEND_REFERENCE_INDEX: u32 = 2674;
const COLUMN_CLASSID: i32 = 1;
const COLUMN_OBJID: i32 = 2;
const COLUMN_REFCLASSID: i16 = 4;
const COLUMN_REFOBJID: i16 = 5;
const COLUMN_DEPTYPE: i32 = 7;
const LANGUAGE_C: u32 = 13;

/// The extension's schema. Only the extension's owner may create anything in it.
pub fn state_schema() -> Option<Oid> {
    members(pg_sys::NamespaceRelationId).first().copied()
}

/// The extension's function with that name and number of arguments.
pub fn function(name: &CStr, arguments: usize) -> Option<Oid> {
    function_where(|form, _| {
        // SAFETY: a name ends within its 64 bytes.
        let its_name = unsafe { CStr::from_ptr(form.proname.data.as_ptr()) };
        its_name == name && form.pronargs as usize == arguments
    })
}

/// The trigger function `fenced`, identified by its symbol in the library.
pub fn fenced() -> Option<Oid> {
    function_where(|form, source| form.prolang == LANGUAGE_C.into() && source == b"fenced")
}

/// The first function for which `is_it` returns true, given its row of pg_proc and its source.
fn function_where(is_it: impl Fn(&pg_sys::FormData_pg_proc, &[u8]) -> bool) -> Option<Oid> {
    const CACHE: i32 = pg_sys::SysCacheIdentifier::PROCOID as i32;
    members(pg_sys::ProcedureRelationId).into_iter().find(|oid| {
        // SAFETY: a row of pg_proc, read before it is released; its source is never NULL.
        unsafe {
            let tuple = pg_sys::SearchSysCache1(CACHE, (*oid).into());
            if tuple.is_null() {
                return false;
            }
            let column = pg_sys::Anum_pg_proc_prosrc as pg_sys::AttrNumber;
            let mut null = false;
            let source = pg_sys::SysCacheGetAttr(CACHE, tuple, column, &mut null);
            let source = pg_sys::pg_detoast_datum_packed(source.cast_mut_ptr());
            let source = pgrx::varlena::varlena_to_byte_slice(source);
            let found = is_it(&*pg_sys::GETSTRUCT(tuple).cast(), source);
            pg_sys::ReleaseSysCache(tuple);
            found
        }
    })
}

/// The extension's members in this catalog; none if the extension does not exist.
fn members(catalog: Oid) -> Vec<Oid> {
    let mut found = Vec::new();
    // SAFETY: the index is by these two columns; values kept of a row are copied.
    unsafe {
        let extension = pg_sys::get_extension_oid(c"pg_fence".as_ptr(), true);
        if extension == Oid::INVALID {
            return found;
        }
        let equal = pg_sys::F_OIDEQ.into();
        let wanted = [
            (COLUMN_REFCLASSID, equal, pg_sys::ExtensionRelationId.into()),
            (COLUMN_REFOBJID, equal, extension.into()),
        ];
        let (index, none) = (Some(DEPEND_REFERENCE_INDEX.into()), std::ptr::null_mut());
        table_scan::each_catalog_row(DEPEND.into(), index, wanted, none, |tuple, columns| {
            let column = |n| -> Datum {
                let mut null = false;
                pg_sys::heap_getattr(tuple, n, columns, &mut null)
            };
            let oid = |n| Oid::from(column(n).value() as u32);
            let is_member = column(COLUMN_DEPTYPE).value() as u8 == b'e';
            if is_member && oid(COLUMN_CLASSID) == catalog {
                found.push(oid(COLUMN_OBJID));
            }
        });
    }
    found
}
