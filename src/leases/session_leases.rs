//! The grants that end with this session (`session => true`): which it has, and when their locks are given back.
//!
//! The lock is what tells others that the session lives (`pg::locks::session_lock`). It is taken before the grant's row is
//! written and outlives the transaction; here is kept what has to give it back earlier than the session's end: a
//! rollback of the acquire, and the end of the grant in this session. A grant that another session ends leaves its
//! lock behind until `forget_ended` or the end of the session: it keeps nobody out, for its key is the first token.

use super::queue;
use crate::errors::{self, Refusal};
use crate::pg::locks::lock_count;
use crate::pg::locks::session_lock::{self, SessionLock};
use crate::pg::session::clock;
use crate::pg::session::scope::{Ending, Moment, SavepointId};
use crate::pg::session::xact;
use crate::pg::state::lease_table::{AsOf, LeaseTable};
use pg_fence_rules::grant::Phase;
use pg_fence_rules::Token;
use std::cell::RefCell;
use std::collections::HashSet;

/// A grant that this session acquired, to end with it.
struct SessionLease {
    name: Vec<u8>,
    first: Token,
    /// The savepoint that acquired it, until its transaction has committed.
    acquired_in: Option<SavepointId>,
    /// The savepoint in which this session has ended it, until its transaction ends.
    ended_in: Option<SavepointId>,
}

/// The leases of this session, oldest first.
#[derive(Default)]
struct SessionLeases(Vec<SessionLease>);

thread_local! {
    static LEASES: RefCell<SessionLeases> = const { RefCell::new(SessionLeases(Vec::new())) };
}

/// The leases of this session hear of the ends of its transactions.
pub fn follow(moment: Moment) {
    LEASES.with_borrow_mut(|leases| leases.follow(moment));
}

/// Binds a grant that is about to be written to this session. Several leases acquired under one token share a lock.
/// Errors: 53200.
pub fn bind(table: &LeaseTable, name: &[u8], first: Token) -> Result<(), Refusal> {
    session_lock::at_exit(session_ended);
    if lock_count::is_full() {
        forget_ended(table);
    }
    let lock = SessionLock::of(first);
    if !lock.is_mine() {
        lock.take()?;
    }
    let acquired_in = Some(xact::savepoint());
    let lease = SessionLease { name: name.to_vec(), first, acquired_in, ended_in: None };
    LEASES.with_borrow_mut(|leases| leases.0.push(lease));
    Ok(())
}

/// This transaction ends a grant; where it is one of this session's, its lock goes with the commit.
pub fn grant_ended(name: &[u8], first: Token) {
    LEASES.with_borrow_mut(|leases| {
        let ours = leases.0.iter_mut().find(|l| l.first == first && l.name == name);
        if let Some(lease) = ours.filter(|l| l.ended_in.is_none()) {
            lease.ended_in = Some(xact::savepoint());
        }
    });
}

/// Refuses to prepare a transaction that has acquired one (0A000): what ends with a session cannot be left to
/// whichever session commits the prepared transaction.
pub fn check_prepare(prepares: bool) -> Result<(), Refusal> {
    let acquired = |leases: &SessionLeases| leases.0.iter().any(|l| l.acquired_in.is_some());
    if prepares && LEASES.with_borrow(acquired) {
        Err(errors::session_lease_prepared())
    } else {
        Ok(())
    }
}

/// Gives back the locks of grants that are over: others may have ended them, or the clock.
fn forget_ended(table: &LeaseTable) {
    let now = clock::now();
    let lives = |name: &[u8], first: Token| {
        table
            .rows(name, AsOf::Now)
            .iter()
            .any(|row| row.grant.tokens.first() == first && row.grant.phase(now) == Phase::Held)
    };
    // Not borrowed while the table is read: an error must leave the list as it is.
    let settled = LEASES.with_borrow(|leases| {
        let settled = leases.0.iter().filter(|lease| lease.acquired_in.is_none());
        settled.map(|lease| (lease.name.clone(), lease.first)).collect::<Vec<_>>()
    });
    let over: HashSet<(Vec<u8>, Token)> =
        settled.into_iter().filter(|(name, first)| !lives(name, *first)).collect();
    LEASES.with_borrow_mut(|leases| {
        leases.give_back(|lease| {
            lease.acquired_in.is_none() && over.contains(&(lease.name.clone(), lease.first))
        });
    });
}

impl SessionLeases {
    fn follow(&mut self, moment: Moment) {
        let is_committed = matches!(moment, Moment::Ended(Ending::Committed));
        self.give_back(|lease| {
            let is_over = |mark: &mut Option<SavepointId>| {
                mark.take_if(|savepoint| !moment.spares(savepoint)).is_some()
            };
            let (acquired, ended) = (is_over(&mut lease.acquired_in), is_over(&mut lease.ended_in));
            // Others end what a rollback leaves, if anybody does.
            if is_committed {
                ended
            } else {
                acquired
            }
        });
        if matches!(moment, Moment::Ended(_)) {
            self.notice_unlocked();
        }
    }

    /// `DISCARD ALL` and `pg_advisory_unlock_all()` give back all of the session's locks: the waiters are told.
    /// Looking at the oldest is enough, for they go together.
    fn notice_unlocked(&mut self) {
        if self.0.first().is_none_or(|oldest| SessionLock::of(oldest.first).is_mine()) {
            return;
        }
        let gone = self.forget(|lease| {
            let goes = !SessionLock::of(lease.first).is_mine();
            if goes {
                queue::wake(&lease.name);
            }
            goes
        });
        lock_count::session_entries_gone(gone.len());
    }

    /// Forgets some, and gives back the locks that no other lease shares.
    fn give_back(&mut self, some: impl FnMut(&mut SessionLease) -> bool) {
        for first in self.forget(some) {
            let lock = SessionLock::of(first);
            if !self.0.iter().any(|lease| lease.first == first) && lock.is_mine() {
                lock.give();
            }
        }
    }

    /// Forgets some; which first tokens they had, each once.
    fn forget(&mut self, mut some: impl FnMut(&mut SessionLease) -> bool) -> Vec<Token> {
        let mut gone = Vec::new();
        self.0.retain_mut(|lease| {
            let goes = some(lease);
            if goes {
                gone.push(lease.first);
            }
            !goes
        });
        gone.sort_unstable();
        gone.dedup();
        gone
    }
}

/// The session has ended, and its locks are gone: those who wait for its leases are told.
fn session_ended() {
    for lease in LEASES.take().0 {
        queue::wake(&lease.name);
    }
}
