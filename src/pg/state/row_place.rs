//! Where the rows of leases were found, so that a session which guards a lease again need not search the index.
//!
//! A place is a hint. What is there must be visible now, and the caller compares the name and the token: a place that is
//! outdated costs one more look.

use pgrx::pg_sys::ItemPointerData;
use std::cell::RefCell;
use std::collections::HashMap;

/// How many places a session remembers. It must be clearly more than the leases that it writes under in turn.
const MOST: usize = 4_096;

thread_local! {
    static PLACES: RefCell<HashMap<Vec<u8>, ItemPointerData>> = RefCell::default();
}

/// Remembers where the row of a lease is.
pub fn remember(name: &[u8], place: ItemPointerData) {
    PLACES.with_borrow_mut(|places| {
        if places.len() >= MOST {
            places.clear();
        }
        places.insert(name.to_vec(), place);
    });
}

/// Where the row of that lease was.
pub fn of(name: &[u8]) -> Option<ItemPointerData> {
    PLACES.with_borrow(|places| places.get(name).copied())
}
