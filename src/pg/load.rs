//! What happens when the library is loaded into a backend.

use super::{relation, settings, xact};

/// # Safety
/// For Postgres to call, once for each backend.
#[no_mangle]
#[doc(hidden)]
pub unsafe extern "C-unwind" fn _PG_init() {
    pgrx::pg_sys::panic::register_pg_guard_panic_hook();
    settings::declare();
    relation::listen();
    xact::listen();
}
