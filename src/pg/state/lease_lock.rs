//! The keys of the leases' locks: a hash of a lease's name and a slot, under a secret of the server.
//!
//! Everybody may see in `pg_locks` which keys are locked. Without a secret, a role that may choose names could search
//! for one that has the key of another role's lease, and block that. SipHash prevents it: to those who do not know the
//! secret, a key tells nothing of another one.
//!
//! The secret is the server's mock authentication nonce: random bytes in the control file, made by initdb, that no SQL
//! function shows or changes. All sessions of a running server have the same. A crash, a base backup and a promotion
//! keep it, so a prepared transaction keeps its locks. The database is hashed as well, because who may call
//! `fence.queue_key` in one must not learn the keys of another.

use crate::pg::locks::lock::LockTag;
use crate::pg::raw;
use crate::pg::session::server;
use pg_fence_rules::locks::Lock;
#[allow(deprecated)] // what is meant instead has no fixed algorithm
use std::hash::{Hasher, SipHasher};

impl LockTag {
    /// The lock of that kind on a lease, or on the grant in a slot; the slot is 0 for a lock on the whole lease.
    pub fn new(lock: Lock, name: &[u8], slot: i32) -> Self {
        LockTag::by_key(lock, hash(name, slot))
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

/// SipHash-2-4.
#[allow(deprecated)]
fn hash(name: &[u8], slot: i32) -> u64 {
    // SAFETY: 32 bytes of the control file's copy in shared memory, which do not change while the server runs.
    let [first, second] =
        unsafe { raw::GetMockAuthenticationNonce().cast::<[u64; 2]>().read_unaligned() };
    let mut hasher = SipHasher::new_with_keys(first, second);
    hasher.write(&server::database().to_le_bytes());
    hasher.write(name);
    hasher.write(&slot.to_le_bytes());
    hasher.finish()
}
