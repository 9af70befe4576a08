//! Reading and writing fence.lease.
//!
//! The table is read by the server's own scans, under its lock, and written as PostgreSQL writes its catalogs. SPI is
//! not used, so there is no plan, no `search_path`, and the caller's rights do not matter.

use crate::errors::{self, Report};
use crate::pg::call::args::{bytes_of, text_datum};
use crate::pg::call::raise;
use crate::pg::compat;
use crate::pg::raw;
use crate::pg::session::server;
use crate::pg::session::xact;
use crate::pg::state::additions;
use crate::pg::state::opened::{IfLocked, Opened};
use crate::pg::state::relation::{self, state_oid};
use crate::pg::state::row::{
    self, COLUMN_TYPES, Deleter, Fields, MAX_COLUMNS, NewGrant, Row, RowVersion,
};
use crate::pg::state::row_place;
use crate::pg::table_scan;
use once_cell::unsync::OnceCell;
use pg_fence_rules::Token;
use pgrx::itemptr::item_pointer_get_block_number_no_check;
use pgrx::pg_sys;
use std::cell::Cell;

/// The purpose of opening the table.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read only.
    Read,
    /// Read and write.
    Write,
}

/// The rows of a lease that a read shows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AsOf {
    /// The rows committed at this moment, and this transaction's own.
    Now,
    /// The rows committed at this moment, without this transaction's own.
    Committed,
    /// The rows in the transaction's snapshot (REPEATABLE READ and above), without this transaction's own.
    Snapshot,
    /// The rows committed at this moment, this transaction's own, and those that open transactions are writing.
    InFlight,
}

/// fence.lease, opened and locked as by a statement that reads or writes it.
///
/// A reader releases the locks on drop, so that maintenance waits neither for a sleeping session nor for a guarding
/// transaction.
pub struct LeaseTable {
    table: Opened,
    index: OnceCell<Opened>,
}

impl LeaseTable {
    /// Opens the table, waiting for maintenance as any statement does.
    pub fn open(access: Access) -> Result<Self, Report> {
        let opened = Self::try_open(access, IfLocked::Queue)?;
        opened.ok_or_else(|| errors::state_missing("lease"))
    }

    /// Opens the table. Returns `None` if a lock is not free and `if_locked` forbids waiting.
    pub fn try_open(access: Access, if_locked: IfLocked) -> Result<Option<Self>, Report> {
        relation::check_version();
        let mode = match access {
            Access::Read => pg_sys::AccessShareLock,
            Access::Write => pg_sys::RowExclusiveLock,
        };
        let Some(table) = Opened::open(state_oid(c"lease")?, mode, if_locked) else {
            return Ok(None);
        };
        // Looked up only after the table is locked: before that, another index may replace it.
        let Some(index) = Opened::open(state_oid(c"lease_pkey")?, mode, if_locked) else {
            return Ok(None);
        };
        let opened = LeaseTable { table, index: OnceCell::with_value(index) };
        opened.check_shape()?;
        Ok(Some(opened))
    }

    /// Opens the table to read one row, waiting for maintenance. The index is opened later, if the row's position is
    /// unknown or a definition has changed.
    pub fn open_to_look() -> Result<Self, Report> {
        relation::check_version();
        let table = Opened::queued(state_oid(c"lease")?, pg_sys::AccessShareLock);
        let opened = LeaseTable { table, index: OnceCell::new() };
        opened.check_shape()?;
        Ok(opened)
    }

    /// The index by name and slot. Errors: 55000.
    fn index(&self) -> Result<&Opened, Report> {
        let is_new = self.index.get().is_none();
        let index = self.index.get_or_try_init(|| {
            let oid = state_oid(c"lease_pkey")?;
            Ok(Opened::queued(oid, pg_sys::AccessShareLock))
        })?;
        if is_new {
            // A definition may have changed during the wait for the lock.
            self.check_shape()?;
        }
        Ok(index)
    }

    /// Errors with 55000 unless the table has the expected shape. Checks again if a definition has changed.
    fn check_shape(&self) -> Result<(), Report> {
        thread_local! {
            static CHECKED: Cell<Option<(pg_sys::Oid, u64)>> = const { Cell::new(None) };
        }
        // SAFETY: an open relation.
        let checked = || Some((unsafe { (*self.relation()).rd_id }, relation::generation()));
        if CHECKED.get() != checked() {
            let index = self.index()?.relation;
            if !self.has_known_shape(index) {
                return Err(errors::state_differs("lease"));
            }
            CHECKED.set(checked());
        }
        Ok(())
    }

