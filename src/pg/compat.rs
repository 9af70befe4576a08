//! The parts of Postgres that pgrx does not bind, or that differ between major versions.
//!
//! Where it differs, the older versions are named: a new one is taken for the newest, and stands here only where something
//! changes with it.

use crate::pg::raw;
use pgrx::pg_sys;
use std::ffi::{c_int, CStr};

/// Calls one of the functions below so that an error raised in it unwinds as pgrx's own calls do.
///
/// # Safety
/// As for the function called; `f` must hold nothing that needs dropping.
pub unsafe fn guarded<T>(f: impl FnOnce() -> T) -> T {
    // SAFETY: the caller's promise; Postgres runs on one thread.
    unsafe { pg_sys::ffi::pg_guard_ffi_boundary(f) }
}

// All that pgrx has no binding of. The lab's test `project::prototypes` has a C compiler hold the declarations against
// the headers of each major version.
extern "C-unwind" {
    /// access/twophase.h: the setting max_prepared_transactions
    pub static max_prepared_xacts: c_int;

    /// commands/sequence.h: draws without asking for the caller's rights where that is false
    pub fn nextval_internal(relid: pg_sys::Oid, check_permissions: bool) -> i64;
    /// libpq/libpq.h: is the client still there?
    pub fn pq_check_connection() -> bool;

    /// utils/timeout.h: gives a timeout of one's own a number; FATAL where the session has ten already
    pub fn RegisterTimeout(id: u32, handler: extern "C" fn()) -> u32;
    /// utils/timeout.h; this and the next never raise
    pub fn enable_timeout_after(id: u32, delay_ms: c_int);
    /// utils/timeout.h
    pub fn disable_timeout(id: u32, keep_indicator: bool);

    /// storage/sinvaladt.h; NULL for an id that no backend has
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    fn BackendIdGetProc(id: c_int) -> *mut pg_sys::PGPROC;
}

/// USER_TIMEOUT of utils/timeout.h: by this, `RegisterTimeout` is asked for a number.
#[cfg(any(feature = "pg15", feature = "pg16"))]
pub const USER_TIMEOUT: u32 = 12;
#[cfg(not(any(feature = "pg15", feature = "pg16")))]
pub const USER_TIMEOUT: u32 = 13;

/// May `member` act as `role`: has it that role's rights, or may it become it (`SET ROLE`)? Until 15 every member
/// may; from 16 on a role can be granted without either. So it is to the role that created it with CREATEROLE, which may
/// only administer it.
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

