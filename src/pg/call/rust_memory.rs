//! Rust's own memory, and what happens where there is none left, for Rust or for Postgres.

// Unit tests run without a server that could end their session.
#![cfg_attr(test, allow(dead_code))]

use crate::pg::call::raise;
use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// Rust's own memory. Where there is none left Rust would abort the process, and with it the whole server: here only
/// the session ends (FATAL). A text that may be large is measured, or left in Postgres's memory, where this is an
/// ERROR.
struct RustMemory;

#[cfg(not(test))]
#[global_allocator]
static RUST_MEMORY: RustMemory = RustMemory;

// SAFETY: the system's memory, or no return.
unsafe impl GlobalAlloc for RustMemory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        had(unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        had(unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        had(unsafe { System.realloc(memory, layout, size) })
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[inline]
fn had(memory: *mut u8) -> *mut u8 {
    if memory.is_null() {
        raise::end_without_memory();
    }
    memory
}

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
pub fn keep_reserve() {
    if RESERVE.load(Relaxed).is_null() {
        // SAFETY: not of size zero.
        RESERVE.store(unsafe { System.alloc(RESERVED) }, Relaxed);
    }
}

/// For an error that tells of no memory, before it is copied. Ends the session where another one has had the reserve,
/// and as much is not to be had again.
#[cold]
pub fn use_reserve() {
    let mut reserve = RESERVE.swap(null_mut(), Relaxed);
    // SAFETY: not of size zero; nobody else has what was swapped.
    unsafe {
        if reserve.is_null() {
            reserve = System.alloc(RESERVED);
        }
        if reserve.is_null() {
            raise::end_without_memory();
        }
        System.dealloc(reserve, RESERVED);
    }
}
