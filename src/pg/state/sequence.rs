//! Sequences read and set without SQL: the callers of the extension have no rights on them.

use crate::errors::{self, Refusal};
use crate::pg::call::raise;
use crate::pg::compat;
use crate::pg::raw;
use crate::pg::state::opened::{self, IfLocked, Opened};
use crate::pg::state::relation;
use pgrx::pg_sys;

/// The content of a sequence's page.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// Its last value; None when never called, since a recovery has emptied it where it is unlogged.
    pub last: Option<i64>,
    /// The file that it is in: another one after each ALTER SEQUENCE.
    pub file: u32,
    /// Another one after each change of the page; None where it is not logged, and so tells of none.
    pub state: Option<PageState>,
}

/// The state of a page of a logged sequence: setting the sequence changes it, to the same value too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageState {
    file: u32,
    /// The log record that the page was last changed by.
    at: u64,
}

#[repr(C)]
struct SequenceData {
    last_value: i64,
    log_cnt: i64,
    is_called: bool,
}

/// The leading columns of catalog pg_sequence (pgrx binds no struct for it).
#[repr(C)]
struct SequenceForm {
    seqrelid: u32,
    seqtypid: u32,
    seqstart: i64,
    seqincrement: i64,
    seqmax: i64,
    seqmin: i64,
    seqcache: i64,
    seqcycle: bool,
}

/// The definition of a sequence, which decides whether its values are fit to be tokens.
#[derive(Clone, Copy, Debug)]
pub struct Definition {
    /// A crash does not empty it, for it is in WAL.
    pub logged: bool,
    /// How far apart its values are; negative where it descends.
    pub increment: i64,
    /// How many values a session takes at once: above 1, sessions draw out of order.
    pub cache: i64,
    /// It starts over at its end, and so gives values twice.
    pub cycle: bool,
    /// It was rewritten by this transaction, which may yet be rolled back, and its values with it.
    pub rewritten_here: bool,
}

/// Reads the page of a sequence: no permission, no transaction id, no WAL. Waits for nobody but who is changing its
/// definition. Raises XX001 where the page is damaged.
pub fn read(oid: pg_sys::Oid) -> Page {
    // Not kept: maintenance of the sequence would wait for a session that has only looked.
    let sequence = Opened::queued(oid, pg_sys::AccessShareLock);
    read_page(&sequence).unwrap_or_else(|| raise::now(damage(&sequence)))
}

fn damage(sequence: &Opened) -> Refusal {
    // SAFETY: an open relation.
    let name = unsafe { relation::quoted_name(sequence.relation) };
    errors::damaged_sequence(&name, is_unlogged(sequence))
}

fn is_unlogged(sequence: &Opened) -> bool {
    // SAFETY: an open relation.
    let class = unsafe { &*(*sequence.relation).rd_rel };
    class.relpersistence as u8 == pg_sys::RELPERSISTENCE_UNLOGGED
}

/// Reads a sequence's page; None where it is none.
fn read_page(sequence: &Opened) -> Option<Page> {
    // SAFETY: the relation is open and locked, the page pinned and locked while it is read.
    unsafe {
        compat::guarded(|| {
            let buffer = raw::ReadBuffer(sequence.relation, 0);
            compat::lock_page(buffer);
            let data = compat::sequence_tuple(pg_sys::BufferGetPage(buffer));
            let last = data.map(|data| {
                let data = &*data.cast::<SequenceData>();
                data.is_called.then_some(data.last_value)
            });
            let at = raw::BufferGetLSNAtomic(buffer);
            raw::UnlockReleaseBuffer(buffer);
            let file = compat::file(&*sequence.relation);
            let state = (!is_unlogged(sequence)).then_some(PageState { file, at });
            last.map(|last| Page { last, file, state })
        })
    }
}

/// Reads an unlogged sequence; not for a standby, which has no page of it. None where it is logged. Raises XX001 where its
/// page is damaged, or not there.
///
/// PostgreSQL up to 15.18 and 16.14 leaves zeroes when a standby is promoted soon after it has replayed the sequence's
/// creation (its redo does not write the init fork to disk); and under wal_level = minimal, a crash soon after CREATE
/// DATABASE may leave a copy without a page.
pub fn read_unlogged(oid: pg_sys::Oid) -> Option<Page> {
    let sequence = Opened::queued(oid, pg_sys::AccessShareLock);
    if !is_unlogged(&sequence) {
        return None;
    }
    Some(read_unlogged_page(&sequence).unwrap_or_else(|| raise::now(damage(&sequence))))
}

