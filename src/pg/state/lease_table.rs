//! fence.lease: one way to read it, one way to write it.
//!
//! It is read by scans of the server's own kind, under the table's lock, and written as PostgreSQL writes its catalogs. No
//! SPI: so no plan, no `search_path`, no rights of the caller's.

use crate::errors::{self, Refusal};
use crate::pg::call::args::{bytes_of, text_datum};
use crate::pg::call::raise;
use crate::pg::compat;
use crate::pg::raw;
use crate::pg::session::server;
use crate::pg::session::xact;
use crate::pg::state::additions;
use crate::pg::state::opened::{IfLocked, Opened};
use crate::pg::state::relation::{self, state_oid};
use crate::pg::state::row::{self, Deleter, Fields, NewGrant, Row, RowVersion, COLUMNS, LEASE};
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
    /// To look only.
    Read,
    /// To look and to write.
    Write,
}

/// Which rows of a lease are read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AsOf {
    /// The rows committed at this moment, and this transaction's own.
    Now,
    /// The rows committed at this moment, without this transaction's own.
    Committed,
    /// The rows in the transaction's snapshot (REPEATABLE READ and above), without this transaction's own.
    Snapshot,
    /// The rows that the statement sees.
    Statement,
    /// The rows committed at this moment, this transaction's own, and those that open transactions are writing.
    InFlight,
}

/// fence.lease, opened and locked as a statement that reads or writes it would.
///
/// A reader gives the locks back at the end, so that no maintenance waits for a sleeping waiter or for a guarded
/// transaction.
pub struct LeaseTable {
    table: Opened,
    index: OnceCell<Opened>,
}

impl LeaseTable {
    /// Opens it, waiting for maintenance as any statement does.
    pub fn open(access: Access) -> Result<Self, Refusal> {
        let opened = Self::try_open(access, IfLocked::Queue)?;
        opened.ok_or_else(|| errors::state_missing("lease"))
    }

    /// Opens it; None where a lock is not to be had that way.
    pub fn try_open(access: Access, if_locked: IfLocked) -> Result<Option<Self>, Refusal> {
        relation::check_version();
        let mode = match access {
            Access::Read => pg_sys::AccessShareLock,
            Access::Write => pg_sys::RowExclusiveLock,
        };
        let Some(table) = Opened::open(state_oid(c"lease")?, mode, if_locked) else {
            return Ok(None);
        };
        // Not before the table is locked: until then another index may take its place.
        let Some(index) = Opened::open(state_oid(c"lease_pkey")?, mode, if_locked) else {
            return Ok(None);
        };
        let opened = LeaseTable { table, index: OnceCell::with_value(index) };
        opened.check_shape()?;
        Ok(Some(opened))
    }

    /// Opens it, waiting for maintenance, for a look at one row. The index is opened where the row's place is not known, or
    /// where a definition has changed.
    pub fn open_to_look() -> Result<Self, Refusal> {
        relation::check_version();
        let table = Opened::queued(state_oid(c"lease")?, pg_sys::AccessShareLock);
        let opened = LeaseTable { table, index: OnceCell::new() };
        opened.check_shape()?;
        Ok(opened)
    }

    /// The index by name and slot. Errors: 55000.
    fn index(&self) -> Result<&Opened, Refusal> {
        let is_new = self.index.get().is_none();
        let index = self.index.get_or_try_init(|| {
            let oid = state_oid(c"lease_pkey")?;
            Ok(Opened::queued(oid, pg_sys::AccessShareLock))
        })?;
        if is_new {
            // A definition may have changed while its lock was waited for.
            self.check_shape()?;
        }
        Ok(index)
    }

