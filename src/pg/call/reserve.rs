//! Memory that is reserved for out-of-memory errors.

// Unit tests run without a server that could raise such an error.
#![cfg_attr(test, allow(dead_code))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// The memory reserved for an out-of-memory error. Each error is copied twice, by us and by pgrx, whose guard then
/// panics. If there is no memory for a copy, that raises another error, and after five nested errors Postgres ends all
/// sessions. NULL before the first call, and after the reserve was used. The memory is never touched, so it takes up
/// only address space.
static RESERVE: AtomicPtr<u8> = AtomicPtr::new(null_mut());

/// A grown memory context takes at least a megabyte, and Rust's panic takes some more.
const RESERVED: Layout = match Layout::from_size_align(9 << 18, 16) {
    Ok(layout) => layout,
    Err(_) => panic!("a size"),
};

/// Allocates the reserve, if there is none. Called at the start of each call.
pub fn ensure() {
    if RESERVE.load(Relaxed).is_null() {
        // SAFETY: not of size zero.
        RESERVE.store(unsafe { System.alloc(RESERVED) }, Relaxed);
    }
}

/// Frees the reserve for an out-of-memory error, before the error is copied. Returns false if an earlier error has used
/// the reserve, and it cannot be allocated again.
pub fn use_up() -> bool {
    let mut reserve = RESERVE.swap(null_mut(), Relaxed);
    // SAFETY: not of size zero; no other code has the swapped pointer.
    unsafe {
        if reserve.is_null() {
            reserve = System.alloc(RESERVED);
        }
        if reserve.is_null() {
            return false;
        }
        System.dealloc(reserve, RESERVED);
    }
    true
}
