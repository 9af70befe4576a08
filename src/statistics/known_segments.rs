//! A list of this server's segments. They are pinned, so without the list the segments of dropped databases and
//! extensions would stay. It also notes which databases could get no segment, so that the log says it once.
//!
//! The list is in the server's main shared memory, and is used under the lock under which segments are made. Where
//! there is no room for it, or in it, a segment stays until the server stops.

use crate::pg::session::server;
use crate::pg::session::xact;
use crate::pg::shared_memory;
use crate::pg::state::relation;
use std::cell::Cell;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};

const NAME: &CStr = c"pg_fence segments";
/// Room for so many databases: 4 kB.
const LENGTH: usize = 512;
/// In the place of a handle: the log tells that the database has no segment. No segment has this one.
const NO_SEGMENT: u32 = 0;

thread_local! {
    /// As of which change of databases this session has looked for those that were dropped.
    static LOOKED_AT: Cell<Option<u64>> = const { Cell::new(None) };
    /// Has this session told the log that it cannot count?
    static TOLD: Cell<bool> = const { Cell::new(false) };
}

/// May a database have been dropped since this session has looked?
pub fn may_be_over() -> bool {
    LOOKED_AT.get() != Some(relation::database_changes())
}

/// Lets the segments of databases go that have been dropped.
pub fn forget_those_that_are_over() {
    LOOKED_AT.set(Some(relation::database_changes()));
    forget(|database, _| database != server::database() && !server::database_exists(database));
}

/// Lets those of this database go, which is about to make another one.
pub fn forget_own() {
    forget(|database, handle| database == server::database() && handle != NO_SEGMENT);
}

fn forget(is_over: impl Fn(u32, u32) -> bool) {
    for entry in list() {
        let Some((database, handle)) = read(entry) else { continue };
        if is_over(database, handle) {
            entry.store(0, Ordering::Relaxed);
            if handle != NO_SEGMENT {
                // It may be gone: then that is an error.
                xact::in_savepoint(|| shared_memory::let_go(handle));
            }
        }
    }
}

/// Adds the segment of this database, so that it can be let go when the database is dropped.
pub fn add(handle: u32) {
    let own = (server::database(), NO_SEGMENT);
    if let Some(told) = list().iter().find(|entry| read(entry) == Some(own)) {
        told.store(0, Ordering::Relaxed);
    }
    TOLD.set(false);
    put(handle);
}

/// True for the first caller, in whichever session: it should log that this database has no segment.
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

/// Database and handle; None for an entry that is free.
fn read(entry: &AtomicU64) -> Option<(u32, u32)> {
    let entry = entry.load(Ordering::Relaxed);
    (entry != 0).then_some(((entry >> 32) as u32, entry as u32))
}

fn list() -> &'static [AtomicU64] {
    xact::in_savepoint(|| shared_memory::named(NAME, LENGTH)).unwrap_or_default()
}