    /// Returns true if the table is a heap with our columns first, and the index has the columns of our searches.
    fn has_known_shape(&self, index: pg_sys::Relation) -> bool {
        // SAFETY: both are open.
        self.table.is_heap_with(COLUMN_TYPES)
            && unsafe {
                let table = self.relation();
                let key = &*(*index).rd_index;
                (*self.row_type()).natts as usize <= MAX_COLUMNS
                    && (*(*index).rd_rel).relam == pg_sys::BTREE_AM_OID
                    && key.indrelid == (*table).rd_id
                    && key.indnatts >= 2
                    && key.indkey.values.as_slice(2) == [1, 2]
            }
    }

    fn relation(&self) -> pg_sys::Relation {
        self.table.relation
    }

    fn row_type(&self) -> pg_sys::TupleDesc {
        // SAFETY: an open relation.
        unsafe { (*self.relation()).rd_att }
    }

    /// The rows of a lease, in the order of their slots.
    pub fn rows(&self, name: &[u8], as_of: AsOf) -> Vec<Row> {
        self.search(name, None, as_of)
    }

    /// The rows of one slot of a lease. A lease may have thousands of grants, so a call that is about one of them does
    /// not read all.
    pub fn rows_in_slot(&self, name: &[u8], slot: i32, as_of: AsOf) -> Vec<Row> {
        self.search(name, Some(slot), as_of)
    }

    fn search(&self, name: &[u8], slot: Option<i32>, as_of: AsOf) -> Vec<Row> {
        let name = text_datum(name);
        let index = self.index().unwrap_or_else(|report| raise::error(report)).relation;
        let mut found = Vec::with_capacity(1);
        let scan = |snapshot| {
            let mut keys = [pg_sys::ScanKeyData::default(); 2];
            let count = 1 + i32::from(slot.is_some());
            // SAFETY: both relations are open, the snapshot outlives the scan, and the keys' types and collation are
            // those of the index's first two columns. A tuple is copied while its page is pinned.
            unsafe {
                let equal = pg_sys::BTEqualStrategyNumber as u16;
                raw::ScanKeyInit(&mut keys[0], 1, equal, pg_sys::F_TEXTEQ.into(), name);
                let slot = slot.unwrap_or_default().into();
                raw::ScanKeyInit(&mut keys[1], 2, equal, pg_sys::F_INT4EQ.into(), slot);
                let (table, keys) = (self.relation(), keys.as_mut_ptr());
                let scan = raw::systable_beginscan_ordered(table, index, snapshot, count, keys);
                loop {
                    let forward = pg_sys::ScanDirection::ForwardScanDirection;
                    let tuple = raw::systable_getnext_ordered(scan, forward);
                    if tuple.is_null() {
                        break;
                    }
                    found.push(raw::heap_copytuple(tuple));
                }
                raw::systable_endscan_ordered(scan);
            }
        };
        // SAFETY: `scan` calls the server, and drops nothing.
        unsafe { compat::guarded(|| with_snapshot(as_of, scan)) };
        found.into_iter().map(|tuple| self.row(tuple)).collect()
    }

    /// The present row of a lease whose grant has this token. Reads the last known position first, and then the index.
    pub fn row_with(&self, name: &[u8], token: Token) -> Option<Row> {
        // SERIALIZABLE must record reads in the index, and on a standby only snapshots decide what is visible.
        let remembers = !xact::keeps_snapshot() && !server::in_recovery();
        let fits = |row: &Row| row.name() == name && row.grant.has(token);
        let place = remembers.then(|| row_place::of(name)).flatten();
        let place = place.filter(|place| self.has_page_of(*place));
        // SAFETY: a valid tuple.
        let copy = |tuple| unsafe { raw::heap_copytuple(tuple) };
        let known = place.and_then(|place| self.tuple_at(place, copy)).map(|copy| self.row(copy));
        if known.as_ref().is_some_and(fits) {
            return known;
        }
        let row = self.rows(name, AsOf::Now).into_iter().find(fits)?;
        if remembers {
            row_place::remember(name, row.place());
        }
        Some(row)
    }

