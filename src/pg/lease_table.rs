//! The lease table, read and written directly: no SPI, so no plan, no `search_path`, no rights of the caller's.

use super::args::text_datum;
use super::errors::{self, Refusal};
use super::keyed::{Access, Keyed, Spec};
use super::memory::Scratch;
use super::relation_lock::Wait;
use super::row::{Deleter, Fields, NewGrant, Row, LEASE};
use super::row_version::RowVersion;
use super::{compat, raw, xact};
use pg_fence_rules::{Instant, Span, Token};
use pgrx::pg_sys;

/// Which committed state a look-up sees; changes of this transaction are seen always.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AsOf {
    /// All that is committed at this moment.
    Now,
    /// What the transaction's snapshot sees (REPEATABLE READ and above).
    Transaction,
}

/// fence.lease, opened.
pub struct LeaseTable(Keyed);

static SPEC: Spec = Spec { table: c"lease", index: c"lease_pkey", columns: LEASE, number: 0 };

/// What was seen of a lease, and at which moment.
pub struct Look {
    /// All its rows.
    pub rows: Vec<Row>,
    /// How many transactions had ended; 0 when that is not known.
    moment: u64,
}

impl LeaseTable {
    /// Opens it, waiting for maintenance as any statement does.
    pub fn open(access: Access) -> Result<Self, Refusal> {
        let opened = Self::try_open(access, Wait::Queue)?;
        opened.ok_or_else(|| errors::state_missing("lease"))
    }

    /// Opens it; None where its lock is not to be had that way.
    pub fn try_open(access: Access, wait: Wait) -> Result<Option<Self>, Refusal> {
        super::relation::check_version();
        Ok(Keyed::open(&SPEC, access, wait)?.map(LeaseTable))
    }

    /// The rows of a lease, in the order of their slots.
    pub fn rows(&self, name: &[u8], as_of: AsOf) -> Vec<Row> {
        self.scan(name, Some(as_of)).rows
    }

    /// The rows of a lease, with what it takes to tell later whether they are still all.
    pub fn look(&self, name: &[u8]) -> Look {
        self.scan(name, Some(AsOf::Now))
    }

    /// The rows of a lease with those that open transactions are writing, and without those that this one
    /// has replaced.
    pub fn rows_in_flight(&self, name: &[u8]) -> Vec<Row> {
        self.scan(name, None).rows
    }

    fn scan(&self, name: &[u8], as_of: Option<AsOf>) -> Look {
        let mut tuples = Vec::with_capacity(1);
        let mut moment = 0;
        let name = text_datum(name);
        let mut dirty = pg_sys::SnapshotData {
            snapshot_type: pg_sys::SnapshotType::SNAPSHOT_DIRTY,
            ..Default::default()
        };
        // SAFETY: the snapshot is registered for as long as the scan runs; each tuple is copied before the
        // scan lets go of its page.
        unsafe {
            compat::guarded(|| match as_of {
                Some(as_of) => {
                    let snapshot = snapshot(as_of, &mut moment);
                    self.0.each(name, snapshot, |tuple| tuples.push(raw::heap_copytuple(tuple)));
                    raw::UnregisterSnapshot(snapshot);
                }
                None => {
                    self.0.each(name, &mut dirty, |tuple| tuples.push(raw::heap_copytuple(tuple)));
                }
            });
            Look { rows: tuples.into_iter().map(|tuple| self.row(tuple)).collect(), moment }
        }
    }

    /// # Safety
    /// The tuple must be a copied row of this table.
    unsafe fn row(&self, tuple: pg_sys::HeapTuple) -> Row {
        // SAFETY: the caller's promise.
        unsafe { Row::new(tuple, (*self.0.table()).rd_att) }
    }

    /// Reads a row again, as of now. None when it is no longer the version that was read: it was changed or
    /// deleted, or its place is another row's.
    pub fn again(&self, row: &Row) -> Option<Row> {
        self.at(row.version(), &row.name(), row.grant.slot)
    }

