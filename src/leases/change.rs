//! Changing or ending the grant that a token belongs to: for its holder, and for an administrator.

use super::locks::{Locked, Locks};
use super::lookup::{check_role, greatest, may_know_of, of_token, refuse_adopted};
use super::{queue, session_leases};
use crate::errors::{self, Report};
use crate::pg::session::clock;
use crate::pg::session::commit;
use crate::pg::session::xact;
use crate::pg::state::lease_table::{Access, AsOf, LeaseTable};
use crate::pg::state::row::Row;
use crate::statistics::{self, Counter};
use crate::tokens;
use pg_fence_rules::grant::{Phase, Release};
use pg_fence_rules::locks::{CHANGE, LockStep};
use pg_fence_rules::{Instant, Token};
use pgrx::pg_sys::TransactionId;
use std::collections::BTreeSet;

/// Releases the grants of this token and returns their closing token. Releases none, and returns `None`, if the token
/// has no grant in one of the leases.
pub fn release(names: &[Vec<u8>], token: Token) -> Result<Option<Token>, Report> {
    let table = LeaseTable::open(Access::Write)?;
    let is_releasable = |row: &Row| row.grant.release(token, clock::now()) != Release::Lost;
    let mut grants = Vec::with_capacity(names.len());
    for name in names {
        // If one grant is lost, dropping `grants` releases the locks taken so far.
        match lock_grant(&table, name, token, CHANGE, is_releasable) {
            Ok(locked) => {
                check_role(&locked.row)?;
                grants.push(locked);
            }
            Err(not_locked) => return not_locked.lost(),
        }
    }
    if names.len() > 1 {
        // Adopted leases are released one by one: the other service may have used the number for several.
        grants.iter().try_for_each(|locked| refuse_adopted(&locked.row))?;
    }
    // Each lock may have been waited for, so the clock is read after the last.
    let now = clock::now();
    let releases: Vec<Release> =
        grants.iter().map(|locked| locked.row.grant.release(token, now)).collect();
    match releases[..] {
        _ if releases.contains(&Release::Lost) => return Ok(None),
        [first @ Release::Again(closing), ..] if releases.iter().all(|one| *one == first) => {
            return Ok(Some(closing));
        }
        _ => {}
    }
    let current = releases.iter().filter(|release| **release == Release::Close).count();
    // Leases that this transaction has released one by one get the common closing token, too.
    let closing = close_all(&table, grants, now)?;
    statistics::add(Counter::Releases, current);
    Ok(Some(closing))
}

/// Closes locked grants, and holds their locks until the transaction ends; the end wakes the heads of their queues.
/// Returns their closing token: a new one, greater than all of theirs. An adopted grant is closed by its own number,
/// because another service numbers it and its numbers never enter the sequence.
fn close_all(table: &LeaseTable, grants: Vec<Locked>, now: Instant) -> Result<Token, Report> {
    let closing = match &grants[..] {
        [Locked { row, .. }] if row.grant.adopted.is_some() => row.grant.tokens.latest(),
        _ => tokens::draw(greatest(grants.iter().map(|locked| &locked.row)))?,
    };
    // All locks are marked as held before the first write: an error must not find one that is still to be released.
    let rows: Vec<Row> = grants.into_iter().map(Locked::hold_until_commit).collect();
    for row in rows {
        if row.grant.adopted.is_some() {
            // A lasting end: no next acquire makes it durable, and no deadline ends a grant that a crash brings back.
            commit::flush_at_commit();
        }
        table.replace(&row, &row.closed(closing, now))?;
        session_leases::grant_ended(row.name(), row.grant.tokens.first());
        queue::changed(row.name());
    }
    Ok(closing)
}