/// As `read_unlogged`, without waiting for a lock on the sequence: then it is None altogether. Raises nothing.
pub fn try_read_unlogged(oid: pg_sys::Oid) -> Option<Option<Page>> {
    let sequence = Opened::open(oid, pg_sys::AccessShareLock, IfLocked::GiveUp)?;
    Some(is_unlogged(&sequence).then(|| read_unlogged_page(&sequence)).flatten())
}

fn read_unlogged_page(sequence: &Opened) -> Option<Page> {
    // SAFETY: an open relation.
    let has_page = unsafe { compat::guarded(|| compat::has_first_page(sequence.relation)) };
    has_page.then(|| read_page(sequence)).flatten()
}

/// Takes the lock that `set` takes, without waiting for a lock on the sequence.
pub fn try_lock(oid: pg_sys::Oid) -> bool {
    opened::lock(oid, pg_sys::RowExclusiveLock as i32, IfLocked::GiveUp)
}

/// The next value; takes a transaction id only in a draw that is logged. Raises 2200H where there is none.
pub fn next(oid: pg_sys::Oid) -> i64 {
    // SAFETY: raises Postgres's own error where the oid is no sequence or is exhausted.
    unsafe { compat::guarded(|| compat::nextval_internal(oid, false)) }
}

/// Sets the last value so that no crash undoes it. The caller holds the jump's lock.
pub fn set_durably(oid: pg_sys::Oid, value: i64) {
    set(oid, value);
    if let Some(PageState { at, .. }) = read(oid).state {
        // SAFETY: the position is one that this server has written.
        unsafe { pg_sys::XLogFlush(at) };
    }
}

/// Sets the last value, without a transaction. The caller holds the lock that others take to do the same.
pub fn set(oid: pg_sys::Oid, value: i64) {
    let mut user = pg_sys::InvalidOid;
    let mut context = 0;
    // SAFETY: setval asks for rights, so it runs as the sequence's owner, in a security context in which
    // nothing of the caller's can run; an error restores the user with the transaction.
    unsafe {
        let rel = pg_sys::relation_open(oid, pg_sys::AccessShareLock as i32);
        let owner = (*(*rel).rd_rel).relowner;
        pg_sys::relation_close(rel, pg_sys::AccessShareLock as i32);
        pg_sys::GetUserIdAndSecContext(&mut user, &mut context);
        let local = pg_sys::SECURITY_LOCAL_USERID_CHANGE | pg_sys::SECURITY_RESTRICTED_OPERATION;
        pg_sys::SetUserIdAndSecContext(owner, context | local as i32);
        pgrx::direct_function_call::<i64>(
            pg_sys::setval_oid,
            &[Some(pg_sys::Datum::from(oid)), Some(pg_sys::Datum::from(value))],
        );
        pg_sys::SetUserIdAndSecContext(user, context);
    }
}

/// Its definition, which nobody changes until the transaction ends; None when it is no sequence.
pub fn definition(oid: pg_sys::Oid) -> Option<Definition> {
    let sequence = Opened::queued(oid, pg_sys::RowExclusiveLock);
    sequence.keep_lock();
    // SAFETY: the relation is open while it is looked at; a catalog tuple is valid until released, and its
    // fixed columns are laid out as declared above.
    unsafe {
        compat::guarded(|| {
            let rel = &*sequence.relation;
            let logged = (*rel.rd_rel).relpersistence as u8 == pg_sys::RELPERSISTENCE_PERMANENT;
            let rewritten_here = compat::is_rewritten(rel);
            let cache = pg_sys::SysCacheIdentifier::SEQRELID as i32;
            let tuple = raw::SearchSysCache1(cache, pg_sys::Datum::from(oid));
            if tuple.is_null() {
                return None;
            }
            let form = &*pg_sys::GETSTRUCT(tuple).cast::<SequenceForm>();
            let (increment, cycle) = (form.seqincrement, form.seqcycle);
            let cache = form.seqcache;
            raw::ReleaseSysCache(tuple);
            Some(Definition { logged, increment, cache, cycle, rewritten_here })
        })
    }
}
