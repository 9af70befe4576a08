//! A segment of dynamic shared memory that this session has attached, as words that any session may change at any
//! time. It needs no `shared_preload_libraries`: the session that misses it makes it, and pins it, so that it lives
//! until the server stops.
//!
//! Its content, and how others find it, are the caller's affair.

use crate::pg::call::raise;
use pgrx::pg_sys;
use pgrx::PgTryBuilder;
use std::ffi::CStr;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Where the attached segment is, how many words it has and what it is called. (A backend has one thread.)
static WORDS: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());
static LENGTH: AtomicUsize = AtomicUsize::new(0);
static HANDLE: AtomicU32 = AtomicU32::new(0);
/// A segment that could not be attached, so that it is not asked for again: Postgres would take it for attached.
static UNATTACHABLE: AtomicU32 = AtomicU32::new(0);

/// Is a segment attached?
#[inline]
pub fn is_attached() -> bool {
    !WORDS.load(Ordering::Relaxed).is_null()
}

/// Works on the words of the attached segment; None where there is none.
#[inline]
pub fn with<T>(work: impl FnOnce(&[AtomicU64]) -> T) -> Option<T> {
    let words = WORDS.load(Ordering::Relaxed);
    if words.is_null() {
        return None;
    }
    // SAFETY: as long as the pointer is set, so many words are mapped; it is reset right before they go.
    Some(work(unsafe { std::slice::from_raw_parts(words, LENGTH.load(Ordering::Relaxed)) }))
}

/// Attaches a segment until this session ends, if `is_ours` says that it is the one that is meant: handles are
/// random numbers, and the one that is asked for may be of an earlier life of the server. False where there is none, or it is
/// somebody else's; an error says why it cannot be mapped into this process.
pub fn attach(handle: u32, is_ours: impl FnOnce(&[AtomicU64]) -> bool) -> Result<bool, String> {
    if handle == UNATTACHABLE.load(Ordering::Relaxed) {
        return Err("its shared memory cannot be mapped".into());
    }
    // SAFETY: looks through this process's list of segments.
    if unsafe { !pg_sys::dsm_find_mapping(handle).is_null() } {
        // Attached already, and not by us.
        return Ok(false);
    }
    let segment = without_owner(|| {
        // SAFETY: gives back NULL where there is no such segment; raises where it cannot be mapped.
        let attach = AssertUnwindSafe(|| Ok(unsafe { pg_sys::dsm_attach(handle) }));
        PgTryBuilder::new(attach).catch_others(|error| Err(raise::message_of(&error))).execute()
    });
    let segment = segment.inspect_err(|_| UNATTACHABLE.store(handle, Ordering::Relaxed))?;
    if segment.is_null() {
        return Ok(false);
    }
    // SAFETY: attached just now.
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

/// Makes a segment of so many words, all zero until `begin` has filled them in, and attaches it until this session
/// ends. None where the server has too many segments; raises where there is no memory left.
pub fn create(length: usize, begin: impl FnOnce(&[AtomicU64])) -> Option<u32> {
    let flags = pg_sys::DSM_CREATE_NULL_IF_MAXSEGMENTS as i32;
    // SAFETY: gives back NULL where there are too many.
    let segment =
        without_owner(|| unsafe { pg_sys::dsm_create(length * size_of::<AtomicU64>(), flags) });
    if segment.is_null() {
        return None;
    }
    // SAFETY: a new segment, which nobody else knows yet; its memory need not be zero where it was reserved when the
    // server started.
    unsafe {
        let (words, _) = words_of(segment);
        std::ptr::write_bytes(words, 0, length);
        begin(std::slice::from_raw_parts(words, length));
        pg_sys::dsm_pin_segment(segment);
        remember(segment, words, length);
        Some(pg_sys::dsm_segment_handle(segment))
    }
}

/// Detaches the segment from this session, and returns its handle.
pub fn leave() -> Option<u32> {
    if !is_attached() {
        return None;
    }
    let handle = HANDLE.load(Ordering::Relaxed);
    // SAFETY: looks through this process's list of segments, and detaches the one that is ours.
    unsafe {
        let segment = pg_sys::dsm_find_mapping(handle);
        if !segment.is_null() {
            pg_sys::dsm_detach(segment);
        }
    }
    Some(handle)
}

/// Lets a segment go when the last session has left it. Raises where there is no such segment, or it may go already.
pub fn let_go(handle: u32) {
    // SAFETY: the server looks for it.
    unsafe { pg_sys::dsm_unpin_segment(handle) }
}

/// Words of this name that the whole server shares, all zero at first, from what it has set aside for such as were not
/// announced when it started: a few kilobytes at most. Raises where nothing is left of that. One session at a time may
/// ask.
pub fn named(name: &CStr, length: usize) -> &'static [AtomicU64] {
    let mut found = false;
    // SAFETY: memory of the server's main segment is never given back; the caller sees to it that nobody asks before it
    // is zero.
    unsafe {
        let size = length * size_of::<AtomicU64>();
        let words = pg_sys::ShmemInitStruct(name.as_ptr(), size, &mut found).cast::<AtomicU64>();
        if !found {
            std::ptr::write_bytes(words, 0, length);
        }
        std::slice::from_raw_parts(words, length)
    }
}

/// Does work whose segment is to belong to the session, not to whatever statement or savepoint is under way.
fn without_owner<T>(work: impl FnOnce() -> T) -> T {
    /// Puts the owner back also where the work fails.
    struct Owner(pg_sys::ResourceOwner);
    impl Drop for Owner {
        fn drop(&mut self) {
            // SAFETY: a global of this thread, as it was.
            unsafe { pg_sys::CurrentResourceOwner = self.0 };
        }
    }
    // SAFETY: a global of this thread.
    let _owner = Owner(unsafe { pg_sys::CurrentResourceOwner });
    // SAFETY: as above; a segment without an owner lives as long as the session.
    unsafe { pg_sys::CurrentResourceOwner = std::ptr::null_mut() };
    work()
}

/// # Safety
/// The segment must be attached.
unsafe fn words_of(segment: *mut pg_sys::dsm_segment) -> (*mut AtomicU64, usize) {
    // SAFETY: the caller's promise; a segment begins at a page.
    unsafe {
        let length = pg_sys::dsm_segment_map_length(segment) / size_of::<AtomicU64>();
        (pg_sys::dsm_segment_address(segment).cast(), length)
    }
}

/// # Safety
/// These must be the words of the segment, which is attached.
unsafe fn remember(segment: *mut pg_sys::dsm_segment, words: *mut AtomicU64, length: usize) {
    // SAFETY: the caller's promise; the callback only resets the pointer.
    unsafe {
        pg_sys::on_dsm_detach(segment, Some(detached), pg_sys::Datum::from(0));
        HANDLE.store(pg_sys::dsm_segment_handle(segment), Ordering::Relaxed);
    }
    LENGTH.store(length, Ordering::Relaxed);
    WORDS.store(words, Ordering::Relaxed);
}

/// Called by Postgres right before the segment is unmapped, at the session's end at the latest.
unsafe extern "C-unwind" fn detached(_: *mut pg_sys::dsm_segment, _: pg_sys::Datum) {
    WORDS.store(std::ptr::null_mut(), Ordering::Relaxed);
}
