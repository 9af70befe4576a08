//! The grants that end with this session (`session => true`): which it has, and when their locks are given back.
//!
//! The lock is what tells others that the session lives (`pg::session_lock`). It is taken before the grant's row is
//! written and outlives the transaction; here is kept what has to give it back earlier than the session's end: a
//! rollback of the acquire, and the end of the grant in this session. A grant that another session ends leaves its
//! lock behind until `forget_ended` or the end of the session: it keeps nobody out, for its key is the first token.

use super::line;
use crate::errors::{self, Refusal};
use crate::pg::lease_table::{AsOf, LeaseTable};
use crate::pg::session_lock::{self, SessionLock};
use crate::pg::xact::{self, SubTransaction};
use crate::pg::{lock_count, server};
use pg_fence_rules::grant::Phase;
use pg_fence_rules::Token;
use std::cell::RefCell;

/// A grant that this session acquired, to end with it.
struct SessionLease {
    name: Vec<u8>,
    first: Token,
    /// The savepoint that acquired it, until its transaction has committed.
    acquired_in: Option<SubTransaction>,
    /// The savepoint in which this session has ended it, until its transaction ends.
    ended_in: Option<SubTransaction>,
}

thread_local! {
    static LEASES: RefCell<Vec<SessionLease>> = const { RefCell::new(Vec::new()) };
}

/// Binds a grant that is about to be written to this session. Several leases acquired under one token share a lock.
pub fn bind(table: &LeaseTable, name: &[u8], first: Token) {
    session_lock::at_exit(session_ended);
    if lock_count::is_full() {
        forget_ended(table);
    }
    let lock = SessionLock::of(first);
    if !lock.is_mine() {
        lock.take();
    }
    let acquired_in = Some(xact::savepoint());
    let lease = SessionLease { name: name.to_vec(), first, acquired_in, ended_in: None };
    LEASES.with_borrow_mut(|leases| leases.push(lease));
}

/// This transaction ends a grant; where it is one of this session's, its lock goes with the commit.
pub fn ended(name: &[u8], first: Token) {
    LEASES.with_borrow_mut(|leases| {
        let ours = leases.iter_mut().find(|l| l.first == first && l.name == name);
        if let Some(lease) = ours.filter(|l| l.ended_in.is_none()) {
            lease.ended_in = Some(xact::savepoint());
        }
    });
}

/// Refuses to prepare a transaction that has acquired one (0A000): what ends with a session cannot be left to
/// whichever session commits the prepared transaction.
pub fn before_prepare() -> Result<(), Refusal> {
    let acquired = |leases: &Vec<SessionLease>| leases.iter().any(|l| l.acquired_in.is_some());
    if LEASES.with_borrow(acquired) {
        Err(errors::session_lease_prepared())
    } else {
        Ok(())
    }
}

/// Gives back the locks of grants that are over: others may have ended them, or the clock.
fn forget_ended(table: &LeaseTable) {
    let now = server::now();
    let lives = |lease: &SessionLease| {
        lease.acquired_in.is_some()
            || table.rows(&lease.name, AsOf::Now).iter().any(|row| {
                row.grant.tokens.first() == lease.first && row.grant.phase(now) == Phase::Held
            })
    };
    // Not borrowed while the table is read: an error must find it whole.
    let leases = LEASES.take();
    let over: Vec<bool> = leases.iter().map(|lease| !lives(lease)).collect();
    LEASES.set(leases);
    let mut over = over.into_iter();
    give_back(|_| over.next().unwrap_or(false));
}

/// A savepoint's acquires and releases pass to its parent.
pub fn savepoint_released(savepoint: SubTransaction, parent: SubTransaction) {
    LEASES.with_borrow_mut(|leases| {
        for mark in leases.iter_mut().flat_map(|l| [&mut l.acquired_in, &mut l.ended_in]) {
            if *mark == Some(savepoint) {
                *mark = Some(parent);
            }
        }
    });
}

/// A savepoint's acquires and releases did not happen.
pub fn savepoint_rolled_back(savepoint: SubTransaction) {
    give_back(|lease| lease.acquired_in == Some(savepoint));
    LEASES.with_borrow_mut(|leases| {
        leases.iter_mut().filter(|l| l.ended_in == Some(savepoint)).for_each(|l| l.ended_in = None);
    });
}

/// The transaction has committed.
pub fn transaction_committed() {
    give_back(|lease| lease.ended_in.is_some());
    settle();
}

/// The transaction was rolled back, or prepared: what it ended is ended by others, if at all.
pub fn transaction_rolled_back() {
    give_back(|lease| lease.acquired_in.is_some());
    settle();
}

fn settle() {
    LEASES.with_borrow_mut(|leases| {
        for lease in leases.iter_mut() {
            (lease.acquired_in, lease.ended_in) = (None, None);
        }
    });
    notice_unlocked();
}

/// `DISCARD ALL` and `pg_advisory_unlock_all()` give back all of the session's locks: whoever waits is told.
/// Looking at the oldest is enough, for they go together.
fn notice_unlocked() {
    let oldest = LEASES.with_borrow(|leases| leases.first().map(|lease| lease.first));
    if oldest.is_none_or(|first| SessionLock::of(first).is_mine()) {
        return;
    }
    let mut gone = LEASES.with_borrow_mut(|leases| {
        let mut gone = Vec::new();
        leases.retain(|lease| {
            let kept = SessionLock::of(lease.first).is_mine();
            if !kept {
                line::wake(&lease.name);
                gone.push(lease.first);
            }
            kept
        });
        gone
    });
    gone.sort_unstable();
    gone.dedup();
    lock_count::session_entries_gone(gone.len());
}

/// Forgets some, and gives back the locks that no other lease shares.
fn give_back(mut some: impl FnMut(&SessionLease) -> bool) {
    LEASES.with_borrow_mut(|leases| {
        let mut gone = Vec::new();
        leases.retain(|lease| {
            let goes = some(lease);
            if goes {
                gone.push(lease.first);
            }
            !goes
        });
        gone.sort_unstable();
        gone.dedup();
        for first in gone {
            let lock = SessionLock::of(first);
            if !leases.iter().any(|lease| lease.first == first) && lock.is_mine() {
                lock.give();
            }
        }
    });
}

/// The session has ended, and its locks are gone: whoever waits for one of its leases is told.
fn session_ended() {
    for lease in LEASES.take() {
        line::wake(&lease.name);
    }
}
