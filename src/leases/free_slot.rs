//! Choosing and locking a slot for a new grant.
//!
//! An exclusive acquire locks every slot whose grant is not closed for good, at once or not at all, and then decides
//! (`alone`). Shared acquires, and those of one slot among several, live beside each other: they take turns, and each
//! keeps its turn until its row is written, so that the next one sees that row, although nobody has committed it
//! (`beside_others`).

use super::guard;
use super::locks::Locks;
use super::request::{BY_ANOTHER, NotGranted, Request};
use crate::errors;
use crate::pg::locks::lock::LockTag;
use crate::pg::locks::wait::Waiting;
use crate::pg::session::clock;
use crate::pg::session::role;
use crate::pg::session::xact;
use crate::pg::state::lease_table::{AsOf, LeaseTable};
use crate::pg::state::row::{Deleter, Row};
use pg_fence_rules::grant::{self, Acquire, ExistingGrant, Grant, Mode, Phase};
use pg_fence_rules::locks::{ACQUIRE_EXCLUSIVE, BLOCK_EXCLUSIVE, LockStep, TAKE_SLOT, TAKE_TURN};
use pg_fence_rules::{Instant, Token};
use std::time::Duration;

/// The longest wait for a turn, unless `lock_timeout` would end it first. A turn takes some microseconds; only somebody
/// who locks rows of the state by hand makes it longer. An acquire that gives up takes the lease for taken.
const LONGEST_TURN: Duration = Duration::from_secs(5);

/// The slot chosen for a grant.
pub struct FreeSlot<'a> {
    /// The number of the slot to write.
    pub slot: i32,
    /// The row now in the slot: of a grant that is over, or of the caller's own that it reclaims.
    pub existing: Option<Row>,
    /// Grants in other slots that this one ends.
    pub ended: Vec<Row>,
    /// The turn among shared and slot acquires, which ends when this value is dropped.
    _turn: Option<Locks<'a>>,
}

/// A free slot with its locks, which are released on drop unless `hold_until_commit` was called.
pub struct LockedSlot<'a> {
    chosen: FreeSlot<'a>,
    locks: Locks<'a>,
}

impl<'a> LockedSlot<'a> {
    /// The greatest token known of the slot's previous grant.
    pub fn above(&self) -> Token {
        self.chosen.existing.map_or(Token::BEFORE_ALL, |row| row.grant.greatest())
    }

    /// Holds the locks until the transaction ends. Call this before any write: an uncommitted row alone protects
    /// nothing, because nobody else sees it.
    pub fn hold_until_commit(self) -> FreeSlot<'a> {
        self.locks.hold_until_commit();
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
    let chosen = match request.acquire.mode {
        Mode::Exclusive => alone(table, request, &mut locks)?,
        _ => beside_others(table, request, &mut locks)?,
    };
    Ok(LockedSlot { chosen, locks })
}

/// The rows of the lease in the terms of the rules. `guarded` returns true if an open transaction relies on a grant.
fn existing(
    request: &Request,
    rows: &[Row],
    guarded: impl Fn(&ExistingGrant) -> bool,
) -> Vec<ExistingGrant> {
    let role = request.acquire.reclaim.then(role::current);
    let is_mine = |row: &Row| {
        role.as_deref()
            .is_some_and(|role| request.holder.as_deref() == row.holder() && row.role() == role)
    };
    let existing = |row: &Row| {
        let seen = ExistingGrant { grant: row.grant, mine: is_mine(row), guarded: false };
        ExistingGrant { guarded: guarded(&seen), ..seen }
    };
    rows.iter().map(existing).collect()
}

