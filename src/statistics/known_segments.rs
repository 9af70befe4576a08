//! The list of this server's statistics segments, in its main shared memory: which is that of each database, and which
//! databases could get none, so that this is logged once.
//!
//! A start of the server and a crash empty the list, as they free the segments. It is read without a lock, and changed
//! under the lock under which segments are created.

use crate::pg::session::server;
use crate::pg::session::xact;
use crate::pg::shared_memory;
use crate::pg::state::relation;
use std::cell::Cell;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};

/// The name of the list. A new layout of the segments gets a new name.
const NAME: &CStr = c"pg_fence segments 4";
/// The number of entries, which take 4 kB.
const LENGTH: usize = 512;
/// The handle recorded after it was logged that the database has no segment. No segment has this handle.
const NO_SEGMENT: u32 = 0;

thread_local! {
    /// The list; empty until this session has found it.
    static LIST: Cell<&'static [AtomicU64]> = const { Cell::new(&[]) };
    /// The counter of database changes when this session last looked for dropped databases.
    static CHECKED_AT: Cell<Option<u64>> = const { Cell::new(None) };
    /// True if this session has checked that the lack of a segment was logged.
    static REPORTED: Cell<bool> = const { Cell::new(false) };
}

/// Finds the list, or makes it. Returns false if the server has no memory for it.
pub fn find_list() -> bool {
    if LIST.get().is_empty() {
        let list = xact::in_savepoint(|| shared_memory::named(NAME, LENGTH));
        LIST.set(list.unwrap_or_default());
    }
    !LIST.get().is_empty()
}

/// The segment of this database.
pub fn own() -> Option<u32> {
    let handles = entries().filter(|(_, database, _)| *database == server::database());
    handles.map(|(_, _, handle)| handle).find(|handle| *handle != NO_SEGMENT)
}

/// Returns true if a database may have been dropped since this session last checked.
pub fn may_have_dropped() -> bool {
    CHECKED_AT.get() != Some(relation::database_changes())
}

/// Releases the segments of dropped databases.
pub fn release_dropped() {
    CHECKED_AT.set(Some(relation::database_changes()));
    release(|database, _| database != server::database() && !server::database_exists(database));
}

/// Releases the previous segment of this database, which is about to create another one.
pub fn release_own() {
    release(|database, handle| database == server::database() && handle != NO_SEGMENT);
}

fn release(is_wanted: impl Fn(u32, u32) -> bool) {
    for (entry, _, handle) in entries().filter(|(_, db, handle)| is_wanted(*db, *handle)) {
        entry.store(0, Ordering::Relaxed);
        if handle != NO_SEGMENT {
            // The segment may be gone already, which raises an error.
            xact::in_savepoint(|| shared_memory::unpin(handle));
        }
    }
}

/// Returns true if the list has room for a segment of this database.
pub fn has_room() -> bool {
    is_reported() || free_entry().is_some()
}

/// Adds the segment of this database. The list must have room for it.
pub fn add(handle: u32) {
    release(|database, handle| database == server::database() && handle == NO_SEGMENT);
    REPORTED.set(false);
    put(handle);
}

/// Returns true for the first caller in any session, which should log that this database has no segment.
pub fn is_first_to_report() -> bool {
    let is_first = !(REPORTED.replace(true) || is_reported());
    if is_first {
        put(NO_SEGMENT);
    }
    is_first
}

/// Returns true if the list says that this database has no segment.
fn is_reported() -> bool {
    entries().any(|(_, database, handle)| (database, handle) == (server::database(), NO_SEGMENT))
}

fn free_entry() -> Option<&'static AtomicU64> {
    LIST.get().iter().find(|entry| entry.load(Ordering::Relaxed) == 0)
}

/// Adds an entry of this database, if there is room.
fn put(handle: u32) {
    if let Some(entry) = free_entry() {
        let database = u64::from(server::database());
        entry.store(database << 32 | u64::from(handle), Ordering::Relaxed);
    }
}

/// Each entry, with its database and its handle.
fn entries() -> impl Iterator<Item = (&'static AtomicU64, u32, u32)> {
    LIST.get().iter().filter_map(|entry| {
        let value = entry.load(Ordering::Relaxed);
        (value != 0).then_some((entry, (value >> 32) as u32, value as u32))
    })
}
