//! Rust's own memory, and what happens where there is none left.

// Unit tests run without a server that could end their session.
#![cfg_attr(test, allow(dead_code))]

use crate::errors;
use crate::pg::call::raise;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, Ordering};

/// Rust's own memory. Where there is none left Rust would abort the process, and with it the whole server: here only
/// the session ends (FATAL). What may be large is measured, or allocated by `copied`, so that this is an ERROR.
struct RustMemory;

#[cfg(not(test))]
#[global_allocator]
static RUST_MEMORY: RustMemory = RustMemory;

/// Somebody asks who takes no for an answer.
static MAY_FAIL: AtomicBool = AtomicBool::new(false);

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
    if memory.is_null() && !MAY_FAIL.load(Ordering::Relaxed) {
        raise::end_without_memory();
    }
    memory
}

/// A copy of bytes of which there may be many. Raises 53200 where there is no memory for it.
pub fn copied(bytes: &[u8]) -> Vec<u8> {
    let mut copy = Vec::new();
    MAY_FAIL.store(true, Ordering::Relaxed);
    let reserved = copy.try_reserve_exact(bytes.len());
    MAY_FAIL.store(false, Ordering::Relaxed);
    if reserved.is_err() {
        raise::now(errors::out_of_memory());
    }
    copy.extend_from_slice(bytes);
    copy
}
