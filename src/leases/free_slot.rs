//! Choosing and locking a slot for a new grant, without ever waiting.
//!
//! An exclusive acquire locks every slot of the lease and then decides (`exclusive_slot`). Shared acquires, and those
//! of one slot among several, run concurrently, so the rows that they read may change. Such an acquire locks the slot
//! that it chose, reads the rows again and starts over if they have changed (`BesideOthers`).

use super::guard;
use super::locks::Locks;
use super::request::{NotGranted, Request, BY_ANOTHER};
use crate::errors::{self, Refusal};
use crate::pg::locks::lock::LockTag;
use crate::pg::session::clock;
use crate::pg::session::role;
use crate::pg::session::xact;
use crate::pg::state::lease_table::{AsOf, LeaseTable};
use crate::pg::state::row::{Deleter, Row};
use pg_fence_rules::grant::{self, Acquire, ExistingGrant, Grant, Mode, Phase};
use pg_fence_rules::locks::{
    Lock, ACQUIRE_ALONE, EXCLUDE_ALONE, EXCLUDE_SHARED, EXCLUDE_SLOTS, IS_GUARDED,
    SLOT_IS_BEING_TAKEN, TAKE_SLOT,
};
use pg_fence_rules::{Instant, Token};

/// The slot chosen for a grant. Its locks are held until the transaction ends.
pub struct FreeSlot {
    /// The number of the slot to write.
    pub slot: i32,
    /// The row in the slot, of a grant that is over.
    pub over: Option<Row>,
    /// Grants in other slots that this one ends.
    pub ended: Vec<Row>,
}

impl FreeSlot {
    /// Returns true if an open transaction is loading a row into this slot.
    fn is_being_loaded(&self, table: &LeaseTable, request: &Request) -> bool {
        let is_here = |grant: &Grant| grant.slot == self.slot;
        self.over.is_none() && is_being_loaded(table, &request.name, is_here)
    }

    /// Returns true if an open transaction is loading a row that excludes the new grant.
    fn excludes_a_load(&self, table: &LeaseTable, request: &Request) -> bool {
        let is_excluded = |grant: &Grant| grant.slot == self.slot || grant.mode != request.ask.mode;
        self.over.is_none() && is_being_loaded(table, &request.name, is_excluded)
    }
}

/// A free slot with its locks, which are released on drop unless `keep` was called.
pub struct LockedSlot<'a> {
    chosen: FreeSlot,
    locks: Locks<'a>,
}

impl LockedSlot<'_> {
    /// The greatest token known of the slot's previous grant.
    pub fn above(&self) -> Token {
        self.chosen.over.map_or(Token::BEFORE_ALL, |row| row.grant.greatest())
    }

    /// Holds the locks until the transaction ends. Call this before any write: an uncommitted row alone protects
    /// nothing, because nobody else sees it.
    pub fn keep(self) -> FreeSlot {
        self.locks.keep();
        self.chosen
    }
}

/// Checks without a lock whether a try could succeed, so that a losing try only reads. Returns true if the grant would
/// only replace one of the caller's own. Errors: 22023, 55000.
pub fn looks_free(table: &LeaseTable, request: &Request) -> Result<bool, NotGranted> {
    let existing = existing(request, &table.rows(&request.name, AsOf::Now), |_| false);
    let now = clock::now();
    admit(request, &existing, now)?;
    Ok(existing.iter().any(|s| s.mine && s.grant.phase(now) == Phase::Held))
}

/// Chooses a free slot and locks it.
pub fn lock_one<'a>(
    table: &LeaseTable,
    request: &'a Request,
) -> Result<LockedSlot<'a>, NotGranted> {
    let mut locks = Locks::of(&request.name);
    let chosen = match request.ask.mode {
        Mode::Exclusive => exclusive_slot(table, request, &mut locks)?,
        _ => BesideOthers { table, request, busy: Vec::new() }.search(&mut locks)?,
    };
    // Rows of open transactions count, although they may yet be rolled back.
    if other_number(table, request).is_some() || chosen.excludes_a_load(table, request) {
        return Err(BY_ANOTHER);
    }
    Ok(LockedSlot { chosen, locks })
}

