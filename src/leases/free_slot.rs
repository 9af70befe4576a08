//! Finding a slot for a new grant and locking it, without ever waiting.
//!
//! An exclusive acquire locks every slot of the lease and then looks (`exclusive_slot`). A shared one, and one of several
//! slots, goes beside others who do the same at the same time; what it looks at may change under it, so it
//! takes one slot, looks whether that is still what it chose, and else begins again (`BesideOthers`).

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

/// Where a grant can go. Out of here comes only one whose locks stay until the transaction ends.
pub struct FreeSlot {
    /// The slot to be written.
    pub slot: i32,
    /// The row that the slot has, of a grant that is over.
    pub over: Option<Row>,
    /// Grants in other slots that this one ends.
    pub ended: Vec<Row>,
}

impl FreeSlot {
    /// Is a row being loaded into this slot?
    fn is_being_loaded(&self, table: &LeaseTable, request: &Request) -> bool {
        let is_here = |grant: &Grant| grant.slot == self.slot;
        self.over.is_none() && is_being_loaded(table, &request.name, is_here)
    }

    /// Is one being loaded that the new grant cannot live beside?
    fn excludes_a_load(&self, table: &LeaseTable, request: &Request) -> bool {
        let is_excluded = |grant: &Grant| grant.slot == self.slot || grant.mode != request.ask.mode;
        self.over.is_none() && is_being_loaded(table, &request.name, is_excluded)
    }
}

/// A free slot, locked; given back unless it is kept.
pub struct LockedSlot<'a> {
    chosen: FreeSlot,
    locks: Locks<'a>,
}

impl LockedSlot<'_> {
    /// The greatest token that the lease's grant there is known to have had.
    pub fn above(&self) -> Token {
        self.chosen.over.map_or(Token::BEFORE_ALL, |row| row.grant.greatest())
    }

    /// Keeps the locks. To be called before anything is written: an uncommitted row alone protects nothing.
    pub fn keep(self) -> FreeSlot {
        self.locks.keep();
        self.chosen
    }
}

/// Tells without a lock whether it is worth trying: a losing try reads only. Would the caller only replace a grant of its
/// own? Errors: 22023, 55000.
pub fn looks_free(table: &LeaseTable, request: &Request) -> Result<bool, NotGranted> {
    let existing = existing(request, &table.rows(&request.name, AsOf::Now), |_| false);
    let now = clock::now();
    admit(request, &existing, now)?;
    Ok(existing.iter().any(|s| s.mine && s.grant.phase(now) == Phase::Held))
}

/// Finds a free slot and locks it.
pub fn lock_one<'a>(
    table: &LeaseTable,
    request: &'a Request,
) -> Result<LockedSlot<'a>, NotGranted> {
    let mut locks = Locks::of(&request.name);
    let chosen = match request.ask.mode {
        Mode::Exclusive => exclusive_slot(table, request, &mut locks)?,
        _ => BesideOthers { table, request, busy: Vec::new() }.search(&mut locks)?,
    };
    // It may yet be rolled back.
    if other_number(table, request).is_some() || chosen.excludes_a_load(table, request) {
        return Err(BY_ANOTHER);
    }
    Ok(LockedSlot { chosen, locks })
}

/// Another number of slots that somebody, also one whose transaction is open, has been granted. A grant that is over
/// counts while it is guarded: it may have been made, guarded and have ended since the slot was chosen.
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

/// The rows of the lease as the rules see them. `guarded` tells of a slot whether an open transaction relies on the grant
/// there.
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

/// Which slot the rules give to the request beside the grants that are there. Errors: 22023, 55000.
fn admit(request: &Request, existing: &[ExistingGrant], now: Instant) -> Result<i32, NotGranted> {
    match grant::admit(existing, &request.ask, now) {
        Acquire::Grant { slot } => Ok(slot),
        Acquire::Taken { until } => Err(NotGranted::Taken { until }),
        Acquire::SlotsDiffer { live } => Err(request.slots_differ(live).into()),
        Acquire::Adopted => Err(errors::adopted_name(&request.name).into()),
    }
}

/// Decides by the rows that were read. The clock is read now, so after the locks were obtained.
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

/// The slot of an exclusive grant: 0, with every slot locked.
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
        // No slot is added meanwhile: that takes the lock of slot 0, too, which is ours.
        for slot in others {
            if !locks.take(ACQUIRE_ALONE, slot)? {
                return Err(BY_ANOTHER);
            }
        }
        // A session that held one of these locks until now may have renewed.
        rows = settled_rows(table, name).ok_or(BY_ANOTHER)?;
    }
    // All locks are ours, so only guards of this very transaction are left.
    let existing = existing(request, &rows, |slot| guard::guards_slot(name, slot));
    decide(request, &rows, &existing)
}

/// The rows of a lease whose locks are held; None when an open transaction is deleting one (a prune, which holds no
/// lock).
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

/// Is an open transaction putting such a row into the lease? Where its slot has none yet and the lock is ours, that is one
/// that loads a dump: to write there would wait for it.
pub fn is_being_loaded(table: &LeaseTable, name: &[u8], such: impl Fn(&Grant) -> bool) -> bool {
    let is_it = |row: &Row| such(&row.grant) && row.is_others_uncommitted();
    table.rows(name, AsOf::InFlight).iter().any(is_it)
}

