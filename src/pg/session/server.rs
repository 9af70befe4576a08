//! The identity of this server and this database, and when the server started.

use crate::errors::{self, Report};
use pg_fence_rules::Instant;
use pg_fence_rules::epochs::{self, Identity, Start};
use pgrx::pg_sys;
use std::ffi::{CStr, c_int};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;

/// fcntl.h: O_RDONLY.
const READ_ONLY: c_int = 0;
/// The number of bytes to read of a backup label, which has a few hundred.
const LABEL_MAX: usize = 8_192;

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
    unsafe {
        let name = pg_sys::get_database_name(pg_sys::MyDatabaseId);
        if name.is_null() {
            return Vec::new();
        }
        CStr::from_ptr(name).to_bytes().to_vec()
    }
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
fn backup() -> io::Result<Option<u64>> {
    if fs::metadata("backup_label.old").is_ok_and(|file| !file.is_file()) {
        return Err(io::Error::other("it is not a regular file"));
    }
    // SAFETY: a NUL-terminated name in the data directory, which is each backend's working directory.
    let fd = unsafe { pg_sys::OpenTransientFile(c"backup_label.old".as_ptr(), READ_ONLY) };
    if fd < 0 {
        let error = io::Error::last_os_error();
        return if error.kind() == ErrorKind::NotFound { Ok(None) } else { Err(error) };
    }
    // SAFETY: the server opened the descriptor and closes it below; nothing raises until then.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let label = label_of(&file);
    // SAFETY: a descriptor that the function above has opened, and that is closed once.
    unsafe { pg_sys::CloseTransientFile(fd) };
    label.map(Some)
}

fn label_of(mut file: &File) -> io::Result<u64> {
    let mut content = [0; LABEL_MAX];
    let mut length = 0;
    while length < content.len() {
        match file.read(&mut content[length..]) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(epochs::backup_label(&content[..length]))
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
