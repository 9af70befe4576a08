//! Renewing grants: all of a list under one token, or each for itself in the heartbeat of a process.
//!
//! One pass locks, in the order of names; then the clock is read, one token is drawn, and what is locked is written.

use super::change::{changeable, Found};
use super::known::{check_role, greatest, refuse_adopted};
use super::locks::Locked;
use super::queue;
use crate::errors::Refusal;
use crate::pg::session::clock;
use crate::pg::state::lease_table::{AsOf, LeaseTable};
use crate::pg::state::row::Row;
use crate::statistics::{self, Counter};
use crate::tokens;
use pg_fence_rules::locks::{LockStep, CHANGE};
use pg_fence_rules::{Instant, Span, Token};

/// A renewal that was written.
#[derive(Clone, Copy)]
pub struct Renewed {
    /// Its token.
    pub token: Token,
    /// How long the grant lives from now on.
    pub ttl: Span,
    /// At the latest until its session ends.
    pub ends_with_session: bool,
}

/// The grants that this token may renew, locked, and when that was decided; None where it may not renew one of them.
/// Errors: 42501, 53200, 55000.
pub fn all_renewable<'a>(
    table: &LeaseTable,
    names: &'a [Vec<u8>],
    token: Token,
) -> Result<Option<(Vec<Locked<'a>>, Instant)>, Refusal> {
    let mut all = Vec::with_capacity(names.len());
    for name in names {
        let found = renewable(table, name, token, CHANGE)?;
        check(table, name, &found)?;
        match found.locked()? {
            Some((locked, ())) => all.push(locked),
            // The locks taken so far are given back.
            None => return Ok(None),
        }
    }
    // The locks were waited for one by one: the time of the decision is after the last.
    let now = clock::now();
    let holds = all.iter().all(|locked| locked.row.grant.renewable(token, now));
    Ok(holds.then_some((all, now)))
}

/// The grant that this token may renew, as far as it is to be had by that step.
pub fn renewable<'a>(
    table: &LeaseTable,
    name: &'a [u8],
    token: Token,
    step: LockStep,
) -> Result<Found<'a, ()>, Refusal> {
    changeable(table, name, token, step, |row| {
        row.grant.renewable(token, clock::now()).then_some(())
    })
}

/// Is it for this caller to renew? Errors: 42501, and 55000 where somebody else has made the grant.
pub fn check(table: &LeaseTable, name: &[u8], found: &Found<()>) -> Result<(), Refusal> {
    match found {
        Found::Locked(Locked { row, .. }, ()) | Found::InTheWay(row) | Found::NoRoom(row, _) => {
            check_role(|| Some(name), row)?;
            refuse_adopted(row)
        }
        // It may have another token, or none.
        Found::Lost => table.rows(name, AsOf::Now).iter().try_for_each(refuse_adopted),
    }
}

/// Draws one token and writes the renewals, by default for the ttl last asked for. The locks stay until the transaction
/// ends. The grants are those that live `now`, in the order of their names.
pub fn renew(
    table: &LeaseTable,
    grants: Vec<Locked>,
    now: Instant,
    ttl: Option<Span>,
) -> Result<Vec<Renewed>, Refusal> {
    if grants.is_empty() {
        return Ok(Vec::new());
    }
    let fresh = tokens::draw(greatest(grants.iter().map(|locked| &locked.row)))?;
    // All before the first is written: an error must find no lock that is still to be given back.
    let rows: Vec<Row> = grants.into_iter().map(Locked::keep).collect();
    let mut renewed = Vec::with_capacity(rows.len());
    let mut last: &[u8] = &[];
    for row in &rows {
        // A token is of one grant: another of the same lease gets its own.
        let is_further = row.name() == last;
        let token = if is_further { tokens::draw(row.grant.greatest())? } else { fresh };
        let ttl = ttl.unwrap_or(row.ttl);
        table.replace(row, &row.renewed(token, now, ttl))?;
        if now + ttl < row.grant.expires_at {
            // The head of the queue may sleep for too long.
            queue::changed(row.name());
        }
        last = row.name();
        renewed.push(Renewed { token, ttl, ends_with_session: row.ends_with_session() });
    }
    statistics::add(Counter::Renewals, rows.len());
    Ok(renewed)
}
