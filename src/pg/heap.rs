//! The lease table, read and written directly: no SPI, so no plan, no `search_path`, no rights of the caller's.

use super::args::{text_bytes, text_datum};
use super::memory::Scratch;
use super::relation::state_oid;
use super::{compat, raw, xact};
use crate::errors::Refusal;
use crate::protocol::grant::{Grant, Mode, Tokens};
use crate::protocol::{Micros, Token};
use pgrx::pg_sys;
use std::ffi::c_int;

const COLUMNS: usize = 17;

/// Columns of fence.lease by position.
#[derive(Clone, Copy)]
enum Column {
    Name,
    Slot,
    Mode,
    Slots,
    Holder,
    Session,
    Role,
    FirstToken,
    Renewed,
    Closing,
    AcquiredAt,
    RenewedAt,
    ExpiresAt,
    EndedAt,
    TtlUs,
    Renewals,
    Metadata,
}

/// Which committed state a look-up sees; changes of this transaction are seen always.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AsOf {
    /// All that is committed at this moment.
    Now,
    /// What the transaction's snapshot sees (REPEATABLE READ and above).
    Transaction,
}

/// fence.lease, opened.
pub struct LeaseTable {
    rel: pg_sys::Relation,
    index: pg_sys::Relation,
}

/// What was seen of a lease, and at which moment.
pub struct Look {
    /// All its rows.
    pub rows: Vec<Row>,
    /// How many transactions had ended; 0 when that is not known.
    moment: u64,
}

/// A row, copied.
#[derive(Clone, Copy)]
pub struct Row {
    /// As the rules see it.
    pub grant: Grant,
    /// The ttl last asked for.
    pub ttl_us: Micros,
    tuple: pg_sys::HeapTuple,
    values: [pg_sys::Datum; COLUMNS],
    nulls: [bool; COLUMNS],
}

/// Where a version of a row is.
#[derive(Clone, Copy)]
pub struct Place(pg_sys::ItemPointerData);

/// Who has marked a row as deleted (or replaced).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Deleter {
    /// Nobody, or a transaction that was rolled back.
    None,
    /// A transaction that is open.
    Open,
    /// One that has committed since the row was read.
    Committed,
}

/// A grant to be written.
pub struct NewGrant<'a> {
    pub name: &'a [u8],
    pub slot: i32,
    pub mode: Mode,
    pub holder: Option<&'a [u8]>,
    pub session: &'a [u8],
    pub role: &'a [u8],
    pub token: Token,
    pub now: Micros,
    pub ttl_us: Micros,
    pub metadata: Option<pg_sys::Datum>,
}

impl LeaseTable {
    /// Opens it to be read, or to be written as well.
    pub fn open(write: bool) -> Result<Self, Refusal> {
        super::relation::check_version();
        let table = state_oid(c"lease")?;
        let mode = if write { pg_sys::RowExclusiveLock } else { pg_sys::AccessShareLock } as i32;
        let open = |oid| {
            // SAFETY: opens and locks a relation; the reference is given back on drop.
            unsafe { compat::guarded(|| raw::relation_open(oid, mode)) }
        };
        let mut opened = LeaseTable { rel: open(table), index: std::ptr::null_mut() };
        // Not before the table is locked: until then another index may take its place.
        opened.index = open(state_oid(c"lease_pkey")?);
        Ok(opened)
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
        let mut key = pg_sys::ScanKeyData::default();
        // SAFETY: the key's type and collation are those of the index's first column; the snapshot is
        // registered for as long as the scan runs; each tuple is copied before the scan lets go of its page.
        unsafe {
            compat::guarded(|| {
                let snapshot = match as_of {
                    Some(as_of) => snapshot(as_of, &mut moment),
                    None => &mut dirty,
                };
                let equal = pg_sys::BTEqualStrategyNumber as u16;
                let column = Column::Name as i16 + 1;
                raw::ScanKeyInit(&mut key, column, equal, pg_sys::F_TEXTEQ.into(), name);
                let scan =
                    raw::systable_beginscan_ordered(self.rel, self.index, snapshot, 1, &mut key);
                loop {
                    let forward = pg_sys::ScanDirection::ForwardScanDirection;
                    let tuple = raw::systable_getnext_ordered(scan, forward);
                    if tuple.is_null() {
                        break;
                    }
                    tuples.push(raw::heap_copytuple(tuple));
                }
                raw::systable_endscan_ordered(scan);
                if as_of.is_some() {
                    raw::UnregisterSnapshot(snapshot);
                }
            });
            Look { rows: tuples.into_iter().map(|tuple| self.row(tuple)).collect(), moment }
        }
    }