    /// The row of a lease's slot, as of now, where it is still in the place where an earlier look of this
    /// transaction found it. Meanwhile the table may have been rewritten, and be shorter.
    pub fn still_at(&self, version: RowVersion, name: &[u8], slot: i32) -> Option<Row> {
        let fork = pg_sys::ForkNumber::MAIN_FORKNUM;
        // SAFETY: an open table.
        let blocks = unsafe { pg_sys::RelationGetNumberOfBlocksInFork(self.0.table(), fork) };
        (version.block() < blocks).then(|| self.at(version, name, slot)).flatten()
    }

    /// The row of a lease's slot, as of now, where it is still this version.
    fn at(&self, version: RowVersion, name: &[u8], slot: i32) -> Option<Row> {
        // SAFETY: a place in the table that held a tuple; if it holds one that is visible, it is copied while
        // its page is pinned.
        let tuple = unsafe {
            compat::guarded(|| {
                let snapshot = snapshot(AsOf::Now, &mut 0);
                let t_self = version.pointer();
                let mut tuple = pg_sys::HeapTupleData { t_self, ..Default::default() };
                let mut buffer = 0;
                let there =
                    raw::heap_fetch(self.0.table(), snapshot, &mut tuple, &mut buffer, false);
                let copy = there.then(|| {
                    let copy = raw::heap_copytuple(&mut tuple);
                    raw::ReleaseBuffer(buffer);
                    copy
                });
                raw::UnregisterSnapshot(snapshot);
                copy
            })
        };
        // SAFETY: a copied row of this table.
        let row = unsafe { self.row(tuple?) };
        (row.grant.slot == slot && row.name() == name).then_some(row)
    }

