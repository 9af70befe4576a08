//! A table of the state, opened with the index that leads with the name of a lease.
//!
//! Who only reads gives its locks back when it closes the table, so that no maintenance waits for a sleeping
//! waiter or for a guarded transaction. Who has written keeps the table's lock until the transaction ends,
//! as every writer does: pg_repack and CREATE INDEX rely on that.

use crate::pg::call::errors::{self, Refusal};
use crate::pg::compat;
use crate::pg::locks::relation_lock::{self, Wait};
use crate::pg::raw;
use crate::pg::state::executor;
use crate::pg::state::form::{self, Form, Spec};
use crate::pg::state::relation::state_oid;
use crate::pg::state::row::Fields;
use crate::pg::state::row_version::{Location, Pointer, RowVersion, NO_BUFFER};
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::c_int;

/// What a table is opened for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

/// The relations, opened and locked; closed when this goes.
struct Opened {
    table: pg_sys::Relation,
    /// NULL until it is needed: a row whose place is known is read without it.
    index: Cell<pg_sys::Relation>,
    mode: c_int,
    wrote: Cell<bool>,
    /// Whose the references are; they are given back as its own.
    owner: pg_sys::ResourceOwner,
}

/// The table, opened and locked.
pub struct Keyed {
    spec: &'static Spec,
    form: Form,
    opened: Opened,
}

impl Keyed {
    /// Opens the table; None where its lock is not to be had that way.
    pub fn open(spec: &'static Spec, access: Access, wait: Wait) -> Result<Option<Self>, Refusal> {
        let mode = match access {
            Access::Read => pg_sys::AccessShareLock,
            Access::Write => pg_sys::RowExclusiveLock,
        } as c_int;
        let Some(table) = open_relation(state_oid(spec.table)?, mode, wait) else {
            return Ok(None);
        };
        let (index, wrote) = (Cell::new(std::ptr::null_mut()), Cell::new(false));
        // SAFETY: reads a global of this thread.
        let owner = unsafe { pg_sys::CurrentResourceOwner };
        let opened = Opened { table, index, mode, wrote, owner };
        // SAFETY: an open relation.
        let form = match form::known(spec, unsafe { (*table).rd_id }) {
            Some(form) => form,
            // Not before the table is locked: until then another index may take its place.
            None if !opened.open_index(state_oid(spec.index)?, wait) => return Ok(None),
            // SAFETY: both are open.
            None => unsafe { form::look(spec, table, opened.index.get())? },
        };
        Ok(Some(Keyed { spec, form, opened }))
    }

    /// The table without a lock, for `at` and `again` alone; None where the session does not know it (any more).
    pub fn unlocked(spec: &'static Spec) -> Option<Self> {
        let form = form::known(spec, state_oid(spec.table).ok()?)?;
        // SAFETY: a relation of the session's cache, whose reference is given back on drop.
        let (table, owner) = unsafe {
            let table = compat::guarded(|| raw::RelationIdGetRelation(form.table));
            (table, pg_sys::CurrentResourceOwner)
        };
        if table.is_null() {
            return None;
        }
        let (index, wrote) = (Cell::new(std::ptr::null_mut()), Cell::new(false));
        let mode = pg_sys::NoLock as c_int;
        Some(Keyed { spec, form, opened: Opened { table, index, mode, wrote, owner } })
    }

    /// Makes the table ready to be searched; false where the index's lock is not to be had that way.
    pub fn open_index(&self, wait: Wait) -> bool {
        self.opened.open_index(self.form.index, wait)
    }

    /// The table, open and locked for as long as this lives.
    pub fn table(&self) -> pg_sys::Relation {
        self.opened.table
    }

    /// Where the files of the table are.
    pub fn files(&self) -> raw::File {
        // SAFETY: an open relation.
        compat::files(unsafe { &*self.table() })
    }

    /// The file that the table is in.
    pub fn file(&self) -> u32 {
        // SAFETY: an open relation.
        compat::file(unsafe { &*self.table() })
    }

    /// The columns of the table.
    pub fn row_type(&self) -> pg_sys::TupleDesc {
        // SAFETY: an open relation.
        unsafe { (*self.table()).rd_att }
    }

    /// May a trigger suppress or change what is written?
    pub fn has_triggers(&self) -> bool {
        self.form.triggers
    }

    /// The refusal of a write that a trigger has suppressed or changed.
    pub fn meddled(&self) -> Refusal {
        errors::state_meddled(&self.spec.table.to_string_lossy())
    }

    /// Writes a new row, whose key the table must not have.
    pub fn insert(&self, fields: &Fields) {
        self.opened.wrote.set(true);
        // SAFETY: the fields are the table's.
        unsafe {
            if self.form.plain {
                let row = compat::guarded(|| {
                    let row = fields.tuple(self.row_type());
                    raw::simple_heap_insert(self.table(), row);
                    row
                });
                self.enter_into_index(row, fields);
            } else {
                executor::insert(self.table(), self.spec.columns.len(), fields);
            }
        }
    }

