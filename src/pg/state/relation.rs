//! Looking up objects in the extension's schema, and noticing when they change.

use crate::encoding::to_utf8;
use crate::errors::{self, Report};
use crate::pg::call::args::bytes_of;
use crate::pg::call::raise;
use crate::pg::own;
use crate::pg::table_scan;
use once_cell::unsync::OnceCell;
use pgrx::pg_sys;
use std::cell::{Cell, RefCell};
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    /// The oids that have been looked up, by name.
    static OIDS: RefCell<Vec<(&'static CStr, pg_sys::Oid)>> = const { RefCell::new(Vec::new()) };
    /// The extension's schema.
    static SCHEMA: Cell<Option<pg_sys::Oid>> = const { Cell::new(None) };
    /// The number of changes of definitions.
    static GENERATION: Cell<u64> = const { Cell::new(0) };
    /// The watched relations, and the number of their changes.
    static WATCHED: Cell<([pg_sys::Oid; 2], u64)> = const { Cell::new(([pg_sys::InvalidOid; 2], 0)) };
    static VERSION_CHECKED: OnceCell<()> = const { OnceCell::new() };
}

/// The number of changes of names and of databases, for those who store an oid or something read by it.
static NAME_CHANGES: AtomicU64 = AtomicU64::new(0);
/// The number of changes of databases.
static DATABASE_CHANGES: AtomicU64 = AtomicU64::new(0);

/// The version of this library.
pub const LIBRARY_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Warns once in each session if the SQL objects are of another version than the library.
pub fn check_version() {
    VERSION_CHECKED.with(|checked| *checked.get_or_init(warn_of_another_version));
}

fn warn_of_another_version() {
    if let Some(sql) = sql_version().filter(|sql| sql != LIBRARY_VERSION) {
        raise::warn(errors::other_version(LIBRARY_VERSION, &sql));
    }
}

/// The version of the SQL objects (pg_extension.extversion).
pub fn sql_version() -> Option<String> {
    let name = pg_sys::Datum::from(c"pg_fence".as_ptr());
    let by_name = (pg_sys::Anum_pg_extension_extname as i16, pg_sys::F_NAMEEQ.into(), name);
    let index = Some(pg_sys::ExtensionNameIndexId.into());
    let (catalog, none) = (pg_sys::ExtensionRelationId, std::ptr::null_mut());
    let mut version = None;
    // SAFETY: the index is by name; the value is never NULL, and it is copied.
    unsafe {
        table_scan::each_catalog_row(catalog, index, [by_name], none, |tuple, columns| {
            let mut null = false;
            let column = pg_sys::Anum_pg_extension_extversion as i32;
            let value = pg_sys::heap_getattr(tuple, column, columns, &mut null);
            version = Some(String::from_utf8_lossy(bytes_of(value)).into_owned());
        });
    }
    version
}

/// The oid of a table, index, sequence or view in the extension's schema. Stored until a relation or a schema of the
/// database changes. Errors: 55000 if there is none.
pub fn state_oid(name: &'static CStr) -> Result<pg_sys::Oid, Report> {
    let kept = OIDS.with_borrow(|k| k.iter().find(|(n, _)| *n == name).map(|(_, oid)| *oid));
    kept.map_or_else(|| look_up(name), Ok)
}

#[cold]
fn look_up(name: &'static CStr) -> Result<pg_sys::Oid, Report> {
    // The schema belongs to the extension under any name, and nobody else may create anything in it.
    if SCHEMA.get().is_none() {
        SCHEMA.set(own::state_schema());
    }
    // SAFETY: a catalog look-up by a NUL-terminated name.
    let oid = SCHEMA.get().map_or(pg_sys::InvalidOid, |schema| unsafe {
        pg_sys::get_relname_relid(name.as_ptr(), schema)
    });
    if oid == pg_sys::InvalidOid {
        return Err(errors::state_missing(&name.to_string_lossy()));
    }
    OIDS.with_borrow_mut(|k| k.push((name, oid)));
    Ok(oid)
}

