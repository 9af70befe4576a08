//! The server, the clock and the caller.

use super::compat;
use pg_fence_rules::epoch::{Identity, Start};
use pg_fence_rules::{Floor, Instant};
use pgrx::pg_sys;
use std::ffi::CStr;
use std::time::Duration;

/// The server's clock, now.
pub fn now() -> Instant {
    if crate::known_bugs::NOW {
        return super::xact::started_at();
    }
    // SAFETY: reads the clock.
    Instant::from_micros(unsafe { pg_sys::GetCurrentTimestamp() })
}

/// How long until the server's clock shows that time; zero when it has passed, for ever where there is none.
pub fn span_until(at: Option<Instant>) -> Duration {
    at.map_or(Duration::MAX, |at| {
        Duration::from_micros(at.since(now()).micros().max(0).unsigned_abs())
    })
}

/// Is this server a standby (or replaying WAL for another reason)?
pub fn in_recovery() -> bool {
    // SAFETY: reads shared memory.
    unsafe { pg_sys::RecoveryInProgress() }
}

/// The timeline that this server writes, or replays.
pub fn timeline() -> u32 {
    // SAFETY: the insertion timeline is fixed once recovery is over; before, the replayed one is asked for.
    unsafe {
        if pg_sys::RecoveryInProgress() {
            let mut timeline = 0;
            pg_sys::GetXLogReplayRecPtr(&mut timeline);
            timeline
        } else {
            pg_sys::GetWALInsertionTimeLine()
        }
    }
}

/// What tells this cluster from others; `initdb` and `pg_upgrade` change it.
pub fn system_identifier() -> u64 {
    // SAFETY: reads the control file's copy in shared memory.
    unsafe { pg_sys::GetSystemIdentifier() }
}

/// Which database this is, given the oid of its token sequence and where its latest jump went to.
pub fn identity(sequence: pg_sys::Oid, floor: Floor) -> Identity {
    Identity {
        timeline: timeline(),
        system_identifier: system_identifier(),
        database: database(),
        sequence: sequence.to_u32(),
        floor,
    }
}

/// Which start of the server this is, given the file of the sequence that marks it.
pub fn start(file: u32) -> Start {
    // SAFETY: set once when the server starts.
    let started = unsafe { pg_sys::PgStartTime };
    Start { server: Instant::from_micros(started), database: database(), file }
}

fn database() -> u32 {
    // SAFETY: set once when the backend starts.
    unsafe { pg_sys::MyDatabaseId }.to_u32()
}

/// Raises 25006 in a read-only transaction and on a standby.
pub fn writable(function: &CStr) {
    // SAFETY: raise or return.
    unsafe {
        pg_sys::PreventCommandIfReadOnly(function.as_ptr());
        pg_sys::PreventCommandDuringRecovery(function.as_ptr());
    }
}

/// The name of the current user.
pub fn current_role() -> Vec<u8> {
    // SAFETY: gives back a NUL-terminated copy.
    unsafe {
        CStr::from_ptr(pg_sys::GetUserNameFromId(pg_sys::GetUserId(), false)).to_bytes().to_vec()
    }
}

/// May the caller act for this role: is it that role, one that may act as it, or a superuser? In a trigger that runs
/// under another user (a cascading key, a SECURITY DEFINER function) the session's role counts as well.
pub fn acts_for(role: &[u8], in_trigger: bool) -> bool {
    let name = super::encoding::c_string(role);
    // SAFETY: catalog look-ups by a NUL-terminated name.
    unsafe {
        let current = pg_sys::GetUserId();
        let outer = pg_sys::GetOuterUserId();
        let oid = pg_sys::get_role_oid(name, true);
        let acts = |user| {
            pg_sys::superuser_arg(user) || (oid != pg_sys::InvalidOid && compat::acts_as(user, oid))
        };
        acts(current) || (in_trigger && acts(outer))
    }
}

/// `application[pid]`, for those who give no holder.
pub fn session() -> String {
    // SAFETY: application_name is a NUL-terminated string or NULL.
    unsafe {
        let application = if pg_sys::application_name.is_null() {
            String::new()
        } else {
            CStr::from_ptr(pg_sys::application_name).to_string_lossy().into_owned()
        };
        let application = if application.is_empty() { "session" } else { &application };
        let pid = pg_sys::MyProcPid;
        format!("{application}[{pid}]")
    }
}

/// Is this session an apply worker or restoring (`session_replication_role = replica`)?
pub fn replica() -> bool {
    // SAFETY: reads a setting.
    unsafe { pg_sys::SessionReplicationRole as u32 == pg_sys::SESSION_REPLICATION_ROLE_REPLICA }
}

/// Raises what a cancel or a termination raises.
pub fn serve_interrupts() {
    pgrx::check_for_interrupts!();
}

/// Do this transaction's commits wait for standbys?
pub fn commits_wait_for_standbys() -> bool {
    let local = pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_LOCAL_FLUSH as i32;
    // SAFETY: reads settings.
    unsafe {
        pg_sys::max_wal_senders > 0
            && pg_sys::synchronous_commit > local
            && !pg_sys::SyncRepStandbyNames.is_null()
            && *pg_sys::SyncRepStandbyNames != 0
    }
}