/// The source of the value that RESET would give a setting; None if nobody has declared or set one of that name.
pub fn reset_source(name: &CStr) -> Option<pg_sys::GucSource::Type> {
    // SAFETY: the list of settings, and each name in it, is valid until a setting is declared. Raises nothing.
    unsafe {
        #[cfg(feature = "pg15")]
        let setting = {
            let count = usize::try_from(pg_sys::GetNumConfigOptions()).unwrap_or(0);
            let settings = std::slice::from_raw_parts(pg_sys::get_guc_variables(), count);
            // A client may have written the name in capitals.
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

/// Locks a page to be read.
///
/// # Safety
/// It must be pinned; whoever calls this runs inside `guarded`.
pub unsafe fn lock_page(page: pg_sys::Buffer) {
    // SAFETY: the caller's promise.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18"))]
        raw::LockBuffer(page, pg_sys::BUFFER_LOCK_SHARE as c_int);
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17", feature = "pg18")))]
        raw::LockBufferInternal(page, pg_sys::BufferLockMode::BUFFER_LOCK_SHARE);
    }
}

/// The data of the one tuple of a sequence's page; None where it is no such page.
///
/// # Safety
/// The page must be locked, or a copy.
pub unsafe fn sequence_tuple(page: pg_sys::Page) -> Option<*mut u8> {
    const POINTERS: usize = std::mem::offset_of!(pg_sys::PageHeaderData, pd_linp);
    const SIZE: usize = pg_sys::BLCKSZ as usize;
    /// commands/sequence.c: SEQ_MAGIC, in the page's special space.
    const MAGIC: u32 = 0x1717;
    // Three columns: two of eight bytes, one of one.
    const COLUMNS: usize = 17;
    // SAFETY: nothing is read beyond the page, wherever the page says that it is.
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

/// Has the relation a first page?
///
/// # Safety
/// The relation must be open.
pub unsafe fn has_first_page(rel: pg_sys::Relation) -> bool {
    const MAIN: pg_sys::ForkNumber::Type = pg_sys::ForkNumber::MAIN_FORKNUM;
    // SAFETY: the caller's promise; a standby has no file of what is unlogged.
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
/// The type must have so many columns.
pub unsafe fn attribute(
    columns: pg_sys::TupleDesc,
    n: usize,
) -> *const pg_sys::FormData_pg_attribute {
    // SAFETY: the columns follow the fixed part; from 18 on, behind as many compact ones.
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

/// The backend behind a virtual transaction id, None when it has gone or is a prepared transaction.
pub fn process_of(vxid: &pg_sys::VirtualTransactionId) -> Option<*mut pg_sys::PGPROC> {
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    // SAFETY: looks up shared memory under its own lock; an id out of range gives NULL.
    let process = unsafe { (vxid.backendId > 0).then(|| BackendIdGetProc(vxid.backendId)) };
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    // SAFETY: as above.
    let process =
        unsafe { (vxid.procNumber >= 0).then(|| pg_sys::ProcNumberGetProc(vxid.procNumber)) };
    // A prepared transaction keeps the id of the session that prepared it, which has moved on since.
    process.filter(|p| {
        // SAFETY: a PGPROC is shared memory that is never freed.
        !p.is_null() && unsafe { local_transaction(*p) } == vxid.localTransactionId
    })
}

/// A virtual transaction id as numbers, to be compared.
pub fn parts(vxid: &pg_sys::VirtualTransactionId) -> (i32, u32) {
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    return (vxid.backendId, vxid.localTransactionId);
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    return (vxid.procNumber, vxid.localTransactionId);
}

/// # Safety
/// The process must be one of shared memory.
unsafe fn local_transaction(process: *mut pg_sys::PGPROC) -> pg_sys::LocalTransactionId {
    // SAFETY: the caller's promise; a stale value only means that the transaction is over.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        return (*process).lxid;
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        return (*process).vxid.lxid;
    }
}

/// InvalidSubTransactionId of c.h, which pgrx does not bind.
const NO_SAVEPOINT: pg_sys::SubTransactionId = 0;

/// The file that a relation is in.
pub fn file(rel: &pg_sys::RelationData) -> u32 {
    #[cfg(feature = "pg15")]
    return rel.rd_node.relNode.to_u32();
    #[cfg(not(feature = "pg15"))]
    return rel.rd_locator.relNumber.to_u32();
}

/// Has this transaction put a relation that it has not created into another file?
pub fn is_rewritten(rel: &pg_sys::RelationData) -> bool {
    rel.rd_createSubid == NO_SAVEPOINT && rewritten_in(rel) != NO_SAVEPOINT
}

fn rewritten_in(rel: &pg_sys::RelationData) -> pg_sys::SubTransactionId {
    #[cfg(feature = "pg15")]
    return rel.rd_firstRelfilenodeSubid;
    #[cfg(not(feature = "pg15"))]
    return rel.rd_firstRelfilelocatorSubid;
}

/// Does this backend hold the lock in this very mode?
pub fn lock_held_by_me(tag: &pg_sys::LOCKTAG, mode: c_int) -> bool {
    // SAFETY: looks up the backend's own table of locks.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        return pg_sys::LockHeldByMe(tag, mode);
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        return pg_sys::LockHeldByMe(tag, mode, false);
    }
}

/// Takes a lock for the transaction, or for the session, if it is to be had at once; false also where the lock table is
/// full.
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

/// Can a wait have a name of our own in `pg_stat_activity`?
pub const NAMES_WAIT_EVENTS: bool = cfg!(not(any(feature = "pg15", feature = "pg16")));

/// The number by which `pg_stat_activity` knows a wait of an extension; it has the name where that can be. Raises where
/// the server has too many such names.
pub fn wait_event(name: &CStr) -> u32 {
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    let number = {
        let _ = name;
        pg_sys::PG_WAIT_EXTENSION
    };
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    // SAFETY: gives each name of the server one number.
    let number = unsafe { pg_sys::WaitEventExtensionNew(name.as_ptr()) };
    number
}
