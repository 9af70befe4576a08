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
use crate::pg::session::xact::{self, Outcome, TransactionId};
use crate::pg::state::lease_table::{AsOf, LeaseTable};
use pg_fence_rules::grant::Phase;
use pg_fence_rules::Token;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

/// The first token of a grant, and the name of its lease: leases that were acquired at once share the token.
type Key = (Token, Vec<u8>);

/// A grant that this session acquired, to end with it.
#[derive(Default)]
struct SessionLease {
    /// The savepoint that acquired it, until its transaction has committed.
    acquired_in: Option<SavepointId>,
    /// The savepoint in which this session has ended it, until its transaction ends.
    ended_in: Option<SavepointId>,
}

/// The leases of this session. A session may have thousands: the end of a transaction looks at those alone that the
/// transaction has touched.
#[derive(Default)]
struct SessionLeases {
    /// The oldest first; those that share a lock stand together.
    all: BTreeMap<Key, SessionLease>,
    /// Which of them the open transaction has acquired or ended.
    touched: Vec<Key>,
    /// Which of them a prepared transaction has ended: until that one is committed they are the session's.
    ended_by_prepared: Vec<(TransactionId, Key)>,
}

thread_local! {
    static LEASES: RefCell<SessionLeases> = RefCell::default();
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
    let lease = SessionLease { acquired_in: Some(xact::savepoint()), ended_in: None };
    LEASES.with_borrow_mut(|leases| {
        leases.touched.push((first, name.to_vec()));
        leases.all.insert((first, name.to_vec()), lease);
    });
    Ok(())
}

/// This transaction ends a grant; where it is one of this session's, its lock goes with the commit.
pub fn grant_ended(name: &[u8], first: Token) {
    LEASES.with_borrow_mut(|leases| {
        let key = (first, name.to_vec());
        let Some(lease) = leases.all.get_mut(&key) else { return };
        if lease.ended_in.is_none() {
            lease.ended_in = Some(xact::savepoint());
            leases.touched.push(key);
        }
    });
}

/// Called before a commit or, where it `prepares`, before a transaction is prepared. Refuses to prepare one that has
/// acquired a lease of the session (0A000): what ends with a session cannot be left to whichever session commits the
/// prepared transaction.
pub fn before_commit(prepares: bool) -> Result<(), Refusal> {
    LEASES.with_borrow_mut(|leases| match prepares {
        true => leases.note_prepared(),
        false => {
            leases.settle_prepared();
            Ok(())
        }
    })
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
    let settled: Vec<Key> = LEASES.with_borrow(|leases| {
        let settled = leases.all.iter().filter(|(_, lease)| lease.acquired_in.is_none());
        settled.map(|(key, _)| key.clone()).collect()
    });
    let over: Vec<Key> = settled.into_iter().filter(|(first, name)| !lives(name, *first)).collect();
    LEASES.with_borrow_mut(|leases| over.iter().for_each(|key| leases.give_back(key)));
}

impl SessionLeases {
    fn follow(&mut self, moment: Moment) {
        let is_committed = matches!(moment, Moment::Ended(Ending::Committed));
        for key in std::mem::take(&mut self.touched) {
            let Some(lease) = self.all.get_mut(&key) else { continue };
            let is_over = |mark: &mut Option<SavepointId>| {
                mark.take_if(|savepoint| !moment.spares(savepoint)).is_some()
            };
            let (acquired, ended) = (is_over(&mut lease.acquired_in), is_over(&mut lease.ended_in));
            // Others end what a rollback leaves, if anybody does.
            let goes = if is_committed { ended } else { acquired };
            if goes {
                self.give_back(&key);
            } else if lease.acquired_in.is_some() || lease.ended_in.is_some() {
                self.touched.push(key);
            }
        }
        if matches!(moment, Moment::Ended(_)) {
            self.notice_unlocked();
        }
    }

    fn note_prepared(&mut self) -> Result<(), Refusal> {
        let mut touched = self.touched.iter().filter_map(|key| self.all.get(key));
        if touched.any(|lease| lease.acquired_in.is_some()) {
            return Err(errors::session_lease_prepared());
        }
        let Some(transaction) = xact::id() else { return Ok(()) };
        for key in &self.touched {
            if self.all.get(key).is_some_and(|lease| lease.ended_in.is_some()) {
                self.ended_by_prepared.push((transaction, key.clone()));
            }
        }
        Ok(())
    }

    /// Gives back the locks of the grants whose end was prepared and is committed by now.
    fn settle_prepared(&mut self) {
        for (transaction, key) in std::mem::take(&mut self.ended_by_prepared) {
            match transaction.outcome() {
                Outcome::Committed => self.give_back(&key),
                Outcome::Open => self.ended_by_prepared.push((transaction, key)),
                Outcome::Other => {}
            }
        }
    }

    /// `DISCARD ALL` and `pg_advisory_unlock_all()` give back all of the session's locks: the waiters are told.
    /// Looking at the oldest is enough, for they go together.
    fn notice_unlocked(&mut self) {
        let is_mine = |key: &Key| SessionLock::of(key.0).is_mine();
        if self.all.first_key_value().is_none_or(|(oldest, _)| is_mine(oldest)) {
            return;
        }
        let mut gone = BTreeSet::new();
        self.all.retain(|key, _| {
            let stays = is_mine(key);
            if !stays {
                gone.insert(key.0);
                queue::wake(&key.1);
            }
            stays
        });
        lock_count::session_entries_gone(gone.len());
    }

    /// Forgets one, and gives back its lock where no other lease shares it.
    fn give_back(&mut self, key: &Key) {
        let is_shared = |all: &BTreeMap<Key, SessionLease>| {
            let next = all.range((key.0, Vec::new())..).next();
            next.is_some_and(|((first, _), _)| *first == key.0)
        };
        if self.all.remove(key).is_some() && !is_shared(&self.all) {
            let lock = SessionLock::of(key.0);
            if lock.is_mine() {
                lock.give();
            }
        }
    }
}

/// The session has ended, and its locks are gone: those who wait for its leases are told.
fn session_ended() {
    for (_, name) in LEASES.take().all.into_keys() {
        queue::wake(&name);
    }
}