    /// Shows every row of the table.
    pub fn each(&self, mut show: impl FnMut(&Row) -> Result<(), Refusal>) -> Result<(), Refusal> {
        // SAFETY: as in `scan`, but over the heap, without a key.
        unsafe {
            let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot());
            let none = std::ptr::null_mut();
            let scan = pg_sys::systable_beginscan(
                self.0.table(),
                pg_sys::InvalidOid,
                false,
                snapshot,
                0,
                none,
            );
            let scratch = Scratch::new();
            loop {
                pgrx::check_for_interrupts!();
                let tuple = pg_sys::systable_getnext(scan);
                if tuple.is_null() {
                    break;
                }
                scratch.turn(|| show(&self.row(pg_sys::heap_copytuple(tuple))))?;
            }
            pg_sys::systable_endscan(scan);
            pg_sys::UnregisterSnapshot(snapshot);
            Ok(())
        }
    }

    /// The new grants of transactions that are open, but for this one. Reads the whole table.
    pub fn uncommitted(&self) -> Vec<Row> {
        let mut rows: Vec<Row> = Vec::new();
        let mut dirty = pg_sys::SnapshotData {
            snapshot_type: pg_sys::SnapshotType::SNAPSHOT_DIRTY,
            ..Default::default()
        };
        // SAFETY: the snapshot lives as long as the scan; each tuple is copied while its page is pinned.
        unsafe {
            let (none, heap) = (std::ptr::null_mut(), pg_sys::InvalidOid);
            let table = self.0.table();
            let scan = pg_sys::systable_beginscan(table, heap, false, &mut dirty, 0, none);
            loop {
                pgrx::check_for_interrupts!();
                let tuple = pg_sys::systable_getnext(scan);
                if tuple.is_null() {
                    break;
                }
                if xact::is_others_uncommitted(tuple) {
                    rows.push(self.row(pg_sys::heap_copytuple(tuple)));
                }
            }
            pg_sys::systable_endscan(scan);
        }
        // One that its own transaction has replaced since is not the latest; one with the first token of a
        // committed row is that grant, being renewed or closed.
        rows.retain(|row| row.deleter() == Deleter::None && !self.is_known(row));
        rows
    }

    /// Is there a committed version of the row's grant?
    fn is_known(&self, row: &Row) -> bool {
        let (slot, first) = (row.grant.slot, row.grant.tokens.first());
        let rows = self.rows(&row.name(), AsOf::Now);
        rows.iter().any(|known| known.grant.slot == slot && known.grant.tokens.first() == first)
    }

    /// The rows of a lease whose locks are held; None when an open transaction is deleting one (a prune,
    /// which holds no lock). With what was seen before they were, where that may still be all.
    pub fn settled_rows(&self, name: &[u8], seen: Option<&Look>) -> Option<Vec<Row>> {
        let mut unchanged = seen.and_then(|seen| self.unchanged(seen));
        loop {
            let rows = unchanged.take().unwrap_or_else(|| self.rows(name, AsOf::Now));
            let by = |deleter| rows.iter().any(|r| r.deleter() == deleter);
            if by(Deleter::Open) {
                return None;
            }
            if !by(Deleter::Committed) {
                return Some(rows);
            }
        }
    }

    /// The rows that were seen, read again by their places: they are still all where no transaction that
    /// wrote anything has ended since (the rule by which Postgres itself uses a snapshot again). None where
    /// one has.
    fn unchanged(&self, seen: &Look) -> Option<Vec<Row>> {
        // SAFETY: Postgres's own static copy, read at once.
        let moment =
            unsafe { compat::guarded(|| (*raw::GetLatestSnapshot()).snapXactCompletionCount) };
        if moment == 0 || moment != seen.moment {
            return None;
        }
        seen.rows.iter().map(|row| self.again(row)).collect()
    }

    /// Writes a new grant, over the row that its slot has, if there is one.
    pub fn grant(&self, new: &NewGrant, over: Option<&Row>) -> Result<(), Refusal> {
        let fields = Fields::of_grant(new);
        match over {
            Some(row) => self.replace(row, &fields.over(row)),
            None => {
                self.0.insert(&fields);
                self.check_written(new.name, new.slot, &fields)
            }
        }
    }

    /// Writes a renewal of the row's grant.
    pub fn renew(&self, row: &Row, token: Token, now: Instant, ttl: Span) -> Result<(), Refusal> {
        self.replace(row, &row.renewed(token, now, ttl))
    }

    /// Closes the row's grant.
    pub fn close(&self, row: &Row, closing: Token, now: Instant) -> Result<(), Refusal> {
        self.replace(row, &row.closed(closing, now))
    }

    /// Closes the row's grant, which another one ends: there is no closing token.
    pub fn end(&self, row: &Row, now: Instant) -> Result<(), Refusal> {
        self.close(row, row.grant.tokens.latest(), now.min(row.grant.expires_at))
    }

    /// Deletes the row, unless a trigger prevents it.
    pub fn delete(&self, row: &Row) -> Result<bool, Refusal> {
        self.0.delete(row.version());
        if !self.0.has_triggers() {
            return Ok(true);
        }
        xact::see_own_changes();
        let rows = self.rows(&row.name(), AsOf::Now);
        Ok(!rows.iter().any(|left| left.grant.slot == row.grant.slot))
    }

    /// The row was read under the grant's lock, so nobody else is changing it.
    fn replace(&self, row: &Row, fields: &Fields) -> Result<(), Refusal> {
        self.0.update(row.version(), fields);
        if self.0.has_triggers() {
            return self.check_written(&row.name(), row.grant.slot, fields);
        }
        xact::see_own_changes();
        Ok(())
    }

    /// Refuses a write that a trigger has suppressed or changed: no token may be given for it.
    fn check_written(&self, name: &[u8], slot: i32, fields: &Fields) -> Result<(), Refusal> {
        xact::see_own_changes();
        // SAFETY: a copied row of this table.
        let stands = |row: &Row| unsafe { self.0.holds(row.tuple(), fields) };
        let written = |row: &Row| row.grant.slot == slot && row.written_here() && stands(row);
        if self.0.has_triggers() && !self.rows(name, AsOf::Now).iter().any(written) {
            return Err(self.0.meddled());
        }
        Ok(())
    }
}

/// A registered snapshot, to be unregistered, and its moment.
///
/// # Safety
/// To be called inside `compat::guarded`.
unsafe fn snapshot(as_of: AsOf, moment: &mut u64) -> pg_sys::Snapshot {
    // SAFETY: either is a snapshot of this transaction. The copy that is registered forgets the moment.
    unsafe {
        let snapshot = match as_of {
            AsOf::Now => raw::GetLatestSnapshot(),
            AsOf::Transaction => raw::GetTransactionSnapshot(),
        };
        *moment = (*snapshot).snapXactCompletionCount;
        raw::RegisterSnapshot(snapshot)
    }
}
