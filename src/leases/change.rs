//! Renewing and ending a grant: what its own holder does with one of its tokens, and what an administrator does.

use super::locks::{Locked, Locks};
use super::{queue, session_leases};
use crate::errors::{self, Refusal};
use crate::pg::session::commit;
use crate::pg::session::role;
use crate::pg::session::server;
use crate::pg::session::xact;
use crate::pg::state::lease_table::{Access, AsOf, LeaseTable};
use crate::pg::state::role_prefix;
use crate::pg::state::row::Row;
use crate::statistics::{self, Counter};
use crate::tokens;
use pg_fence_rules::grant::{Phase, Release};
use pg_fence_rules::locks::CHANGE;
use pg_fence_rules::{Instant, Span, Token};
use pgrx::pg_sys::TransactionId;

/// The grant that this token may renew, locked, and the time of the decision.
pub fn renewable<'a>(
    table: &LeaseTable,
    name: &'a [u8],
    token: Token,
) -> Result<Option<(Locked<'a>, Instant)>, Refusal> {
    let found = changeable(table, name, token, |row| {
        let now = server::now();
        row.grant.renewable(token, now).then_some(now)
    })?;
    match &found {
        Some((locked, _)) => {
            check_role(|| Some(name), &locked.row, false)?;
            refuse_adopted(&locked.row)?;
        }
        // It may have another token, or none.
        None => table.rows(name, AsOf::Now).iter().try_for_each(refuse_adopted)?,
    }
    Ok(found)
}

/// 55000 where somebody else has made the grant, and the caller may know of it.
pub fn refuse_adopted(row: &Row) -> Result<(), Refusal> {
    match row.grant.adopted.is_some() && may_know_of(row, false) {
        true => Err(errors::adopted_name(row.name())),
        false => Ok(()),
    }
}

/// The token that closes a grant: one that is drawn, greater than all of its own. Nothing is drawn for a grant that
/// somebody else has made: its own number closes it, and never becomes one of the sequence.
pub fn closing_token(row: &Row) -> Result<Token, Refusal> {
    match row.grant.adopted {
        Some(_) => Ok(row.grant.tokens.latest()),
        None => tokens::draw(row.grant.greatest()),
    }
}

/// Writes a renewal of a row whose lock is kept, by default for the ttl last asked for. `fresh` is its token.
pub fn renew(
    table: &LeaseTable,
    row: &Row,
    fresh: Token,
    now: Instant,
    ttl: Option<Span>,
) -> Result<(), Refusal> {
    let ttl = ttl.unwrap_or(row.ttl);
    table.renew(row, fresh, now, ttl)?;
    statistics::count(Counter::Renewals);
    if now + ttl < row.grant.expires_at {
        // The head of the queue may sleep for too long.
        queue::changed(row.name());
    }
    Ok(())
}

/// What a release has found, its grant locked.
pub enum Releasable<'a> {
    /// A current grant, to be closed with a token that is yet to be drawn.
    Close(Box<Locked<'a>>),
    /// One that this transaction has closed, and its closing token.
    Again(Box<Locked<'a>>, Token),
    /// The token is none of a current grant's.
    Lost,
}

/// Finds the grant that this token releases.
pub fn releasable<'a>(
    table: &LeaseTable,
    name: &'a [u8],
    token: Token,
) -> Result<Releasable<'a>, Refusal> {
    let found = changeable(table, name, token, |row| {
        let release = row.grant.release(token, server::now());
        (release != Release::Lost).then_some(release)
    })?;
    let Some((locked, release)) = found else { return Ok(Releasable::Lost) };
    check_role(|| Some(name), &locked.row, false)?;
    Ok(match release {
        Release::Again(closing) => Releasable::Again(Box::new(locked), closing),
        _ => Releasable::Close(Box::new(locked)),
    })
}

/// Closes a grant whose lock stays until the transaction ends; that wakes the head of the queue.
pub fn close(table: &LeaseTable, row: &Row, closing: Token, now: Instant) -> Result<(), Refusal> {
    let name = row.name();
    if row.grant.adopted.is_some() {
        // Nobody acquires next who makes it durable, and no deadline ends what a crash brings back.
        commit::force();
    }
    table.close(row, closing, now)?;
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
        let now = server::now();
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
    let closing = match rows.as_slice() {
        [row] => closing_token(row)?,
        _ => tokens::draw(greatest(&rows))?,
    };
    locks.keep();
    let now = server::now();
    rows.iter().try_for_each(|row| close(table, row, closing, now))?;
    statistics::add(Counter::Revocations, rows.len());
    Ok(Some(closing))
}

