//! Parts of Postgres that pgrx does not bind, or that differ between major versions.
//!
//! For a difference, the older versions are named: a new version is treated like the newest, and is named here only
//! once something changes in it.

use crate::pg::raw;
use pgrx::pg_sys;
use std::ffi::{CStr, c_int};

/// Calls `f`, so that an error raised in it unwinds as in pgrx's own calls.
///
/// # Safety
/// As for the functions that are called; `f` must hold nothing that needs dropping.
pub unsafe fn guarded<T>(f: impl FnOnce() -> T) -> T {
    // SAFETY: the caller's promise; Postgres runs on one thread.
    unsafe { pg_sys::ffi::pg_guard_ffi_boundary(f) }
}

// Functions that pgrx does not bind. The test `project::prototypes` compares the declarations with the headers of each
// major version, by a C compiler.
unsafe extern "C-unwind" {
    /// access/heaptoast.h: a copy of the tuple without out-of-line values
    pub fn toast_flatten_tuple(
        tuple: pg_sys::HeapTuple,
        columns: pg_sys::TupleDesc,
    ) -> pg_sys::HeapTuple;
    /// access/twophase.h: the setting max_prepared_transactions
    pub static max_prepared_xacts: c_int;

    /// commands/sequence.h: with false, draws without checking the caller's rights
    pub fn nextval_internal(relid: pg_sys::Oid, check_permissions: bool) -> i64;
    /// libpq/libpq.h: returns true if the client is still connected
    pub fn pq_check_connection() -> bool;

    /// utils/timeout.h: registers a timeout and returns its number; FATAL if the session has ten already
    pub fn RegisterTimeout(id: u32, handler: extern "C" fn()) -> u32;
    /// utils/timeout.h; this and the next never raise
    pub fn enable_timeout_after(id: u32, delay_ms: c_int);
    /// utils/timeout.h
    pub fn disable_timeout(id: u32, keep_indicator: bool);

    /// storage/sinvaladt.h; NULL for an id that no backend has
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    fn BackendIdGetProc(id: c_int) -> *mut pg_sys::PGPROC;
}

/// USER_TIMEOUT of utils/timeout.h, which makes `RegisterTimeout` assign a number.
#[cfg(any(feature = "pg15", feature = "pg16"))]
pub const USER_TIMEOUT: u32 = 12;
#[cfg(not(any(feature = "pg15", feature = "pg16")))]
pub const USER_TIMEOUT: u32 = 13;

/// Returns true if `member` has the rights of `role`, or may become it (`SET ROLE`). Until 15 every member may; from 16
/// on a role can be granted without either. For example, a role created with CREATEROLE is granted to its creator only
/// for administration.
///
/// # Safety
/// Both must be roles.
pub unsafe fn acts_as(member: pg_sys::Oid, role: pg_sys::Oid) -> bool {
    // SAFETY: looks up catalogs.
    unsafe {
        #[cfg(feature = "pg15")]
        return pg_sys::is_member_of_role(member, role);
        #[cfg(not(feature = "pg15"))]
        return pg_sys::has_privs_of_role(member, role)
            || pg_sys::member_can_set_role(member, role);
    }
}

/// The source of the value to which RESET would set a setting; `None` if no setting of that name was declared or set.
pub fn reset_source(name: &CStr) -> Option<pg_sys::GucSource::Type> {
    // SAFETY: the list of settings, and each name in it, is valid until a setting is declared. Nothing raises.
    unsafe {
        #[cfg(feature = "pg15")]
        let setting = {
            let count = usize::try_from(pg_sys::GetNumConfigOptions()).unwrap_or(0);
            let settings = std::slice::from_raw_parts(pg_sys::get_guc_variables(), count);
            // A client may write the name in capitals.
            let is_it = |setting: &&*mut pg_sys::config_generic| {
                let found = CStr::from_ptr((***setting).name).to_bytes();
                found.eq_ignore_ascii_case(name.to_bytes())
            };
            settings.iter().find(is_it).copied()
        };
        #[cfg(not(feature = "pg15"))]
        let setting = Some(pg_sys::find_option(name.as_ptr(), false, true, 0));
        setting.filter(|setting| !setting.is_null()).map(|setting| (*setting).reset_source)
    }
}