    /// Reads a row again, as of now. None when it is no longer the version that was read: it was changed or
    /// deleted, or its place is another row's.
    pub fn again(&self, row: &Row) -> Option<Row> {
        self.at(row.place(), &row.name(), row.grant.slot)
    }

    /// The row of a lease's slot, as of now, where it is still in this place.
    pub fn at(&self, place: Place, name: &[u8], slot: i32) -> Option<Row> {
        // SAFETY: a place in the table that held a tuple; if it holds one that is visible, it is copied while
        // its page is pinned.
        let tuple = unsafe {
            compat::guarded(|| {
                let snapshot = snapshot(AsOf::Now, &mut 0);
                let mut tuple = pg_sys::HeapTupleData { t_self: place.0, ..Default::default() };
                let mut buffer = 0;
                let there = raw::heap_fetch(self.rel, snapshot, &mut tuple, &mut buffer, false);
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
            let scan =
                pg_sys::systable_beginscan(self.rel, pg_sys::InvalidOid, false, snapshot, 0, none);
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
    pub fn grant(&self, new: &NewGrant, over: Option<&Row>) {
        let (mode, slots) = match new.mode {
            Mode::Exclusive => (b'x', 0),
            Mode::Shared => (b's', 0),
            Mode::Slots(n) => (b'n', n),
        };
        let mut values = [pg_sys::Datum::from(0); COLUMNS];
        let mut nulls = [false; COLUMNS];
        let mut set = |column: Column, value: Option<pg_sys::Datum>| match value {
            Some(value) => values[column as usize] = value,
            None => nulls[column as usize] = true,
        };
        set(Column::Name, Some(text_datum(new.name)));
        set(Column::Slot, Some(new.slot.into()));
        set(Column::Mode, Some((mode as i8).into()));
        set(Column::Slots, Some(slots.into()));
        set(Column::Holder, new.holder.map(text_datum));
        set(Column::Session, Some(text_datum(new.session)));
        set(Column::Role, Some(name_datum(new.role)));
        set(Column::FirstToken, Some(new.token.into()));
        set(Column::Renewed, Some(bigints(&[])));
        set(Column::Closing, None);
        set(Column::AcquiredAt, Some(new.now.into()));
        set(Column::RenewedAt, Some(new.now.into()));
        set(Column::ExpiresAt, Some((new.now + new.ttl_us).into()));
        set(Column::EndedAt, None);
        set(Column::TtlUs, Some(new.ttl_us.into()));
        set(Column::Renewals, Some(0i64.into()));
        set(Column::Metadata, new.metadata);
        self.write(over, &values, &nulls);
    }

    /// Writes a renewal of the row's grant.
    pub fn renew(&self, row: &Row, token: Token, now: Micros, ttl_us: Micros) {
        let (mut values, nulls) = (row.values, row.nulls);
        let renewals = values[Column::Renewals as usize].value() as i64 + 1;
        values[Column::Renewed as usize] = bigints(row.grant.tokens.renew(token).renewed());
        values[Column::RenewedAt as usize] = now.into();
        values[Column::ExpiresAt as usize] = (now + ttl_us).into();
        values[Column::TtlUs as usize] = ttl_us.into();
        values[Column::Renewals as usize] = renewals.into();
        self.write(Some(row), &values, &nulls);
    }

    /// Closes the row's grant, which another one ends: there is no closing token.
    pub fn end(&self, row: &Row, now: Micros) {
        self.close(row, row.grant.tokens.latest(), now.min(row.grant.expires_at));
    }

    /// Closes the row's grant.
    pub fn close(&self, row: &Row, closing: Token, now: Micros) {
        let (mut values, mut nulls) = (row.values, row.nulls);
        values[Column::Closing as usize] = closing.into();
        nulls[Column::Closing as usize] = false;
        values[Column::EndedAt as usize] = now.into();
        nulls[Column::EndedAt as usize] = false;
        self.write(Some(row), &values, &nulls);
    }

    /// Deletes the row.
    pub fn delete(&self, row: &Row) {
        // SAFETY: the tuple's own identity, read under the grant's lock.
        unsafe { pg_sys::CatalogTupleDelete(self.rel, &mut (*row.tuple).t_self) };
    }

    fn write(
        &self,
        over: Option<&Row>,
        values: &[pg_sys::Datum; COLUMNS],
        nulls: &[bool; COLUMNS],
    ) {
        // SAFETY: values and nulls fit the table's columns; the row that is written over was read under the
        // grant's lock, so nobody else is changing it.
        unsafe {
            compat::guarded(|| {
                let desc = (*self.rel).rd_att;
                let tuple = raw::heap_form_tuple(desc, values.as_ptr(), nulls.as_ptr());
                match over {
                    Some(row) => {
                        raw::CatalogTupleUpdate(self.rel, &mut (*row.tuple).t_self, tuple);
                    }
                    None => raw::CatalogTupleInsert(self.rel, tuple),
                }
            });
        }
        xact::see_own_changes();
    }

    /// # Safety
    /// The tuple must be a copied row of this table.
    unsafe fn row(&self, tuple: pg_sys::HeapTuple) -> Row {
        let mut values = [pg_sys::Datum::from(0); COLUMNS];
        let mut nulls = [true; COLUMNS];
        // SAFETY: the arrays have a place for each column.
        unsafe {
            pg_sys::heap_deform_tuple(
                tuple,
                (*self.rel).rd_att,
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
            );
            let int8 = |column: Column| values[column as usize].value() as i64;
            let mode = match values[Column::Mode as usize].value() as u8 {
                b's' => Mode::Shared,
                b'n' => Mode::Slots(values[Column::Slots as usize].value() as i32),
                _ => Mode::Exclusive,
            };
            let closing = (!nulls[Column::Closing as usize]).then(|| int8(Column::Closing));
            let renewed = read_bigints(values[Column::Renewed as usize]);
            let grant = Grant {
                slot: values[Column::Slot as usize].value() as i32,
                mode,
                tokens: Tokens::new(int8(Column::FirstToken), &renewed),
                closing,
                closed_here: closing.is_some() && xact::is_own(tuple),
                expires_at: int8(Column::ExpiresAt),
            };
            Row { grant, ttl_us: int8(Column::TtlUs), tuple, values, nulls }
        }
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

impl Drop for LeaseTable {
    fn drop(&mut self) {
        // An error's clean-up gives the reference back by itself.
        if !std::thread::panicking() {
            // SAFETY: opened by `open`; the locks stay until the transaction ends.
            unsafe {
                compat::guarded(|| {
                    if !self.index.is_null() {
                        raw::relation_close(self.index, pg_sys::NoLock as c_int);
                    }
                    raw::relation_close(self.rel, pg_sys::NoLock as c_int);
                });
            }
        }
    }
}

impl Row {
    fn text(&self, column: Column) -> Option<Vec<u8>> {
        let i = column as usize;
        // SAFETY: only asked for text columns.
        (!self.nulls[i]).then(|| unsafe { text_bytes(self.values[i]) })
    }

    /// The lease.
    pub fn name(&self) -> Vec<u8> {
        self.text(Column::Name).unwrap_or_default()
    }

    /// The holder, where it named itself.
    pub fn holder(&self) -> Option<Vec<u8>> {
        self.text(Column::Holder)
    }

    /// The session that acquired it.
    pub fn session(&self) -> Vec<u8> {
        self.text(Column::Session).unwrap_or_default()
    }

    /// The role that acquired it.
    pub fn role(&self) -> Vec<u8> {
        // SAFETY: a name is 64 bytes, NUL-terminated.
        unsafe {
            let name = self.values[Column::Role as usize].cast_mut_ptr::<pg_sys::NameData>();
            std::ffi::CStr::from_ptr((*name).data.as_ptr()).to_bytes().to_vec()
        }
    }

    /// Since when it is over, or will be.
    pub fn over_since(&self) -> Micros {
        if self.nulls[Column::EndedAt as usize] {
            self.grant.expires_at
        } else {
            self.values[Column::EndedAt as usize].value() as i64
        }
    }

    /// Is somebody deleting it?
    pub fn deleter(&self) -> Deleter {
        // SAFETY: a copied tuple; its xmax is that of the moment it was read.
        unsafe {
            let header = (*self.tuple).t_data;
            let mask = u32::from((*header).t_infomask);
            if mask & (pg_sys::HEAP_XMAX_INVALID | pg_sys::HEAP_XMAX_LOCK_ONLY) != 0 {
                return Deleter::None;
            }
            let xmax = (*header).t_choice.t_heap.t_xmax;
            if pg_sys::TransactionIdIsCurrentTransactionId(xmax) {
                Deleter::None
            } else if pg_sys::TransactionIdIsInProgress(xmax) {
                Deleter::Open
            } else if pg_sys::TransactionIdDidCommit(xmax) {
                Deleter::Committed
            } else {
                Deleter::None
            }
        }
    }

    /// Where this version is.
    pub fn place(&self) -> Place {
        // SAFETY: a copied tuple keeps its identity.
        Place(unsafe { (*self.tuple).t_self })
    }

    /// Which version it is.
    pub fn id(&self) -> (u16, u16, u16) {
        // SAFETY: a copied tuple keeps its identity.
        unsafe {
            let tid = (*self.tuple).t_self;
            (tid.ip_blkid.bi_hi, tid.ip_blkid.bi_lo, tid.ip_posid)
        }
    }

    /// Was this version written by the transaction that is asking?
    pub fn written_here(&self) -> bool {
        // SAFETY: a copied tuple.
        unsafe { xact::is_own(self.tuple) }
    }
}

fn name_datum(name: &[u8]) -> pg_sys::Datum {
    // SAFETY: palloc0 gives a whole, zeroed name; at most 63 bytes are copied.
    unsafe {
        let data = pg_sys::palloc0(std::mem::size_of::<pg_sys::NameData>()).cast::<u8>();
        let length = name.len().min(pg_sys::NAMEDATALEN as usize - 1);
        std::ptr::copy_nonoverlapping(name.as_ptr(), data, length);
        pg_sys::Datum::from(data)
    }
}

fn bigints(tokens: &[Token]) -> pg_sys::Datum {
    let mut values: Vec<pg_sys::Datum> = tokens.iter().map(|t| (*t).into()).collect();
    // SAFETY: an array of int8 from as many values.
    unsafe {
        pg_sys::Datum::from(pg_sys::construct_array(
            values.as_mut_ptr(),
            values.len() as c_int,
            pg_sys::INT8OID,
            8,
            true,
            b'd' as std::ffi::c_char,
        ))
    }
}

/// # Safety
/// The datum must be a bigint[].
unsafe fn read_bigints(datum: pg_sys::Datum) -> Vec<Token> {
    // SAFETY: a detoasted array has its header and dimensions before its elements; one dimension without
    // NULLs puts the first element behind the 16 + 8 bytes of both.
    unsafe {
        let array = pg_sys::pg_detoast_datum(datum.cast_mut_ptr()).cast::<pg_sys::ArrayType>();
        if (*array).ndim != 1 || (*array).dataoffset != 0 {
            return Vec::new();
        }
        let bytes = array.cast::<u8>();
        let count = *bytes.add(16).cast::<i32>();
        let first = bytes.add(24).cast::<i64>();
        (0..count.max(0) as usize).map(|i| *first.add(i)).collect()
    }
}
