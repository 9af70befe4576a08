//! The lease table, read and written directly: no SPI, so no plan, no `search_path`, no rights of the caller's.

use crate::known_bugs;
use crate::pg::call::args::text_datum;
use crate::pg::call::errors::{self, Refusal};
use crate::pg::compat;
use crate::pg::locks::relation_lock::Wait;
use crate::pg::raw;
use crate::pg::session::xact;
use crate::pg::state::form::Spec;
use crate::pg::state::found_rows;
use crate::pg::state::keyed::{Access, Keyed};
use crate::pg::state::relation;
use crate::pg::state::row::{Deleter, Fields, NewGrant, Row, LEASE};
use crate::pg::state::row_version::{Location, Pointer, Sighting, NO_BUFFER};
use crate::pg::table_scan;
use pg_fence_rules::{Instant, Span, Token};
use pgrx::pg_sys;
use std::ops::Deref;

/// Which rows of a lease are read; changes of this transaction always are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AsOf {
    /// All that is committed at this moment.
    Now,
    /// What the transaction's snapshot sees (REPEATABLE READ and above).
    Transaction,
    /// Also what open transactions are writing, but not what this one has replaced.
    InFlight,
}

/// fence.lease, opened and locked as a statement that reads or writes it would.
pub struct LeaseTable(Keyed);

static SPEC: Spec = Spec { table: c"lease", index: c"lease_pkey", columns: LEASE, number: 0 };

/// fence.lease without a lock on it, as the session knows it: for a look at a row whose place it remembers.
///
/// VACUUM FULL may put the table into another file meanwhile. It tells all sessions before it gives its lock back, and
/// so before anybody can write to that file: what is read in the old one, once all that was told is known, was true
/// when the look began.
pub struct Glance {
    table: LeaseTable,
    generation: u64,
}

impl Glance {
    /// None where the session does not know the table (any more).
    fn new() -> Option<Self> {
        let table = LeaseTable(Keyed::unlocked(&SPEC)?);
        Some(Glance { table, generation: relation::generation() })
    }

    /// The row where the session has found it before; see `LeaseTable::remembered`.
    pub fn row(name: &[u8], wanted: impl Fn(&Row) -> bool) -> Option<Row> {
        if !found_rows::has(name) {
            return None;
        }
        relation::learn_changes();
        Glance::new()?.table.remembered(name, wanted)
    }

    /// The row where the session has found it before, as it was known to be at some time: to be locked, and then to be
    /// looked at again.
    pub fn old_row(name: &[u8], wanted: impl Fn(&Row) -> bool) -> Option<(Self, Row)> {
        let glance = found_rows::has(name).then(Glance::new).flatten()?;
        let row = glance.table.remembered(name, wanted)?;
        Some((glance, row))
    }

    /// As `LeaseTable::again`, for a row whose grant has been locked since. None, too, where the table may be in
    /// another file by now.
    pub fn again(&self, row: &Row) -> Option<Row> {
        relation::learn_changes();
        (relation::generation() == self.generation).then(|| self.table.again(row)).flatten()
    }

    /// The row that was just looked at again, to be known later.
    pub fn sighting(&self, row: &Row) -> Sighting {
        self.table.sighting(row)
    }
}

/// The rows of a lease, in the order of their slots.
pub struct Rows {
    list: Vec<Row>,
    /// How many transactions had ended when they were read; 0 when that is not known.
    moment: u64,
}

impl Deref for Rows {
    type Target = [Row];

    fn deref(&self) -> &[Row] {
        &self.list
    }
}

impl IntoIterator for Rows {
    type Item = Row;
    type IntoIter = std::vec::IntoIter<Row>;

    fn into_iter(self) -> Self::IntoIter {
        self.list.into_iter()
    }
}

/// A row can be read in three ways: searched for by the lease's name (`rows`), at the place that the session
/// remembers (`remembered`), and once more where it was just read (`again`).
impl LeaseTable {
    /// Opens it, waiting for maintenance as any statement does.
    pub fn open(access: Access) -> Result<Self, Refusal> {
        let opened = Self::try_open(access, Wait::Queue)?;
        opened.ok_or_else(|| errors::state_missing("lease"))
    }

    /// Opens it; None where its lock is not to be had that way.
    pub fn try_open(access: Access, wait: Wait) -> Result<Option<Self>, Refusal> {
        relation::check_version();
        Ok(Keyed::open(&SPEC, access, wait)?.map(LeaseTable))
    }

    /// Makes it ready for `rows`, which else waits for maintenance of the index; false where that is at work.
    pub fn can_search(&self, wait: Wait) -> bool {
        self.0.open_index(wait)
    }