    /// Writes a new version of a row. Nobody else may be changing it.
    pub fn update(&self, over: RowVersion, fields: &Fields) {
        self.opened.wrote.set(true);
        // SAFETY: the fields are the table's, the version one that was read.
        unsafe {
            if self.form.plain {
                let row = compat::guarded(|| {
                    let row = fields.tuple(self.row_type());
                    compat::simple_heap_update(self.table(), &mut over.tid(), row);
                    row
                });
                // Mostly it is in the page of the old one, to which the index leads already.
                if u32::from((*(*row).t_data).t_infomask2) & pg_sys::HEAP_ONLY_TUPLE == 0 {
                    self.enter_into_index(row, fields);
                }
            } else {
                executor::update(self.table(), over, fields);
            }
        }
    }

    /// Lets the index lead to a row that was written.
    ///
    /// # Safety
    /// The row must be one of the table, with these fields.
    unsafe fn enter_into_index(&self, row: pg_sys::HeapTuple, fields: &Fields) {
        self.open_index(Wait::Queue);
        let index = self.opened.index.get();
        let (mut key, mut nulls) = (fields.values(), fields.nulls());
        // SAFETY: the caller's promise; the key are the first two columns.
        unsafe {
            compat::guarded(|| {
                raw::index_insert(
                    index,
                    key.as_mut_ptr(),
                    nulls.as_mut_ptr(),
                    &mut (*row).t_self,
                    self.table(),
                    pg_sys::IndexUniqueCheck::UNIQUE_CHECK_YES,
                    false,
                    raw::BuildIndexInfo(index),
                );
            });
        }
    }

    /// Deletes a row. Nobody else may be changing it.
    pub fn delete(&self, version: RowVersion) {
        self.opened.wrote.set(true);
        // SAFETY: the version is one that was read.
        unsafe {
            if self.form.plain {
                pg_sys::CatalogTupleDelete(self.table(), &mut version.tid());
            } else {
                executor::delete(self.table(), version);
            }
        }
    }

    /// Are our columns of a row what was written?
    ///
    /// # Safety
    /// The tuple must be a row of the table.
    pub unsafe fn holds(&self, tuple: pg_sys::HeapTuple, fields: &Fields) -> bool {
        // SAFETY: the caller's promise.
        unsafe { fields.are_in(tuple, self.row_type(), self.spec.columns.len()) }
    }

    /// Shows the rows of a lease that a snapshot sees, in the order of the index, each while its page is locked, and
    /// where it was found.
    ///
    /// # Safety
    /// To be called inside `compat::guarded`, with the index open, a text, and a snapshot that is registered or static.
    pub unsafe fn each(
        &self,
        name: pg_sys::Datum,
        snapshot: pg_sys::Snapshot,
        mut show: impl FnMut(pg_sys::HeapTuple, Location),
    ) {
        let mut key = pg_sys::ScanKeyData::default();
        // SAFETY: the key's type and collation are those of the index's first column.
        unsafe {
            let equal = pg_sys::BTEqualStrategyNumber as u16;
            raw::ScanKeyInit(&mut key, 1, equal, pg_sys::F_TEXTEQ.into(), name);
            let scan = compat::index_beginscan(self.table(), self.opened.index.get(), snapshot, 1);
            raw::index_rescan(scan, &mut key, 1, std::ptr::null_mut(), 0);
            loop {
                let forward = pg_sys::ScanDirection::ForwardScanDirection;
                let entry = raw::index_getnext_tid(scan, forward);
                if entry.is_null() {
                    break;
                }
                let entry = Pointer::of(*entry);
                let location =
                    Location { entry, buffer: raw::ReadBuffer(self.table(), entry.block()) };
                let dead = self.versions(location, snapshot, |tuple| show(tuple, location));
                // The index forgets what leads nowhere any more; in recovery nothing is sure.
                (*scan).kill_prior_tuple = dead && !(*scan).xactStartedInRecovery;
            }
            raw::index_endscan(scan);
        }
    }

    /// Shows the version that was found at a place if it is still the latest of its row; else as `at`.
    ///
    /// # Safety
    /// As for `at`.
    pub unsafe fn again(
        &self,
        version: RowVersion,
        location: Location,
        mut show: impl FnMut(pg_sys::HeapTuple),
    ) {
        let buffer = location.buffer;
        // SAFETY: the caller's promise; versions of a row that follow one another there are in one page.
        unsafe {
            if !self.pin(location) {
                return;
            }
            raw::LockBuffer(buffer, pg_sys::BUFFER_LOCK_SHARE as c_int);
            match version.unmarked_in(pg_sys::BufferGetPage(buffer)) {
                Some(mut tuple) => {
                    show(&mut tuple);
                    raw::UnlockReleaseBuffer(buffer);
                }
                None => {
                    raw::LockBuffer(buffer, pg_sys::BUFFER_LOCK_UNLOCK as c_int);
                    self.versions(location, &mut committed(), show);
                }
            }
        }
    }

