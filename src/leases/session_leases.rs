//! The grants that end with this session (`session => true`), and when their locks are released.
//!
//! A lock shows other sessions that this one lives (`pg::locks::session_lock`). It is taken before the grant's row is
//! written and outlives the transaction. This module releases it before the end of the session in two cases: the
//! acquire is rolled back, or this session ends the grant. If another session or a prepared transaction ends the grant, the
//! lock stays until `forget_ended` or the end of the session, as that of a grant that expires. It blocks nobody, because
//! its key is the grant's first token, but it takes up an entry of the server's lock table.

use super::queue;
use crate::errors::{self, Report};
use crate::pg::locks::lock::LockTag;
use crate::pg::locks::lock_count;
use crate::pg::locks::session_lock::{self, SessionLock};
use crate::pg::session::clock;
use crate::pg::session::scope::{Ending, SavepointId, TransactionEvent};
use crate::pg::session::xact;
use crate::pg::state::lease_table::{AsOf, LeaseTable};
use crate::pg::state::row::Row;
use pg_fence_rules::Token;
use pg_fence_rules::grant::Phase;
use pg_fence_rules::locks::CHANGE;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

/// The first token of a grant and the name of its lease. Leases acquired in one call share the token.
type Key = (Token, Vec<u8>);

/// A grant that this session acquired and that ends with it.
#[derive(Default)]
struct SessionLease {
    /// The savepoint that acquired the grant, until its transaction has committed.
    acquired_in: Option<SavepointId>,
    /// The savepoint in which this session ended the grant, until its transaction is over.
    ended_in: Option<SavepointId>,
}

/// The session leases of this session. There may be thousands, so the end of a transaction visits only those that the
/// transaction touched.
#[derive(Default)]
struct SessionLeases {
    /// All of them, the oldest first; leases that share a lock are neighbours.
    all: BTreeMap<Key, SessionLease>,
    /// Those that the open transaction has acquired or ended.
    touched: Vec<Key>,
    /// Twice the number that the last `forget_ended` has left, so that few acquires look for ended grants.
    sweep_at: usize,
}

/// The least number of session leases among which an acquire looks for ended grants.
const LEAST_SWEPT: usize = 64;

thread_local! {
    static LEASES: RefCell<SessionLeases> = RefCell::default();
}

/// Settles the grants that the transaction has acquired or ended, at its end and at the rollback of a savepoint.
pub fn on_transaction_event(event: TransactionEvent) {
    LEASES.with_borrow_mut(|leases| leases.settle(event));
}

/// Binds a grant that is about to be written to this session. Several leases acquired under one token share one lock.
/// Errors: 53200.
pub fn bind(table: &LeaseTable, name: &[u8], first: Token) -> Result<(), Report> {
    session_lock::at_exit(session_ended);
    if lock_count::is_full() || LEASES.with_borrow(SessionLeases::may_have_many_ended) {
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

/// Notes that this transaction ends a grant. If it is one of this session's, its lock is released at commit.
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

/// Runs before a commit or, if `prepares`, before PREPARE TRANSACTION. A transaction that has acquired a session lease
/// cannot be prepared (0A000): any session may commit it, and the lease would not end with that one.
pub fn before_commit(prepares: bool) -> Result<(), Report> {
    match prepares && LEASES.with_borrow(SessionLeases::has_acquired) {
        true => Err(errors::session_lease_prepared()),
        false => Ok(()),
    }
}

/// Releases the locks of grants that have expired or that other sessions have ended, unless a rollback or a commit may
/// still bring one back to life.
fn forget_ended(table: &LeaseTable) {
    let now = clock::now();
    let row_of = |name: &[u8], first: Token| {
        let mut rows = table.rows(name, AsOf::Now).into_iter();
        rows.find(|row| row.grant.tokens.first() == first)
    };
    // A rollback restores the grant that this transaction has shortened.
    let may_be_held = |row: &Row| row.is_own() || row.grant.phase(now) == Phase::Held;
    // A renewal has this lock from before its look at the clock until its transaction ends.
    let is_being_renewed = |name: &[u8], row: &Row| {
        row.grant.phase(now) == Phase::Expired
            && LockTag::new(CHANGE.lock, name, row.grant.slot).has_conflicts(CHANGE.mode)
    };
    let lives = |name: &[u8], first: Token| {
        row_of(name, first).is_some_and(|row| {
            may_be_held(&row)
                || is_being_renewed(name, &row)
                // That transaction may have committed between the two looks.
                || row_of(name, first).is_some_and(|row| may_be_held(&row))
        })
    };
    // The list is not borrowed while the table is read, so that an error leaves it as it is.
    let settled: Vec<Key> = LEASES.with_borrow(|leases| {
        let is_open = |lease: &SessionLease| lease.acquired_in.or(lease.ended_in).is_some();
        let settled = leases.all.iter().filter(|(_, lease)| !is_open(lease));
        settled.map(|(key, _)| key.clone()).collect()
    });
    let over: Vec<Key> = settled.into_iter().filter(|(first, name)| !lives(name, *first)).collect();
    LEASES.with_borrow_mut(|leases| {
        over.iter().for_each(|key| leases.give_back(key));
        leases.sweep_at = 2 * leases.all.len();
    });
}

impl SessionLeases {
    fn settle(&mut self, event: TransactionEvent) {
        let is_committed = matches!(event, TransactionEvent::Ended(Ending::Committed));
        for key in std::mem::take(&mut self.touched) {
            let Some(lease) = self.all.get_mut(&key) else { continue };
            let is_over = |mark: &mut Option<SavepointId>| {
                mark.take_if(|savepoint| !event.survives(*savepoint)).is_some()
            };
            let (acquired, ended) = (is_over(&mut lease.acquired_in), is_over(&mut lease.ended_in));
            // A rolled-back end leaves the grant alive, so only a rolled-back acquire removes the lease here.
            let goes = if is_committed { ended } else { acquired };
            if goes {
                self.give_back(&key);
            } else if lease.acquired_in.is_some() || lease.ended_in.is_some() {
                self.touched.push(key);
            }
        }
        if matches!(event, TransactionEvent::Ended(_)) {
            self.notice_unlocked();
        }
    }

    /// Returns true if there are twice as many as after the last `forget_ended`.
    fn may_have_many_ended(&self) -> bool {
        self.all.len() >= self.sweep_at.max(LEAST_SWEPT)
    }

    /// Returns true if the open transaction has acquired one.
    fn has_acquired(&self) -> bool {
        let mut touched = self.touched.iter().filter_map(|key| self.all.get(key));
        touched.any(|lease| lease.acquired_in.is_some())
    }

    /// Wakes the waiters after `DISCARD ALL` or `pg_advisory_unlock_all()`, which release all of the session's locks.
    /// They go together, so checking the oldest is enough.
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

    /// Forgets a lease, and releases its lock if no other lease shares it.
    fn give_back(&mut self, key: &Key) {
        let is_shared = |all: &BTreeMap<Key, SessionLease>| {
            let next = all.range((key.0, Vec::new())..).next();
            next.is_some_and(|((first, _), _)| *first == key.0)
        };
        if self.all.remove(key).is_some() && !is_shared(&self.all) {
            let lock = SessionLock::of(key.0);
            if lock.is_mine() {
                lock.release();
            }
        }
    }
}

/// Wakes the sessions that wait for this session's leases: it has ended, and its locks are released.
fn session_ended() {
    for (_, name) in LEASES.take().all.into_keys() {
        queue::wake(&name);
    }
}
