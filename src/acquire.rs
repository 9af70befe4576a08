//! Granting a lease: look, lock, look again, decide, draw, write.

use crate::errors::{self, Refusal};
use crate::pg::lease_table::{AsOf, LeaseTable, Look};
use crate::pg::lock::{Mode as Lock, Tag};
use crate::pg::row::{Deleter, NewGrant, Row};
use crate::pg::{guarded_commits, server, snapshot_age, xact};
use crate::{guard, queue, session_leases};
use pg_fence_rules::grant::{self, Acquire, Ask, Grant, Mode, Phase, Seat, Tokens};
use pg_fence_rules::{Micros, Token};

/// Who asks for what.
pub struct Request<'a> {
    pub name: &'a [u8],
    pub holder: Option<&'a [u8]>,
    pub ttl_us: Micros,
    pub metadata: Option<pgrx::pg_sys::Datum>,
    /// The grant is to end with this session, too.
    pub session: bool,
    pub ask: Ask,
}

/// How a try ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tried<T> {
    /// Granted, or to be had.
    Won(T),
    /// Taken; the clock alone can change that at this time (i64::MAX: it cannot).
    Lost {
        /// When to look again at the latest.
        until: Micros,
    },
}

/// A place that was found free and is locked until the transaction ends.
pub struct FreeSlot {
    slot: i32,
    over: Option<Row>,
    /// Other grants that this one ends.
    ended: Vec<Row>,
    above: Token,
    locks: Locks,
}

impl FreeSlot {
    /// The greatest token that the lease is known to have had.
    pub fn above(&self) -> Token {
        self.above
    }

    /// Gives it up.
    pub fn abandon(self, name: &[u8]) {
        self.locks.give_all();
        queue::wake(name);
    }
}

/// The slot, the row that it has, and other grants that end.
type Found = (i32, Option<Row>, Vec<Row>);

/// Locks that are given back unless the try wins.
#[derive(Default)]
struct Locks(Vec<(Tag, Lock)>);

impl Locks {
    fn take(&mut self, tag: Tag, mode: Lock) -> bool {
        let taken = tag.take(mode, false);
        if taken {
            self.0.push((tag, mode));
        }
        taken
    }

    /// Gives back those taken since there were so many.
    fn give_from(&mut self, many: usize) {
        for (tag, mode) in self.0.drain(many..).rev() {
            tag.give(mode);
        }
    }

    fn give_all(mut self) {
        self.give_from(0);
    }
}

/// Only something that committed since we looked, or an open transaction, can be in the way.
const LOST: Tried<Found> = Tried::Lost { until: Micros::MAX };

/// A lease that looked free.
pub struct Chance {
    /// The caller would only replace a grant of its own.
    pub reclaims: bool,
    seen: Look,
}

/// Tells without a lock whether it is worth trying: a losing try reads only.
pub fn look(table: &LeaseTable, request: &Request) -> Result<Tried<Chance>, Refusal> {
    let seen = table.look(request.name);
    let seats = seats(request, &seen.rows, &|_| false);
    let now = server::now();
    match grant::acquire(&seats, &request.ask, now) {
        Acquire::Grant { .. } => {
            let reclaims = seats.iter().any(|s| s.mine && s.grant.phase(now) == Phase::Held);
            Ok(Tried::Won(Chance { reclaims, seen }))
        }
        Acquire::Taken { until } => Ok(Tried::Lost { until }),
        Acquire::SlotsDiffer { live } => Err(slots_differ(request, live)),
    }
}

/// Finds a place and locks it, without ever waiting.
pub fn place(
    table: &LeaseTable,
    request: &Request,
    chance: &Chance,
) -> Result<Tried<FreeSlot>, Refusal> {
    let mut locks = Locks(Vec::with_capacity(1));
    let tried = match request.ask.mode {
        Mode::Exclusive => exclusive(table, request, &chance.seen, &mut locks),
        _ => beside_others(table, request, &mut locks),
    };
    let tried = match tried? {
        // It may yet be rolled back.
        Tried::Won(_) if other_number(table, request).is_some() => LOST,
        tried => tried,
    };
    match tried {
        Tried::Won((slot, over, ended)) => {
            check_snapshot(table, request)?;
            let above = over.map_or(0, |row| row.grant.greatest());
            Ok(Tried::Won(FreeSlot { slot, over, ended, above, locks }))
        }
        Tried::Lost { until } => {
            if !locks.0.is_empty() {
                locks.give_all();
                // Who looked meanwhile found the lease locked.
                queue::wake(request.name);
            }
            Ok(Tried::Lost { until })
        }
    }
}

