//! How many entries of the server's lock table this transaction has taken for leases, and its session for those that
//! end with it.
//!
//! The whole server shares the table. If it is full, nobody can lock anything, or even connect: so a
//! transaction is refused before it has a quarter of it.

use crate::errors::{self, Refusal};
use crate::pg::compat;
use crate::pg::session::scope::{Moment, SavepointId};
use crate::pg::session::xact;
use pgrx::pg_sys;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// An entry of the lock table, by its tag's kind and key. A session has one for each tag, in however many modes it holds
/// it.
pub type Entry = (u16, u64);

/// An entry that the transaction has.
struct Taken {
    /// How often it was taken and not given back.
    times: u32,
    /// In which savepoint it was first: with that one it goes.
    savepoint: SavepointId,
}

thread_local! {
    static TAKEN: RefCell<BTreeMap<Entry, Taken>> = const { RefCell::new(BTreeMap::new()) };
    /// Entries that the session keeps beyond the transaction.
    static SESSION: Cell<usize> = const { Cell::new(0) };
}

/// The entries of this transaction go with it.
pub fn follow(moment: Moment) {
    TAKEN.with_borrow_mut(|taken| taken.retain(|_, entry| moment.spares(&mut entry.savepoint)));
}

/// Takes an entry, and counts it in the innermost savepoint; false where it is not to be had. 53200 when it would be one
/// too many.
pub fn take(entry: Entry, acquire: impl FnOnce() -> bool) -> Result<bool, Refusal> {
    if !TAKEN.with_borrow(|taken| taken.contains_key(&entry)) {
        require_one_more()?;
    }
    let taken = acquire();
    if taken {
        TAKEN.with_borrow_mut(|taken| {
            let first = || Taken { times: 0, savepoint: xact::savepoint() };
            taken.entry(entry).or_insert_with(first).times += 1;
        });
    }
    Ok(taken)
}

/// 53200 when one more entry would be too many.
pub fn require_one_more() -> Result<(), Refusal> {
    if is_full() {
        return Err(errors::lock_table_share(at_most()));
    }
    Ok(())
}

/// Has this session a quarter of the table?
pub fn is_full() -> bool {
    TAKEN.with_borrow(BTreeMap::len) + SESSION.get() >= at_most()
}

/// The session keeps one entry more.
pub fn session_entry_taken() {
    SESSION.set(SESSION.get() + 1);
}

/// So many of them are gone.
pub fn session_entries_gone(count: usize) {
    SESSION.set(SESSION.get().saturating_sub(count));
}

/// A quarter of the table.
fn at_most() -> usize {
    // SAFETY: settings that are fixed when the server starts.
    let entries = unsafe {
        i64::from(pg_sys::max_locks_per_xact)
            * (i64::from(pg_sys::MaxBackends) + i64::from(compat::max_prepared_xacts))
    };
    usize::try_from(entries / 4).unwrap_or(usize::MAX)
}

/// It was given back, once.
pub fn given_back(entry: Entry) {
    TAKEN.with_borrow_mut(|taken| {
        if let Some(held) = taken.get_mut(&entry) {
            held.times -= 1;
            if held.times == 0 {
                taken.remove(&entry);
            }
        }
    });
}
