//! A table of the state, opened with the index that leads with the name of a lease.
//!
//! Who only reads gives its locks back when it closes the table, so that no maintenance waits for a sleeping
//! waiter or for a guarded transaction. Who has written keeps the table's lock until the transaction ends,
//! as every writer does: pg_repack and CREATE INDEX rely on that.

use super::errors::{self, Refusal};
use super::relation::state_oid;
use super::relation_lock::{self, Wait};
use super::row::{Fields, COLUMNS};
use super::row_version::RowVersion;
use super::{compat, executor, raw};
use crate::known_bugs;
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::{c_int, CStr};

/// What a table of the state is made of.
pub struct Spec {
    pub table: &'static CStr,
    /// Its primary key, on the first two columns.
    pub index: &'static CStr,
    /// The type of each column, and whether it may be NULL.
    pub columns: &'static [(pg_sys::Oid, bool)],
    /// A number of its own, below `TABLES`.
    pub number: usize,
}

/// How many tables the state has.
const TABLES: usize = 2;

/// What a table is opened for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

/// What writing to a table takes, found once for each change of its definition.
#[derive(Clone, Copy)]
struct Form {
    table: pg_sys::Oid,
    index: pg_sys::Oid,
    generation: u64,
    /// Nothing belongs to a row but what the extension made, so that it may be written directly.
    plain: bool,
    /// Triggers may suppress or change what is written.
    triggers: bool,
}

thread_local! {
    static FORMS: Cell<[Option<Form>; TABLES]> = const { Cell::new([None; TABLES]) };
    /// Counts the changes of any relation's definition.
    static GENERATION: Cell<u64> = const { Cell::new(0) };
}

/// Forgets what is known of tables when a definition may have changed; called once, when the library is
/// loaded.
pub fn listen() {
    // SAFETY: registered once; the function never raises.
    unsafe {
        pg_sys::CacheRegisterRelcacheCallback(Some(definition_changed), pg_sys::Datum::from(0));
    }
}

unsafe extern "C-unwind" fn definition_changed(_: pg_sys::Datum, _: pg_sys::Oid) {
    GENERATION.set(GENERATION.get() + 1);
}

/// Both, opened and locked.
pub struct Keyed {
    spec: &'static Spec,
    table: pg_sys::Relation,
    index: pg_sys::Relation,
    mode: c_int,
    form: Option<Form>,
    wrote: Cell<bool>,
    /// Whose the references are; they are given back as its own.
    owner: pg_sys::ResourceOwner,
}

impl Keyed {
    /// Opens them; None where the lock is not to be had that way.
    pub fn open(spec: &'static Spec, access: Access, wait: Wait) -> Result<Option<Self>, Refusal> {
        let mode = match access {
            Access::Read => pg_sys::AccessShareLock,
            Access::Write => pg_sys::RowExclusiveLock,
        } as c_int;
        let Some(table) = open_relation(state_oid(spec.table)?, mode, wait) else {
            return Ok(None);
        };
        let index = std::ptr::null_mut();
        // SAFETY: reads a global of this thread.
        let owner = unsafe { pg_sys::CurrentResourceOwner };
        let wrote = Cell::new(false);
        let mut opened = Keyed { spec, table, index, mode, form: None, wrote, owner };
        // Not before the table is locked: until then another index may take its place.
        let Some(index) = open_relation(state_oid(spec.index)?, mode, wait) else {
            return Ok(None);
        };
        opened.index = index;
        opened.form = Some(opened.known_form()?);
        Ok(Some(opened))
    }

    /// The table.
    pub fn table(&self) -> pg_sys::Relation {
        self.table
    }

    /// May a trigger suppress or change what is written?
    pub fn has_triggers(&self) -> bool {
        self.form.is_some_and(|f| f.triggers)
    }

    /// The refusal of a write that a trigger has suppressed or changed.
    pub fn meddled(&self) -> Refusal {
        errors::state_meddled(&self.spec.table.to_string_lossy())
    }

