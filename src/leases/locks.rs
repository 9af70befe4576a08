//! The locks of a lease: released on drop, unless they are held until the transaction ends.
//!
//! `pg_fence_rules::locks` lists the locks and who takes which. Every decision about a lease goes the same way: take
//! the locks, read the row again, decide, and `hold_until_commit` the locks or drop them. `Locked` is a grant whose locks
//! are taken; an acquire may need several slots and takes its locks in `free_slot`.

use super::queue;
use crate::errors::Report;
use crate::pg::locks::lock::LockTag;
use crate::pg::locks::wait::{self, Waiting};
use crate::pg::state::lease_table::{AsOf, LeaseTable};
use crate::pg::state::row::Row;
use pg_fence_rules::locks::{LockMode, LockStep};

/// Locks of one lease that this transaction has just taken. Dropping them without `hold_until_commit` releases them and
/// wakes the head of the lease's queue, which may have found the lease locked in between.
pub struct Locks<'a> {
    name: &'a [u8],
    taken: Vec<(LockTag, LockMode)>,
}

impl<'a> Locks<'a> {
    /// An empty set of locks of this lease.
    pub fn of(name: &'a [u8]) -> Self {
        Locks { name, taken: Vec::new() }
    }

    /// Takes a lock. Returns false if the step does not wait and the lock is held. Errors: 53200.
    pub fn take(&mut self, step: LockStep, slot: i32) -> Result<bool, Report> {
        let tag = LockTag::new(step.lock, self.name, slot);
        let taken = tag.take(step.mode, step.waits)?;
        self.taken.extend(taken.then_some((tag, step.mode)));
        Ok(taken)
    }

    /// Takes a lock, waiting for it if it is held. Returns false if the time is up first. Sessions that then ask for a
    /// conflicting lock queue behind this one. Errors: 53200, and those of an interrupted wait.
    pub fn take_within(
        &mut self,
        step: LockStep,
        slot: i32,
        waiting: &Waiting,
    ) -> Result<bool, Report> {
        let tag = LockTag::new(step.lock, self.name, slot);
        let taken = wait::take_within(&tag, step.mode, waiting)?;
        self.taken.extend(taken.then_some((tag, step.mode)));
        Ok(taken)
    }

    /// The number of locks taken.
    pub fn count(&self) -> usize {
        self.taken.len()
    }

    /// Releases all locks but the first `first`. The queue's head is not woken yet, since the search continues.
    pub fn give_back_all_but(&mut self, first: usize) {
        for (tag, mode) in self.taken.drain(first..).rev() {
            tag.release(mode);
        }
    }

    /// Holds the locks until the transaction ends, or the savepoint is rolled back.
    pub fn hold_until_commit(mut self) {
        self.taken.clear();
    }
}

impl Drop for Locks<'_> {
    fn drop(&mut self) {
        // The clean-up after an error releases the locks by itself; waking the head before that would be too early.
        if self.taken.is_empty() || std::thread::panicking() {
            return;
        }
        self.give_back_all_but(0);
        queue::wake(self.name);
    }
}

/// A grant with the row read under its lock. Dropping it releases the lock unless `hold_until_commit` was called.
pub struct Locked<'a> {
    /// The row, which no other session can change now.
    pub row: Row,
    locks: Locks<'a>,
}

impl<'a> Locked<'a> {
    /// Locks the grant in a slot and reads its row again. Returns `None`, with nothing locked, if the lock is held by
    /// another session or no row of the slot is wanted (any more). Errors: 53200.
    pub fn grant(
        table: &LeaseTable,
        name: &'a [u8],
        slot: i32,
        step: LockStep,
        wanted: impl Fn(&Row) -> bool,
    ) -> Result<Option<Self>, Report> {
        let mut locks = Locks::of(name);
        if !locks.take(step, slot)? {
            return Ok(None);
        }
        Ok(Self::under(locks, table, slot, wanted))
    }

    /// Locks a grant that was read, as `grant` does. Usually nobody has written its row since, and that is found out
    /// without another search.
    pub fn seen(
        table: &LeaseTable,
        name: &'a [u8],
        seen: &Row,
        step: LockStep,
        wanted: impl Fn(&Row) -> bool,
    ) -> Result<Option<Self>, Report> {
        let mut locks = Locks::of(name);
        if !locks.take(step, seen.grant.slot)? {
            return Ok(None);
        }
        if table.still_has(seen) {
            return Ok(Some(Locked { row: seen.with_session_rechecked(), locks }));
        }
        Ok(Self::under(locks, table, seen.grant.slot, wanted))
    }

    /// Reads the row of a slot again under these locks, because what was read before may be outdated. Drops the locks if
    /// there is no such row.
    pub fn under(
        locks: Locks<'a>,
        table: &LeaseTable,
        slot: i32,
        wanted: impl Fn(&Row) -> bool,
    ) -> Option<Self> {
        let row = table.rows_in_slot(locks.name, slot, AsOf::Now).into_iter().find(wanted)?;
        Some(Locked { row, locks })
    }

    /// Holds the lock until the transaction ends, or the savepoint is rolled back.
    pub fn hold_until_commit(self) -> Row {
        self.locks.hold_until_commit();
        self.row
    }
}
