//! The identity of this server and this database, and when the server started.

use crate::errors::{self, Report};
use crate::pg::call::args::c_bytes;
use pg_fence_rules::Instant;
use pg_fence_rules::epochs::{self, Identity, Start};
use pgrx::pg_sys;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};

/// The number of bytes to read of a backup label, which has a few hundred.
const LABEL_MAX: u64 = 8_192;

/// Returns true if this server is a standby, or replays WAL for another reason.
pub fn in_recovery() -> bool {
    // SAFETY: reads shared memory.
    unsafe { pg_sys::RecoveryInProgress() }
}

/// Returns true if there is dynamic shared memory. Single-user mode has none.
pub fn has_dynamic_memory() -> bool {
    // SAFETY: set once when the process starts.
    unsafe { pg_sys::IsUnderPostmaster }
}

/// The name of this database.
pub fn database_name() -> Vec<u8> {
    // SAFETY: returns a NUL-terminated copy, or NULL.
    unsafe { c_bytes(pg_sys::get_database_name(pg_sys::MyDatabaseId)) }
}

/// Returns true if there is a database with this oid.
pub fn database_exists(oid: u32) -> bool {
    let cache = pg_sys::SysCacheIdentifier::DATABASEOID as i32;
    let none = pg_sys::Datum::from(0);
    // SAFETY: a catalog look-up.
    unsafe { pg_sys::SearchSysCacheExists(cache, pg_sys::Datum::from(oid), none, none, none) }
}

/// The timeline that this server writes, or replays.
pub fn timeline() -> u32 {
    // SAFETY: the insertion timeline is fixed once recovery is over; before that, the replayed one is read.
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

/// The number that identifies this cluster; `initdb` and `pg_upgrade` change it.
pub fn system_identifier() -> u64 {
    // SAFETY: reads the control file's copy in shared memory.
    unsafe { pg_sys::GetSystemIdentifier() }
}

/// The identity of this database, given the oid of its token sequence. Errors: 58030 if a file cannot be read.
pub fn identity(sequence: pg_sys::Oid) -> Result<Identity, Report> {
    Ok(Identity {
        timeline: timeline(),
        system_identifier: system_identifier(),
        database: database(),
        sequence: sequence.to_u32(),
        backup: backup().map_err(|error| errors::unreadable_backup_label(&error))?,
    })
}

/// The base backup from which this server was once started; `None` if there was none. A server that starts with a
/// backup_label renames it to this file once all that depends on it is in the control file. Nothing else in the server
/// creates, changes or removes the file. Only a regular file is opened, because opening a FIFO would wait for a writer.
/// The data directory is the working directory of each backend.
fn backup() -> io::Result<Option<u64>> {
    const FILE: &str = "backup_label.old";
    match fs::metadata(FILE) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Ok(file) if !file.is_file() => return Err(io::Error::other("it is not a regular file")),
        other => other?,
    };
    let mut content = Vec::new();
    File::open(FILE)?.take(LABEL_MAX).read_to_end(&mut content)?;
    Ok(Some(epochs::backup_label(&content)))
}

/// The start of the server, given the token sequence and the file of the sequence that records the start.
pub fn start(sequence: pg_sys::Oid, file: u32) -> Start {
    Start { server: started_at(), database: database(), file, sequence: sequence.to_u32() }
}

/// The time at which this server started.
pub fn started_at() -> Instant {
    // SAFETY: set once when the server starts.
    Instant::from_micros(unsafe { pg_sys::PgStartTime })
}

/// The oid of this database.
pub fn database() -> u32 {
    // SAFETY: set once when the backend starts.
    unsafe { pg_sys::MyDatabaseId }.to_u32()
}
