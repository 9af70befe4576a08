//! Sequences read and set without SQL: the callers of the extension have no rights on them.

use super::{compat, raw};
use crate::protocol::ahead::Logged;
use pgrx::pg_sys;

/// What a sequence's page says.
#[derive(Clone, Copy, Debug)]
pub struct State {
    /// Its last value; None when never called.
    pub last: Option<i64>,
    /// The log record that the page was last changed by.
    pub logged: Logged,
    /// How many more values it covers.
    pub left: i64,
    /// The file that the page is of.
    pub file: u32,
    /// Whether what is written to it is logged: not, under wal_level = minimal, in the transaction that has
    /// created it.
    pub logs: bool,
    /// It was rewritten by this transaction, which may yet be rolled back.
    pub rewritten_here: bool,
}

/// How many values Postgres logs ahead (SEQ_LOG_VALS).
pub const AHEAD: i64 = 32;

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

/// What of a sequence's definition decides whether its values are fit to be tokens.
#[derive(Clone, Copy, Debug)]
pub struct Definition {
    /// Written to WAL.
    pub logged: bool,
    /// INCREMENT BY
    pub increment: i64,
    /// CACHE
    pub cache: i64,
    /// CYCLE
    pub cycle: bool,
    /// The file that it is in: another one after each ALTER SEQUENCE.
    pub file: u32,
}

/// Reads the page of a sequence: no permission, no transaction id, no WAL.
pub fn read(oid: pg_sys::Oid) -> State {
    with_page(oid, pg_sys::BUFFER_LOCK_SHARE, |rel, buffer, data| {
        // SAFETY: the page is locked.
        let at = unsafe { raw::BufferGetLSNAtomic(buffer) };
        let logged = Logged { up_to: data.last_value.saturating_add(data.log_cnt), at };
        let last = data.is_called.then_some(data.last_value);
        let left = data.log_cnt;
        let (file, logs) = (compat::file(rel), compat::is_logged(rel));
        State { last, logged, left, file, logs, rewritten_here: compat::is_rewritten(rel) }
    })
}

/// Lets the next draw be logged. The count is not logged itself: 0 is what a crash leaves.
///
/// Nothing to do where recovery would not read the page's last record: then the next draw is logged anyhow
/// (and a page that is changed without a record to restore it by must not be torn).
pub fn log_next(oid: pg_sys::Oid) {
    with_page(oid, pg_sys::BUFFER_LOCK_EXCLUSIVE, |rel, buffer, data| {
        // SAFETY: the page is locked exclusively.
        unsafe {
            if data.log_cnt > 0
                && (raw::BufferGetLSNAtomic(buffer) > redo() || !compat::is_logged(rel))
            {
                data.log_cnt = 0;
                raw::MarkBufferDirty(buffer);
            }
        }
    });
}

/// Works on the page of a sequence.
fn with_page<R>(
    oid: pg_sys::Oid,
    lock: u32,
    work: impl FnOnce(&pg_sys::RelationData, pg_sys::Buffer, &mut SequenceData) -> R,
) -> R {
    // SAFETY: the relation is locked and open, the page pinned and locked while it is worked on, and a
    // sequence has its one tuple as item 1 of block 0.
    unsafe {
        compat::guarded(|| {
            let rel = raw::relation_open(oid, pg_sys::AccessShareLock as i32);
            let buffer = raw::ReadBuffer(rel, 0);
            raw::LockBuffer(buffer, lock as i32);
            let header = compat::first_item(pg_sys::BufferGetPage(buffer));
            let hoff = (*header.cast::<pg_sys::HeapTupleHeaderData>()).t_hoff as usize;
            let result = work(&*rel, buffer, &mut *header.add(hoff).cast::<SequenceData>());
            raw::UnlockReleaseBuffer(buffer);
            // Not kept: maintenance of the sequence would wait for whoever has only looked.
            raw::relation_close(rel, pg_sys::AccessShareLock as i32);
            result
        })
    }
}

/// Is this record on disk?
pub fn is_flushed(record: &Logged) -> bool {
    // SAFETY: compares with what this server has flushed.
    !unsafe { pg_sys::XLogNeedsFlush(record.at) }
}

/// Makes sure that this record is on disk. Costs nothing when it is already.
pub fn flush(record: &Logged) {
    // SAFETY: the position is one that this server has written.
    unsafe { pg_sys::XLogFlush(record.at) };
}

/// Where recovery would start.
pub fn redo() -> u64 {
    // SAFETY: reads shared memory.
    unsafe { pg_sys::GetRedoRecPtr() }
}

/// The next value; takes a transaction id only in a draw that is logged.
pub fn next(oid: pg_sys::Oid) -> i64 {
    // SAFETY: raises Postgres's own error where the oid is no sequence or is exhausted.
    unsafe { compat::guarded(|| compat::nextval_internal(oid, false)) }
}

/// Sets the last value, without a transaction. The caller holds the jump's lock.
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

/// Its definition, from the catalogs.
pub fn definition(oid: pg_sys::Oid) -> Option<Definition> {
    let found = |cache: pg_sys::SysCacheIdentifier::Type| {
        // SAFETY: a look-up by oid; the tuple is valid until released.
        let tuple = unsafe { pg_sys::SearchSysCache1(cache as i32, pg_sys::Datum::from(oid)) };
        (!tuple.is_null()).then_some(tuple)
    };
    let sequence = found(pg_sys::SysCacheIdentifier::SEQRELID)?;
    let relation = found(pg_sys::SysCacheIdentifier::RELOID)?;
    // SAFETY: their fixed columns are laid out as declared above, or by pgrx.
    unsafe {
        let form = &*pg_sys::GETSTRUCT(sequence).cast::<SequenceForm>();
        let class = &*pg_sys::GETSTRUCT(relation).cast::<pg_sys::FormData_pg_class>();
        let definition = Definition {
            logged: class.relpersistence as u8 == b'p',
            increment: form.seqincrement,
            cache: form.seqcache,
            cycle: form.seqcycle,
            file: class.relfilenode.to_u32(),
        };
        pg_sys::ReleaseSysCache(sequence);
        pg_sys::ReleaseSysCache(relation);
        Some(definition)
    }
}
