//! The server, the clock and the caller.

use super::encoding::push_number;
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
    Instant::from_micros(unsafe { super::raw::GetCurrentTimestamp() })
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

/// Of the cluster.
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

/// `application[pid]`, for those who give no holder.
pub fn session() -> Vec<u8> {
    // SAFETY: application_name is a NUL-terminated string or NULL, which Postgres keeps in ASCII.
    let (application, pid) = unsafe {
        let application = pg_sys::application_name;
        let is_set = !application.is_null() && *application != 0;
        let application = if is_set { CStr::from_ptr(application) } else { c"session" };
        (application.to_bytes(), pg_sys::MyProcPid)
    };
    let mut session = Vec::with_capacity(application.len() + 16);
    session.extend_from_slice(application);
    session.push(b'[');
    push_number(&mut session, pid.into());
    session.push(b']');
    session
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