/// Returns the number of slots of another grant in force, if it differs from the requested number. Uncommitted grants
/// count. So does an expired grant while it is guarded: it may have been made, guarded and have expired since the slot
/// was chosen.
pub fn other_number(table: &LeaseTable, request: &Request) -> Option<i32> {
    let Mode::Slots(asked) = request.ask.mode else { return None };
    let now = clock::now();
    let is_in_force = |row: &Row| {
        row.grant.phase(now) == Phase::Held || is_guarded_by_others(&request.name, row.grant.slot)
    };
    table.rows(&request.name, AsOf::InFlight).iter().find_map(|row| match row.grant.mode {
        Mode::Slots(n) if n != asked && is_in_force(row) => Some(n),
        _ => None,
    })
}

fn is_guarded_by_others(name: &[u8], slot: i32) -> bool {
    LockTag::new(IS_GUARDED.lock, name, slot).has_conflicts(IS_GUARDED.mode)
}

/// The rows of the lease in the terms of the rules. `guarded` returns true if an open transaction relies on the grant
/// in a slot.
fn existing(request: &Request, rows: &[Row], guarded: impl Fn(i32) -> bool) -> Vec<ExistingGrant> {
    let role = request.ask.reclaim.then(role::current);
    let is_mine = |row: &Row| {
        role.as_deref()
            .is_some_and(|role| request.holder.as_deref() == row.holder() && row.role() == role)
    };
    let existing = |row: &Row| ExistingGrant {
        grant: row.grant,
        mine: is_mine(row),
        guarded: guarded(row.grant.slot),
    };
    rows.iter().map(existing).collect()
}

/// Returns the slot that the rules give to the request, in view of the existing grants. Errors: 22023, 55000.
fn admit(request: &Request, existing: &[ExistingGrant], now: Instant) -> Result<i32, NotGranted> {
    match grant::admit(existing, &request.ask, now) {
        Acquire::Grant { slot } => Ok(slot),
        Acquire::Taken { until } => Err(NotGranted::Taken { until }),
        Acquire::SlotsDiffer { live } => Err(request.slots_differ(live).into()),
        Acquire::Adopted => Err(errors::adopted_name(&request.name).into()),
    }
}

/// Decides by the rows that were read. Reads the clock only now, after the locks were taken.
fn decide(
    request: &Request,
    rows: &[Row],
    existing: &[ExistingGrant],
) -> Result<FreeSlot, NotGranted> {
    let now = clock::now();
    let slot = admit(request, existing, now)?;
    let is_ended = |row: &Row, seen: &ExistingGrant| {
        row.grant.slot != slot && grant::ends(&request.ask, seen, now)
    };
    let both = rows.iter().zip(existing);
    let ended = both.filter(|(row, seen)| is_ended(row, seen)).map(|(row, _)| *row).collect();
    Ok(FreeSlot { slot, over: in_slot(rows, slot).copied(), ended })
}

fn in_slot(rows: &[Row], slot: i32) -> Option<&Row> {
    rows.iter().find(|row| row.grant.slot == slot)
}

/// Locks every slot of the lease and returns slot 0, the slot of an exclusive grant.
fn exclusive_slot(
    table: &LeaseTable,
    request: &Request,
    locks: &mut Locks,
) -> Result<FreeSlot, NotGranted> {
    let name = &request.name;
    if !locks.take(ACQUIRE_ALONE, 0)? {
        return Err(BY_ANOTHER);
    }
    let mut rows = settled_rows(table, name).ok_or(BY_ANOTHER)?;
    let others: Vec<i32> = rows.iter().map(|r| r.grant.slot).filter(|slot| *slot != 0).collect();
    if !others.is_empty() {
        // No slot can be added meanwhile: adding one takes the lock of slot 0, which is held here.
        for slot in others {
            if !locks.take(ACQUIRE_ALONE, slot)? {
                return Err(BY_ANOTHER);
            }
        }
        // A session that held one of these locks until now may have renewed its grant.
        rows = settled_rows(table, name).ok_or(BY_ANOTHER)?;
    }
    // All locks are held here, so only this transaction itself can still guard a grant.
    let existing = existing(request, &rows, |slot| guard::guards_slot(name, slot));
    decide(request, &rows, &existing)
}

