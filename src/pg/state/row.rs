//! A row of fence.lease.

use crate::pg::call::args::{bytes_of, read_array, text_datum, token_array};
use crate::pg::compat;
use crate::pg::locks::session_lock::SessionLock;
use crate::pg::raw;
use crate::pg::session::{client, role, xact};
use pg_fence_rules::grant::{Grant, Mode, Tokens};
use pg_fence_rules::{Floor, Instant, Span, Token};
use pgrx::{pg_sys, PgMemoryContexts};

/// How many columns the table may have. Somebody may have added some: they are kept as they are.
pub const COLUMNS: usize = 26;

/// Columns of fence.lease by position.
#[derive(Clone, Copy)]
enum Column {
    Name,
    Slot,
    Mode,
    Slots,
    Holder,
    SessionLabel,
    Role,
    FirstToken,
    RenewalTokens,
    ClosingToken,
    AcquiredAt,
    RenewedAt,
    ExpiresAt,
    EndedAt,
    TtlUs,
    Renewals,
    Metadata,
    SessionBound,
    AdoptedFloor,
}

/// The columns of a row: of one that is there, or to be written.
#[derive(Clone, Copy)]
pub struct Fields {
    /// By position; of a NULL, anything.
    pub values: [pg_sys::Datum; COLUMNS],
    /// By position.
    pub nulls: [bool; COLUMNS],
}

/// The types of fence.lease's columns.
pub const LEASE: &[pg_sys::Oid] = &[
    pg_sys::TEXTOID,
    pg_sys::INT4OID,
    pg_sys::CHAROID,
    pg_sys::INT4OID,
    pg_sys::TEXTOID,
    pg_sys::TEXTOID,
    pg_sys::NAMEOID,
    pg_sys::INT8OID,
    pg_sys::INT8ARRAYOID,
    pg_sys::INT8OID,
    pg_sys::TIMESTAMPTZOID,
    pg_sys::TIMESTAMPTZOID,
    pg_sys::TIMESTAMPTZOID,
    pg_sys::TIMESTAMPTZOID,
    pg_sys::INT8OID,
    pg_sys::INT8OID,
    pg_sys::JSONBOID,
    pg_sys::BOOLOID,
    pg_sys::INT8OID,
];

/// Returns true if each row has a value in this column, from 0.
pub fn is_always_given(column: usize) -> bool {
    use Column::{AdoptedFloor, ClosingToken, EndedAt, Holder, Metadata};
    let may_be_null = [Holder, ClosingToken, EndedAt, Metadata, AdoptedFloor];
    column < LEASE.len() && !may_be_null.iter().any(|other| *other as usize == column)
}

/// A row of fence.lease, copied: it outlives the page that it was read from.
#[derive(Clone, Copy)]
pub struct Row {
    /// As the rules see it.
    pub grant: Grant,
    /// The ttl last asked for.
    pub ttl: Span,
    tuple: pg_sys::HeapTuple,
    fields: Fields,
}

/// A version of a row, by where it is, and by who wrote it: once it is pruned, another one may be there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RowVersion {
    block: (u16, u16),
    item: u16,
    written_by: pg_sys::TransactionId,
}

impl RowVersion {
    /// That of a tuple; a copy keeps it.
    ///
    /// # Safety
    /// The tuple must be valid.
    #[inline]
    pub unsafe fn of(tuple: pg_sys::HeapTuple) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let (at, written_by) = ((*tuple).t_self, (*(*tuple).t_data).t_choice.t_heap.t_xmin);
            let block = (at.ip_blkid.bi_hi, at.ip_blkid.bi_lo);
            RowVersion { block, item: at.ip_posid, written_by }
        }
    }
}

/// The transaction that has marked a row as deleted (or replaced).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Deleter {
    /// Nobody, or a transaction that was rolled back.
    None,
    /// This transaction, which is open.
    Open(pg_sys::TransactionId),
    /// One that has committed since the row was read.
    Committed,
}