/// The qualified name of a relation, quoted as in SQL.
///
/// # Safety
/// The relation must be open.
pub unsafe fn quoted_name(relation: pg_sys::Relation) -> String {
    // SAFETY: an open relation has its catalog row; the names are NUL-terminated.
    let name = unsafe {
        let form = (*relation).rd_rel;
        let schema = pg_sys::get_namespace_name((*form).relnamespace);
        CStr::from_ptr(pg_sys::quote_qualified_identifier(schema, (*form).relname.data.as_ptr()))
    };
    to_utf8(name.to_bytes())
}

/// Returns true if a relation that the caller has locked still exists. Unless names have changed since its oid was
/// looked up, it does.
pub fn is_there(relation: pg_sys::Oid) -> bool {
    let is_known = OIDS.with_borrow(|known| known.iter().any(|(_, oid)| *oid == relation));
    let none = pg_sys::Datum::from(0);
    let cache = pg_sys::SysCacheIdentifier::RELOID as i32;
    // SAFETY: a catalog look-up.
    is_known || unsafe { pg_sys::SearchSysCacheExists(cache, relation.into(), none, none, none) }
}

/// A counter that grows whenever the definition of a relation or sequence may have changed.
pub fn generation() -> u64 {
    GENERATION.get()
}

/// A counter that grows whenever the definition or the privileges of one of these relations may have changed. Only two
/// relations are watched at a time: asking for others also increases the counter.
pub fn changes_of(relations: [pg_sys::Oid; 2]) -> u64 {
    let (watched, changes) = WATCHED.get();
    if watched == relations {
        return changes;
    }
    WATCHED.set((relations, changes + 1));
    changes + 1
}

/// Registers for changes of the catalogs. Called once, when the library is loaded.
pub fn register() {
    // SAFETY: registered once; the functions never raise.
    unsafe {
        let nothing = pg_sys::Datum::from(0);
        pg_sys::CacheRegisterRelcacheCallback(Some(relation_changed), nothing);
        let sequences = pg_sys::SysCacheIdentifier::SEQRELID as i32;
        pg_sys::CacheRegisterSyscacheCallback(sequences, Some(sequence_changed), nothing);
        for cache in [pg_sys::SysCacheIdentifier::NAMESPACEOID, pg_sys::SysCacheIdentifier::RELOID]
        {
            pg_sys::CacheRegisterSyscacheCallback(cache as i32, Some(names_changed), nothing);
        }
        let databases = pg_sys::SysCacheIdentifier::DATABASEOID as i32;
        pg_sys::CacheRegisterSyscacheCallback(databases, Some(databases_changed), nothing);
    }
}

unsafe extern "C-unwind" fn relation_changed(_: pg_sys::Datum, relation: pg_sys::Oid) {
    GENERATION.set(GENERATION.get() + 1);
    let (watched, changes) = WATCHED.get();
    // An invalid oid stands for all relations.
    if watched.contains(&relation) || relation == pg_sys::InvalidOid {
        WATCHED.set((watched, changes + 1));
    }
}

unsafe extern "C-unwind" fn sequence_changed(_: pg_sys::Datum, _: i32, _: u32) {
    GENERATION.set(GENERATION.get() + 1);
}

unsafe extern "C-unwind" fn names_changed(_: pg_sys::Datum, cache: i32, _: u32) {
    OIDS.with_borrow_mut(Vec::clear);
    if cache == pg_sys::SysCacheIdentifier::NAMESPACEOID as i32 {
        SCHEMA.set(None);
    }
    NAME_CHANGES.fetch_add(1, Ordering::Relaxed);
}

unsafe extern "C-unwind" fn databases_changed(_: pg_sys::Datum, _: i32, _: u32) {
    DATABASE_CHANGES.fetch_add(1, Ordering::Relaxed);
    NAME_CHANGES.fetch_add(1, Ordering::Relaxed);
}

/// The number of times that a database may have been dropped.
pub fn database_changes() -> u64 {
    DATABASE_CHANGES.load(Ordering::Relaxed)
}

/// The number of times that a stored oid may have become outdated, or a database may have been dropped.
pub fn name_changes() -> u64 {
    NAME_CHANGES.load(Ordering::Relaxed)
}
