//! The rows of fence.lease.

use crate::pg::call::args::{bytes_of, read_array, text_datum, token_array};
use crate::pg::compat;
use crate::pg::locks::session_lock::SessionLock;
use crate::pg::raw;
use crate::pg::session::{client, role, xact};
use pg_fence_rules::grant::{Grant, Mode, Phase, Tokens};
use pg_fence_rules::{Epoch, Instant, Span, Token};
use pgrx::{PgMemoryContexts, pg_sys};

/// The number of columns that the table may have. Columns added by others are copied unchanged.
pub const MAX_COLUMNS: usize = 26;

/// The columns of fence.lease, by position.
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

/// The columns of a stored row, or of one to be written.
#[derive(Clone, Copy)]
pub struct Fields {
    /// The values by position; arbitrary for a NULL.
    pub values: [pg_sys::Datum; MAX_COLUMNS],
    /// True for each NULL, by position.
    pub nulls: [bool; MAX_COLUMNS],
}

/// The types of fence.lease's columns.
pub const COLUMN_TYPES: &[pg_sys::Oid] = &[
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

/// Returns true if a column, counted from 0, has a value in each row.
pub fn is_always_given(column: usize) -> bool {
    use Column::{AdoptedFloor, ClosingToken, EndedAt, Holder, Metadata};
    let may_be_null = [Holder, ClosingToken, EndedAt, Metadata, AdoptedFloor];
    column < COLUMN_TYPES.len() && !may_be_null.iter().any(|other| *other as usize == column)
}

/// A row of fence.lease, copied, so that it outlives the page from which it was read.
#[derive(Clone, Copy)]
pub struct Row {
    /// The columns that the rules use.
    pub grant: Grant,
    /// The ttl last asked for.
    pub ttl: Span,
    tuple: pg_sys::HeapTuple,
    fields: Fields,
}

/// The identity of a row version: its position and its writer, because a pruned version's position is reused.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RowVersion {
    block: (u16, u16),
    item: u16,
    written_by: pg_sys::TransactionId,
}

impl RowVersion {
    /// The version of a tuple or of its copy.
    ///
    /// # Safety
    /// The tuple must be valid.
    pub unsafe fn of(tuple: pg_sys::HeapTuple) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let (at, written_by) = ((*tuple).t_self, (*(*tuple).t_data).t_choice.t_heap.t_xmin);
            let block = (at.ip_blkid.bi_hi, at.ip_blkid.bi_lo);
            RowVersion { block, item: at.ip_posid, written_by }
        }
    }

    /// The position of this version in its table.
    pub fn place(&self) -> pg_sys::ItemPointerData {
        let ip_blkid = pg_sys::BlockIdData { bi_hi: self.block.0, bi_lo: self.block.1 };
        pg_sys::ItemPointerData { ip_blkid, ip_posid: self.item }
    }
}

/// The transaction that has deleted or replaced a row version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Deleter {
    /// No transaction, or one that was rolled back, or the current one.
    None,
    /// An open transaction.
    Open(pg_sys::TransactionId),
    /// A transaction that has committed since the row was read.
    Committed,
}

impl Deleter {
    /// The deleter of a tuple, as of when the tuple was read.
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
            // If another transaction has locked the row (FOR KEY SHARE), the deleter is one member of a multixact.
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

/// A new grant to the current role and session.
pub struct NewGrant<'a> {
    /// The name of the lease.
    pub name: &'a [u8],
    /// The number of the grant within its lease.
    pub slot: i32,
    /// The mode, which decides which other grants it excludes.
    pub mode: Mode,
    /// The holder's name, if the caller gave one.
    pub holder: Option<&'a [u8]>,
    /// The token of the acquire, which no other grant has.
    pub token: Token,
    /// The start of the grant: the time of the decision.
    pub now: Instant,
    /// The life of the grant.
    pub lifetime: Lifetime,
    /// The caller's jsonb value.
    pub metadata: Option<pg_sys::Datum>,
}

/// How long a new grant lives.
#[derive(Clone, Copy)]
pub enum Lifetime {
    /// For a ttl, unless it is renewed.
    Ttl {
        /// The time to live.
        ttl: Span,
        /// True if the grant also ends with this session.
        session_bound: bool,
    },
    /// Until it is ended, because another service has granted it. The value is the present epoch.
    Adopted(Epoch),
}

impl Fields {
    /// A row of NULLs.
    fn empty() -> Self {
        Fields { values: [pg_sys::Datum::from(0); MAX_COLUMNS], nulls: [true; MAX_COLUMNS] }
    }