impl Deleter {
    /// That of a tuple, at the moment it was read.
    ///
    /// # Safety
    /// The tuple must be valid.
    pub unsafe fn of(tuple: pg_sys::HeapTuple) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let header = (*tuple).t_data;
            let mask = u32::from((*header).t_infomask);
            if mask & (pg_sys::HEAP_XMAX_INVALID | pg_sys::HEAP_XMAX_LOCK_ONLY) != 0 {
                return Deleter::None;
            }
            // Somebody may have locked the row (FOR KEY SHARE): beside that, the deleter is one member of a multixact.
            let xid = match mask & pg_sys::HEAP_XMAX_IS_MULTI {
                0 => (*header).t_choice.t_heap.t_xmax,
                _ => pg_sys::HeapTupleGetUpdateXid(header),
            };
            if pg_sys::TransactionIdIsCurrentTransactionId(xid) {
                Deleter::None
            } else if pg_sys::TransactionIdIsInProgress(xid) {
                Deleter::Open(xid)
            } else if pg_sys::TransactionIdDidCommit(xid) {
                Deleter::Committed
            } else {
                Deleter::None
            }
        }
    }
}

/// A grant of this session and the current role, to be written.
pub struct NewGrant<'a> {
    /// The name of the lease.
    pub name: &'a [u8],
    /// Which of its grants.
    pub slot: i32,
    /// Whether it excludes others, and which.
    pub mode: Mode,
    /// The holder, where it names itself.
    pub holder: Option<&'a [u8]>,
    /// The token that it is acquired with, which no other grant has.
    pub token: Token,
    /// When it begins: the time of the decision.
    pub now: Instant,
    /// How long it lives; one that somebody else has granted, until it is ended.
    pub lifetime: Lifetime,
    /// As the caller gave it: a jsonb.
    pub metadata: Option<pg_sys::Datum>,
}

/// How long a new grant lives.
#[derive(Clone, Copy)]
pub enum Lifetime {
    /// For so long, unless renewed; at the latest until this session ends, where that is said.
    Ttl {
        /// How long.
        ttl: Span,
        /// It ends with this session.
        session_bound: bool,
    },
    /// Until it is ended: somebody else has granted it. The latest jump.
    Adopted(Floor),
}

impl Fields {
    /// All NULL.
    fn empty() -> Self {
        Fields { values: [pg_sys::Datum::from(0); COLUMNS], nulls: [true; COLUMNS] }
    }

    /// The columns of a new grant, over the row of an earlier grant of that lease where its slot has one: what the
    /// library does not know of stays as it is.
    pub fn of_grant(new: &NewGrant, over: Option<&Row>) -> Self {
        let (mode, slots) = match new.mode {
            Mode::Exclusive => (b'x', 0),
            Mode::Shared => (b's', 0),
            Mode::Slots(n) => (b'n', n),
        };
        let (ttl, session_bound, expires_at) = match new.lifetime {
            Lifetime::Ttl { ttl, session_bound } => (ttl, session_bound, new.now + ttl),
            Lifetime::Adopted(_) => (Span::ZERO, false, Instant::LATEST),
        };
        let mut fields = Fields::empty();
        fields
            .set(Column::Name, over.map_or_else(|| text_datum(new.name), Row::name_as_stored))
            .set(Column::Slot, new.slot)
            .set(Column::Mode, mode as i8)
            .set(Column::Slots, slots)
            .set(Column::SessionLabel, text_datum(&client::label()))
            .set(Column::Role, name_datum(&role::current()))
            .set(Column::FirstToken, new.token.bigint())
            .set(Column::RenewalTokens, token_array(&[]))
            .set(Column::AcquiredAt, new.now.micros())
            .set(Column::RenewedAt, new.now.micros())
            .set(Column::ExpiresAt, expires_at.micros())
            .set(Column::TtlUs, ttl.micros())
            .set(Column::Renewals, 0i64)
            .set(Column::SessionBound, session_bound);
        if let Lifetime::Adopted(floor) = new.lifetime {
            fields.set(Column::AdoptedFloor, floor.token().bigint());
        }
        if let Some(holder) = new.holder {
            fields.set(Column::Holder, text_datum(holder));
        }
        if let Some(metadata) = new.metadata {
            fields.set(Column::Metadata, metadata);
        }
        over.map_or(fields, |row| fields.with_rest_of(&row.fields, LEASE.len()))
    }