    fn known_form(&self) -> Result<Form, Refusal> {
        // SAFETY: open relations.
        let (table, index) = unsafe { ((*self.table).rd_id, (*self.index).rd_id) };
        let generation = GENERATION.get();
        let is_current =
            |f: &Form| f.generation == generation && f.table == table && f.index == index;
        let mut forms = FORMS.get();
        if let Some(form) = forms[self.spec.number].filter(is_current) {
            return Ok(form);
        }
        // SAFETY: open relations.
        let (plain, triggers) = unsafe {
            if !self.is_known() {
                return Err(errors::state_differs(&self.spec.table.to_string_lossy()));
            }
            // Not relhastriggers, which stays set until the next VACUUM after the last one went.
            (known_bugs::DIRECT_WRITES || self.is_plain(), !(*self.table).trigdesc.is_null())
        };
        // What is found out may itself notice a change: then it is found out again next time.
        let form = Form { table, index, generation, plain, triggers };
        forms[self.spec.number] = Some(form);
        FORMS.set(forms);
        Ok(form)
    }

    /// Is it a heap with our columns first, and the index what we search by?
    ///
    /// # Safety
    /// Both must be open.
    unsafe fn is_known(&self) -> bool {
        // SAFETY: the caller's promise; the columns' number is checked first.
        unsafe {
            let class = &*(*self.table).rd_rel;
            let (key, columns) = (&*(*self.index).rd_index, (*self.table).rd_att);
            let natts = (*columns).natts as usize;
            class.relkind as u8 == pg_sys::RELKIND_RELATION
                && class.relam == pg_sys::HEAP_TABLE_AM_OID
                && (*(*self.index).rd_rel).relam == pg_sys::BTREE_AM_OID
                && key.indrelid == (*self.table).rd_id
                && key.indnatts >= 2
                && key.indkey.values.as_slice(2) == [1, 2]
                && (self.spec.columns.len()..=COLUMNS).contains(&natts)
                && self.spec.columns.iter().enumerate().all(|(n, (type_oid, _))| {
                    let column = &*compat::attribute(columns, n);
                    column.atttypid == *type_oid && !column.attisdropped
                })
        }
    }

    /// Does nothing belong to a write but the row and its key? Whatever a DBA has added is honoured by the
    /// executor's way of writing.
    ///
    /// # Safety
    /// Both must be open and known.
    unsafe fn is_plain(&self) -> bool {
        // SAFETY: the caller's promise; the lists are copies.
        unsafe {
            let class = &*(*self.table).rd_rel;
            let columns = (*self.table).rd_att;
            let constraints = (*columns).constr;
            let indexes = pg_sys::RelationGetIndexList(self.table);
            let only_ours =
                (*indexes).length == 1 && (*(*indexes).elements).oid_value == (*self.index).rd_id;
            pg_sys::list_free(indexes);
            let key = &*(*self.index).rd_index;
            only_ours
                && key.indnatts == 2
                && key.indisunique
                && key.indimmediate
                && key.indisvalid
                && key.indisready
                && (*self.table).trigdesc.is_null()
                && !class.relispartition
                && class.relreplident as u8 == pg_sys::REPLICA_IDENTITY_DEFAULT
                && (*columns).natts as usize == self.spec.columns.len()
                && (constraints.is_null()
                    || ((*constraints).num_check == 0 && !(*constraints).has_generated_stored))
                && self.spec.columns.iter().enumerate().all(|(n, (_, nullable))| {
                    !(*nullable && (*compat::attribute(columns, n)).attnotnull)
                })
                && self.publications_are_content()
        }
    }

    /// Can every publication that the table is in publish an update and a delete of it?
    ///
    /// # Safety
    /// The table must be open.
    unsafe fn publications_are_content(&self) -> bool {
        let mut published = pg_sys::PublicationDesc::default();
        // SAFETY: the caller's promise.
        unsafe { pg_sys::RelationBuildPublicationDesc(self.table, &mut published) };
        let of = published.pubactions;
        (!of.pubupdate || (published.rf_valid_for_update && published.cols_valid_for_update))
            && (!of.pubdelete || (published.rf_valid_for_delete && published.cols_valid_for_delete))
    }

