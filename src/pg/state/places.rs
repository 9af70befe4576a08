//! Where this session has found the rows of leases, so that it need not search the index for a lease that it has just
//! acquired, renewed or guarded.
//!
//! A place is a hint. Whoever reads a row there looks whether it is the lease's (`LeaseTable::remembered`), and
//! searches where it is not: the row may have been deleted and its place been given to another one.

use crate::pg::hash::{self, Quick};
use crate::pg::state::row_version::Place;
use std::cell::RefCell;
use std::collections::HashMap;

/// So many are remembered; then all are forgotten.
const MOST: usize = 4096;

/// Those in one file of the table: VACUUM FULL and pg_repack make another one.
#[derive(Default)]
struct Places {
    file: u32,
    /// By the hash of the name: two names that share one take turns.
    by_hash: HashMap<u64, Place, Quick>,
}

thread_local! {
    static PLACES: RefCell<Places> = RefCell::default();
}

/// Remembers where a row of a lease is, in that file.
pub fn remember(file: u32, name: &[u8], place: Place) {
    PLACES.with_borrow_mut(|places| {
        if places.file != file || places.by_hash.len() >= MOST {
            *places = Places { file, ..Places::default() };
        }
        places.by_hash.insert(hash::of(name), place);
    });
}

/// Is anything remembered of the lease?
pub fn has(name: &[u8]) -> bool {
    PLACES.with_borrow(|places| places.by_hash.contains_key(&hash::of(name)))
}

/// Where a row of a lease was last seen in that file.
pub fn find(file: u32, name: &[u8]) -> Option<Place> {
    PLACES.with_borrow(|places| {
        let known = (places.file == file).then_some(&places.by_hash);
        known.and_then(|known| known.get(&hash::of(name)).copied())
    })
}
