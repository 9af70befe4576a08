//! The C functions that the SQL names (`sql` lists them). Each does all of its Rust work first, and is left with a plain
//! value: an answer or an error. Only then does it return or raise, for a raise skips every destructor.
//!
//! Never delete one that a released version's SQL names.

use crate::errors::Refusal;
use crate::pg::call::args::{Answer, Args};
use crate::pg::call::raise;
use pgrx::pg_sys;

/// Serves a call of an SQL function.
///
/// # Safety
/// Called by Postgres with the call to be served.
#[inline(always)]
pub unsafe fn enter(
    fcinfo: pg_sys::FunctionCallInfo,
    work: impl FnOnce(Args) -> Result<Answer, Refusal>,
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

/// Serves a call of an SQL function that has a short way: `quick` answers what it can, and neither raises nor panics.
///
/// # Safety
/// As for `enter`.
#[inline(always)]
pub unsafe fn enter_quickly(
    fcinfo: pg_sys::FunctionCallInfo,
    quick: impl FnOnce(Args) -> Option<pg_sys::Datum>,
    work: impl FnOnce(Args) -> Result<Answer, Refusal>,
) -> pg_sys::Datum {
    #[inline(never)]
    unsafe fn rest(
        fcinfo: pg_sys::FunctionCallInfo,
        work: impl FnOnce(Args) -> Result<Answer, Refusal>,
    ) -> pg_sys::Datum {
        // SAFETY: the caller's promise.
        unsafe { enter(fcinfo, work) }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match quick(Args::new(fcinfo)) {
            Some(datum) => datum,
            None => rest(fcinfo, work),
        }
    }
}

macro_rules! sql_functions {
    ($($name:ident, $info:ident => $work:path $(, quickly $quick:path)?;)*) => {$(
        #[no_mangle]
        #[doc(hidden)]
        #[allow(unsafe_code)]
        pub extern "C" fn $info() -> &'static pgrx::pg_sys::Pg_finfo_record {
            const V1: pgrx::pg_sys::Pg_finfo_record =
                pgrx::pg_sys::Pg_finfo_record { api_version: 1 };
            &V1
        }

        /// # Safety
        /// For Postgres to call, with the arguments that the SQL declares.
        #[no_mangle]
        #[doc(hidden)]
        #[allow(unsafe_code)]
        pub unsafe extern "C-unwind" fn $name(
            fcinfo: pgrx::pg_sys::FunctionCallInfo,
        ) -> pgrx::pg_sys::Datum {
            // SAFETY: Postgres's call.
            unsafe { $crate::pg::call::entry::serve!(fcinfo, $($quick,)? $work) }
        }
    )*};
}

macro_rules! serve {
    ($fcinfo:ident, $work:path) => {
        $crate::pg::call::entry::enter($fcinfo, $work)
    };
    ($fcinfo:ident, $quick:path, $work:path) => {
        $crate::pg::call::entry::enter_quickly($fcinfo, $quick, $work)
    };
}

pub(crate) use {serve, sql_functions};