    /// With another row's columns behind its own first ones.
    fn with_rest_of(mut self, other: &Fields, own: usize) -> Self {
        self.values[own..].copy_from_slice(&other.values[own..]);
        self.nulls[own..].copy_from_slice(&other.nulls[own..]);
        self
    }

    /// The columns of a tuple.
    ///
    /// # Safety
    /// The tuple must be of that row type, which has at most `COLUMNS` columns.
    unsafe fn of(tuple: pg_sys::HeapTuple, row_type: pg_sys::TupleDesc) -> Self {
        let mut fields = Fields::empty();
        let (values, nulls) = (fields.values.as_mut_ptr(), fields.nulls.as_mut_ptr());
        // SAFETY: the arrays have a place for each column.
        unsafe { raw::heap_deform_tuple(tuple, row_type, values, nulls) };
        fields
    }

    /// A tuple of them.
    ///
    /// # Safety
    /// The row type must be the table's. To be called inside `compat::guarded`.
    pub unsafe fn tuple(mut self, row_type: pg_sys::TupleDesc) -> pg_sys::HeapTuple {
        // SAFETY: the caller's promise; the arrays have a place for each column.
        unsafe { raw::heap_form_tuple(row_type, self.values.as_mut_ptr(), self.nulls.as_mut_ptr()) }
    }

    fn set(&mut self, column: Column, value: impl Into<pg_sys::Datum>) -> &mut Self {
        let n = column as usize;
        self.values[n] = value.into();
        self.nulls[n] = false;
        self
    }

    fn get(&self, column: Column) -> Option<pg_sys::Datum> {
        (!self.nulls[column as usize]).then(|| self.values[column as usize])
    }

    fn int8(&self, column: Column) -> i64 {
        self.values[column as usize].value() as i64
    }
}

/// The mode that columns mode and slots say.
pub fn mode(letter: u8, slots: i32) -> Mode {
    match letter {
        b's' => Mode::Shared,
        b'n' => Mode::Slots(slots),
        _ => Mode::Exclusive,
    }
}

impl Row {
    /// Reads a copied tuple.
    ///
    /// # Safety
    /// The tuple must be one of fence.lease, and `row_type` that table's.
    pub unsafe fn new(tuple: pg_sys::HeapTuple, row_type: pg_sys::TupleDesc) -> Row {
        // SAFETY: the caller's promise.
        let fields = unsafe { Fields::of(tuple, row_type) };
        // SAFETY: an array of bigints.
        let renewed = fields.get(Column::RenewalTokens).map(|d| unsafe { read_array(d) });
        let renewed: Vec<Token> = renewed.into_iter().flatten().map(Token::from_bigint).collect();
        let closing =
            fields.get(Column::ClosingToken).map(|d| Token::from_bigint(d.value() as i64));
        let first = Token::from_bigint(fields.int8(Column::FirstToken));
        let grant = Grant {
            slot: fields.int8(Column::Slot) as i32,
            mode: mode(fields.int8(Column::Mode) as u8, fields.int8(Column::Slots) as i32),
            tokens: Tokens::new(first, &renewed),
            closing,
            // SAFETY: a valid tuple.
            closed_here: closing.is_some() && unsafe { xact::is_own(tuple) },
            expires_at: Instant::from_micros(fields.int8(Column::ExpiresAt)),
            abandoned: false,
            adopted: fields
                .get(Column::AdoptedFloor)
                .map(|d| Floor::at(Token::from_bigint(d.value() as i64))),
        };
        let ttl = Span::from_micros(fields.int8(Column::TtlUs));
        let mut row = Row { grant, ttl, tuple, fields };
        row.grant.abandoned = row.is_abandoned();
        row
    }

