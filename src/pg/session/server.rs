//! The server, the clock and the caller.

use crate::pg::compat;
use crate::pg::encoding::push_number;
use crate::pg::raw;
use pg_fence_rules::moves::{Identity, Start};
use pg_fence_rules::Instant;
use pgrx::pg_sys;
use std::ffi::CStr;
use std::time::Duration;

/// The server's clock, now.
pub fn now() -> Instant {
    if crate::known_bugs::NOW {
        return crate::pg::session::xact::started_at();
    }
    // SAFETY: reads the clock.
    Instant::from_micros(unsafe { crate::pg::raw::GetCurrentTimestamp() })
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

/// Is there dynamic shared memory? In single-user mode there is none.
pub fn has_dynamic_memory() -> bool {
    // SAFETY: set once when the process starts.
    unsafe { pg_sys::IsUnderPostmaster }
}

/// The name of this database.
pub fn database_name() -> Vec<u8> {
    // SAFETY: gives back a NUL-terminated copy, or NULL.
    unsafe {
        let name = pg_sys::get_database_name(pg_sys::MyDatabaseId);
        if name.is_null() {
            return Vec::new();
        }
        CStr::from_ptr(name).to_bytes().to_vec()
    }
}

/// Is there a database with this oid?
pub fn database_exists(oid: u32) -> bool {
    let cache = pg_sys::SysCacheIdentifier::DATABASEOID as i32;
    let none = pg_sys::Datum::from(0);
    // SAFETY: a catalog look-up.
    unsafe { pg_sys::SearchSysCacheExists(cache, pg_sys::Datum::from(oid), none, none, none) }
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

/// Which database this is, given the oid of its token sequence.
pub fn identity(sequence: pg_sys::Oid) -> Identity {
    Identity {
        timeline: timeline(),
        system_identifier: system_identifier(),
        database: database(),
        sequence: sequence.to_u32(),
    }
}

/// Which start of the server this is, given the file of the sequence that marks it.
pub fn start(file: u32) -> Start {
    Start { server: started_at(), database: database(), file }
}

/// When this server started.
pub fn started_at() -> Instant {
    // SAFETY: set once when the server starts.
    Instant::from_micros(unsafe { pg_sys::PgStartTime })
}

/// The oid of this database.
pub fn database() -> u32 {
    // SAFETY: set once when the backend starts.
    unsafe { pg_sys::MyDatabaseId }.to_u32()
}

/// Raises 25006 in a read-only transaction and on a standby.
pub fn writable(function: &CStr) {
    // SAFETY: raise or return.
    unsafe {
        compat::guarded(|| {
            raw::PreventCommandIfReadOnly(function.as_ptr());
            raw::PreventCommandDuringRecovery(function.as_ptr());
        });
    }
}

/// Who sends the statements of this session.
pub struct Client {
    /// The process of this session.
    pub pid: i32,
    /// The role that the session has set itself to: within a function that runs as its owner, that of the caller.
    pub role_oid: pg_sys::Oid,
    /// Its name; empty for a role that was dropped.
    pub role: Vec<u8>,
    /// `application_name`, in the server's encoding; empty where it has none.
    pub application_name: Vec<u8>,
    /// The client's address, as inet is written; None for one that has come by a socket of the system.
    pub address: Option<Vec<u8>>,
}

/// Who sends the statements of this session.
pub fn client() -> Client {
    // SAFETY: reads who it is; gives back a NUL-terminated copy, or NULL for a role that was dropped.
    let (role_oid, role) = unsafe {
        let oid = pg_sys::GetOuterUserId();
        let name = pg_sys::GetUserNameFromId(oid, true);
        (oid, if name.is_null() { Vec::new() } else { CStr::from_ptr(name).to_bytes().to_vec() })
    };
    let application_name = with_application_name(<[u8]>::to_vec);
    Client { pid: pid(), role_oid, role, application_name, address: address() }
}

fn with_application_name<T>(show: impl FnOnce(&[u8]) -> T) -> T {
    // SAFETY: NUL-terminated, or NULL; nothing changes the setting while it is shown.
    unsafe {
        if pg_sys::application_name.is_null() {
            return show(&[]);
        }
        show(CStr::from_ptr(pg_sys::application_name).to_bytes())
    }
}

fn pid() -> i32 {
    // SAFETY: set once when the process starts.
    unsafe { pg_sys::MyProcPid }
}

fn address() -> Option<Vec<u8>> {
    // SAFETY: functions of the server, with the arguments that they declare.
    unsafe {
        let address = pgrx::direct_function_call_as_datum(pg_sys::inet_client_addr, &[]);
        let text = pgrx::direct_function_call_as_datum(pg_sys::inet_out, &[Some(address?)]);
        Some(CStr::from_ptr(text?.cast_mut_ptr()).to_bytes().to_vec())
    }
}

/// `application[pid]`, for those who give no holder.
pub fn session() -> Vec<u8> {
    let mut session = with_application_name(|name| {
        let name = if name.is_empty() { b"session" } else { name };
        // With room for the rest, so that it is allocated once.
        let mut session = Vec::with_capacity(name.len() + 16);
        session.extend_from_slice(name);
        session
    });
    session.push(b'[');
    push_number(&mut session, pid().into());
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