/// Returns the slot that the rules give to the request, in view of the existing grants. Errors: 22023, 55000.
fn admit(request: &Request, existing: &[ExistingGrant], now: Instant) -> Result<i32, NotGranted> {
    match grant::admit(existing, &request.acquire, now) {
        Acquire::Grant { slot } => Ok(slot),
        Acquire::Taken { until } => Err(NotGranted::Taken { until }),
        Acquire::SlotsDiffer { live } => {
            let requested = if let Mode::Slots(n) = request.acquire.mode { n } else { 1 };
            Err(errors::slots_differ(&request.name, live, requested).into())
        }
        Acquire::Adopted => Err(errors::adopted_name(&request.name).into()),
    }
}

/// Decides by the rows that were read, which come first among the existing grants. The clock was read only after the
/// locks were taken.
fn decide<'a>(
    request: &Request,
    rows: &[Row],
    existing: &[ExistingGrant],
    now: Instant,
) -> Result<FreeSlot<'a>, NotGranted> {
    let slot = admit(request, existing, now)?;
    let is_ended = |row: &Row, seen: &ExistingGrant| {
        row.grant.slot != slot && grant::ends(&request.acquire, seen, now)
    };
    let both = rows.iter().zip(existing);
    let ended = both.filter(|(row, seen)| is_ended(row, seen)).map(|(row, _)| *row).collect();
    Ok(FreeSlot { slot, existing: in_slot(rows, slot).copied(), ended, _turn: None })
}

fn in_slot(rows: &[Row], slot: i32) -> Option<&Row> {
    rows.iter().find(|row| row.grant.slot == slot)
}

/// Locks the slots of the lease, so that none has a grant or a guard of another transaction, and returns slot 0, the slot
/// of an exclusive grant.
fn alone<'a>(
    table: &LeaseTable,
    request: &Request,
    locks: &mut Locks,
) -> Result<FreeSlot<'a>, NotGranted> {
    let name = &request.name;
    if !locks.take(ACQUIRE_EXCLUSIVE, 0)? {
        return Err(BY_ANOTHER);
    }
    let mut rows = settled_rows(table, name).ok_or(BY_ANOTHER)?;
    if rows.iter().any(|row| row.grant.slot != 0) {
        // No slot can be added or taken meanwhile: that takes the lock of slot 0, which is held here.
        for row in rows.iter().filter(|row| row.grant.slot != 0) {
            let (LockStep { lock, mode, .. }, slot) = (ACQUIRE_EXCLUSIVE, row.grant.slot);
            // Nobody can begin to rely on a closed grant, so it needs no lock. Past readers leave a row each, and their
            // locks could be more than a transaction may hold. To others, a grant that this transaction has closed is
            // live until the commit.
            let is_free = match row.grant.closing {
                Some(_) if !row.is_own() => !LockTag::new(lock, name, slot).has_conflicts(mode),
                _ => locks.take(ACQUIRE_EXCLUSIVE, slot)?,
            };
            if !is_free {
                return Err(BY_ANOTHER);
            }
        }
        // A session that held one of these locks until now may have renewed its grant.
        rows = settled_rows(table, name).ok_or(BY_ANOTHER)?;
    }
    // No other transaction has a lock that conflicts, so only this one itself can still guard a grant.
    let existing = existing(request, &rows, |seen| guard::guards_slot(name, seen.grant.slot));
    let chosen = decide(request, &rows, &existing, clock::now())?;
    if chosen.existing.is_none() && is_being_loaded(table, name) {
        return Err(BY_ANOTHER);
    }
    Ok(chosen)
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

/// Returns true if another open transaction has written a row of the lease. If all locks of the lease are held here,
/// that transaction loads a dump; writing would wait for it.
pub fn is_being_loaded(table: &LeaseTable, name: &[u8]) -> bool {
    table.rows(name, AsOf::InFlight).iter().any(Row::is_others_uncommitted)
}

/// The grants in all row versions that other open transactions have written, including versions that they have replaced
/// since. The scan may not meet the newest version, and the rollback of a savepoint may restore an older one.
fn under_way(table: &LeaseTable, name: &[u8]) -> Vec<Grant> {
    let rows = table.rows(name, AsOf::InFlight).into_iter();
    rows.filter(Row::is_others_uncommitted).map(|row| row.grant).collect()
}

