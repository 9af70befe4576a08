//! The number of lock table entries that this transaction uses for leases, and its session for session leases.
//!
//! The whole server shares the lock table. If it is full, nobody can lock anything, or even connect. So a session may
//! use at most a quarter of it.

use crate::errors::{self, Report};
use crate::pg::compat;
use crate::pg::session::scope::{SavepointId, TransactionEvent};
use crate::pg::session::xact;
use pgrx::pg_sys;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// An entry of the lock table, by the kind and key in its tag. A session has one entry per tag, whatever the number of
/// modes.
pub type Entry = (u16, u64);

/// An entry that the transaction uses.
struct Taken {
    /// The number of times that the lock was taken and not released.
    times: u32,
    /// The savepoint in which the lock was first taken; its rollback releases the lock.
    savepoint: SavepointId,
}

thread_local! {
    static TAKEN: RefCell<BTreeMap<Entry, Taken>> = const { RefCell::new(BTreeMap::new()) };
    /// The number of entries of session leases, which outlive the transaction.
    static SESSION: Cell<usize> = const { Cell::new(0) };
}

/// Forgets entries at the end of the transaction, and at the rollback of their savepoint.
pub fn on_transaction_event(event: TransactionEvent) {
    TAKEN.with_borrow_mut(|taken| taken.retain(|_, entry| event.survives(entry.savepoint)));
}

/// Takes a lock entry and counts it for the current subtransaction. Returns false if `acquire` does not get the lock.
/// Errors with 53200 if the session's share is used up.
pub fn take(entry: Entry, acquire: impl FnOnce() -> bool) -> Result<bool, Report> {
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

/// Errors with 53200 if the session's share is used up.
pub fn require_one_more() -> Result<(), Report> {
    if is_full() {
        return Err(errors::lock_table_share(at_most()));
    }
    Ok(())
}

/// Returns true if this session uses a quarter of the lock table.
pub fn is_full() -> bool {
    TAKEN.with_borrow(BTreeMap::len) + SESSION.get() >= at_most()
}

/// Counts an entry of a session lease.
pub fn session_entry_taken() {
    SESSION.set(SESSION.get() + 1);
}

/// Forgets `count` entries of session leases.
pub fn session_entries_gone(count: usize) {
    SESSION.set(SESSION.get().saturating_sub(count));
}

/// The number of entries that a session may use: a quarter of the table.
fn at_most() -> usize {
    // SAFETY: settings that are fixed when the server starts.
    let entries = unsafe {
        i64::from(pg_sys::max_locks_per_xact)
            * (i64::from(pg_sys::MaxBackends) + i64::from(compat::max_prepared_xacts))
    };
    usize::try_from(entries / 4).unwrap_or(usize::MAX)
}

/// Forgets an entry if its lock was released as often as taken.
pub fn released(entry: Entry) {
    TAKEN.with_borrow_mut(|taken| {
        if let Some(held) = taken.get_mut(&entry) {
            held.times -= 1;
            if held.times == 0 {
                taken.remove(&entry);
            }
        }
    });
}
