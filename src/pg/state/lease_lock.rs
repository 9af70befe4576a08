//! The keys of the leases' locks: a hash of a lease's name and a slot, under a secret of the database.
//!
//! Everybody may see in `pg_locks` which keys are locked. Without a secret, a role that may choose names could search
//! for one that has the key of another role's lease, and block that. SipHash prevents it: to those who do not know the
//! secret, a key tells nothing of another one. The secret is in a sequence that only the extension's owner may read;
//! members of `pg_read_all_data` may read it all the same, so the audit reports them. The secret is in no dump, because
//! a new database has no locks yet. A standby has it, and so have prepared transactions.

use crate::errors::{self, Refusal};
use crate::pg::call::raise;
use crate::pg::locks::lock::LockTag;
use crate::pg::session::server;
use crate::pg::session::xact;
use crate::pg::state::relation::{self, state_oid};
use crate::pg::state::sequence;
use pg_fence_rules::locks::Lock;
use pgrx::pg_sys::Oid;
use std::cell::Cell;
#[allow(deprecated)] // what is meant instead has no fixed algorithm
use std::hash::{Hasher, SipHasher};

/// The secret, and the sequence from which it was read.
#[derive(Clone, Copy)]
struct Known {
    /// The counter of name changes when the sequence was last looked up.
    at: u64,
    sequence: Oid,
    secret: i64,
}

thread_local! {
    static KNOWN: Cell<Option<Known>> = const { Cell::new(None) };
}

impl LockTag {
    /// The lock of that kind on a lease, or on the grant in a slot; the slot is 0 for a lock on the whole lease. Raises
    /// 55000 if the secret is lost.
    pub fn new(lock: Lock, name: &[u8], slot: i32) -> Self {
        LockTag::by_key(lock, hash(secret(), name, slot))
    }

    /// The lock on a lease's queue of waiters.
    pub fn queue(name: &[u8]) -> Self {
        LockTag::new(Lock::Queue, name, 0)
    }

    /// The key, which `pg_locks` shows in two halves.
    pub fn key(&self) -> u64 {
        self.entry().1
    }
}

/// A fault of the secret that a session can see.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SecretFault {
    /// The sequence has no value: sessions that do not know the secret yet find no lock.
    Lost,
    /// The sequence was set since this session has read it, so that sessions use different locks for one lease.
    Replaced,
    /// The secret is small, so it was set by hand instead of drawn at random, and can be guessed.
    Guessable,
}

/// The least secret that cannot be guessed. A random one is smaller in one of two thousand million databases.
const LEAST_SECRET: i64 = 1 << 32;

/// Compares the sequence with the secret that this session uses. Returns `None` on a standby, where no leases are
/// granted.
pub fn secret_fault() -> Option<SecretFault> {
    if server::in_recovery() {
        return None;
    }
    let sequence = state_oid(c"lock_key_seq").ok()?;
    let known = KNOWN.get().filter(|known| known.sequence == sequence);
    match sequence::read(sequence).last {
        None => Some(SecretFault::Lost),
        Some(secret) if known.is_some_and(|known| known.secret != secret) => {
            Some(SecretFault::Replaced)
        }
        Some(secret) if secret < LEAST_SECRET => Some(SecretFault::Guessable),
        Some(_) => None,
    }
}

/// SipHash-2-4.
#[allow(deprecated)]
fn hash(secret: i64, name: &[u8], slot: i32) -> u64 {
    let mut hasher = SipHasher::new_with_keys(secret as u64, 0);
    hasher.write(name);
    hasher.write(&slot.to_le_bytes());
    hasher.finish()
}

#[inline]
fn secret() -> i64 {
    match KNOWN.get() {
        Some(known) if known.at == relation::name_changes() => known.secret,
        known => look_again(known).unwrap_or_else(|refusal| raise::now(refusal)),
    }
}

/// Reads the secret again, since the extension may be another one by now. At the end of a transaction nothing can be
/// looked up, but then the transaction's locks have the known secret.
#[cold]
fn look_again(known: Option<Known>) -> Result<i64, Refusal> {
    if let Some(known) = known.filter(|_| !xact::may_look_up()) {
        return Ok(known.secret);
    }
    let sequence = state_oid(c"lock_key_seq")?;
    let secret = match known {
        Some(known) if known.sequence == sequence => known.secret,
        _ => sequence::read(sequence).last.ok_or_else(errors::no_lock_key)?,
    };
    KNOWN.set(Some(Known { at: relation::name_changes(), sequence, secret }));
    Ok(secret)
}