/// Locks the grant that has this token against other changes, waiting for an open transaction that has
/// changed it, reads it again and decides. None, and nothing locked, when there is no such grant, now or
/// after the wait, the decision is against it, or the caller may not know of it.
fn changeable<'a, T>(
    table: &LeaseTable,
    name: &'a [u8],
    token: Token,
    decide: impl Fn(&Row) -> Option<T>,
) -> Result<Option<(Locked<'a>, T)>, Refusal> {
    loop {
        let Some(seen) = look(table, name, token, &decide) else { return Ok(None) };
        let has_token = |row: &Row| row.grant.has(token);
        let unlocked_writer = match Locked::grant(table, name, seen.grant.slot, CHANGE, has_token)?
        {
            Some(locked) => match (decide(&locked.row), locked.row.open_writer()) {
                (Some(_), Some(writer)) => Some(writer),
                (decision, _) => return Ok(decision.map(|decision| (locked, decision))),
            },
            // Where the grant is not there any more, another one may have the token by now.
            None => unlocked_writer(table, name, token),
        };
        wait_for(unlocked_writer);
    }
}

/// Who is just putting this token's grant there without its lock, as one does that loads a dump.
pub fn unlocked_writer(table: &LeaseTable, name: &[u8], token: Token) -> Option<TransactionId> {
    find(&table.rows(name, AsOf::InFlight), token).and_then(Row::open_writer)
}

/// Waits for a transaction that has written a row without the grant's lock, as one does that loads a dump.
fn wait_for(unlocked_writer: Option<TransactionId>) {
    server::serve_interrupts();
    if let Some(writer) = unlocked_writer {
        xact::wait_for(writer);
    }
}

/// The grant that has this token, as it is seen without its lock; None where it is not worth locking, or the caller may
/// not know of it.
pub fn look<T>(
    table: &LeaseTable,
    name: &[u8],
    token: Token,
    decide: impl Fn(&Row) -> Option<T>,
) -> Option<Row> {
    let seen = find(&table.rows(name, AsOf::Now), token).copied();
    let seen = match &seen {
        // What is over does not come back: a caller who is too late locks nothing, and so keeps the
        // lease from nobody.
        Some(row) if decide(row).is_none() && row.open_writer().is_none() => return None,
        Some(_) => seen,
        // A token of an uncommitted grant may have been passed on: its transaction is waited for.
        None => find(&table.rows(name, AsOf::InFlight), token).copied(),
    };
    seen.filter(|row| may_know_of(row, false))
}

/// The greatest token that any of these grants is known to have had.
pub fn greatest<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Token {
    rows.into_iter().map(|r| r.grant.greatest()).max().unwrap_or(Token::BEFORE_ALL)
}

/// Does the token speak for the lease at this instant? No, where the caller may not see the lease.
pub fn speaks(name: &[u8], token: Token) -> Result<bool, Refusal> {
    let floor = tokens::floor_seen()?;
    let rows = LeaseTable::open(Access::Read)?.rows(name, AsOf::Now);
    let now = server::now();
    Ok(role_prefix::shows(name) && rows.iter().any(|row| row.grant.speaks(token, now, floor)))
}

/// The grant that this token is of.
pub fn find(rows: &[Row], token: Token) -> Option<&Row> {
    rows.iter().find(|r| r.grant.has(token))
}

/// May the caller learn that there is such a grant? A caller that may not is answered as if the token were any number.
pub fn may_know_of(row: &Row, in_trigger: bool) -> bool {
    role::acts_for(row.role(), in_trigger) || role_prefix::may_be_told(row.name())
}

/// 42501 unless the caller may act for the role that was granted the lease. In a trigger, the session's role may stand
/// in for the current one. `lease` gives its name, where the error may show it.
pub fn check_role<'a>(
    lease: impl FnOnce() -> Option<&'a [u8]>,
    row: &Row,
    in_trigger: bool,
) -> Result<(), Refusal> {
    let role = row.role();
    if role::acts_for(role, in_trigger) {
        return Ok(());
    }
    let shown = role_prefix::may_be_told(row.name()).then_some(role);
    Err(errors::not_your_lease(lease(), shown))
}
