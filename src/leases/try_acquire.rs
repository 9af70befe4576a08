//! One attempt to acquire one or more leases: read the rows, lock, read again, decide, draw a token, write.

use super::free_slot::{self, FreeSlot, LockedSlot};
use super::request::{BY_ANOTHER, NotGranted, Request, unless_refused};
use super::{guard, queue, session_leases};
use crate::errors::Report;
use crate::pg::session::clock;
use crate::pg::session::commit;
use crate::pg::state::lease_table::{Access, AsOf, LeaseTable};
use crate::pg::state::opened::IfLocked;
use crate::pg::state::role_prefix;
use crate::pg::state::row::{Lifetime, NewGrant, Row};
use crate::statistics::{self, Counter};
use crate::tokens;
use pg_fence_rules::durability::{self, Predecessor};
use pg_fence_rules::grant::Phase;
use pg_fence_rules::names::Level;
use pg_fence_rules::{Span, Token};

/// Time until the next attempt while maintenance holds the table's lock, or waits for it.
const MAINTENANCE_RETRY_INTERVAL: Span = Span::from_micros(100_000);

/// Makes one attempt to acquire all the leases under one token; all are granted, or none. The requests are sorted by
/// name, so that two such calls never block each other. With `behind_the_queue`, waiting sessions come first.
/// `if_locked` says what to do if maintenance holds the table. Errors: 22023, 42501, 53200, 55000.
pub fn try_acquire(
    requests: &[Request],
    behind_the_queue: bool,
    if_locked: IfLocked,
) -> Result<Token, NotGranted> {
    let in_maintenance =
        || NotGranted::Taken { until: Some(clock::now() + MAINTENANCE_RETRY_INTERVAL) };
    let table = LeaseTable::try_open(Access::Write, if_locked)?.ok_or_else(in_maintenance)?;
    // Checked at each attempt, because a prefix may be revoked while its role waits.
    let names = requests.iter().map(|request| request.name.as_slice());
    if !role_prefix::require_each(names, Level::Worker, if_locked)? {
        return Err(in_maintenance());
    }
    for request in requests {
        let reclaims = free_slot::looks_free(&table, request)?;
        if behind_the_queue && !reclaims && queue::somebody_waits(&request.name) {
            return Err(BY_ANOTHER);
        }
    }
    // If one lease is taken, dropping the others releases their locks.
    let lock = |request| free_slot::lock_one(&table, request);
    let chosen = requests.iter().map(lock).collect::<Result<Vec<_>, _>>()?;
    Ok(grant(&table, requests, chosen)?)
}

/// Returns true if the grant would only replace one of the caller's own. Errors: 22023, 55000.
pub fn takes_back_its_own(request: &Request) -> Result<bool, Report> {
    if !request.acquire.reclaim {
        return Ok(false);
    }
    let Some(table) = LeaseTable::try_open(Access::Read, IfLocked::GiveUp)? else {
        return Ok(false);
    };
    Ok(unless_refused(free_slot::looks_free(&table, request))?.unwrap_or(false))
}

/// Draws a token and writes the grants into the slots chosen for them.
fn grant(
    table: &LeaseTable,
    requests: &[Request],
    chosen: Vec<LockedSlot>,
) -> Result<Token, Report> {
    let above = chosen.iter().map(LockedSlot::above).max().unwrap_or(Token::BEFORE_ALL);
    let token = tokens::draw(above)?;
    // All locks are marked as held before the first write: an error must not find one that is still to be released.
    let chosen: Vec<FreeSlot> = chosen.into_iter().map(LockedSlot::hold_until_commit).collect();
    for (request, slot) in requests.iter().zip(&chosen) {
        write(table, request, slot, token)?;
    }
    // The warning may wait for the client, and the turn must not.
    drop(chosen);
    // One warning is enough for all leases.
    requests.iter().take(1).for_each(|request| guard::warn_of_older_reads(&request.name));
    Ok(token)
}

/// Returns true if the lease has a grant that a crash could bring back. Called under the new grant's locks, before it
/// is written.
fn some_may_come_back(table: &LeaseTable, name: &[u8]) -> bool {
    let now = clock::now();
    table.rows(name, AsOf::Now).iter().any(|row| {
        durability::may_come_back(&Predecessor {
            ends_with_session: row.ends_with_session(),
            live: row.grant.phase(now) == Phase::Held,
            on_disk: row.is_on_disk(),
        })
    })
}

/// Writes the grant into its slot.
fn write(
    table: &LeaseTable,
    request: &Request,
    chosen: &FreeSlot,
    token: Token,
) -> Result<(), Report> {
    let FreeSlot { slot, existing, ended, .. } = chosen;
    if request.session {
        session_leases::bind(table, &request.name, token)?;
        if some_may_come_back(table, &request.name) {
            commit::flush_at_commit();
        }
    }
    let now = clock::now();
    let is_over = |row: &Row| matches!(row.grant.phase(now), Phase::Expired | Phase::Abandoned);
    let takes_over = ended.iter().chain(existing).any(is_over);
    for row in ended {
        // The new grant ends this one, so there is no closing token.
        let (latest, at) = (row.grant.tokens.latest(), now.min(row.grant.expires_at));
        table.replace(row, &row.closed(latest, at))?;
    }
    for row in ended.iter().chain(existing) {
        session_leases::grant_ended(&request.name, row.grant.tokens.first());
    }
    let new = NewGrant {
        name: &request.name,
        slot: *slot,
        mode: request.acquire.mode,
        holder: request.holder.as_deref(),
        token,
        now,
        lifetime: Lifetime::Ttl { ttl: request.ttl, session_bound: request.session },
        metadata: request.metadata,
    };
    table.grant(&new, existing.as_ref())?;
    queue::changed(&request.name);
    statistics::count(Counter::Grants);
    if takes_over {
        statistics::count(Counter::TakeOvers);
    }
    Ok(())
}
