//! Changing a grant by one of its tokens, and ending it: by its own holder, and by an administrator.

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

/// The token that closes these grants: one that is drawn, greater than all of their own. Nothing is drawn for a grant that
/// somebody else has made: its own number closes it, and never becomes one of the sequence.
fn closing_token(rows: &[&Row]) -> Result<Token, Refusal> {
    match rows {
        [row] if row.grant.adopted.is_some() => Ok(row.grant.tokens.latest()),
        _ => tokens::draw(greatest(rows.iter().copied())),
    }
}

/// Releases the grants that this token is of: all of them or, where it is of none in one lease, none. Their closing token.
pub fn release(names: &[Vec<u8>], token: Token) -> Result<Option<Token>, Refusal> {
    let table = LeaseTable::open(Access::Write)?;
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        // Where one is lost, the locks taken so far are given back.
        let grant = changeable(&table, name, token, CHANGE, |row| {
            let release = row.grant.release(token, clock::now());
            (release != Release::Lost).then_some(release)
        })?;
        let Some((locked, release)) = grant.locked()? else { return Ok(None) };
        check_role(|| Some(name), &locked.row)?;
        found.push((locked, release));
    }
    if names.len() > 1 {
        // Several leases under one number of somebody else's are released one by one.
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
    // Leases that this transaction released one by one get the closing token of all.
    let closing = closing_token(&found.iter().map(|(locked, _)| &locked.row).collect::<Vec<_>>())?;
    let rows: Vec<Row> = found.into_iter().map(|(locked, _)| locked.keep()).collect();
    rows.iter().try_for_each(|row| close(&table, row, closing, now))?;
    statistics::add(Counter::Releases, current);
    Ok(Some(closing))
}

/// Closes a grant whose lock stays until the transaction ends; that wakes the head of the queue.
pub fn close(table: &LeaseTable, row: &Row, closing: Token, now: Instant) -> Result<(), Refusal> {
    let name = row.name();
    if row.grant.adopted.is_some() {
        // Nobody acquires next who makes it durable, and no deadline ends what a crash brings back.
        commit::force();
    }
    table.replace(row, &row.closed(closing, now))?;
    session_leases::grant_ended(name, row.grant.tokens.first());
    queue::changed(name);
    Ok(())
}

/// Closes whatever such grants of a lease are current, under one closing token; None where none is.
pub fn revoke(
    table: &LeaseTable,
    name: &[u8],
    such: impl Fn(&Row) -> bool,
) -> Result<Option<Token>, Refusal> {
    let held = |rows: Vec<Row>| -> Vec<Row> {
        let now = clock::now();
        rows.into_iter().filter(|r| r.grant.phase(now) == Phase::Held && such(r)).collect()
    };
    // Grants in the making count: their transactions are waited for.
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

/// The state of a grant that is to be changed.
pub enum Found<'a, T> {
    /// It is locked, and this was decided.
    Locked(Locked<'a>, T),
    /// There is no such grant, now or after the wait, the decision is against it, or the caller may not know of it. Nothing
    /// is locked.
    Lost,
    /// An open transaction is changing it, and the step does not wait. As it was seen.
    InTheWay(Row),
    /// There is no room in the lock table for it. As it was seen.
    NoRoom(Row, Refusal),
}

impl<'a, T> Found<'a, T> {
    /// For who waits: what is locked. Errors: 53200.
    pub fn locked(self) -> Result<Option<(Locked<'a>, T)>, Refusal> {
        match self {
            Found::Locked(locked, decision) => Ok(Some((locked, decision))),
            Found::NoRoom(_, refusal) => Err(refusal),
            Found::Lost | Found::InTheWay(_) => Ok(None),
        }
    }
}

/// Locks the grant that has this token against other changes, waiting for an open transaction that has changed it where
/// the step waits, reads it again and decides.
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
            // Where the grant is not there any more, another one may have the token by now.
            None => of_token(&table.rows(name, AsOf::InFlight), token).and_then(Row::open_writer),
        };
        if unlocked_writer.is_some() && !step.waits {
            return Ok(Found::InTheWay(seen));
        }
        wait_for(unlocked_writer);
    }
}

/// Waits for a transaction that has written a row without the grant's lock, as one does that loads a dump.
fn wait_for(unlocked_writer: Option<TransactionId>) {
    xact::serve_interrupts();
    if let Some(writer) = unlocked_writer {
        xact::wait_for(writer);
    }
}

/// The grant that has this token, as it is seen without its lock; None where it is not worth locking, or the caller may
/// not know of it.
fn seen<T>(
    table: &LeaseTable,
    name: &[u8],
    token: Token,
    decide: impl Fn(&Row) -> Option<T>,
) -> Option<Row> {
    let seen = of_token(&table.rows(name, AsOf::Now), token).copied();
    let seen = match &seen {
        // A grant that is over does not come back: a caller who is too late locks nothing, and so keeps the
        // lease from nobody.
        Some(row) if decide(row).is_none() && row.open_writer().is_none() => return None,
        Some(_) => seen,
        // A token of an uncommitted grant may have been passed on: its transaction is waited for.
        None => of_token(&table.rows(name, AsOf::InFlight), token).copied(),
    };
    seen.filter(|row| may_know_of(row, false))
}