    /// The columns of a new grant. If it is written over the row of an earlier grant, columns unknown to the library
    /// keep their values.
    pub fn of_grant(new: &NewGrant, existing: Option<&Row>) -> Self {
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
            .set(Column::Name, existing.map_or_else(|| text_datum(new.name), Row::name_as_stored))
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
        if let Lifetime::Adopted(epoch) = new.lifetime {
            fields.set(Column::AdoptedFloor, epoch.token().bigint());
        }
        if let Some(holder) = new.holder {
            fields.set(Column::Holder, text_datum(holder));
        }
        if let Some(metadata) = new.metadata {
            fields.set(Column::Metadata, metadata);
        }
        existing.map_or(fields, |row| fields.with_rest_of(&row.fields, COLUMN_TYPES.len()))
    }

    /// Replaces the columns from position `own` on by those of another row.
    fn with_rest_of(mut self, other: &Fields, own: usize) -> Self {
        self.values[own..].copy_from_slice(&other.values[own..]);
        self.nulls[own..].copy_from_slice(&other.nulls[own..]);
        self
    }

    /// The columns of a tuple.
    ///
    /// # Safety
    /// The tuple must be of that row type, which has at most `MAX_COLUMNS` columns.
    unsafe fn of(tuple: pg_sys::HeapTuple, row_type: pg_sys::TupleDesc) -> Self {
        let mut fields = Fields::empty();
        let (values, nulls) = (fields.values.as_mut_ptr(), fields.nulls.as_mut_ptr());
        // SAFETY: the arrays have an element for each column.
        unsafe { raw::heap_deform_tuple(tuple, row_type, values, nulls) };
        fields
    }

    /// A tuple of these columns.
    ///
    /// # Safety
    /// The row type must be the table's. To be called inside of `compat::guarded`.
    pub unsafe fn tuple(mut self, row_type: pg_sys::TupleDesc) -> pg_sys::HeapTuple {
        // SAFETY: the caller's promise; the arrays have an element for each column.
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

/// The mode for the values of the columns mode and slots.
pub fn mode(letter: u8, slots: i32) -> Mode {
    match letter {
        b's' => Mode::Shared,
        b'n' => Mode::Slots(slots),
        _ => Mode::Exclusive,
    }
}

impl Row {
    /// Parses a copied tuple.
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
                .map(|d| Epoch::at(Token::from_bigint(d.value() as i64))),
        };
        let ttl = Span::from_micros(fields.int8(Column::TtlUs));
        let mut row = Row { grant, ttl, tuple, fields };
        row.grant.abandoned = row.is_abandoned();
        row
    }

    /// Returns true if the grant ends with a session that has ended. This is checked at each read, so also at the one
    /// after the grant's lock was taken.
    fn is_abandoned(&self) -> bool {
        self.grant.closing.is_none()
            && self.ends_with_session()
            && !SessionLock::of(self.grant.tokens.first()).is_held()
    }

    /// The same version, after another check whether the session of its grant has ended.
    pub fn with_session_rechecked(mut self) -> Row {
        self.grant.abandoned = self.is_abandoned();
        self
    }

    /// Returns true if the grant ends with the session that acquired it.
    pub fn ends_with_session(&self) -> bool {
        self.fields.get(Column::SessionBound).is_some_and(|d| d.value() & 0xff != 0)
    }

    /// The row's columns after a renewal.
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

    /// The row's columns after an adoption in a new epoch.
    pub fn adopted_again(&self, epoch: Epoch, now: Instant) -> Fields {
        let mut fields = self.fields;
        fields
            .set(Column::AdoptedFloor, epoch.token().bigint())
            .set(Column::RenewedAt, now.micros())
            .set(Column::Renewals, self.fields.int8(Column::Renewals) + 1);
        fields
    }

    /// The row's columns after the grant is closed.
    pub fn closed(&self, closing: Token, now: Instant) -> Fields {
        let mut fields = self.fields;
        fields.set(Column::ClosingToken, closing.bigint()).set(Column::EndedAt, now.micros());
        fields
    }

    fn text(&self, column: Column) -> Option<&[u8]> {
        // SAFETY: only called for text columns; the tuple is a copy that outlives the row.
        self.fields.get(column).map(|d| unsafe { bytes_of(d) })
    }

    /// The name of the lease, in the database's encoding.
    pub fn name(&self) -> &[u8] {
        self.text(Column::Name).unwrap_or_default()
    }

    fn name_as_stored(&self) -> pg_sys::Datum {
        self.fields.values[Column::Name as usize]
    }

    /// The holder's name, if it gave one.
    pub fn holder(&self) -> Option<&[u8]> {
        self.text(Column::Holder)
    }

