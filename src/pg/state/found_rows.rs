//! Where this session has found the rows of leases, so that it need not search the index for a lease that it has just
//! acquired, renewed or guarded.
//!
//! A location is a hint. Whoever reads a row there looks whether it is the lease's (`LeaseTable::remembered`), and
//! searches where it is not: the row may have been deleted and its place been given to another one.

use crate::pg::hash::{self, Quick};
use crate::pg::state::row_version::Location;
use std::cell::RefCell;
use std::collections::HashMap;

/// So many are remembered; then all are forgotten.
const MOST: usize = 4096;

/// Those in one file of the table: VACUUM FULL and pg_repack make another one.
#[derive(Default)]
struct FoundRows {
    file: u32,
    /// By the hash of the name: two names that share one take turns.
    by_hash: HashMap<u64, Location, Quick>,
}

thread_local! {
    static FOUND: RefCell<FoundRows> = RefCell::default();
}

/// Remembers where a row of a lease is, in that file.
pub fn remember(file: u32, name: &[u8], location: Location) {
    FOUND.with_borrow_mut(|found| {
        if found.file != file || found.by_hash.len() >= MOST {
            *found = FoundRows { file, ..FoundRows::default() };
        }
        found.by_hash.insert(hash::of(name), location);
    });
}

/// Is anything remembered of the lease?
pub fn has(name: &[u8]) -> bool {
    FOUND.with_borrow(|found| found.by_hash.contains_key(&hash::of(name)))
}

/// Where a row of a lease was last seen in that file.
pub fn find(file: u32, name: &[u8]) -> Option<Location> {
    FOUND.with_borrow(|found| {
        let known = (found.file == file).then_some(&found.by_hash);
        known.and_then(|known| known.get(&hash::of(name)).copied())
    })
}