/// Locks a page for reading.
///
/// # Safety
/// The page must be pinned; the caller runs inside of `guarded`.
pub unsafe fn lock_page(page: pg_sys::Buffer) {
    // SAFETY: the caller's promise.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18"))]
        raw::LockBuffer(page, pg_sys::BUFFER_LOCK_SHARE as c_int);
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
        raw::LockBufferInternal(page, pg_sys::BufferLockMode::BUFFER_LOCK_SHARE);
    }
}

/// The data of the only tuple on a sequence's page; `None` if the page is not that of a sequence.
///
/// # Safety
/// The page must be locked, or a copy.
pub unsafe fn sequence_tuple(page: pg_sys::Page) -> Option<*mut u8> {
    const POINTERS: usize = std::mem::offset_of!(pg_sys::PageHeaderData, pd_linp);
    const SIZE: usize = pg_sys::BLCKSZ as usize;
    /// SEQ_MAGIC of commands/sequence.c, in the page's special space.
    const MAGIC: u32 = 0x1717;
    // There are three columns: two of eight bytes, one of one.
    const COLUMNS: usize = 17;
    // SAFETY: nothing is read outside of the page, whatever offsets it contains.
    unsafe {
        let header = &*page.cast::<pg_sys::PageHeaderData>();
        let bytes = page.cast::<u8>();
        let special = usize::from(header.pd_special);
        let is_page = special <= SIZE - size_of::<u32>()
            && bytes.add(special).cast::<u32>().read_unaligned() == MAGIC
            && usize::from(header.pd_lower) >= POINTERS + size_of::<pg_sys::ItemIdData>();
        if !is_page {
            return None;
        }
        let pointer = &*bytes.add(POINTERS).cast::<pg_sys::ItemIdData>();
        let at = pointer.lp_off() as usize;
        let fits = |length: usize| at.is_multiple_of(8) && at >= POINTERS && at + length <= SIZE;
        let before = size_of::<pg_sys::HeapTupleHeaderData>();
        if pointer.lp_flags() != pg_sys::LP_NORMAL || !fits(before) {
            return None;
        }
        let hoff = usize::from((*bytes.add(at).cast::<pg_sys::HeapTupleHeaderData>()).t_hoff);
        (hoff.is_multiple_of(8) && fits(hoff + COLUMNS)).then(|| bytes.add(at + hoff))
    }
}

/// Returns true if the relation has a first page.
///
/// # Safety
/// The relation must be open.
pub unsafe fn has_first_page(rel: pg_sys::Relation) -> bool {
    const MAIN: pg_sys::ForkNumber::Type = pg_sys::ForkNumber::MAIN_FORKNUM;
    // SAFETY: the caller's promise; a standby has no file of an unlogged relation.
    unsafe {
        #[cfg(feature = "pg15")]
        let file = pg_sys::smgropen((*rel).rd_node, (*rel).rd_backend);
        #[cfg(not(feature = "pg15"))]
        let file = pg_sys::smgropen((*rel).rd_locator, (*rel).rd_backend);
        pg_sys::smgrexists(file, MAIN) && pg_sys::RelationGetNumberOfBlocksInFork(rel, MAIN) > 0
    }
}

/// A column of a row type, counted from 0.
///
/// # Safety
/// The row type must have that column.
pub unsafe fn attribute(
    columns: pg_sys::TupleDesc,
    n: usize,
) -> *const pg_sys::FormData_pg_attribute {
    // SAFETY: the columns follow the fixed part; from 18 on they follow the same number of compact columns.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17"))]
        let first = (*columns).attrs.as_ptr();
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17")))]
        let first = (*columns)
            .compact_attrs
            .as_ptr()
            .add((*columns).natts as usize)
            .cast::<pg_sys::FormData_pg_attribute>();
        first.add(n)
    }
}

