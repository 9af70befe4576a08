//! Which server and which database this is, and since when.

use pg_fence_rules::moves::{Identity, Start};
use pg_fence_rules::Instant;
use pgrx::pg_sys;
use std::ffi::CStr;

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

/// The number that tells this cluster from others; `initdb` and `pg_upgrade` change it.
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
