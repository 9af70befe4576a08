//! A segment of dynamic shared memory to which this session is attached, as words that any session may change at any
//! time. It needs no `shared_preload_libraries`: the first session creates and pins it, so that it lives until the
//! server stops.
//!
//! The callers decide about its content, and about how other sessions find it.

use crate::pg::call::raise;
use crate::pg::memory::Owner;
use pgrx::PgTryBuilder;
use pgrx::pg_sys;
use std::ffi::CStr;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// The address of the attached segment, its number of words and its handle. (A backend has one thread.)
static WORDS: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());
static LENGTH: AtomicUsize = AtomicUsize::new(0);
static HANDLE: AtomicU32 = AtomicU32::new(0);

/// Runs `work` on the words of the attached segment; `None` if there is none.
pub fn with<T>(work: impl FnOnce(&[AtomicU64]) -> T) -> Option<T> {
    let words = WORDS.load(Ordering::Relaxed);
    if words.is_null() {
        return None;
    }
    // SAFETY: while the pointer is set, this number of words is mapped; it is reset right before they are unmapped.
    Some(work(unsafe { std::slice::from_raw_parts(words, LENGTH.load(Ordering::Relaxed)) }))
}

/// The handle of the attached segment.
pub fn handle() -> Option<u32> {
    with(|_| HANDLE.load(Ordering::Relaxed))
}

/// Attaches a segment until this session ends, if `is_ours` returns true for it. Returns false if there is no such
/// segment, or it is another's. The error says why the segment cannot be mapped.
pub fn attach(handle: u32, is_ours: impl FnOnce(&[AtomicU64]) -> bool) -> Result<bool, String> {
    // A segment without an owner belongs to the session instead of the current statement or savepoint.
    let owner = Owner::is(std::ptr::null_mut());
    // SAFETY: returns NULL if there is no such segment; raises if it cannot be mapped.
    let attach = AssertUnwindSafe(|| Ok(unsafe { pg_sys::dsm_attach(handle) }));
    let segment =
        PgTryBuilder::new(attach).catch_others(|error| Err(raise::message_of(&error))).execute()?;
    drop(owner);
    if segment.is_null() {
        return Ok(false);
    }
    // SAFETY: the segment was attached just now.
    unsafe {
        let (words, length) = words_of(segment);
        let is_ours = is_ours(std::slice::from_raw_parts(words, length));
        if is_ours {
            remember(segment, words, length);
        } else {
            pg_sys::dsm_detach(segment);
        }
        Ok(is_ours)
    }
}

/// Creates a segment of `length` words, which are zero when `begin` fills them in, and attaches it until this session
/// ends. Returns `None` if the server has too many segments; raises if there is no memory left.
pub fn create(length: usize, begin: impl FnOnce(&[AtomicU64])) -> Option<u32> {
    let flags = pg_sys::DSM_CREATE_NULL_IF_MAXSEGMENTS as i32;
    let owner = Owner::is(std::ptr::null_mut());
    // SAFETY: returns NULL if there are too many.
    let segment = unsafe { pg_sys::dsm_create(length * size_of::<AtomicU64>(), flags) };
    drop(owner);
    if segment.is_null() {
        return None;
    }
    // SAFETY: a new segment, unknown to other sessions. It is zeroed, because memory reserved at the server's start may
    // not be.
    unsafe {
        let (words, _) = words_of(segment);
        std::ptr::write_bytes(words, 0, length);
        begin(std::slice::from_raw_parts(words, length));
        pg_sys::dsm_pin_segment(segment);
        remember(segment, words, length);
        Some(pg_sys::dsm_segment_handle(segment))
    }
}

/// Detaches this session from the segment.
pub fn detach() {
    let Some(handle) = handle() else { return };
    // SAFETY: searches this process's list of segments, and detaches the one of this handle.
    unsafe {
        let segment = pg_sys::dsm_find_mapping(handle);
        if !segment.is_null() {
            pg_sys::dsm_detach(segment);
        }
    }
}

/// Unpins a segment, so that it is freed when the last session has detached from it. Raises if there is no such
/// segment, or it was unpinned before.
pub fn unpin(handle: u32) {
    // SAFETY: the server checks the handle.
    unsafe { pg_sys::dsm_unpin_segment(handle) }
}

/// Words that the whole server shares under this name, all zero at first. They come from the memory that the server
/// reserves for requests after its start, a few kilobytes at most; raises if none is left.
pub fn named(name: &CStr, length: usize) -> &'static [AtomicU64] {
    let mut found = false;
    // SAFETY: memory of the server's main segment is fresh from the system, and so zero, and never freed; a structure
    // begins at the boundary of a cache line, so it is aligned.
    unsafe {
        let size = length * size_of::<AtomicU64>();
        let words = pg_sys::ShmemInitStruct(name.as_ptr(), size, &mut found).cast::<AtomicU64>();
        std::slice::from_raw_parts(words, length)
    }
}

/// # Safety
/// The segment must be attached.
unsafe fn words_of(segment: *mut pg_sys::dsm_segment) -> (*mut AtomicU64, usize) {
    // SAFETY: the caller's promise; a segment begins at a page boundary, so it is aligned.
    unsafe {
        let length = pg_sys::dsm_segment_map_length(segment) / size_of::<AtomicU64>();
        (pg_sys::dsm_segment_address(segment).cast(), length)
    }
}

/// # Safety
/// These must be the words of the segment, which must be attached.
unsafe fn remember(segment: *mut pg_sys::dsm_segment, words: *mut AtomicU64, length: usize) {
    // SAFETY: the caller's promise; the callback only resets the pointer.
    unsafe {
        pg_sys::on_dsm_detach(segment, Some(detached), pg_sys::Datum::from(0));
        HANDLE.store(pg_sys::dsm_segment_handle(segment), Ordering::Relaxed);
    }
    LENGTH.store(length, Ordering::Relaxed);
    WORDS.store(words, Ordering::Relaxed);
}

/// Called by Postgres right before the segment is unmapped, at the end of the session at the latest.
unsafe extern "C-unwind" fn detached(_: *mut pg_sys::dsm_segment, _: pg_sys::Datum) {
    WORDS.store(std::ptr::null_mut(), Ordering::Relaxed);
}
