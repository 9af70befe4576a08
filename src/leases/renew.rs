//! Renewing grants: a list under one token, or single ones in the heartbeat of a process.
//!
//! The locks are taken in the order of names. Then the clock is read, one token is drawn and the rows are written.

use super::change::{NotLocked, lock_grant};
use super::locks::Locked;
use super::lookup::{check_role, greatest, refuse_adopted};
use super::queue;
use crate::errors::Report;
use crate::pg::session::clock;
use crate::pg::state::lease_table::{AsOf, LeaseTable};
use crate::pg::state::row::Row;
use crate::statistics::{self, Counter};
use crate::tokens;
use pg_fence_rules::locks::{CHANGE, LockStep};
use pg_fence_rules::{Instant, Span, Token};

/// A renewal that has been written.
#[derive(Clone, Copy)]
pub struct Renewed {
    /// The token of the renewal.
    pub token: Token,
    /// The life of the grant from now on.
    pub ttl: Span,
    /// True if the grant also ends with its session.
    pub ends_with_session: bool,
}

/// Locks the grants that this token may renew and returns them with the time of the decision. Returns `None` if it may
/// not renew one of them. Errors: 42501, 53200, 55000.
pub fn all_renewable<'a>(
    table: &LeaseTable,
    names: &'a [Vec<u8>],
    token: Token,
) -> Result<Option<(Vec<Locked<'a>>, Instant)>, Report> {
    let mut all = Vec::with_capacity(names.len());
    for name in names {
        match renewable(table, name, token, CHANGE)? {
            Ok(locked) => all.push(locked),
            // Dropping `all` releases the locks taken so far.
            Err(not_locked) => return not_locked.lost(),
        }
    }
    // Each lock may have been waited for, so the clock is read after the last.
    let now = clock::now();
    let holds = all.iter().all(|locked| locked.row.grant.renewable(token, now));
    Ok(holds.then_some((all, now)))
}

/// Locks and returns the grant this token may renew, or why not. Errors if the caller may not renew it: 42501, and
/// 55000 if the lease is adopted.
pub fn renewable<'a>(
    table: &LeaseTable,
    name: &'a [u8],
    token: Token,
    step: LockStep,
) -> Result<Result<Locked<'a>, NotLocked>, Report> {
    let wanted = |row: &Row| row.grant.renewable(token, clock::now());
    let found = lock_grant(table, name, token, step, wanted);
    let row = match &found {
        Ok(locked) => &locked.row,
        Err(NotLocked::Held(row) | NotLocked::NoRoom(row, _)) => row,
        Err(NotLocked::Lost) => {
            // An adopted grant may have another token than this one.
            table.rows(name, AsOf::Now).iter().try_for_each(refuse_adopted)?;
            return Ok(found);
        }
    };
    check_role(row)?;
    refuse_adopted(row)?;
    Ok(found)
}

/// Draws one token and writes the renewals, with the ttl last asked for if none is given. `grants` are held at `now`
/// and sorted by name; their locks are held until the transaction ends.
pub fn renew(
    table: &LeaseTable,
    grants: Vec<Locked>,
    now: Instant,
    ttl: Option<Span>,
) -> Result<Vec<Renewed>, Report> {
    if grants.is_empty() {
        return Ok(Vec::new());
    }
    let fresh = tokens::draw(greatest(grants.iter().map(|locked| &locked.row)))?;
    // All locks are marked as held before the first write: an error must not find one that is still to be released.
    let rows: Vec<Row> = grants.into_iter().map(Locked::hold_until_commit).collect();
    let mut renewed = Vec::with_capacity(rows.len());
    let mut last: &[u8] = &[];
    for row in &rows {
        // A token belongs to one grant, so a second grant of the same lease gets its own.
        let is_further = row.name() == last;
        let token = if is_further { tokens::draw(row.grant.greatest())? } else { fresh };
        let ttl = ttl.unwrap_or(row.ttl);
        table.replace(row, &row.renewed(token, now, ttl))?;
        if now + ttl < row.grant.expires_at {
            // The head of the queue may sleep until the old, later deadline.
            queue::changed(row.name());
        }
        last = row.name();
        renewed.push(Renewed { token, ttl, ends_with_session: row.ends_with_session() });
    }
    statistics::add(Counter::Renewals, rows.len());
    Ok(renewed)
}