    /// Shows the version at a place that is committed now, or that this transaction has written, while its page is
    /// locked. Nothing is shown where the page is not in its buffer any more.
    ///
    /// It takes no snapshot: while another transaction changes the row, it is the version before that change.
    ///
    /// # Safety
    /// To be called inside `compat::guarded`.
    pub unsafe fn at(&self, location: Location, show: impl FnMut(pg_sys::HeapTuple)) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.pin(location) {
                self.versions(location, &mut committed(), show);
            }
        }
    }

    /// Pins the page of a place, where it still is in its buffer.
    ///
    /// # Safety
    /// To be called inside `compat::guarded`.
    unsafe fn pin(&self, at: Location) -> bool {
        // SAFETY: the caller's promise; the buffer is one that the page has been in.
        unsafe {
            at.buffer != NO_BUFFER && compat::pin_recent(self.files(), at.entry.block(), at.buffer)
        }
    }

    /// Shows the versions at a place that a snapshot sees (one, but where it shows uncommitted ones, too), while their
    /// page is locked. Gives back its pin. Are all that are there dead for everybody?
    ///
    /// # Safety
    /// As for `each`; the place's buffer must be pinned.
    unsafe fn versions(
        &self,
        location: Location,
        snapshot: pg_sys::Snapshot,
        mut show: impl FnMut(pg_sys::HeapTuple),
    ) -> bool {
        let (mut at, buffer) = (location.entry.tid(), location.buffer);
        let mut tuple = pg_sys::HeapTupleData::default();
        let (mut dead, mut found) = (false, false);
        // SAFETY: the caller's promise.
        unsafe {
            // Without, pages would fill up with old versions, and updates go elsewhere. Who only reads does it as every
            // SELECT does: many may read, and each would go through the old versions.
            let writes = self.opened.mode == pg_sys::RowExclusiveLock as c_int;
            if !writes || fills_up(buffer) {
                raw::heap_page_prune_opt(self.table(), buffer);
            }
            raw::LockBuffer(buffer, pg_sys::BUFFER_LOCK_SHARE as c_int);
            let all = (*snapshot).snapshot_type == pg_sys::SnapshotType::SNAPSHOT_DIRTY;
            while (all || !found)
                && raw::heap_hot_search_buffer(
                    &mut at,
                    self.table(),
                    buffer,
                    snapshot,
                    &mut tuple,
                    if found { std::ptr::null_mut() } else { &mut dead },
                    !found,
                )
            {
                found = true;
                show(&mut tuple);
            }
            raw::UnlockReleaseBuffer(buffer);
        }
        dead && !found
    }
}

/// What is committed at the moment of each look, and what this transaction has written.
fn committed() -> pg_sys::SnapshotData {
    let snapshot_type = pg_sys::SnapshotType::SNAPSHOT_SELF;
    pg_sys::SnapshotData { snapshot_type, ..Default::default() }
}

/// Who writes clears a page of old versions when less of it than this is left for new ones, which is more than the
/// largest row. Postgres itself does it as soon as less is left than the fillfactor leaves to updates: that would be with
/// each of them.
const ROOM: u16 = pg_sys::BLCKSZ as u16 / 4;

/// Is there little room left in the page?
///
/// # Safety
/// The buffer must be pinned.
unsafe fn fills_up(buffer: pg_sys::Buffer) -> bool {
    // SAFETY: a page in memory has a header. It is not locked: Postgres, too, takes these as hints.
    unsafe {
        let header = pg_sys::BufferGetPage(buffer).cast::<pg_sys::PageHeaderData>();
        let (lower, upper) = (&raw const (*header).pd_lower, &raw const (*header).pd_upper);
        let flags = (&raw const (*header).pd_flags).read_volatile();
        u32::from(flags) & pg_sys::PD_PAGE_FULL != 0
            || upper.read_volatile().saturating_sub(lower.read_volatile()) < ROOM
    }
}

impl Opened {
    /// Opens the index; false where its lock is not to be had that way.
    fn open_index(&self, index: pg_sys::Oid, wait: Wait) -> bool {
        if self.index.get().is_null() {
            let Some(index) = open_relation(index, self.mode, wait) else { return false };
            self.index.set(index);
        }
        true
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

impl Drop for Opened {
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
                if !self.index.get().is_null() {
                    raw::relation_close(self.index.get(), self.mode);
                }
                raw::relation_close(self.table, of_table);
            });
            pg_sys::CurrentResourceOwner = current;
        }
    }
}