/// The committed rows of the lease, and the grants that a shared or slot acquire must live beside: those of these rows
/// and those under way. The slots that are `busy` count as guarded. Last, the moment at which all this was read.
fn existing_beside_others(
    table: &LeaseTable,
    request: &Request,
    busy: &[i32],
) -> (Vec<Row>, Vec<ExistingGrant>, Instant) {
    let name = &request.name;
    // Read first: a transaction that commits in between is seen in the committed rows.
    let under_way = under_way(table, name);
    let rows = table.rows(name, AsOf::Now);
    let now = clock::now();
    let mut existing = existing(request, &rows, |seen| {
        let slot = seen.grant.slot;
        // A live grant counts anyway, and its lock matters only if it is to be reclaimed.
        let asks = seen.mine || seen.grant.phase(now) != Phase::Held;
        guard::guards_slot(name, slot)
            || asks && LockTag::new(TAKE_SLOT.lock, name, slot).has_conflicts(TAKE_SLOT.mode)
    });
    grant::add_under_way(&mut existing, &under_way, request.acquire.mode, now);
    for slot in busy {
        match existing.iter_mut().find(|seen| seen.grant.slot == *slot) {
            Some(seen) => seen.guarded = true,
            None => existing.push(ExistingGrant::in_the_making(*slot, request.acquire.mode)),
        }
    }
    (rows, existing, now)
}

/// Waits for this acquire's turn, chooses a slot and locks it, with the slots of the grants that the new one ends.
///
/// While it has the turn, no other grant is made. But a grant that is over may still be guarded, changed or pruned: the
/// choice is made anew if the locks cannot be taken, or the rows have changed until they were.
fn beside_others<'a>(
    table: &LeaseTable,
    request: &'a Request,
    locks: &mut Locks,
) -> Result<FreeSlot<'a>, NotGranted> {
    let name = &request.name;
    let mut turn = Locks::of(name);
    if !turn.take_within(TAKE_TURN, 0, &Waiting::without_lock_timeout(LONGEST_TURN))?
        || !locks.take(BLOCK_EXCLUSIVE, 0)?
    {
        return Err(BY_ANOTHER);
    }
    // Slots whose locks were not free. They count as guarded.
    let mut busy: Vec<i32> = Vec::new();
    loop {
        xact::serve_interrupts();
        let (rows, existing, now) = existing_beside_others(table, request, &busy);
        let chosen = decide(request, &rows, &existing, now)?;
        let already = locks.count();
        // To others, a grant that this transaction has closed is live until the commit.
        let mode = request.acquire.mode;
        let is_closed_here =
            |row: &&Row| row.grant.mode != mode && row.grant.closing.is_some() && row.is_own();
        let slots = || {
            let ended = chosen.ended.iter().chain(rows.iter().filter(is_closed_here));
            ended.map(|row| row.grant.slot).chain([chosen.slot])
        };
        let known_busy = busy.len();
        for slot in slots() {
            if !locks.take(TAKE_SLOT, slot)? {
                busy.push(slot);
            }
        }
        let again = table.rows(name, AsOf::Now);
        let deleter = |slot| in_slot(&again, slot).map_or(Deleter::None, Row::deleter);
        // A prune releases its lock before it commits.
        busy.extend(slots().filter(|slot| matches!(deleter(*slot), Deleter::Open(_))));
        let version = |rows: &[Row], slot| in_slot(rows, slot).map(Row::version);
        let is_same = |slot| version(&rows, slot) == version(&again, slot);
        let is_settled = |slot| is_same(slot) && deleter(slot) == Deleter::None;
        if busy.len() == known_busy && slots().all(is_settled) {
            return Ok(FreeSlot { _turn: Some(turn), ..chosen });
        }
        locks.give_back_all_but(already);
    }
}
