//! What happens when the library is loaded into a backend.

use super::{keyed, relation, settings, xact};

/// # Safety
/// For Postgres to call, once for each backend.
#[no_mangle]
#[doc(hidden)]
pub unsafe extern "C-unwind" fn _PG_init() {
    // Where backtraces are on, pgrx puts one, with file paths, into the DETAIL of every error that passes
    // through Rust. No thread but this one exists.
    std::env::remove_var("RUST_BACKTRACE");
    std::env::remove_var("RUST_LIB_BACKTRACE");
    pgrx::pg_sys::panic::register_pg_guard_panic_hook();
    settings::declare();
    relation::listen();
    keyed::listen();
    xact::listen();
}