    /// Has the session ended that the grant was to end with? Asked at each look: the one that decides has looked at the row
    /// after taking the grant's lock.
    fn is_abandoned(&self) -> bool {
        self.grant.closing.is_none()
            && self.ends_with_session()
            && !SessionLock::of(self.grant.tokens.first()).is_held()
    }

    /// The same version, looked at once more: a session may have ended meanwhile.
    pub fn looked_at_again(mut self) -> Row {
        self.grant.abandoned = self.is_abandoned();
        self
    }

    /// Does the grant end with the session that acquired it?
    pub fn ends_with_session(&self) -> bool {
        self.fields.get(Column::SessionBound).is_some_and(|d| d.value() & 0xff != 0)
    }

    /// Its columns after a renewal.
    pub fn renewed(&self, token: Token, now: Instant, ttl: Span) -> Fields {
        let mut fields = self.fields;
        fields
            .set(Column::RenewalTokens, token_array(self.grant.tokens.renew(token).renewed()))
            .set(Column::RenewedAt, now.micros())
            .set(Column::ExpiresAt, (now + ttl).micros())
            .set(Column::TtlUs, ttl.micros())
            .set(Column::Renewals, self.fields.int8(Column::Renewals) + 1);
        fields
    }

    /// Its columns when it is adopted again after a jump.
    pub fn adopted_again(&self, floor: Floor, now: Instant) -> Fields {
        let mut fields = self.fields;
        fields
            .set(Column::AdoptedFloor, floor.token().bigint())
            .set(Column::RenewedAt, now.micros())
            .set(Column::Renewals, self.fields.int8(Column::Renewals) + 1);
        fields
    }

    /// Its columns when it is closed.
    pub fn closed(&self, closing: Token, now: Instant) -> Fields {
        let mut fields = self.fields;
        fields.set(Column::ClosingToken, closing.bigint()).set(Column::EndedAt, now.micros());
        fields
    }

    fn text(&self, column: Column) -> Option<&[u8]> {
        // SAFETY: only asked for text columns; the tuple is a copy that outlives the row.
        self.fields.get(column).map(|d| unsafe { bytes_of(d) })
    }

    /// The name of the lease, in the database's encoding.
    pub fn name(&self) -> &[u8] {
        self.text(Column::Name).unwrap_or_default()
    }

    fn name_as_stored(&self) -> pg_sys::Datum {
        self.fields.values[Column::Name as usize]
    }

    /// The holder, where it named itself.
    pub fn holder(&self) -> Option<&[u8]> {
        self.text(Column::Holder)
    }

    /// The session that acquired it.
    pub fn session(&self) -> &[u8] {
        self.text(Column::SessionLabel).unwrap_or_default()
    }

    /// The role that acquired it.
    pub fn role(&self) -> &[u8] {
        let name = self.fields.get(Column::Role).map(|d| d.cast_mut_ptr::<pg_sys::NameData>());
        // SAFETY: a name is 64 bytes, NUL-terminated.
        name.map(|name| unsafe { std::ffi::CStr::from_ptr((*name).data.as_ptr()) }.to_bytes())
            .unwrap_or_default()
    }

    /// Since when it is over, or will be.
    pub fn over_since(&self) -> Instant {
        self.fields
            .get(Column::EndedAt)
            .map_or(self.grant.expires_at, |d| Instant::from_micros(d.value() as i64))
    }

    /// Is somebody deleting it?
    pub fn deleter(&self) -> Deleter {
        // SAFETY: a copied tuple; its xmax is that of the moment it was read.
        unsafe { Deleter::of(self.tuple) }
    }

