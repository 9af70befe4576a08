//! Changing or ending the grant that a token belongs to: for its holder, and for an administrator.

use super::known::{check_role, greatest, may_know_of, of_token, refuse_adopted};
use super::locks::{Locked, Locks};
use super::{queue, session_leases};
use crate::errors::Refusal;
use crate::pg::session::clock;
use crate::pg::session::commit;
use crate::pg::session::xact;
use crate::pg::state::lease_table::{Access, AsOf, LeaseTable};
use crate::pg::state::row::Row;
use crate::statistics::{self, Counter};
use crate::tokens;
use pg_fence_rules::grant::{Phase, Release};
use pg_fence_rules::locks::{LockStep, CHANGE};
use pg_fence_rules::{Instant, Token};
use pgrx::pg_sys::TransactionId;

/// Returns the token that closes these grants: a new one, greater than all of theirs. An adopted grant is closed by its
/// own number, because another service numbers it and its numbers never enter the sequence.
fn closing_token(rows: &[&Row]) -> Result<Token, Refusal> {
    match rows {
        [row] if row.grant.adopted.is_some() => Ok(row.grant.tokens.latest()),
        _ => tokens::draw(greatest(rows.iter().copied())),
    }
}

/// Releases the grants of this token and returns their closing token. Releases none, and returns `None`, if the token
/// has no grant in one of the leases.
pub fn release(names: &[Vec<u8>], token: Token) -> Result<Option<Token>, Refusal> {
    let table = LeaseTable::open(Access::Write)?;
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        // If one grant is lost, dropping `found` releases the locks taken so far.
        let grant = changeable(&table, name, token, CHANGE, |row| {
            let release = row.grant.release(token, clock::now());
            (release != Release::Lost).then_some(release)
        })?;
        let Some((locked, release)) = grant.locked()? else { return Ok(None) };
        check_role(|| Some(name), &locked.row)?;
        found.push((locked, release));
    }
    if names.len() > 1 {
        // Adopted leases are released one by one: the other service may have used the number for several.
        found.iter().try_for_each(|(locked, _)| refuse_adopted(&locked.row))?;
    }
    let now = clock::now();
    let is_current = |(_, release): &&(Locked, Release)| *release == Release::Close;
    if !found.iter().filter(is_current).all(|(locked, _)| locked.row.grant.renewable(token, now)) {
        return Ok(None);
    }
    if let [(_, first @ Release::Again(closing)), others @ ..] = found.as_slice() {
        if others.iter().all(|(_, release)| release == first) {
            return Ok(Some(*closing));
        }
    }
    let current = found.iter().filter(is_current).count();
    // Leases that this transaction has released one by one get the common closing token, too.
    let closing = closing_token(&found.iter().map(|(locked, _)| &locked.row).collect::<Vec<_>>())?;
    let rows: Vec<Row> = found.into_iter().map(|(locked, _)| locked.keep()).collect();
    rows.iter().try_for_each(|row| close(&table, row, closing, now))?;
    statistics::add(Counter::Releases, current);
    Ok(Some(closing))
}

/// Closes a grant whose lock is held until the transaction ends; its end wakes the head of the queue.
pub fn close(table: &LeaseTable, row: &Row, closing: Token, now: Instant) -> Result<(), Refusal> {
    let name = row.name();
    if row.grant.adopted.is_some() {
        // A lasting end: no next acquire makes it durable, and no deadline ends a grant that a crash brings back.
        commit::force();
    }
    table.replace(row, &row.closed(closing, now))?;
    session_leases::grant_ended(name, row.grant.tokens.first());
    queue::changed(name);
    Ok(())
}

