//! Which segments this server has: so that those of databases that were dropped, and of extensions that were, go too.
//! The segments are pinned, and nobody else knows them.
//!
//! The list is in the server's main shared memory, and is used under the lock under which segments are made. Where
//! there is no room for it, or in it, a segment stays until the server stops.

use crate::pg::session::server;
use crate::pg::session::xact;
use crate::pg::shared_memory;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};

const NAME: &CStr = c"pg_fence segments";
/// Room for so many databases: 4 kB.
const LENGTH: usize = 512;

/// Lets those go whose databases have been dropped, and those of this database, which is about to make another one.
pub fn forget_those_that_are_over() {
    for entry in list() {
        let Some((database, handle)) = read(entry) else { continue };
        if database == server::database() || !server::database_exists(database) {
            entry.store(0, Ordering::Relaxed);
            // It may be gone: then that is an error.
            xact::in_savepoint(|| shared_memory::let_go(handle));
        }
    }
}

/// Adds the segment of this database, so that it can be let go when the database is dropped.
pub fn add(handle: u32) {
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