/// Writes the grant into its place.
pub fn write(
    table: &LeaseTable,
    request: &Request,
    place: &FreeSlot,
    token: Token,
) -> Result<(), Refusal> {
    if request.session {
        session_leases::bind(table, request.name, token);
    }
    let now = server::now();
    for row in &place.ended {
        table.end(row, now)?;
        session_leases::ended(request.name, row.grant.tokens.first());
    }
    if let Some(row) = &place.over {
        session_leases::ended(request.name, row.grant.tokens.first());
    }
    let (session, role) = (server::session(), server::current_role());
    let new = NewGrant {
        name: request.name,
        slot: place.slot,
        mode: request.ask.mode,
        holder: request.holder,
        session: session.as_bytes(),
        role: &role,
        token,
        now,
        ttl_us: request.ttl_us,
        metadata: request.metadata,
        session_bound: request.session,
    };
    table.grant(&new, place.over.as_ref())?;
    queue::changed(request.name);
    // Two that ask for different numbers at the same moment have seen neither's row.
    match other_number(table, request) {
        Some(other) => Err(slots_differ(request, other)),
        None => Ok(()),
    }
}

/// Another number of slots that somebody, also one whose transaction is open, has been granted.
fn other_number(table: &LeaseTable, request: &Request) -> Option<i32> {
    let Mode::Slots(asked) = request.ask.mode else { return None };
    let now = server::now();
    table.rows_in_flight(request.name).iter().find_map(|row| match row.grant.mode {
        Mode::Slots(n) if n != asked && row.grant.phase(now) == Phase::Held => Some(n),
        _ => None,
    })
}

fn exclusive(
    table: &LeaseTable,
    request: &Request,
    seen: &Look,
    locks: &mut Locks,
) -> Result<Tried<Found>, Refusal> {
    if !locks.take(Tag::grant(request.name, 0), Lock::Own) {
        return Ok(LOST);
    }
    let Some(mut rows) = table.settled_rows(request.name, Some(seen)) else { return Ok(LOST) };
    if rows.iter().any(|r| r.grant.slot != 0) {
        // Slots other than 0 are added to only beside the lock of that one, which is ours.
        for row in rows.iter().filter(|r| r.grant.slot != 0) {
            if !locks.take(Tag::grant(request.name, row.grant.slot), Lock::Own) {
                return Ok(LOST);
            }
        }
        // Who held one of these locks until now may have renewed.
        let Some(settled) = table.settled_rows(request.name, None) else { return Ok(LOST) };
        rows = settled;
    }
    // All locks are ours, so only guards of this very transaction are left.
    let seats = seats(request, &rows, &|slot| guard::guards(request.name, slot));
    decide(request, &rows, &seats)
}

fn beside_others(
    table: &LeaseTable,
    request: &Request,
    locks: &mut Locks,
) -> Result<Tried<Found>, Refusal> {
    let name = request.name;
    let shape = if request.ask.mode == Mode::Shared { Lock::Probe } else { Lock::Guard };
    if !locks.take(Tag::grant(name, 0), Lock::Anchor) || !locks.take(Tag::shape(name), shape) {
        return Ok(LOST);
    }
    // Slots in which somebody else's grant is being written.
    let mut busy: Vec<i32> = Vec::new();
    loop {
        let rows = table.rows(name, AsOf::Now);
        let now = server::now();
        server::serve_interrupts();
        let guarded = |slot: i32| {
            let over =
                rows.iter().any(|r| r.grant.slot == slot && r.grant.phase(now) != Phase::Held);
            // One of the caller's own that lives and is busy (guarded, being renewed) cannot be reclaimed.
            guard::guards(name, slot)
                || if over { is_guarded(name, slot) } else { busy.contains(&slot) }
        };
        let mut seats = seats(request, &rows, &guarded);
        // What was being written may be there by now, and counts once.
        let there = |slot: &&i32| {
            rows.iter().any(|r| r.grant.slot == **slot && r.grant.phase(now) == Phase::Held)
        };
        let making = busy.iter().filter(|slot| !there(slot));
        seats.extend(making.map(|slot| in_the_making(*slot, request.ask.mode)));
        let (slot, over, mut ended) = match decide(request, &rows, &seats)? {
            Tried::Won(found) => found,
            lost => return Ok(lost),
        };
        let before = locks.0.len();
        let lock = Tag::grant(name, slot);
        if !locks.take(lock, Lock::Replace) {
            // Of another kind, and over by the clock: its holder may just be renewing it.
            if over.is_some_and(|r| r.grant.mode != request.ask.mode) && lock.is_relied_on() {
                return Ok(LOST);
            }
            busy.push(slot);
            continue;
        }
        let mut relied_on = false;
        ended.retain(|row| {
            let lock = Tag::grant(name, row.grant.slot);
            let had = locks.take(lock, Lock::Replace);
            // Another one of this kind may be ending it, or taking its place.
            relied_on |= !had && (row.grant.mode == request.ask.mode || lock.is_relied_on());
            had
        });
        if relied_on {
            return Ok(LOST);
        }
        // Who held a lock until now may have put a grant there, renewed, or (a prune) be deleting the row.
        let again = table.rows(name, AsOf::Now);
        let in_slot = |rows: &[Row], slot: i32| rows.iter().find(|r| r.grant.slot == slot).copied();
        let excluding =
            rows.iter().filter(|r| r.grant.mode != request.ask.mode).map(|r| r.grant.slot);
        let ours = ended.iter().map(|r| r.grant.slot).chain([slot]);
        let same = excluding.chain(ours.clone()).all(|slot| {
            in_slot(&rows, slot).map(|r| r.version()) == in_slot(&again, slot).map(|r| r.version())
        });
        let deleter = |slot| in_slot(&again, slot).map_or(Deleter::None, |r| r.deleter());
        if deleter(slot) == Deleter::Open {
            busy.push(slot);
        } else if same && again.len() == rows.len() {
            if ours.clone().all(|slot| deleter(slot) == Deleter::None) {
                return Ok(Tried::Won((slot, over, ended)));
            }
            if ours.clone().any(|slot| deleter(slot) == Deleter::Open) {
                return Ok(LOST);
            }
        }
        locks.give_from(before);
    }
}

