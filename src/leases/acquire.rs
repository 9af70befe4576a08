//! One try to acquire a lease: look, lock, look again, decide, draw, write.

use super::free_slot::{self, FreeSlot, LockedSlot};
use super::request::{Request, Tried};
use super::{line, session_leases, snapshot};
use crate::pg::call::errors::Refusal;
use crate::pg::locks::relation_lock::Wait;
use crate::pg::session::role;
use crate::pg::session::server;
use crate::pg::state::keyed::Access;
use crate::pg::state::lease_table::{AsOf, Glance, LeaseTable, Rows};
use crate::pg::state::row::{NewGrant, Row};
use crate::statistics::{self, Counter};
use crate::{known_bugs, tokens};
use pg_fence_rules::grant::{self, Acquire, Ask, Mode, Phase};
use pg_fence_rules::{Instant, Span, Token};

/// How soon to look again where maintenance waits for the table, or works on it.
const LOOK_AFTER_MAINTENANCE: Span = Span::from_micros(100_000);

/// A lease that looked free, without a lock.
struct LooksFree {
    /// The caller would only replace a grant of its own.
    reclaims: bool,
    seen: Rows,
}

/// One try, with a token of its own. With `behind_the_line`, those who wait in line come first. `wait` says what to do about
/// maintenance of the table. Errors: 22023, 40001, 53200, 55000.
pub fn attempt(
    request: &Request,
    behind_the_line: bool,
    wait: Wait,
) -> Result<Tried<Token>, Refusal> {
    if let Some(until) = taken_at_a_glance(request) {
        return Ok(Tried::Lost { until: Some(until) });
    }
    let Some(table) = open(wait)? else {
        return Ok(Tried::Lost { until: Some(server::now() + LOOK_AFTER_MAINTENANCE) });
    };
    let free = match look(&table, request)? {
        Tried::Won(free) => free,
        Tried::Lost { until } => return Ok(Tried::Lost { until }),
    };
    if behind_the_line && !free.reclaims && line::somebody_waits(&request.name) {
        return Ok(Tried::BY_ANOTHER);
    }
    match free_slot::find(&table, request, &free.seen)? {
        Tried::Lost { until } => Ok(Tried::Lost { until }),
        Tried::Won(chosen) => {
            let token = known_bugs::early_or(|| tokens::draw(chosen.above()))?;
            write(&table, request, &chosen.keep(), token)?;
            Ok(Tried::Won(token))
        }
    }
}

/// One try to acquire several leases under one token: all, or none (then None). The requests are in the order of their
/// names, so that two such calls never hold up each other. Errors: as `attempt`.
pub fn attempt_all(requests: &[Request]) -> Result<Option<Token>, Refusal> {
    let Some(table) = open(Wait::Holders)? else { return Ok(None) };
    let mut looks = Vec::with_capacity(requests.len());
    for request in requests {
        match look(&table, request)? {
            Tried::Won(free) if !line::somebody_waits(&request.name) => looks.push(free.seen),
            _ => return Ok(None),
        }
    }
    let mut chosen_slots: Vec<LockedSlot> = Vec::with_capacity(requests.len());
    for (request, seen) in requests.iter().zip(&looks) {
        match free_slot::find(&table, request, seen)? {
            Tried::Won(chosen) => chosen_slots.push(chosen),
            // Those that are locked so far are given back.
            Tried::Lost { .. } => return Ok(None),
        }
    }
    let above = chosen_slots.iter().map(LockedSlot::above).max().unwrap_or(Token::BEFORE_ALL);
    let token = tokens::draw(above)?;
    // All before the first is written: an error must find no lock that is still to be given back.
    let chosen_slots: Vec<FreeSlot> = chosen_slots.into_iter().map(LockedSlot::keep).collect();
    for (request, chosen) in requests.iter().zip(&chosen_slots) {
        write(&table, request, chosen, token)?;
    }
    Ok(Some(token))
}

/// Until when the lease is taken, where the session remembers the row of a grant that lives and leaves room for no
/// other: most of those who try for a busy lease have done so before.
fn taken_at_a_glance(request: &Request) -> Option<Instant> {
    if request.ask != (Ask { mode: Mode::Exclusive, reclaim: false }) {
        return None;
    }
    let is_alone = |row: &Row| row.grant.mode == Mode::Exclusive;
    let row = Glance::row(&request.name, is_alone)?;
    (row.grant.phase(server::now()) == Phase::Held).then_some(row.grant.expires_at)
}

/// The table, ready to be searched; None where maintenance has it.
fn open(wait: Wait) -> Result<Option<LeaseTable>, Refusal> {
    Ok(LeaseTable::try_open(Access::Write, wait)?.filter(|table| table.can_search(wait)))
}

/// Tells without a lock whether it is worth trying: a losing try reads only.
fn look(table: &LeaseTable, request: &Request) -> Result<Tried<LooksFree>, Refusal> {
    let seen = table.rows(&request.name, AsOf::Now);
    let existing = request.existing(&seen, |_| false);
    let now = server::now();
    match grant::acquire(&existing, &request.ask, now) {
        Acquire::Grant { .. } => {
            let reclaims = existing.iter().any(|s| s.mine && s.grant.phase(now) == Phase::Held);
            Ok(Tried::Won(LooksFree { reclaims, seen }))
        }
        Acquire::Taken { until } => {
            if let [row] = &*seen {
                table.remember(&request.name, row);
            }
            Ok(Tried::Lost { until })
        }
        Acquire::SlotsDiffer { live } => Err(request.slots_differ(live)),
    }
}

/// Writes the grant into its slot.
fn write(
    table: &LeaseTable,
    request: &Request,
    chosen: &FreeSlot,
    token: Token,
) -> Result<(), Refusal> {
    let FreeSlot { slot, over, ended } = chosen;
    if request.session {
        session_leases::bind(table, &request.name, token)?;
    }
    let now = server::now();
    let is_over = |row: &Row| matches!(row.grant.phase(now), Phase::Expired | Phase::Abandoned);
    let takes_over = ended.iter().chain(over).any(is_over);
    for row in ended {
        table.end(row, now)?;
    }
    for row in ended.iter().chain(over) {
        session_leases::grant_ended(&request.name, row.grant.tokens.first());
    }
    let (session, role) = (server::session(), role::current());
    let new = NewGrant {
        name: &request.name,
        slot: *slot,
        mode: request.ask.mode,
        holder: request.holder.as_deref(),
        session: &session,
        role: &role,
        token,
        now,
        ttl: request.ttl,
        metadata: request.metadata,
        session_bound: request.session,
    };
    table.grant(&new, over.as_ref())?;
    if let Some(row) = over {
        table.remember(&request.name, row);
    }
    line::changed(&request.name);
    snapshot::grant_made(token);
    // Two that ask for different numbers at the same moment have seen neither's row.
    match free_slot::other_number(table, request) {
        Some(other) => Err(request.slots_differ(other)),
        None => {
            statistics::count(Counter::Grants);
            if takes_over {
                statistics::count(Counter::TakeOvers);
            }
            Ok(())
        }
    }
}