    /// 55000 unless it is a table as this library knows it. Looks again when a definition has changed.
    fn check_shape(&self) -> Result<(), Refusal> {
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

    /// Is it a heap with our columns first, and the index what we search by?
    fn has_known_shape(&self, index: pg_sys::Relation) -> bool {
        // SAFETY: both are open.
        self.table.is_heap_with(LEASE)
            && unsafe {
                let table = self.relation();
                let key = &*(*index).rd_index;
                (*self.row_type()).natts as usize <= COLUMNS
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
        let name = text_datum(name);
        let index = self.index().unwrap_or_else(|refusal| raise::now(refusal)).relation;
        let mut found = Vec::with_capacity(1);
        let scan = |snapshot| {
            let mut key = pg_sys::ScanKeyData::default();
            // SAFETY: both relations are open, the snapshot outlives the scan, and the key's type and collation are
            // those of the index's first column. A tuple is copied while its page is pinned.
            unsafe {
                let equal = pg_sys::BTEqualStrategyNumber as u16;
                raw::ScanKeyInit(&mut key, 1, equal, pg_sys::F_TEXTEQ.into(), name);
                let table = self.relation();
                let scan = raw::systable_beginscan_ordered(table, index, snapshot, 1, &mut key);
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
        // SAFETY: the work calls the server, and drops nothing.
        unsafe { compat::guarded(|| with_snapshot(as_of, scan)) };
        found.into_iter().map(|tuple| self.row(tuple)).collect()
    }

    /// The row of a lease whose grant has this token, as of now. Looks where it was found the last time, then in the index.
    pub fn row_with(&self, name: &[u8], token: Token) -> Option<Row> {
        // SERIALIZABLE notes what is read, in the index; a standby's own rules of what is visible are those of snapshots.
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

    /// Returns true if this version of a row is still there, and nobody has replaced or deleted it. (False above READ COMMITTED:
    /// the index must be read there.)
    pub fn still_has(&self, row: &Row) -> bool {
        // SAFETY: a valid tuple.
        let version = |tuple| unsafe { RowVersion::of(tuple) };
        !xact::keeps_snapshot() && self.tuple_at(row.place(), version) == Some(row.version())
    }

    /// Returns true if the table has that page still: a rewrite or VACUUM may have shortened it.
    fn has_page_of(&self, place: pg_sys::ItemPointerData) -> bool {
        let main = pg_sys::ForkNumber::MAIN_FORKNUM;
        // SAFETY: an open table.
        unsafe {
            let pages = pg_sys::RelationGetNumberOfBlocksInFork(self.relation(), main);
            item_pointer_get_block_number_no_check(place) < pages
        }
    }

    /// Looks at the tuple in this place, if one is there that is committed now or this transaction's own. The table must have
    /// that page.
    fn tuple_at<T>(
        &self,
        place: pg_sys::ItemPointerData,
        look: impl FnOnce(pg_sys::HeapTuple) -> T,
    ) -> Option<T> {
        let snapshot_type = pg_sys::SnapshotType::SNAPSHOT_SELF;
        let mut now = pg_sys::SnapshotData { snapshot_type, ..Default::default() };
        let mut tuple = pg_sys::HeapTupleData { t_self: place, ..Default::default() };
        let mut buffer = 0;
        // SAFETY: an open table, which is not truncated while it is locked. The page is pinned while the tuple is looked at.
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

    /// The row that is in a copied tuple of this table.
    fn row(&self, tuple: pg_sys::HeapTuple) -> Row {
        // SAFETY: only called for such tuples.
        unsafe { Row::new(tuple, self.row_type()) }
    }

    /// Shows every row of the table.
    pub fn each(&self, mut show: impl FnMut(&Row) -> Result<(), Refusal>) -> Result<(), Refusal> {
        // SAFETY: an open table, whose rows are copied.
        unsafe {
            table_scan::each_row(self.relation(), |tuple| {
                show(&self.row(pg_sys::heap_copytuple(tuple)))
            })
        }
    }

    /// Copies of the rows that the statement sees, of the names that are wanted. The others are passed over unread.
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

    /// The tuple of a row of this table, readable whatever becomes of the transaction that has written it.
    pub fn self_contained(&self, row: &Row) -> pg_sys::HeapTuple {
        // SAFETY: the row type is this table's, which is open.
        unsafe { row.self_contained(self.row_type()) }
    }

    /// The new grants that other transactions have made and not committed: of one lease, or of all, for which it reads the
    /// whole table. One that its own transaction has replaced is not the latest; one with the first token of a committed row
    /// is that grant, being renewed or closed.
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

    /// Is there a committed version of the row's grant?
    fn is_known(&self, row: &Row) -> bool {
        self.rows(row.name(), AsOf::Now).iter().any(|known| known.is_of_same_grant(row))
    }

    /// Writes a new grant, over the row that its slot has, if there is one. Error: 55000.
    pub fn grant(&self, new: &NewGrant, over: Option<&Row>) -> Result<(), Refusal> {
        let fields = Fields::of_grant(new, over);
        if let Some(row) = over {
            return self.replace(row, &fields);
        }
        // SAFETY: `write` has an open table, of whose row type the fields are.
        self.write(|table| unsafe {
            raw::CatalogTupleInsert(table, fields.tuple((*table).rd_att));
        })
    }

    /// Writes a new version of a row that was read under the grant's lock. Error: 55000.
    pub fn replace(&self, row: &Row, fields: &Fields) -> Result<(), Refusal> {
        // SAFETY: as above; under the grant's lock nobody else changes the row.
        self.write(|table| unsafe {
            raw::CheckCmdReplicaIdentity(table, pg_sys::CmdType::CMD_UPDATE);
            raw::CatalogTupleUpdate(table, &mut row.place(), fields.tuple((*table).rd_att));
        })
    }

    /// Deletes the row. Error: 55000.
    pub fn delete(&self, row: &Row) -> Result<(), Refusal> {
        // SAFETY: as above.
        self.write(|table| unsafe {
            raw::CheckCmdReplicaIdentity(table, pg_sys::CmdType::CMD_DELETE);
            raw::CatalogTupleDelete(table, &mut row.place());
        })
    }

    /// Writes as PostgreSQL writes its catalogs: the row and its entries in the indexes. The table's lock is kept until the
    /// transaction ends, as any writer keeps it; that of the index goes with the call. Error: 55000.
    fn write(&self, work: impl FnOnce(pg_sys::Relation)) -> Result<(), Refusal> {
        self.table.keep_lock();
        self.check_additions()?;
        // SAFETY: the table is open and locked for writing. The work calls the server, and drops nothing.
        unsafe {
            compat::guarded(|| {
                work(self.relation());
                raw::CommandCounterIncrement();
            });
        }
        Ok(())
    }

    /// 55000 if the table has been given something that such a write passes over. Looks again when a definition has changed.
    /// The table is locked: of what it looks for, only an index can come meanwhile (`CREATE INDEX CONCURRENTLY`), and that
    /// one wants no entry before this transaction has ended.
    fn check_additions(&self) -> Result<(), Refusal> {
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

/// Does work with the snapshot that shows these rows.
///
/// # Safety
/// To be called inside `compat::guarded`, in a transaction.
unsafe fn with_snapshot(as_of: AsOf, work: impl FnOnce(pg_sys::Snapshot)) {
    // SAFETY: the caller's promise; what is registered is a copy.
    unsafe {
        let mut taken = match as_of {
            AsOf::InFlight => return work(&mut dirty_snapshot()),
            AsOf::Now | AsOf::Committed => *raw::GetLatestSnapshot(),
            AsOf::Snapshot => *raw::GetTransactionSnapshot(),
            AsOf::Statement => *raw::GetActiveSnapshot(),
        };
        if matches!(as_of, AsOf::Committed | AsOf::Snapshot) {
            // As at the transaction's first command: nothing of its own is written yet.
            taken.curcid = 0;
        }
        // So that a copy of this one is registered.
        (taken.copied, taken.active_count, taken.regd_count) = (false, 0, 0);
        let registered = raw::RegisterSnapshot(&mut taken);
        work(registered);
        raw::UnregisterSnapshot(registered);
    }
}