    /// The transaction of somebody else that has written this version, or deletes or replaces it, and is open.
    pub fn open_writer(&self) -> Option<pg_sys::TransactionId> {
        // SAFETY: a copied tuple.
        let written_by = unsafe { xact::open_writer(self.tuple) };
        written_by.or_else(|| match self.deleter() {
            Deleter::Open(xid) => Some(xid),
            _ => None,
        })
    }

    /// The tuple that was read.
    pub fn tuple(&self) -> pg_sys::HeapTuple {
        self.tuple
    }

    /// The tuple with the values in it that are stored out of line, for a row that is not committed: a rollback ends it,
    /// and VACUUM then removes those values although a snapshot of before is still in use. One that is gone is NULL.
    ///
    /// # Safety
    /// The row type must be that of the table that the row is of, which is open.
    pub unsafe fn self_contained(&self, row_type: pg_sys::TupleDesc) -> pg_sys::HeapTuple {
        let mut fields = self.fields;
        let mut has_changed = false;
        // SAFETY: the caller's promise; the fields are the table's columns, and the tuple that they point to is a copy.
        unsafe {
            for n in 0..(*row_type).natts as usize {
                let varies = (*compat::attribute(row_type, n)).attlen == -1;
                if !varies || fields.nulls[n] || !is_out_of_line(fields.values[n]) {
                    continue;
                }
                let fetched = fetched(fields.values[n]);
                fields.nulls[n] = fetched.is_none();
                fields.values[n] = fetched.unwrap_or(pg_sys::Datum::from(0));
                has_changed = true;
            }
            match has_changed {
                true => compat::guarded(|| fields.tuple(row_type)),
                false => self.tuple,
            }
        }
    }

    /// Where in the table this version is.
    pub fn place(&self) -> pg_sys::ItemPointerData {
        // SAFETY: a copied tuple, which keeps it.
        unsafe { (*self.tuple).t_self }
    }

    /// Which version it is.
    pub fn version(&self) -> RowVersion {
        // SAFETY: a copied tuple.
        unsafe { RowVersion::of(self.tuple) }
    }

    /// Is this version known to be on disk, so that no crash loses it?
    pub fn is_on_disk(&self) -> bool {
        // SAFETY: a copied tuple.
        unsafe { xact::is_on_disk(self.tuple) }
    }

    /// Was this version written by the running transaction?
    pub fn is_own(&self) -> bool {
        // SAFETY: a copied tuple.
        unsafe { xact::is_own(self.tuple) }
    }

    /// Was this version written by another transaction, which is open?
    pub fn is_others_uncommitted(&self) -> bool {
        // SAFETY: a copied tuple.
        unsafe { xact::open_writer(self.tuple) }.is_some()
    }

    /// Is it a version of the same grant? (An adopted number may come again, once the lease was forgotten.)
    pub fn is_of_same_grant(&self, other: &Row) -> bool {
        let is = |row: &Row| {
            (row.grant.slot, row.grant.tokens.first(), row.fields.int8(Column::AcquiredAt))
        };
        is(self) == is(other)
    }
}

/// # Safety
/// The datum must be a value of variable length.
unsafe fn is_out_of_line(value: pg_sys::Datum) -> bool {
    // SAFETY: the caller's promise.
    unsafe { pgrx::varlena::varatt_is_1b_e(value.cast_mut_ptr()) }
}

/// A value that is stored out of line; None if a part of it is gone. (In a parallel query no savepoint can begin, so what
/// is missing could not be told from an error.)
///
/// # Safety
/// As for `is_out_of_line`, of a table that is open.
unsafe fn fetched(value: pg_sys::Datum) -> Option<pg_sys::Datum> {
    let memory = PgMemoryContexts::CurrentMemoryContext.value();
    if xact::is_parallel() {
        return None;
    }
    xact::in_savepoint(|| {
        // SAFETY: the caller's promise; the memory is that of the call, which outlives the savepoint.
        unsafe {
            PgMemoryContexts::For(memory)
                .switch_to(|_| pg_sys::detoast_external_attr(value.cast_mut_ptr()).into())
        }
    })
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
