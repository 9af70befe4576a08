//! The functions that SQL calls: arguments in, one answer or error out.

mod arguments;
mod keep;
mod lease;
mod statistics;
mod status;

use crate::fence;
use crate::pg::call::entry::sql_functions;

sql_functions! {
    lease_acquire, pg_finfo_lease_acquire => lease::acquire;
    lease_adopt, pg_finfo_lease_adopt => lease::adopt;
    lease_renew, pg_finfo_lease_renew => lease::renew;
    lease_release, pg_finfo_lease_release => lease::release;
    lease_revoke, pg_finfo_lease_revoke => lease::revoke;
    lease_evict, pg_finfo_lease_evict => lease::evict;
    lease_acquire_all, pg_finfo_lease_acquire_all => lease::acquire_all;
    lease_renew_all, pg_finfo_lease_renew_all => lease::renew_all;
    lease_release_all, pg_finfo_lease_release_all => lease::release_all;
    lease_guard_all, pg_finfo_lease_guard_all => lease::guard_all;
    lease_keep, pg_finfo_lease_keep => keep::keep;
    lease_guard, pg_finfo_lease_guard => lease::guard;
    lease_check, pg_finfo_lease_check => lease::check;
    lease_prune, pg_finfo_lease_prune => lease::prune;
    lease_forget, pg_finfo_lease_forget => lease::forget;
    lease_forget_older, pg_finfo_lease_forget_older => lease::forget_older;
    fence_new_epoch, pg_finfo_fence_new_epoch => status::new_epoch;
    fence_status, pg_finfo_fence_status => status::status;
    fence_blocking_pids, pg_finfo_fence_blocking_pids => status::blocking_pids;
    fence_queue_key, pg_finfo_fence_queue_key => status::queue_key;
    fence_grant_state, pg_finfo_fence_grant_state => status::grant_state;
    fence_is_visible, pg_finfo_fence_is_visible => status::is_visible;
    fence_role_prefix_changed, pg_finfo_fence_role_prefix_changed => status::role_prefix_changed;
    fence_visible_grants, pg_finfo_fence_visible_grants => status::visible_grants;
    fence_uncommitted_grants, pg_finfo_fence_uncommitted_grants => status::uncommitted_grants;
    fence_checked_lease_name, pg_finfo_fence_checked_lease_name => status::checked_lease_name;
    fence_record_creation, pg_finfo_fence_record_creation => status::record_creation;
    fence_read_stats, pg_finfo_fence_read_stats => statistics::read_stats;
    fence_read_refusals, pg_finfo_fence_read_refusals => statistics::read_refusals;
    fence_stats_reset, pg_finfo_fence_stats_reset => statistics::reset;
    fence_protect, pg_finfo_fence_protect => fence::protect;
    fence_unprotect, pg_finfo_fence_unprotect => fence::unprotect;
    fence_audit, pg_finfo_fence_audit => fence::audit;
    fenced, pg_finfo_fenced => fence::fenced;
}
