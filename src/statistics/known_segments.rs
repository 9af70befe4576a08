//! The list of this server's statistics segments. Segments are pinned, so without the list those of dropped databases
//! and extensions would stay. The list also records which databases could get no segment, so that this is logged once.
//!
//! The list is in the server's main shared memory and is used under the lock under which segments are created. If there
//! is no room for the list, or in it, a segment stays until the server stops.

use crate::pg::session::server;
use crate::pg::session::xact;
use crate::pg::shared_memory;
use crate::pg::state::relation;
use std::cell::Cell;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};

const NAME: &CStr = c"pg_fence segments";
/// The number of entries, which take 4 kB.
const LENGTH: usize = 512;
/// The handle recorded after it was logged that the database has no segment. No segment has this handle.
const NO_SEGMENT: u32 = 0;

thread_local! {
    /// The counter of database changes when this session last looked for dropped databases.
    static LOOKED_AT: Cell<Option<u64>> = const { Cell::new(None) };
    /// True if this session has checked that the lack of a segment was logged.
    static TOLD: Cell<bool> = const { Cell::new(false) };
}

/// Returns true if a database may have been dropped since this session last checked.
pub fn may_be_over() -> bool {
    LOOKED_AT.get() != Some(relation::database_changes())
}

/// Releases the segments of dropped databases.
pub fn forget_those_that_are_over() {
    LOOKED_AT.set(Some(relation::database_changes()));
    forget(|database, _| database != server::database() && !server::database_exists(database));
}

/// Releases the previous segments of this database, which is about to create another one.
pub fn forget_own() {
    forget(|database, handle| database == server::database() && handle != NO_SEGMENT);
}

fn forget(is_over: impl Fn(u32, u32) -> bool) {
    for entry in list() {
        let Some((database, handle)) = read(entry) else { continue };
        if is_over(database, handle) {
            entry.store(0, Ordering::Relaxed);
            if handle != NO_SEGMENT {
                // The segment may be gone already, which raises an error.
                xact::in_savepoint(|| shared_memory::let_go(handle));
            }
        }
    }
}

/// Adds the segment of this database, so that it can be released when the database is dropped.
pub fn add(handle: u32) {
    let own = (server::database(), NO_SEGMENT);
    if let Some(told) = list().iter().find(|entry| read(entry) == Some(own)) {
        told.store(0, Ordering::Relaxed);
    }
    TOLD.set(false);
    put(handle);
}

/// Returns true for the first caller in any session, which should log that this database has no segment.
pub fn is_to_be_told() -> bool {
    let own = (server::database(), NO_SEGMENT);
    let told = TOLD.replace(true) || list().iter().any(|entry| read(entry) == Some(own));
    if !told {
        put(NO_SEGMENT);
    }
    !told
}

fn put(handle: u32) {
    if let Some(free) = list().iter().find(|entry| read(entry).is_none()) {
        free.store(u64::from(server::database()) << 32 | u64::from(handle), Ordering::Relaxed);
    }
}

/// The database and the handle of an entry; `None` for a free entry.
fn read(entry: &AtomicU64) -> Option<(u32, u32)> {
    let entry = entry.load(Ordering::Relaxed);
    (entry != 0).then_some(((entry >> 32) as u32, entry as u32))
}

fn list() -> &'static [AtomicU64] {
    xact::in_savepoint(|| shared_memory::named(NAME, LENGTH)).unwrap_or_default()
}
