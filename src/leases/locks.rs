//! Holding the locks of a lease: what is not kept is given back, and the head of the queue looks again.
//!
//! Which locks there are, and who takes which, is told in `pg_fence_rules::locks`. Every decision about a lease runs
//! through here: lock, read the row again under the lock, decide, and `keep` the locks or let them go.

use super::queue;
use crate::errors::Refusal;
use crate::pg::locks::lock::LockTag;
use crate::pg::locks::wait::{self, Waiting};
use crate::pg::state::lease_table::{AsOf, LeaseTable};
use crate::pg::state::row::Row;
use pg_fence_rules::locks::{LockMode, LockStep};

/// Locks of one lease that this transaction has just taken. They are given back when this goes, unless they are kept;
/// then the head of the lease's queue is woken, for a look of its in between found the lease locked.
pub struct Locks<'a> {
    name: &'a [u8],
    taken: Vec<(LockTag, LockMode)>,
}

impl<'a> Locks<'a> {
    /// None yet, of this lease.
    pub fn of(name: &'a [u8]) -> Self {
        Locks { name, taken: Vec::new() }
    }

    /// Takes one; false where somebody is in the way of a lock that is not waited for. Errors: 53200.
    pub fn take(&mut self, step: LockStep, slot: i32) -> Result<bool, Refusal> {
        let tag = LockTag::new(step.lock, self.name, slot);
        let taken = tag.take(step.mode, step.waits)?;
        self.taken.extend(taken.then_some((tag, step.mode)));
        Ok(taken)
    }

    /// Takes one at once, or waits for the one that is in the way; false where that takes too long. A session that asks
    /// for a lock that this one excludes waits behind it. Errors: 53200, and those of a wait that is broken off.
    pub fn take_within(
        &mut self,
        step: LockStep,
        slot: i32,
        waiting: &Waiting,
    ) -> Result<bool, Refusal> {
        let tag = LockTag::new(step.lock, self.name, slot);
        let taken = wait::take_within(&tag, step.mode, waiting)?;
        self.taken.extend(taken.then_some((tag, step.mode)));
        Ok(taken)
    }

    /// Reads the row of a slot again, now that it is locked: what was seen before the lock may be outdated.
    pub fn read_again(
        &self,
        table: &LeaseTable,
        slot: i32,
        wanted: impl Fn(&Row) -> bool,
    ) -> Option<Row> {
        let rows = table.rows(self.name, AsOf::Now).into_iter();
        rows.filter(|row| row.grant.slot == slot).find(wanted)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.taken.len()
    }

    /// Gives back all but so many that were taken first. Nobody is woken yet: the search goes on.
    pub fn give_back_all_but(&mut self, first: usize) {
        for (tag, mode) in self.taken.drain(first..).rev() {
            tag.give(mode);
        }
    }

    /// Keeps them until the transaction, or the savepoint, ends.
    pub fn keep(mut self) {
        self.taken.clear();
    }
}

impl Drop for Locks<'_> {
    fn drop(&mut self) {
        // An error's clean-up gives them back by itself, and wakes nobody too early.
        if self.taken.is_empty() || std::thread::panicking() {
            return;
        }
        self.give_back_all_but(0);
        queue::wake(self.name);
    }
}

/// A grant whose row was read under its lock, which is given back when this goes, unless it is kept.
pub struct Locked<'a> {
    /// The row, which nobody else changes now.
    pub row: Row,
    locks: Locks<'a>,
}

impl<'a> Locked<'a> {
    /// Locks the grant in a slot and reads its row again. None, and nothing locked, where the lock is not to be had
    /// or the slot has no such row (any more). Errors: 53200.
    pub fn grant(
        table: &LeaseTable,
        name: &'a [u8],
        slot: i32,
        step: LockStep,
        wanted: impl Fn(&Row) -> bool,
    ) -> Result<Option<Self>, Refusal> {
        let mut locks = Locks::of(name);
        if !locks.take(step, slot)? {
            return Ok(None);
        }
        Ok(Self::under(locks, table, slot, wanted))
    }

    /// Reads the grant's row again, under locks that are taken; they are given back where there is none.
    pub fn under(
        locks: Locks<'a>,
        table: &LeaseTable,
        slot: i32,
        wanted: impl Fn(&Row) -> bool,
    ) -> Option<Self> {
        let row = locks.read_again(table, slot, wanted)?;
        Some(Locked { row, locks })
    }

    /// Keeps the lock until the transaction, or the savepoint, ends.
    pub fn keep(self) -> Row {
        self.locks.keep();
        self.row
    }
}