    /// The label of the session that acquired the grant.
    pub fn session(&self) -> &[u8] {
        self.text(Column::SessionLabel).unwrap_or_default()
    }

    /// The role that acquired the grant.
    pub fn role(&self) -> &[u8] {
        let name = self.fields.get(Column::Role).map(|d| d.cast_mut_ptr::<pg_sys::NameData>());
        // SAFETY: a name is 64 bytes long and NUL-terminated.
        name.map(|name| unsafe { std::ffi::CStr::from_ptr((*name).data.as_ptr()) }.to_bytes())
            .unwrap_or_default()
    }

    /// The time at which the grant ended, or will end by its deadline. The end of a session is not recorded, so an
    /// abandoned grant counts from its last renewal: its deadline may be a thousand years away.
    pub fn over_since(&self, now: Instant) -> Instant {
        let column = match self.grant.phase(now) {
            Phase::Abandoned => Column::RenewedAt,
            _ if self.fields.get(Column::EndedAt).is_some() => Column::EndedAt,
            _ => Column::ExpiresAt,
        };
        Instant::from_micros(self.fields.int8(column))
    }

    /// The other transaction that deletes or replaces the row.
    pub fn deleter(&self) -> Deleter {
        // SAFETY: a copied tuple, whose xmax is as of when it was read.
        unsafe { Deleter::of(self.tuple) }
    }

    /// The other open transaction that has written this version, or is deleting or replacing it.
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

    /// The tuple with all out-of-line values fetched into it, for an uncommitted row: after a rollback, VACUUM removes
    /// these values even if an earlier snapshot is still in use. `None` if one is gone, and the row with it.
    ///
    /// # Safety
    /// The row type must be that of the row's table, which must be open.
    pub unsafe fn self_contained(&self, row_type: pg_sys::TupleDesc) -> Option<pg_sys::HeapTuple> {
        let memory = PgMemoryContexts::CurrentMemoryContext.value();
        // SAFETY: the caller's promise; the memory context is the call's, which outlives the savepoint.
        let whole = || unsafe {
            let flatten = || compat::toast_flatten_tuple(self.tuple, row_type);
            PgMemoryContexts::For(memory).switch_to(|_| compat::guarded(flatten))
        };
        // SAFETY: a copied tuple.
        let mask = unsafe { (*(*self.tuple).t_data).t_infomask };
        match u32::from(mask) & pg_sys::HEAP_HASEXTERNAL {
            0 => Some(self.tuple),
            // A parallel query cannot begin a savepoint, so it raises an error if a value is gone.
            _ if xact::is_parallel() => Some(whole()),
            _ => xact::in_savepoint(whole),
        }
    }

    /// The position of this version in the table.
    pub fn place(&self) -> pg_sys::ItemPointerData {
        // SAFETY: a copied tuple, which keeps it.
        unsafe { (*self.tuple).t_self }
    }

    /// The identity of this version.
    pub fn version(&self) -> RowVersion {
        // SAFETY: a copied tuple.
        unsafe { RowVersion::of(self.tuple) }
    }

    /// Returns true if this version is known to be on disk, so that no crash loses it.
    pub fn is_on_disk(&self) -> bool {
        // SAFETY: a copied tuple.
        unsafe { xact::is_on_disk(self.tuple) }
    }

    /// Returns true if the current transaction has written this version.
    pub fn is_own(&self) -> bool {
        // SAFETY: a copied tuple.
        unsafe { xact::is_own(self.tuple) }
    }

    /// Returns true if another open transaction has written this version.
    pub fn is_others_uncommitted(&self) -> bool {
        // SAFETY: a copied tuple.
        unsafe { xact::open_writer(self.tuple) }.is_some()
    }

    /// Returns true if both are versions of the same grant. The token alone does not tell, because an adopted number
    /// may come again after the lease was forgotten.
    pub fn is_of_same_grant(&self, other: &Row) -> bool {
        let is = |row: &Row| {
            (row.grant.slot, row.grant.tokens.first(), row.fields.int8(Column::AcquiredAt))
        };
        is(self) == is(other)
    }
}

fn name_datum(name: &[u8]) -> pg_sys::Datum {
    // SAFETY: palloc0 returns a whole, zeroed name; at most 63 bytes are copied.
    unsafe {
        let data = pg_sys::palloc0(std::mem::size_of::<pg_sys::NameData>()).cast::<u8>();
        let length = name.len().min(pg_sys::NAMEDATALEN as usize - 1);
        std::ptr::copy_nonoverlapping(name.as_ptr(), data, length);
        pg_sys::Datum::from(data)
    }
}
