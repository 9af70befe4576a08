//! The positions at which the rows of leases were found, so that a session that guards a lease again need not search
//! the index.
//!
//! A position is a hint: the tuple there must be visible now, and the caller compares the name and the token. An
//! outdated position costs one more read.

use pgrx::pg_sys::ItemPointerData;
use std::cell::RefCell;
use std::collections::HashMap;

/// The number of positions that a session remembers: clearly more than the leases under which it writes in turn.
const MAX_PLACES: usize = 4_096;

thread_local! {
    static PLACES: RefCell<HashMap<Vec<u8>, ItemPointerData>> = RefCell::default();
}

/// Remembers the position of a lease's row.
pub fn remember(name: &[u8], place: ItemPointerData) {
    PLACES.with_borrow_mut(|places| {
        if places.len() >= MAX_PLACES {
            places.clear();
        }
        places.insert(name.to_vec(), place);
    });
}

/// The last known position of the lease's row.
pub fn of(name: &[u8]) -> Option<ItemPointerData> {
    PLACES.with_borrow(|places| places.get(name).copied())
}