/// Reads the rows of a lease whose locks are held. Returns `None` if an open transaction is deleting one: a prune holds
/// no lock until its commit.
pub fn settled_rows(table: &LeaseTable, name: &[u8]) -> Option<Vec<Row>> {
    loop {
        xact::serve_interrupts();
        let rows = table.rows(name, AsOf::Now);
        let deleters: Vec<Deleter> = rows.iter().map(Row::deleter).collect();
        if deleters.iter().any(|deleter| matches!(deleter, Deleter::Open(_))) {
            return None;
        }
        if !deleters.contains(&Deleter::Committed) {
            return Some(rows);
        }
    }
}

/// Returns true if an open transaction is inserting a row into the lease for which `such` holds. If the slot has no row
/// yet and its lock is held here, that transaction loads a dump; writing would wait for it.
pub fn is_being_loaded(table: &LeaseTable, name: &[u8], such: impl Fn(&Grant) -> bool) -> bool {
    let is_it = |row: &Row| such(&row.grant) && row.is_others_uncommitted();
    table.rows(name, AsOf::InFlight).iter().any(is_it)
}

/// The search for a slot of a lease to which others are adding grants at the same time.
struct BesideOthers<'a> {
    table: &'a LeaseTable,
    request: &'a Request,
    /// Slots in which another session is writing a grant or deleting a row. They count as taken.
    busy: Vec<i32>,
}

/// The outcome of an attempt to lock the chosen slot.
enum Attempt {
    /// All locks are held, and the rows are as they were when the slot was chosen.
    Won,
    /// Another transaction is granting the slot, loading a row into it, or pruning its row. Another slot may be free.
    SlotIsBusy,
    /// A grant that would have to end is guarded, or is being ended or pruned by an open transaction.
    Lost,
    /// The blocking session has finished, or a row has changed. Choose again.
    Changed,
}

/// Why no slot can be taken.
enum InTheWay {
    /// Only sessions that are putting another grant into the slot.
    Takers,
    /// A session that guards the slot's grant, or changes it.
    Relying,
    /// No session any more: the blocking one has finished.
    Gone,
}