    /// All rows of a lease.
    pub fn rows(&self, name: &[u8], as_of: AsOf) -> Rows {
        self.0.open_index(Wait::Queue);
        let mut found = Vec::with_capacity(1);
        let mut moment = 0;
        let name = text_datum(name);
        let mut in_flight = pg_sys::SnapshotData {
            snapshot_type: pg_sys::SnapshotType::SNAPSHOT_DIRTY,
            ..Default::default()
        };
        // SAFETY: the snapshot is registered for as long as the scan runs; each tuple is copied while its page is
        // locked. The copy that is registered forgets the moment.
        unsafe {
            compat::guarded(|| {
                let of = match as_of {
                    AsOf::Now => raw::GetLatestSnapshot(),
                    AsOf::Transaction => raw::GetTransactionSnapshot(),
                    AsOf::InFlight => &mut in_flight,
                };
                moment = (*of).snapXactCompletionCount;
                let keep = |tuple, location| found.push((raw::heap_copytuple(tuple), location));
                if as_of == AsOf::InFlight {
                    self.0.each(name, of, keep);
                } else {
                    let of = raw::RegisterSnapshot(of);
                    self.0.each(name, of, keep);
                    raw::UnregisterSnapshot(of);
                }
            });
            let row = |(tuple, location)| Row::new(tuple, self.0.row_type(), location);
            Rows { list: found.into_iter().map(row).collect(), moment }
        }
    }

    /// The row of a lease that this session has found before, as of now, where it still is there and is wanted.
    pub fn remembered(&self, name: &[u8], wanted: impl Fn(&Row) -> bool) -> Option<Row> {
        let location = found_rows::find(self.0.file(), name)?;
        let mut found = None;
        // SAFETY: the tuple is copied while its page is locked, and is a row of this table.
        let row = unsafe {
            compat::guarded(|| {
                self.0.at(location, |tuple| found = Some(raw::heap_copytuple(tuple)));
            });
            Row::new(found?, self.0.row_type(), location)
        };
        // Its location may be another lease's by now.
        let is_its = known_bugs::UNCHECKED_LOCATION || row.name() == name;
        (is_its && wanted(&row)).then_some(row)
    }

    /// Remembers where a row of a lease was found.
    pub fn remember(&self, name: &[u8], row: &Row) {
        found_rows::remember(self.0.file(), name, row.location);
    }

    /// Reads a row again, as of now. None when it is no longer the version that was read: it was changed or
    /// deleted, or its place is another row's.
    pub fn again(&self, row: &Row) -> Option<Row> {
        let mut same = false;
        // SAFETY: a tuple in its page.
        unsafe {
            compat::guarded(|| {
                self.0.again(row.version(), row.location, |tuple| same = row.is_still(tuple));
            });
        }
        same.then(|| row.looked_at_again())
    }

    /// A row that was just read, to be known later.
    pub fn sighting(&self, row: &Row) -> Sighting {
        Sighting::new(row.version(), row.location.buffer, self.0.files())
    }

    /// Reads all rows again by their places: they are still all where no transaction that wrote anything has ended
    /// since (the rule by which Postgres itself uses a snapshot again). None where one has.
    pub fn all_again(&self, rows: &Rows) -> Option<Vec<Row>> {
        // SAFETY: Postgres's own static copy, read at once.
        let moment =
            unsafe { compat::guarded(|| (*raw::GetLatestSnapshot()).snapXactCompletionCount) };
        if moment == 0 || moment != rows.moment {
            return None;
        }
        // With room for as many: mostly one, where `collect` would make room for four.
        let mut all = Vec::with_capacity(rows.len());
        for row in rows.iter() {
            all.push(self.again(row)?);
        }
        Some(all)
    }

    /// The row in a tuple that a scan of the whole table has come to. Nobody looks for it again by that location, which
    /// is not where its index entry leads.
    ///
    /// # Safety
    /// The tuple must be one of this table's.
    unsafe fn row(&self, tuple: pg_sys::HeapTuple) -> Row {
        // SAFETY: the caller's promise.
        unsafe {
            let location = Location { entry: Pointer::of((*tuple).t_self), buffer: NO_BUFFER };
            Row::new(pg_sys::heap_copytuple(tuple), self.0.row_type(), location)
        }
    }

    /// Shows every row of the table.
    pub fn each(&self, mut show: impl FnMut(&Row) -> Result<(), Refusal>) -> Result<(), Refusal> {
        // SAFETY: an open table, whose rows are copied.
        unsafe { table_scan::each_row(self.0.table(), |tuple| show(&self.row(tuple))) }
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
                    rows.push(self.row(tuple));
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
        let rows = self.rows(row.name(), AsOf::Now);
        rows.iter().any(|known| known.grant.slot == slot && known.grant.tokens.first() == first)
    }

    /// Writes a new grant, over the row that its slot has, if there is one.
    pub fn grant(&self, new: &NewGrant, over: Option<&Row>) -> Result<(), Refusal> {
        let fields = Fields::of_grant(new, over);
        match over {
            Some(row) => self.replace(row, &fields),
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
        let rows = self.rows(row.name(), AsOf::Now);
        Ok(!rows.iter().any(|left| left.grant.slot == row.grant.slot))
    }

    /// The row was read under the grant's lock, so nobody else is changing it.
    fn replace(&self, row: &Row, fields: &Fields) -> Result<(), Refusal> {
        self.0.update(row.version(), fields);
        if self.0.has_triggers() {
            return self.check_written(row.name(), row.grant.slot, fields);
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
