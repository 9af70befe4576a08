//! Reading and setting sequences without SQL, because callers of the extension have no rights on them.

use crate::errors::{self, Report};
use crate::pg::call::raise;
use crate::pg::compat;
use crate::pg::raw;
use crate::pg::state::opened::{IfLocked, Opened};
use crate::pg::state::relation;
use pgrx::pg_sys;

/// The content of a sequence's page.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// The sequence's last value; `None` if it was never called, or if a recovery has emptied it because it is
    /// unlogged.
    pub last: Option<i64>,
    /// The relation's file, which each ALTER SEQUENCE replaces.
    pub file: u32,
    /// The state of the page, which differs after each change; `None` for an unlogged sequence, whose page does not
    /// show changes.
    pub state: Option<PageState>,
}

/// The state of the page of a logged sequence. Setting the sequence changes it, even to the same value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageState {
    file: u32,
    /// The WAL position of the last change of the page.
    at: u64,
}

#[repr(C)]
struct SequenceData {
    last_value: i64,
    log_cnt: i64,
    is_called: bool,
}

/// The first columns of the catalog pg_sequence, for which pgrx has no struct.
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

/// Reads the page of a sequence, without permission, transaction id or WAL. Waits only for a session that changes the
/// sequence's definition. Raises XX001 if the page is damaged.
pub fn read(oid: pg_sys::Oid) -> Page {
    // The lock is not held: maintenance of the sequence would wait for a session that has only read it.
    let sequence = Opened::queued(oid, pg_sys::AccessShareLock);
    read_page(&sequence).unwrap_or_else(|| raise::error(damage(&sequence)))
}

fn damage(sequence: &Opened) -> Report {
    // SAFETY: an open relation.
    let name = unsafe { relation::quoted_name(sequence.relation) };
    errors::damaged_sequence(&name, is_unlogged(sequence))
}

fn is_unlogged(sequence: &Opened) -> bool {
    // SAFETY: an open relation.
    let class = unsafe { &*(*sequence.relation).rd_rel };
    class.relpersistence as u8 == pg_sys::RELPERSISTENCE_UNLOGGED
}

/// Reads a sequence's page; `None` if it is not a valid one.
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

/// Reads an unlogged sequence; `None` if it is logged. Not for a standby, which has no page of it. Raises XX001 if its
/// page is damaged or missing.
///
/// PostgreSQL up to 15.18 and 16.14 leaves zeroes if a standby is promoted soon after it has replayed the creation of
/// the sequence (its redo does not write the init fork to disk). Under wal_level = minimal, a crash soon after CREATE
/// DATABASE may leave a copy without a page.
pub fn read_unlogged(oid: pg_sys::Oid) -> Option<Page> {
    let sequence = Opened::queued(oid, pg_sys::AccessShareLock);
    if !is_unlogged(&sequence) {
        return None;
    }
    // SAFETY: an open relation.
    let has_page = unsafe { compat::guarded(|| compat::has_first_page(sequence.relation)) };
    let page = has_page.then(|| read_page(&sequence)).flatten();
    Some(page.unwrap_or_else(|| raise::error(damage(&sequence))))
}

/// Returns true if this transaction has created the sequence, so that a rollback would drop it.
pub fn is_created_here(oid: pg_sys::Oid) -> bool {
    let sequence = Opened::open(oid, pg_sys::AccessShareLock, IfLocked::GiveUp);
    // SAFETY: an open relation.
    sequence.is_some_and(|sequence| unsafe { (*sequence.relation).rd_createSubid != 0 })
}

/// The next value. Takes a transaction id only if the draw is logged. Raises 2200H if there is none.
pub fn next(oid: pg_sys::Oid) -> i64 {
    // SAFETY: raises Postgres's own error if the oid is no sequence, or the sequence is exhausted.
    unsafe { compat::guarded(|| compat::nextval_internal(oid, false)) }
}

/// Sets the last value so that no crash undoes it. The caller holds the lock of the advance.
pub fn set_durably(oid: pg_sys::Oid, value: i64) {
    set(oid, value);
    if let Some(PageState { at, .. }) = read(oid).state {
        // SAFETY: this server has written WAL up to this position.
        unsafe { pg_sys::XLogFlush(at) };
    }
}

/// Sets the last value, outside of the transaction. The caller holds the lock that all who set this sequence take.
pub fn set(oid: pg_sys::Oid, value: i64) {
    let mut user = pg_sys::InvalidOid;
    let mut context = 0;
    // SAFETY: setval checks rights, so it runs as the sequence's owner, in a security context in which none of the
    // caller's code can run; an error restores the user with the transaction.
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

/// Returns what makes the values of the sequence unfit to be tokens; `None` if nothing does. Its definition is locked
/// against changes until the transaction ends.
pub fn fault(oid: pg_sys::Oid) -> Option<&'static str> {
    let sequence = Opened::queued(oid, pg_sys::RowExclusiveLock);
    sequence.keep_lock();
    // SAFETY: the relation is open while it is read; a catalog tuple is valid until released, and its fixed columns
    // have the layout declared above.
    unsafe {
        let rel = &*sequence.relation;
        let cache = pg_sys::SysCacheIdentifier::SEQRELID as i32;
        let tuple = pg_sys::SearchSysCache1(cache, pg_sys::Datum::from(oid));
        if tuple.is_null() {
            return Some("is no sequence");
        }
        let form = &*pg_sys::GETSTRUCT(tuple).cast::<SequenceForm>();
        let is_permanent = (*rel.rd_rel).relpersistence as u8 == pg_sys::RELPERSISTENCE_PERMANENT;
        let faults = [
            (!is_permanent, "is not logged"),
            (form.seqincrement < 1, "does not ascend"),
            // A session takes all cached values at once, so several sessions would draw out of order.
            (form.seqcache != 1, "has a CACHE above 1"),
            (form.seqcycle, "may CYCLE"),
            // A rollback would undo the change, and the values drawn since with it.
            (compat::is_rewritten(rel), "was altered in this transaction"),
        ];
        pg_sys::ReleaseSysCache(tuple);
        faults.into_iter().find_map(|(is_unfit, what)| is_unfit.then_some(what))
    }
}