/// Closes the current grants of a lease for which `such` holds, under one closing token. Returns `None` if there are
/// none. Uncommitted grants count, so this waits for their transactions.
pub fn revoke(
    table: &LeaseTable,
    name: &[u8],
    such: impl Fn(&Row) -> bool,
) -> Result<Option<Token>, Report> {
    let is_held = |row: &Row| row.grant.phase(clock::now()) == Phase::Held && such(row);
    let grants = loop {
        // A scan of what is in flight may miss a row that is replaced meanwhile. A later snapshot shows that one.
        let seen = [AsOf::InFlight, AsOf::Now].map(|as_of| table.rows(name, as_of));
        let held = seen.iter().flatten().filter(|row| is_held(row));
        let slots: BTreeSet<i32> = held.map(|row| row.grant.slot).collect();
        let lock = |slot: &i32| Locked::grant(table, name, *slot, CHANGE, is_held).transpose();
        let grants = slots.iter().filter_map(lock).collect::<Result<Vec<_>, _>>();
        let grants = grants.map_err(errors::evict_in_portions)?;
        let versions = |slot: &i32| table.rows_in_slot(name, *slot, AsOf::InFlight);
        let in_flight =
            || slots.iter().flat_map(versions).filter(is_held).find_map(|row| row.open_writer());
        let unlocked_writer =
            grants.iter().find_map(|one| one.row.open_writer()).or_else(in_flight);
        if unlocked_writer.is_none() {
            break grants;
        }
        drop(grants);
        wait_for(unlocked_writer);
    };
    if grants.is_empty() {
        return Ok(None);
    }
    let count = grants.len();
    let closing = close_all(table, grants, clock::now())?;
    statistics::add(Counter::Revocations, count);
    Ok(Some(closing))
}

/// Why a grant is not locked.
pub enum NotLocked {
    /// No such grant exists, before or after the wait; or it is not wanted; or the caller may not know of it.
    Lost,
    /// An open transaction is changing the grant, and the step does not wait. The row is as read without the lock.
    Held(Box<Row>),
    /// The lock table has no room for the lock. The row is as read without the lock.
    NoRoom(Box<Row>, Report),
}

impl NotLocked {
    /// The answer of a call whose step waits. Errors: 53200.
    pub fn lost<T>(self) -> Result<Option<T>, Report> {
        match self {
            NotLocked::NoRoom(_, report) => Err(report),
            NotLocked::Lost | NotLocked::Held(_) => Ok(None),
        }
    }
}

/// Locks the grant that has this token and reads its row again. If an open transaction is changing the grant, a step
/// that waits waits for that transaction.
pub fn lock_grant<'a>(
    table: &LeaseTable,
    name: &'a [u8],
    token: Token,
    step: LockStep,
    wanted: impl Fn(&Row) -> bool,
) -> Result<Locked<'a>, NotLocked> {
    loop {
        let seen = seen(table, name, token, &wanted).ok_or(NotLocked::Lost)?;
        let has_token = |row: &Row| row.grant.has(token);
        let (slot, mut locks) = (seen.grant.slot, Locks::of(name));
        match locks.take(step, slot) {
            Ok(true) => {}
            Ok(false) => return Err(NotLocked::Held(Box::new(seen))),
            Err(report) => return Err(NotLocked::NoRoom(Box::new(seen), report)),
        }
        let unlocked_writer = match Locked::under(locks, table, slot, has_token) {
            Some(locked) if !wanted(&locked.row) => return Err(NotLocked::Lost),
            Some(locked) => match locked.row.open_writer() {
                None => return Ok(locked),
                writer => writer,
            },
            // The grant is gone; an uncommitted one may have the token by now.
            None => of_token(&table.rows(name, AsOf::InFlight), token).and_then(Row::open_writer),
        };
        if unlocked_writer.is_some() && !step.waits {
            return Err(NotLocked::Held(Box::new(seen)));
        }
        wait_for(unlocked_writer);
    }
}

/// Waits for a transaction that has written a row without the grant's lock, for example while loading a dump.
fn wait_for(unlocked_writer: Option<TransactionId>) {
    xact::serve_interrupts();
    if let Some(writer) = unlocked_writer {
        xact::wait_for(writer);
    }
}

/// Reads the grant of this token without its lock. Returns `None` if the grant is not worth locking, or the caller may
/// not know of it.
fn seen(
    table: &LeaseTable,
    name: &[u8],
    token: Token,
    wanted: impl Fn(&Row) -> bool,
) -> Option<Row> {
    let seen = of_token(&table.rows(name, AsOf::Now), token).copied();
    let seen = match &seen {
        // A grant that is over never comes back. A caller that is too late takes no lock and so blocks nobody.
        Some(row) if !wanted(row) && row.open_writer().is_none() => return None,
        Some(_) => seen,
        // The token may be of an uncommitted grant, told by its transaction: the caller waits for that one.
        None => of_token(&table.rows(name, AsOf::InFlight), token).copied(),
    };
    seen.filter(|row| may_know_of(row, false))
}
