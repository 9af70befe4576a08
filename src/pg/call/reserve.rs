//! Memory that is set aside for the error that tells of no memory.

// Unit tests run without a server that could raise one.
#![cfg_attr(test, allow(dead_code))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// Kept for the error that tells of no memory. Each error is copied twice on its way, by us and by pgrx, whose guard then
/// panics. Where there is no memory for a copy either, that is an error in its turn, and after five of them Postgres ends
/// all sessions. NULL before the first call, and where it was needed. Nobody touches it, so it takes no room but an address.
static RESERVE: AtomicPtr<u8> = AtomicPtr::new(null_mut());

/// A megabyte is the least that Postgres takes for a memory context that has grown; some for Rust's panic.
const RESERVED: Layout = match Layout::from_size_align(9 << 18, 16) {
    Ok(layout) => layout,
    Err(_) => panic!("a size"),
};

/// Where each call begins.
#[inline]
pub fn keep() {
    if RESERVE.load(Relaxed).is_null() {
        // SAFETY: not of size zero.
        RESERVE.store(unsafe { System.alloc(RESERVED) }, Relaxed);
    }
}

/// For an error that tells of no memory, before it is copied. False where another one has had the reserve, and as much is
/// not to be had again.
#[cold]
pub fn use_up() -> bool {
    let mut reserve = RESERVE.swap(null_mut(), Relaxed);
    // SAFETY: not of size zero; nobody else has what was swapped.
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
