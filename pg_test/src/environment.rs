//! Environment variables of this process, which its children inherit.

use std::ffi::OsStr;

/// Sets a variable. The process must not have started a thread yet.
#[allow(unsafe_code)]
pub fn set(name: &str, value: impl AsRef<OsStr>) {
    let threads = std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
    assert!(threads == 1, "{name} is set in a process with {threads} threads");
    // SAFETY: no other thread reads the environment meanwhile, because there is none.
    unsafe { std::env::set_var(name, value) }
}
