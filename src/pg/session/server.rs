//! Which server and which database this is, and since when.

use crate::errors::{self, Refusal};
use pg_fence_rules::moves::{self, Identity, Start};
use pg_fence_rules::Instant;
use pgrx::pg_sys;
use std::ffi::{c_int, CStr};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;

/// fcntl.h: O_RDONLY.
const READ_ONLY: c_int = 0;
/// The most that is read of a backup's label, which has some hundred bytes.
const LABEL_MAX: usize = 8_192;

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

/// Which database this is, given the oid of its token sequence. Error: 58030 where a file cannot be read.
pub fn identity(sequence: pg_sys::Oid) -> Result<Identity, Refusal> {
    Ok(Identity {
        timeline: timeline(),
        system_identifier: system_identifier(),
        database: database(),
        sequence: sequence.to_u32(),
        backup: backup().map_err(|error| errors::unreadable_backup_label(&error))?,
    })
}

/// The base backup that this server was once started from; None if it never was. A server that starts with a backup_label
/// renames it, once all that depends on it is in the control file; nothing else that the server does makes, changes or
/// removes that file. What is no regular file is not opened: to open a FIFO would wait for somebody to write into it.
fn backup() -> io::Result<Option<u64>> {
    if fs::metadata("backup_label.old").is_ok_and(|file| !file.is_file()) {
        return Err(io::Error::other("it is not a regular file"));
    }
    // SAFETY: a NUL-terminated name, within the data directory, where each backend works.
    let fd = unsafe { pg_sys::OpenTransientFile(c"backup_label.old".as_ptr(), READ_ONLY) };
    if fd < 0 {
        let error = io::Error::last_os_error();
        return if error.kind() == ErrorKind::NotFound { Ok(None) } else { Err(error) };
    }
    // SAFETY: the server opened the descriptor and closes it below; until then nothing raises.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let label = label_of(&file);
    // SAFETY: a descriptor that the function above has opened, once.
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
    Ok(moves::backup_label(&content[..length]))
}

/// Which start of the server this is, given the token sequence and the file of the sequence that marks it.
pub fn start(sequence: pg_sys::Oid, file: u32) -> Start {
    Start { server: started_at(), database: database(), file, sequence: sequence.to_u32() }
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
