//! What happens when the library is loaded into a backend.

use crate::pg::session::role;
use crate::pg::session::scope::{self, Ends};
use crate::pg::session::settings;
use crate::pg::state::relation;

/// Makes `pg` ready; what is done when a transaction ends, it is told.
pub fn load<E: Ends>() {
    // Where backtraces are on, pgrx puts one, with file paths, into the DETAIL of every error that passes
    // through Rust. No thread but this one exists.
    std::env::remove_var("RUST_BACKTRACE");
    std::env::remove_var("RUST_LIB_BACKTRACE");
    pgrx::pg_sys::panic::register_pg_guard_panic_hook();
    settings::declare();
    relation::register();
    role::register();
    scope::register::<E>();
}

/// Defines the function that Postgres calls when it loads the library.
macro_rules! on_load {
    ($ends:ty) => {
        /// # Safety
        /// For Postgres to call, once for each backend.
        #[no_mangle]
        #[doc(hidden)]
        #[allow(unsafe_code)]
        pub unsafe extern "C-unwind" fn _PG_init() {
            $crate::pg::load::load::<$ends>();
        }
    };
}

pub(crate) use on_load;