    /// Returns true if this version of the row has been neither replaced nor deleted. Always returns false above READ
    /// COMMITTED, where the index must be read.
    pub fn still_has(&self, row: &Row) -> bool {
        // SAFETY: a valid tuple.
        let version = |tuple| unsafe { RowVersion::of(tuple) };
        !xact::keeps_snapshot() && self.tuple_at(row.place(), version) == Some(row.version())
    }

    /// Returns true if the table still has the page: a rewrite or VACUUM may have shortened it.
    fn has_page_of(&self, place: pg_sys::ItemPointerData) -> bool {
        let main = pg_sys::ForkNumber::MAIN_FORKNUM;
        // SAFETY: an open table.
        unsafe {
            let pages = pg_sys::RelationGetNumberOfBlocksInFork(self.relation(), main);
            item_pointer_get_block_number_no_check(place) < pages
        }
    }

    /// Calls `look` for the tuple at this position, if one is there that is committed now or this transaction's own.
    /// The table must have the page.
    fn tuple_at<T>(
        &self,
        place: pg_sys::ItemPointerData,
        look: impl FnOnce(pg_sys::HeapTuple) -> T,
    ) -> Option<T> {
        let snapshot_type = pg_sys::SnapshotType::SNAPSHOT_SELF;
        let mut now = pg_sys::SnapshotData { snapshot_type, ..Default::default() };
        let mut tuple = pg_sys::HeapTupleData { t_self: place, ..Default::default() };
        let mut buffer = 0;
        // SAFETY: an open table, which is not truncated while it is locked. The page is pinned while `look` runs.
        unsafe {
            compat::guarded(|| {
                let table = self.relation();
                let is_there = raw::heap_fetch(table, &mut now, &mut tuple, &mut buffer, false);
                is_there.then(|| {
                    let seen = look(&mut tuple);
                    raw::ReleaseBuffer(buffer);
                    seen
                })
            })
        }
    }

    /// The row in a copied tuple of this table.
    fn row(&self, tuple: pg_sys::HeapTuple) -> Row {
        // SAFETY: only called for copied tuples of this table.
        unsafe { Row::new(tuple, self.row_type()) }
    }

    /// Calls `visit` for every row of the table.
    pub fn each(&self, mut visit: impl FnMut(&Row) -> Result<(), Report>) -> Result<(), Report> {
        // SAFETY: an open table, whose rows are copied.
        unsafe {
            table_scan::each_row(self.relation(), |tuple| {
                visit(&self.row(pg_sys::heap_copytuple(tuple)))
            })
        }
    }

    /// Copies of the rows that the statement sees, if `wants` returns true for the name. Other rows are skipped without
    /// being parsed.
    pub fn wanted(&self, wants: impl Fn(&[u8]) -> bool) -> Vec<pg_sys::HeapTuple> {
        let columns = self.row_type();
        // SAFETY: an open table whose first column is the name, which is never NULL.
        unsafe {
            table_scan::copies(self.relation(), pg_sys::GetActiveSnapshot(), |tuple| {
                let mut null = false;
                wants(bytes_of(pg_sys::heap_getattr(tuple, 1, columns, &mut null)))
            })
        }
    }

    /// The tuple of a row of this table, which stays readable whether its writer commits or not; `None` if the writer has
    /// rolled back, and parts of it are gone.
    pub fn self_contained(&self, row: &Row) -> Option<pg_sys::HeapTuple> {
        // SAFETY: the row type is this table's, which is open.
        unsafe { row.self_contained(self.row_type()) }
    }

    /// The uncommitted new grants of other transactions: of one lease, or of all, for which the whole table is read. A
    /// row that its own transaction has replaced is omitted, and so is a version of a committed grant that is being
    /// renewed or closed.
    pub fn uncommitted(&self, name: Option<&[u8]>) -> Vec<Row> {
        let is_open = |tuple| {
            // SAFETY: a tuple of the scan.
            unsafe { xact::open_writer(tuple) }.is_some()
        };
        let mut rows = name.map_or_else(
            || {
                let mut all = dirty_snapshot();
                // SAFETY: an open table.
                let found = unsafe { table_scan::copies(self.relation(), &mut all, is_open) };
                found.into_iter().map(|tuple| self.row(tuple)).collect()
            },
            |name| self.rows(name, AsOf::InFlight),
        );
        rows.retain(|row| {
            row.is_others_uncommitted() && row.deleter() == Deleter::None && !self.is_known(row)
        });
        rows
    }