fn decide(request: &Request, rows: &[Row], seats: &[Seat]) -> Result<Tried<Found>, Refusal> {
    // The clock is read after the locks were obtained.
    let now = server::now();
    match grant::acquire(seats, &request.ask, now) {
        Acquire::Taken { until } => Ok(Tried::Lost { until }),
        Acquire::SlotsDiffer { live } => Err(slots_differ(request, live)),
        Acquire::Grant { slot } => {
            let ended = rows
                .iter()
                .zip(seats)
                .filter(|(row, seat)| {
                    row.grant.slot != slot && grant::ends(&request.ask, seat, now)
                })
                .map(|(row, _)| *row)
                .collect();
            let over = rows.iter().find(|r| r.grant.slot == slot).copied();
            Ok(Tried::Won((slot, over, ended)))
        }
    }
}

fn seats(request: &Request, rows: &[Row], guarded: &dyn Fn(i32) -> bool) -> Vec<Seat> {
    let role = request.ask.reclaim.then(server::current_role);
    rows.iter()
        .map(|row| Seat {
            grant: row.grant,
            mine: role.as_deref().is_some_and(|role| {
                request.holder == row.holder().as_deref() && row.role() == role
            }),
            guarded: guarded(row.grant.slot),
        })
        .collect()
}

/// A grant that another transaction is just writing, of the same shape.
fn in_the_making(slot: i32, mode: Mode) -> Seat {
    let grant = Grant {
        slot,
        mode,
        tokens: Tokens::new(0, &[]),
        closing: None,
        closed_here: false,
        expires_at: Micros::MAX,
        abandoned: false,
    };
    Seat { grant, mine: false, guarded: true }
}

/// Does an open transaction rely on what is over?
fn is_guarded(name: &[u8], slot: i32) -> bool {
    let tag = Tag::guarded(name, slot);
    let free = tag.take(Lock::Probe, false);
    if free {
        tag.give(Lock::Probe);
    }
    !free
}

fn slots_differ(request: &Request, live: i32) -> Refusal {
    let asked = match request.ask.mode {
        Mode::Slots(n) => n,
        _ => 1,
    };
    errors::slots_differ(request.name, live, asked)
}

/// At REPEATABLE READ and above the transaction reads the world of its snapshot. What is granted now must
/// have been to be had then: the lease free when the snapshot was taken, and every row still the version that
/// the snapshot sees, and no guarded transaction's commit noted that it does not see (`guard`).
///
/// A live grant that the transaction reclaims, or has ended itself, tells nothing of that: a transaction may have
/// guarded it until a moment ago. Then nothing at all may have been committed since.
fn check_snapshot(table: &LeaseTable, request: &Request) -> Result<(), Refusal> {
    if !xact::keeps_snapshot() || xact::sees_all_commits() {
        return Ok(());
    }
    let now = table.rows(request.name, AsOf::Now);
    let mut then = table.rows(request.name, AsOf::Transaction);
    // Nothing tells when a session ended: it may have been after the snapshot.
    then.iter_mut().for_each(|row| row.grant.abandoned = false);
    let known = |row: &Row, rows: &[Row]| rows.iter().any(|r| r.version() == row.version());
    let same = now.iter().all(|r| r.written_here() || known(r, &then))
        && then.iter().all(|r| r.written_here() || known(r, &now));
    let ends_own = now.iter().any(|r| r.grant.closed_here);
    let free = same
        && !ends_own
        && was_free(request, &then)
        && !guarded_commits::is_newer_than_snapshot(request.name)?;
    if free {
        Ok(())
    } else {
        Err(errors::snapshot_too_early(request.name))
    }
}

/// Was the lease to be had when the transaction's snapshot was taken, by the rows that it sees? Where the clock
/// alone has ended a grant among them, that takes a time that is certainly not later than the snapshot.
fn was_free(request: &Request, then: &[Row]) -> bool {
    let seats = seats(request, then, &|_| false);
    let free_at = |time: Micros| {
        matches!(grant::acquire(&seats, &request.ask, time), Acquire::Grant { .. })
            && !seats.iter().any(|s| s.mine && s.grant.phase(time) == Phase::Held)
    };
    // As if no deadline had passed yet.
    free_at(Micros::MIN) || snapshot_age::not_taken_before().is_some_and(free_at)
}
