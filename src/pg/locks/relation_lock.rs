//! Locks on tables and indexes of the state, taken without queueing behind maintenance.
//!
//! Who queues for a relation's lock behind a REINDEX that itself queues behind an open transaction waits as long
//! as that transaction likes. A try must not: it waits for those who have the lock (then maintenance is at
//! work, and ends), and takes the lease for taken where they merely wait for it.

use crate::pg::compat;
use crate::pg::raw;
use pgrx::pg_sys;
use std::ffi::c_int;

/// What to do about a lock that cannot be had at once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum IfLocked {
    /// Queue for it, behind those that came first.
    Queue,
    /// Wait for those who have one that conflicts; give up where there are only such as wait for one.
    WaitForHolders,
    /// Give up: somebody has a lock that conflicts, or waits for one.
    GiveUp,
}

/// How often to look whether the lock is to be had where nobody has one that conflicts, a millisecond apart:
/// when it changes hands, nobody may have it for an instant.
const QUICK_LOOKS: u32 = 5;

/// Takes a relation's lock without queueing; false when it is not to be had that way.
pub fn take(relation: pg_sys::Oid, mode: c_int, if_locked: IfLocked) -> bool {
    let mut looks = 0;
    loop {
        // SAFETY: a lock by oid, as any; it goes with the transaction at the latest.
        if unsafe { compat::guarded(|| raw::ConditionalLockRelationOid(relation, mode)) } {
            return true;
        }
        match first_holder(relation, mode) {
            _ if if_locked != IfLocked::WaitForHolders => return false,
            // SAFETY: waits for the end of a transaction, as CREATE INDEX CONCURRENTLY does: `lock_timeout`,
            // cancel and the deadlock detector end it.
            Some(holder) => unsafe {
                pg_sys::VirtualXactLock(holder, true);
                looks = 0;
            },
            None if looks == QUICK_LOOKS => return false,
            None => {
                looks += 1;
                // SAFETY: sleeps.
                unsafe { pg_sys::pg_usleep(1_000) };
                pgrx::check_for_interrupts!();
            }
        }
    }
}

/// A transaction that has a lock on the relation which conflicts with this mode. Those that wait for one do
/// not count.
fn first_holder(relation: pg_sys::Oid, mode: c_int) -> Option<pg_sys::VirtualTransactionId> {
    let tag = pg_sys::LOCKTAG {
        // SAFETY: set once when the backend starts.
        locktag_field1: unsafe { pg_sys::MyDatabaseId }.to_u32(),
        locktag_field2: relation.to_u32(),
        locktag_type: pg_sys::LockTagType::LOCKTAG_RELATION as u8,
        locktag_lockmethodid: pg_sys::DEFAULT_LOCKMETHOD as u8,
        ..Default::default()
    };
    let mut count: c_int = 0;
    // SAFETY: gives back `count` entries.
    unsafe {
        let found = pg_sys::GetLockConflicts(&tag, mode, &mut count);
        let first = (count > 0).then(|| *found);
        pg_sys::pfree(found.cast());
        first
    }
}