    /// Returns true if the row's grant has a committed version.
    fn is_known(&self, row: &Row) -> bool {
        self.rows(row.name(), AsOf::Now).iter().any(|known| known.is_of_same_grant(row))
    }

    /// Writes a new grant, into the slot's existing row if there is one. Errors: 55000.
    pub fn grant(&self, new: &NewGrant, existing: Option<&Row>) -> Result<(), Report> {
        let fields = Fields::of_grant(new, existing);
        if let Some(row) = existing {
            return self.replace(row, &fields);
        }
        // SAFETY: `write` passes an open table, whose row type the fields have.
        self.write(|table| unsafe {
            raw::CatalogTupleInsert(table, fields.tuple((*table).rd_att));
        })
    }

    /// Writes a new version of a row that was read under the grant's lock. Errors: 55000.
    pub fn replace(&self, row: &Row, fields: &Fields) -> Result<(), Report> {
        // SAFETY: as above; under the grant's lock no other session changes the row.
        self.write(|table| unsafe {
            raw::CheckCmdReplicaIdentity(table, pg_sys::CmdType::CMD_UPDATE);
            raw::CatalogTupleUpdate(table, &mut row.place(), fields.tuple((*table).rd_att));
        })
    }

    /// Deletes the row. Errors: 55000.
    pub fn delete(&self, row: &Row) -> Result<(), Report> {
        // SAFETY: as above.
        self.write(|table| unsafe {
            raw::CheckCmdReplicaIdentity(table, pg_sys::CmdType::CMD_DELETE);
            pg_sys::CatalogTupleDelete(table, &mut row.place());
        })
    }

    /// Writes as PostgreSQL writes its catalogs: the row and its index entries. The table's lock is held until the
    /// transaction ends, like any writer's; the index's lock is released on drop. Errors: 55000.
    fn write(&self, work: impl FnOnce(pg_sys::Relation)) -> Result<(), Report> {
        self.table.keep_lock();
        self.check_additions()?;
        // SAFETY: the table is open and locked for writing. `work` calls the server, and drops nothing.
        unsafe {
            compat::guarded(|| {
                work(self.relation());
                raw::CommandCounterIncrement();
            });
        }
        Ok(())
    }

    /// Errors with 55000 if the table has an addition that such a write would bypass. Checks again if a definition has
    /// changed. While the table is locked, only an index can still be added (`CREATE INDEX CONCURRENTLY`), and that
    /// needs no entries before this transaction has ended.
    fn check_additions(&self) -> Result<(), Report> {
        thread_local! {
            static CHECKED: Cell<Option<(pg_sys::Oid, u64)>> = const { Cell::new(None) };
        }
        // SAFETY: an open relation.
        let current = Some((unsafe { (*self.relation()).rd_id }, relation::generation()));
        if CHECKED.get() != current {
            // SAFETY: an open relation.
            if let Some(addition) = unsafe { additions::of(self.relation(), row::is_always_given) }
            {
                return Err(errors::state_extended("lease", addition));
            }
            CHECKED.set(current);
        }
        Ok(())
    }
}

fn dirty_snapshot() -> pg_sys::SnapshotData {
    let snapshot_type = pg_sys::SnapshotType::SNAPSHOT_DIRTY;
    pg_sys::SnapshotData { snapshot_type, ..Default::default() }
}

/// Runs `work` with the snapshot that shows these rows.
///
/// # Safety
/// To be called inside of `compat::guarded`, in a transaction.
unsafe fn with_snapshot(as_of: AsOf, work: impl FnOnce(pg_sys::Snapshot)) {
    // SAFETY: the caller's promise; a copy is registered.
    unsafe {
        let mut taken = match as_of {
            AsOf::InFlight => return work(&mut dirty_snapshot()),
            AsOf::Now | AsOf::Committed => *raw::GetLatestSnapshot(),
            AsOf::Snapshot => *raw::GetTransactionSnapshot(),
        };
        if matches!(as_of, AsOf::Committed | AsOf::Snapshot) {
            // At the transaction's first command none of its own rows exist, so this hides them.
            taken.curcid = 0;
        }
        // A snapshot that does not claim to be copied is copied when it is registered.
        (taken.copied, taken.active_count, taken.regd_count) = (false, 0, 0);
        let registered = raw::RegisterSnapshot(&mut taken);
        work(registered);
        raw::UnregisterSnapshot(registered);
    }
}
