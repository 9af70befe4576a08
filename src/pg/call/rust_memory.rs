//! Rust's allocator, which ends the session if memory is exhausted.

// Unit tests run without a server that could end their session.
#![cfg_attr(test, allow(dead_code))]

use crate::pg::call::raise;
use std::alloc::{GlobalAlloc, Layout, System};

/// Rust's allocator. If memory is exhausted, Rust would abort the process and with it the whole server; here only the
/// session ends (FATAL). Texts that may be large are checked for their length, or left in Postgres's memory, where
/// exhaustion is an ERROR.
struct RustMemory;

#[cfg(not(test))]
#[global_allocator]
static RUST_MEMORY: RustMemory = RustMemory;

// SAFETY: returns the system's memory, or does not return.
unsafe impl GlobalAlloc for RustMemory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        or_end_session(unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        or_end_session(unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        or_end_session(unsafe { System.realloc(memory, layout, size) })
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

fn or_end_session(memory: *mut u8) -> *mut u8 {
    if memory.is_null() {
        raise::end_without_memory();
    }
    memory
}
