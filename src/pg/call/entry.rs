//! The C functions that the SQL names (`sql` lists them). Each finishes all Rust work first and is left with a plain
//! value, an answer or an error. Only then does it return or raise, because raising skips every destructor.
//!
//! Never delete a function that a released version's SQL names.

use crate::errors::Report;
use crate::pg::call::args::{Answer, Args};
use crate::pg::call::raise;
use pgrx::pg_sys;

/// Serves a call of an SQL function.
///
/// # Safety
/// Called by Postgres with the call to be served.
pub unsafe fn enter(
    fcinfo: pg_sys::FunctionCallInfo,
    work: impl FnOnce(Args) -> Result<Answer, Report>,
) -> pg_sys::Datum {
    // SAFETY: the outcome is Copy, so nothing is left to drop when the error leaves by longjmp.
    unsafe {
        match raise::caught(|| work(Args::new(fcinfo))) {
            Ok(Answer::Value(datum)) => datum,
            Ok(Answer::Null) => {
                (*fcinfo).isnull = true;
                pg_sys::Datum::from(0)
            }
            Err(error) => raise::throw(error),
        }
    }
}

macro_rules! sql_functions {
    ($($name:ident, $info:ident => $work:path;)*) => {$(
        #[unsafe(no_mangle)]
        #[doc(hidden)]
        #[allow(unsafe_code)]
        pub extern "C" fn $info() -> &'static pgrx::pg_sys::Pg_finfo_record {
            const V1: pgrx::pg_sys::Pg_finfo_record =
                pgrx::pg_sys::Pg_finfo_record { api_version: 1 };
            &V1
        }

        /// # Safety
        /// For Postgres to call, with the arguments that the SQL declares.
        #[unsafe(no_mangle)]
        #[doc(hidden)]
        #[allow(unsafe_code)]
        pub unsafe extern "C-unwind" fn $name(
            fcinfo: pgrx::pg_sys::FunctionCallInfo,
        ) -> pgrx::pg_sys::Datum {
            // SAFETY: Postgres's call.
            unsafe { $crate::pg::call::entry::enter(fcinfo, $work) }
        }
    )*};
}

pub(crate) use sql_functions;