/// The search for a slot among grants that others are making, renewing and ending at the same time.
struct BesideOthers<'a> {
    table: &'a LeaseTable,
    request: &'a Request,
    /// Slots in which somebody else's grant is being written, or a row deleted: they count as taken.
    busy: Vec<i32>,
}

/// The outcome of an attempt to have the slot that was chosen.
enum Attempt {
    /// All of it is locked, and the rows are as when it was chosen.
    Won,
    /// Another transaction is putting a grant into the slot, loading a row into it, or (a prune) deleting its row: another
    /// slot may do.
    SlotIsBusy,
    /// Somebody relies on a grant that would have to go, or ends it at the same time, or (a prune, which may be rolled back)
    /// deletes its row.
    Lost,
    /// The session in the way has finished, or a row has changed: choose again.
    Changed,
}

/// The obstacle to taking a slot of a lease.
enum InTheWay {
    /// At most a session that puts another grant into it.
    Takers,
    /// Somebody who relies on the grant in it, or changes it.
    Relying,
    /// The other session has finished in the meantime.
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

    /// Nobody may be granted the lease alone, or in another mode, while this search lasts: neither would see the
    /// other's row.
    fn exclude_other_kinds(&self, locks: &mut Locks) -> Result<bool, Refusal> {
        let shared = self.request.ask.mode == Mode::Shared;
        let shape = if shared { EXCLUDE_SLOTS } else { EXCLUDE_SHARED };
        Ok(locks.take(EXCLUDE_ALONE, 0)? && locks.take(shape, 0)?)
    }

    /// The grants that are there, and those that others are writing.
    fn existing(&self, rows: &[Row]) -> Vec<ExistingGrant> {
        let now = clock::now();
        let is_live = |row: &Row| row.grant.phase(now) == Phase::Held;
        let is_relied_on = |slot| self.is_relied_on(slot, in_slot(rows, slot), is_live);
        let mut existing = existing(self.request, rows, is_relied_on);
        // A row that was being written may be there by now, and counts once.
        let is_there = |slot: i32| rows.iter().any(|row| row.grant.slot == slot && is_live(row));
        let making = self.busy.iter().filter(|slot| !is_there(**slot));
        existing
            .extend(making.map(|slot| ExistingGrant::in_the_making(*slot, self.request.ask.mode)));
        existing
    }

    /// Does an open transaction rely on the grant in a slot? One that is over keeps its slot while it is guarded; one
    /// of the caller's own that lives cannot be reclaimed while it is guarded or being renewed.
    fn is_relied_on(&self, slot: i32, row: Option<&Row>, is_live: impl Fn(&Row) -> bool) -> bool {
        let name = &self.request.name;
        if guard::guards_slot(name, slot) {
            return true;
        }
        match row {
            // The guard of an exclusive grant is met when its slot is locked.
            Some(row) if !is_live(row) => {
                row.grant.mode != Mode::Exclusive && is_guarded_by_others(name, slot)
            }
            _ => self.busy.contains(&slot),
        }
    }

    /// Locks the slot, and the grants in others that would be ended.
    fn lock(&self, chosen: &mut FreeSlot, locks: &mut Locks) -> Result<Attempt, Refusal> {
        if !locks.take(TAKE_SLOT, chosen.slot)? {
            // Of another mode, and over by the clock: its holder may just be renewing it.
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
                // One of another mode that somebody just replaces needs no ending.
                InTheWay::Takers if self.is_of_another_mode(&row) => {}
                InTheWay::Gone => return Ok(Attempt::Changed),
                // Another one of this mode may be ending it, or taking its slot.
                InTheWay::Takers | InTheWay::Relying => return Ok(Attempt::Lost),
            }
        }
        chosen.ended = ended;
        Ok(Attempt::Won)
    }

    fn is_of_another_mode(&self, row: &Row) -> bool {
        row.grant.mode != self.request.ask.mode
    }

    /// The obstacle to locking a slot.
    fn in_the_way(&self, slot: i32) -> InTheWay {
        let grant = LockTag::new(Lock::Grant, &self.request.name, slot);
        let all = grant.conflicting(TAKE_SLOT.mode);
        let takers = grant.conflicting(SLOT_IS_BEING_TAKEN.mode);
        let others: Vec<_> = all.into_iter().filter(|one| !takers.contains(one)).collect();
        if others.is_empty() {
            return InTheWay::Takers;
        }
        // One of them may have been a taker that finished between the two looks.
        match grant.conflicting(TAKE_SLOT.mode).iter().any(|one| others.contains(one)) {
            true => InTheWay::Relying,
            false => InTheWay::Gone,
        }
    }

    /// Reads the rows again under the locks. A session that held one of them until now may have put a grant there,
    /// renewed, or (a prune, which gives its lock back before it commits) be deleting the row.
    fn settled(&self, before: &[Row], chosen: &FreeSlot) -> Attempt {
        let rows = self.table.rows(&self.request.name, AsOf::Now);
        let deleter = |slot| in_slot(&rows, slot).map_or(Deleter::None, |row| row.deleter());
        if matches!(deleter(chosen.slot), Deleter::Open(_)) {
            return Attempt::SlotIsBusy;
        }
        let ours = || chosen.ended.iter().map(|row| row.grant.slot).chain([chosen.slot]);
        let version = |rows: &[Row], slot| in_slot(rows, slot).map(|row| row.version());
        // A grant of another mode counts wherever it is: it may have been renewed.
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