impl BesideOthers<'_> {
    fn search(mut self, locks: &mut Locks) -> Result<FreeSlot, NotGranted> {
        if !self.exclude_other_kinds(locks)? {
            return Err(BY_ANOTHER);
        }
        loop {
            xact::serve_interrupts();
            let rows = self.table.rows(&self.request.name, AsOf::Now);
            let mut chosen = decide(self.request, &rows, &self.existing(&rows))?;
            let before = locks.count();
            let attempt = match self.lock(&mut chosen, locks)? {
                Attempt::Won => self.settled(&rows, &chosen),
                other => other,
            };
            match attempt {
                Attempt::Won => return Ok(chosen),
                Attempt::Lost => return Err(BY_ANOTHER),
                Attempt::SlotIsBusy => self.busy.push(chosen.slot),
                Attempt::Changed => {}
            }
            locks.give_back_all_but(before);
        }
    }

    /// Excludes exclusive grants and grants of the other mode during this search, since neither search would see the
    /// other's uncommitted row.
    fn exclude_other_kinds(&self, locks: &mut Locks) -> Result<bool, Refusal> {
        let shared = self.request.ask.mode == Mode::Shared;
        let shape = if shared { EXCLUDE_SLOTS } else { EXCLUDE_SHARED };
        Ok(locks.take(EXCLUDE_ALONE, 0)? && locks.take(shape, 0)?)
    }

    /// The existing grants, and those that other sessions are writing.
    fn existing(&self, rows: &[Row]) -> Vec<ExistingGrant> {
        let now = clock::now();
        let is_live = |row: &Row| row.grant.phase(now) == Phase::Held;
        let is_relied_on = |slot| self.is_relied_on(slot, in_slot(rows, slot), is_live);
        let mut existing = existing(self.request, rows, is_relied_on);
        // A row that was being written may be visible by now, and must count once.
        let is_there = |slot: i32| rows.iter().any(|row| row.grant.slot == slot && is_live(row));
        let making = self.busy.iter().filter(|slot| !is_there(**slot));
        existing
            .extend(making.map(|slot| ExistingGrant::in_the_making(*slot, self.request.ask.mode)));
        existing
    }

    /// Returns true if an open transaction relies on the grant in a slot. An expired grant occupies its slot while it
    /// is guarded. The caller's own live grant cannot be reclaimed while it is guarded or being renewed.
    fn is_relied_on(&self, slot: i32, row: Option<&Row>, is_live: impl Fn(&Row) -> bool) -> bool {
        let name = &self.request.name;
        if guard::guards_slot(name, slot) {
            return true;
        }
        match row {
            // A guard of an exclusive grant is noticed when its slot is locked.
            Some(row) if !is_live(row) => {
                row.grant.mode != Mode::Exclusive && is_guarded_by_others(name, slot)
            }
            _ => self.busy.contains(&slot),
        }
    }

    /// Locks the chosen slot, and the slots of the grants that the new one ends.
    fn lock(&self, chosen: &mut FreeSlot, locks: &mut Locks) -> Result<Attempt, Refusal> {
        if !locks.take(TAKE_SLOT, chosen.slot)? {
            // An expired grant of another mode excludes the new one if its holder is just renewing it.
            let excludes = chosen.over.is_some_and(|row| self.is_of_another_mode(&row));
            if !excludes {
                return Ok(Attempt::SlotIsBusy);
            }
            return Ok(match self.in_the_way(chosen.slot) {
                InTheWay::Takers => Attempt::SlotIsBusy,
                InTheWay::Relying => Attempt::Lost,
                InTheWay::Gone => Attempt::Changed,
            });
        }
        let mut ended = Vec::with_capacity(chosen.ended.len());
        for row in chosen.ended.drain(..) {
            let slot = row.grant.slot;
            if locks.take(TAKE_SLOT, slot)? {
                ended.push(row);
                continue;
            }
            match self.in_the_way(slot) {
                // A grant of another mode that is just being replaced need not be ended.
                InTheWay::Takers if self.is_of_another_mode(&row) => {}
                InTheWay::Gone => return Ok(Attempt::Changed),
                // Another session may be ending a grant of this mode, or taking its slot.
                InTheWay::Takers | InTheWay::Relying => return Ok(Attempt::Lost),
            }
        }
        chosen.ended = ended;
        Ok(Attempt::Won)
    }

    fn is_of_another_mode(&self, row: &Row) -> bool {
        row.grant.mode != self.request.ask.mode
    }

    /// Determines which sessions block the lock of a slot.
    fn in_the_way(&self, slot: i32) -> InTheWay {
        let grant = LockTag::new(Lock::Grant, &self.request.name, slot);
        let all = grant.conflicting(TAKE_SLOT.mode);
        let takers = grant.conflicting(SLOT_IS_BEING_TAKEN.mode);
        let others: Vec<_> = all.into_iter().filter(|one| !takers.contains(one)).collect();
        if others.is_empty() {
            return InTheWay::Takers;
        }
        // A session that was no taker at the second look may have been one that finished between the two.
        match grant.conflicting(TAKE_SLOT.mode).iter().any(|one| others.contains(one)) {
            true => InTheWay::Relying,
            false => InTheWay::Gone,
        }
    }

    /// Reads the rows again under the locks. Until the locks were taken, another session may have written a grant,
    /// renewed one, or begun to delete a row (a prune releases its lock before it commits).
    fn settled(&self, before: &[Row], chosen: &FreeSlot) -> Attempt {
        let rows = self.table.rows(&self.request.name, AsOf::Now);
        let deleter = |slot| in_slot(&rows, slot).map_or(Deleter::None, |row| row.deleter());
        if matches!(deleter(chosen.slot), Deleter::Open(_)) {
            return Attempt::SlotIsBusy;
        }
        let ours = || chosen.ended.iter().map(|row| row.grant.slot).chain([chosen.slot]);
        let version = |rows: &[Row], slot| in_slot(rows, slot).map(|row| row.version());
        // Grants of another mode count in every slot, because one may have been renewed.
        let excluding =
            before.iter().filter(|row| self.is_of_another_mode(row)).map(|row| row.grant.slot);
        let same =
            excluding.chain(ours()).all(|slot| version(before, slot) == version(&rows, slot));
        if !same || rows.len() != before.len() {
            Attempt::Changed
        } else if ours().any(|slot| matches!(deleter(slot), Deleter::Open(_))) {
            Attempt::Lost
        } else if ours().any(|slot| deleter(slot) == Deleter::Committed) {
            Attempt::Changed
        } else if chosen.is_being_loaded(self.table, self.request) {
            Attempt::SlotIsBusy
        } else {
            Attempt::Won
        }
    }
}
