//! The C functions that the SQL names. Each runs its Rust to its end, whatever it comes to, which gives back a value
//! without destructors, and only then returns or raises.
//!
//! Never delete one: an older version's SQL may still name it.

use super::args::{Answer, Args};
use super::raise;
use crate::errors::Refusal;
use pgrx::pg_sys;

/// # Safety
/// Called by Postgres with the call to be served.
#[inline(always)]
unsafe fn enter(
    fcinfo: pg_sys::FunctionCallInfo,
    work: impl FnOnce(Args) -> Result<Answer, Refusal>,
) -> pg_sys::Datum {
    // SAFETY: the outcome is Copy, so nothing is left to drop when the error leaves by longjmp.
    unsafe {
        let answer = raise::caught(|| work(Args::new(fcinfo)).map_err(raise::stage));
        match answer {
            Ok(Ok(Answer::Value(datum))) => datum,
            Ok(Ok(Answer::Null)) => {
                (*fcinfo).isnull = true;
                pg_sys::Datum::from(0)
            }
            Ok(Err(staged)) | Err(staged) => raise::throw(staged),
        }
    }
}

macro_rules! sql_functions {
    ($($name:ident, $info:ident => $work:path;)*) => {$(
        #[no_mangle]
        #[doc(hidden)]
        pub extern "C" fn $info() -> &'static pg_sys::Pg_finfo_record {
            const V1: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };
            &V1
        }

        /// # Safety
        /// For Postgres to call, with the arguments that the SQL declares.
        #[no_mangle]
        #[doc(hidden)]
        pub unsafe extern "C-unwind" fn $name(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
            // SAFETY: Postgres's call.
            unsafe { enter(fcinfo, $work) }
        }
    )*};
}

sql_functions! {
    lease_acquire, pg_finfo_lease_acquire => crate::lease::acquire;
    lease_renew, pg_finfo_lease_renew => crate::lease::renew;
    lease_release, pg_finfo_lease_release => crate::lease::release;
    lease_revoke, pg_finfo_lease_revoke => crate::lease::revoke;
    lease_acquire_all, pg_finfo_lease_acquire_all => crate::batch::acquire_all;
    lease_renew_all, pg_finfo_lease_renew_all => crate::batch::renew_all;
    lease_release_all, pg_finfo_lease_release_all => crate::batch::release_all;
    lease_guard, pg_finfo_lease_guard => crate::guard::lease_guard;
    lease_check, pg_finfo_lease_check => crate::lease::check;
    lease_prune, pg_finfo_lease_prune => crate::lease::prune;
    fence_new_epoch, pg_finfo_fence_new_epoch => crate::status::new_epoch;
    fence_status, pg_finfo_fence_status => crate::status::status;
    fence_blocking_pids, pg_finfo_fence_blocking_pids => crate::status::blocking_pids;
    fence_session_alive, pg_finfo_fence_session_alive => crate::status::session_alive;
    fence_uncommitted, pg_finfo_fence_uncommitted => crate::status::uncommitted;
    fence_checked_name, pg_finfo_fence_checked_name => crate::status::checked_name;
    fence_greatest, pg_finfo_fence_greatest => crate::status::greatest;
    fence_record_creation, pg_finfo_fence_record_creation => crate::status::record_creation;
    fenced, pg_finfo_fenced => crate::fenced::fenced;
}