/// The process of a virtual transaction id; `None` if it has ended or is a prepared transaction.
pub fn process_of(vxid: &pg_sys::VirtualTransactionId) -> Option<*mut pg_sys::PGPROC> {
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    // SAFETY: looks up shared memory under its own lock; an id out of range returns NULL.
    let process = unsafe { (vxid.backendId > 0).then(|| BackendIdGetProc(vxid.backendId)) };
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    // SAFETY: as above.
    let process =
        unsafe { (vxid.procNumber >= 0).then(|| pg_sys::ProcNumberGetProc(vxid.procNumber)) };
    // A prepared transaction keeps the id of its former session, which has other transactions since.
    process.filter(|p| {
        // SAFETY: a PGPROC is shared memory that is never freed; a stale value only means that the transaction is over.
        let transaction = (!p.is_null()).then(|| unsafe {
            #[cfg(any(feature = "pg15", feature = "pg16"))]
            return (**p).lxid;
            #[cfg(not(any(feature = "pg15", feature = "pg16")))]
            return (**p).vxid.lxid;
        });
        transaction == Some(vxid.localTransactionId)
    })
}

/// InvalidSubTransactionId of c.h, which pgrx does not bind.
const NO_SAVEPOINT: pg_sys::SubTransactionId = 0;

/// The file of a relation.
pub fn file(rel: &pg_sys::RelationData) -> u32 {
    #[cfg(feature = "pg15")]
    return rel.rd_node.relNode.to_u32();
    #[cfg(not(feature = "pg15"))]
    return rel.rd_locator.relNumber.to_u32();
}

/// Returns true if this transaction has moved the relation to another file, and has not created it.
pub fn is_rewritten(rel: &pg_sys::RelationData) -> bool {
    rel.rd_createSubid == NO_SAVEPOINT && rewritten_in(rel) != NO_SAVEPOINT
}

fn rewritten_in(rel: &pg_sys::RelationData) -> pg_sys::SubTransactionId {
    #[cfg(feature = "pg15")]
    return rel.rd_firstRelfilenodeSubid;
    #[cfg(not(feature = "pg15"))]
    return rel.rd_firstRelfilelocatorSubid;
}

/// Returns true if this backend holds the lock in exactly this mode.
pub fn lock_held_by_me(tag: &pg_sys::LOCKTAG, mode: c_int) -> bool {
    // SAFETY: looks up the backend's own table of locks.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        return pg_sys::LockHeldByMe(tag, mode);
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        return pg_sys::LockHeldByMe(tag, mode, false);
    }
}

/// Takes a lock for the transaction or for the session, if it is free. Returns false also if the lock table is full.
pub fn try_lock(tag: &pg_sys::LOCKTAG, mode: c_int, session: bool) -> bool {
    let none = std::ptr::null_mut();
    // SAFETY: the tag is complete; the lock manager cleans up at the end of the transaction, or the session.
    let result = unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17"))]
        let result = pg_sys::LockAcquireExtended(tag, mode, session, true, false, none);
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17")))]
        let result = pg_sys::LockAcquireExtended(tag, mode, session, true, false, none, false);
        result
    };
    result != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL
}

/// The number of an extension's wait in `pg_stat_activity`, which shows the name if the version supports that. Raises
/// if the server has no room for another name: it has 128 (`WAIT_EVENT_CUSTOM_HASH_MAX_SIZE` of `wait_event.c`).
pub fn wait_event(name: &CStr) -> u32 {
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    let number = {
        let _ = name;
        pg_sys::PG_WAIT_EXTENSION
    };
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    // SAFETY: assigns one number to each name in the server.
    let number = unsafe { pg_sys::WaitEventExtensionNew(name.as_ptr()) };
    number
}