/// Closes the current grants of a lease for which `such` holds, under one closing token. Returns `None` if there are
/// none.
pub fn revoke(
    table: &LeaseTable,
    name: &[u8],
    such: impl Fn(&Row) -> bool,
) -> Result<Option<Token>, Refusal> {
    let held = |rows: Vec<Row>| -> Vec<Row> {
        let now = clock::now();
        rows.into_iter().filter(|r| r.grant.phase(now) == Phase::Held && such(r)).collect()
    };
    // Uncommitted grants count, so the loop waits for their transactions.
    let (locks, rows) = loop {
        let mut slots: Vec<i32> =
            held(table.rows(name, AsOf::InFlight)).iter().map(|r| r.grant.slot).collect();
        slots.sort_unstable();
        slots.dedup();
        let mut locks = Locks::of(name);
        for slot in &slots {
            locks.take(CHANGE, *slot)?;
        }
        let locked = |as_of| {
            let rows = held(table.rows(name, as_of)).into_iter();
            rows.filter(|r| slots.contains(&r.grant.slot)).collect::<Vec<Row>>()
        };
        let rows = locked(AsOf::Now);
        let writer = rows.iter().chain(&locked(AsOf::InFlight)).find_map(Row::open_writer);
        if writer.is_none() {
            break (locks, rows);
        }
        drop(locks);
        wait_for(writer);
    };
    if rows.is_empty() {
        return Ok(None);
    }
    let closing = closing_token(&rows.iter().collect::<Vec<_>>())?;
    locks.keep();
    let now = clock::now();
    rows.iter().try_for_each(|row| close(table, row, closing, now))?;
    statistics::add(Counter::Revocations, rows.len());
    Ok(Some(closing))
}

/// The outcome of locking a grant that is to be changed.
pub enum Found<'a, T> {
    /// The grant is locked, with the caller's decision about it.
    Locked(Locked<'a>, T),
    /// No such grant exists, before or after the wait; or the decision is against it; or the caller may not know of it.
    /// Nothing is locked.
    Lost,
    /// An open transaction is changing the grant, and the step does not wait. The row is as read without the lock.
    InTheWay(Row),
    /// The lock table has no room for the lock. The row is as read without the lock.
    NoRoom(Row, Refusal),
}

impl<'a, T> Found<'a, T> {
    /// The locked grant, for callers whose step waits. Errors: 53200.
    pub fn locked(self) -> Result<Option<(Locked<'a>, T)>, Refusal> {
        match self {
            Found::Locked(locked, decision) => Ok(Some((locked, decision))),
            Found::NoRoom(_, refusal) => Err(refusal),
            Found::Lost | Found::InTheWay(_) => Ok(None),
        }
    }
}

/// Locks the grant that has this token, reads its row again and decides. If an open transaction is changing the grant,
/// a step that waits waits for that transaction.
pub fn changeable<'a, T>(
    table: &LeaseTable,
    name: &'a [u8],
    token: Token,
    step: LockStep,
    decide: impl Fn(&Row) -> Option<T>,
) -> Result<Found<'a, T>, Refusal> {
    loop {
        let Some(seen) = seen(table, name, token, &decide) else { return Ok(Found::Lost) };
        let mut locks = Locks::of(name);
        match locks.take(step, seen.grant.slot) {
            Ok(true) => {}
            Ok(false) => return Ok(Found::InTheWay(seen)),
            Err(refusal) => return Ok(Found::NoRoom(seen, refusal)),
        }
        let has_token = |row: &Row| row.grant.has(token);
        let unlocked_writer = match Locked::under(locks, table, seen.grant.slot, has_token) {
            Some(locked) => match (decide(&locked.row), locked.row.open_writer()) {
                (Some(_), Some(writer)) => Some(writer),
                (Some(decision), None) => return Ok(Found::Locked(locked, decision)),
                (None, _) => return Ok(Found::Lost),
            },
            // The grant is gone; an uncommitted one may have the token by now.
            None => of_token(&table.rows(name, AsOf::InFlight), token).and_then(Row::open_writer),
        };
        if unlocked_writer.is_some() && !step.waits {
            return Ok(Found::InTheWay(seen));
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
fn seen<T>(
    table: &LeaseTable,
    name: &[u8],
    token: Token,
    decide: impl Fn(&Row) -> Option<T>,
) -> Option<Row> {
    let seen = of_token(&table.rows(name, AsOf::Now), token).copied();
    let seen = match &seen {
        // A grant that is over never comes back. A caller that is too late takes no lock and so blocks nobody.
        Some(row) if decide(row).is_none() && row.open_writer().is_none() => return None,
        Some(_) => seen,
        // The token may be of an uncommitted grant, told by its transaction: the caller waits for that one.
        None => of_token(&table.rows(name, AsOf::InFlight), token).copied(),
    };
    seen.filter(|row| may_know_of(row, false))
}
