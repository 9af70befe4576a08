//! Initialising the library in a backend.

use crate::pg::session::role;
use crate::pg::session::scope::{self, Listener};
use crate::pg::session::settings;
use crate::pg::state::relation;

/// Initialises `pg`. The listener is called when a transaction ends.
pub fn load(listener: Listener) {
    // If backtraces are on, pgrx puts one with file paths into the DETAIL of every error that passes through Rust.
    for name in ["RUST_BACKTRACE", "RUST_LIB_BACKTRACE"] {
        // SAFETY: the process has no other thread.
        unsafe { std::env::remove_var(name) };
    }
    pgrx::pg_sys::panic::register_pg_guard_panic_hook();
    settings::declare();
    relation::register();
    role::register();
    scope::register(listener);
}