    /// Writes a row.
    pub fn insert(&self, fields: &Fields) {
        self.wrote.set(true);
        // SAFETY: the fields are the table's.
        unsafe {
            if self.is_direct() {
                compat::guarded(|| {
                    raw::CatalogTupleInsert(self.table, fields.tuple((*self.table).rd_att));
                });
            } else {
                executor::insert(self.table, self.spec.columns.len(), fields);
            }
        }
    }

    /// Writes a new version of a row. Nobody else may be changing it.
    pub fn update(&self, over: RowVersion, fields: &Fields) {
        self.wrote.set(true);
        // SAFETY: the fields are the table's, the version one that was read.
        unsafe {
            if self.is_direct() {
                compat::guarded(|| {
                    let tuple = fields.tuple((*self.table).rd_att);
                    raw::CatalogTupleUpdate(self.table, &mut over.pointer(), tuple);
                });
            } else {
                executor::update(self.table, over, fields);
            }
        }
    }

    /// Deletes a row. Nobody else may be changing it.
    pub fn delete(&self, version: RowVersion) {
        self.wrote.set(true);
        // SAFETY: the version is one that was read.
        unsafe {
            if self.is_direct() {
                pg_sys::CatalogTupleDelete(self.table, &mut version.pointer());
            } else {
                executor::delete(self.table, version);
            }
        }
    }

    fn is_direct(&self) -> bool {
        self.form.is_some_and(|f| f.plain)
    }

    /// Are our columns of a row what was written?
    ///
    /// # Safety
    /// The tuple must be a row of the table.
    pub unsafe fn holds(&self, tuple: pg_sys::HeapTuple, fields: &Fields) -> bool {
        // SAFETY: the caller's promise.
        unsafe { fields.are_in(tuple, (*self.table).rd_att, self.spec.columns.len()) }
    }

    /// Shows the rows of a lease that a snapshot sees, in the order of the index, each while its page is
    /// pinned.
    ///
    /// # Safety
    /// To be called inside `compat::guarded`, with a text and a snapshot that is registered or static.
    pub unsafe fn each(
        &self,
        name: pg_sys::Datum,
        snapshot: pg_sys::Snapshot,
        mut show: impl FnMut(pg_sys::HeapTuple),
    ) {
        let mut key = pg_sys::ScanKeyData::default();
        // SAFETY: the key's type and collation are those of the index's first column.
        unsafe {
            let equal = pg_sys::BTEqualStrategyNumber as u16;
            raw::ScanKeyInit(&mut key, 1, equal, pg_sys::F_TEXTEQ.into(), name);
            let scan =
                raw::systable_beginscan_ordered(self.table, self.index, snapshot, 1, &mut key);
            loop {
                let forward = pg_sys::ScanDirection::ForwardScanDirection;
                let tuple = raw::systable_getnext_ordered(scan, forward);
                if tuple.is_null() {
                    break;
                }
                show(tuple);
            }
            raw::systable_endscan_ordered(scan);
        }
    }
}

fn open_relation(oid: pg_sys::Oid, mode: c_int, wait: Wait) -> Option<pg_sys::Relation> {
    // SAFETY: opens a relation that is, or is being, locked; the reference is given back on drop.
    let open = |mode| unsafe { compat::guarded(|| raw::relation_open(oid, mode)) };
    if wait == Wait::Queue {
        return Some(open(mode));
    }
    relation_lock::take(oid, mode, wait).then(|| open(pg_sys::NoLock as c_int))
}

impl Drop for Keyed {
    fn drop(&mut self) {
        // An error's clean-up gives the references back by itself.
        if std::thread::panicking() {
            return;
        }
        let of_table = if self.wrote.get() { pg_sys::NoLock as c_int } else { self.mode };
        // SAFETY: opened by `open`, within the same call, which the owner outlives.
        unsafe {
            let current = pg_sys::CurrentResourceOwner;
            pg_sys::CurrentResourceOwner = self.owner;
            compat::guarded(|| {
                if !self.index.is_null() {
                    raw::relation_close(self.index, self.mode);
                }
                raw::relation_close(self.table, of_table);
            });
            pg_sys::CurrentResourceOwner = current;
        }
    }
}
