//! The functions on one lease.

use crate::acquire::{self, Request, Tried};
use crate::errors::{self, Refusal};
use crate::pg::args::{Answer, Args};
use crate::pg::keyed::Access;
use crate::pg::lease_table::{AsOf, LeaseTable};
use crate::pg::lock::{Mode as Lock, Tag};
use crate::pg::relation_lock::Wait;
use crate::pg::row::{Deleter, Row};
use crate::pg::{guarded_commits, relation, server, xact};
use crate::{guard, input, plant, queue, session_leases, token};
use pg_fence_rules::grant::{Phase, Release};
use pg_fence_rules::{Micros, Token};

/// `lease_acquire(name, holder, ttl, wait, metadata, shared, slots, reclaim, session) → bigint`: the token, or NULL
/// when the lease is taken and stayed so for `wait`. Errors: 22004, 22023, 25006, 40001, 55000.
pub fn acquire(args: Args) -> Result<Answer, Refusal> {
    let call = input::acquire(&args)?;
    server::writable(c"lease_acquire()");
    let request = Request {
        name: &call.name,
        holder: call.holder.as_deref(),
        ttl_us: call.ttl_us,
        metadata: call.metadata,
        session: call.session,
        ask: call.ask,
    };
    plant::draw_early(|| token::draw(0))?;
    let token = if call.wait.is_zero() {
        match attempt(&request, true, Wait::Holders)? {
            Tried::Won(token) => Some(token),
            Tried::Lost { .. } => None,
        }
    } else {
        queue::acquire(&request, call.wait)?
    };
    Ok(token.into())
}

/// How soon to look again where maintenance waits for the table, or works on it.
const LOOK_AFTER_MAINTENANCE: Micros = 100_000;

/// One try. With `polite`, those who wait in line come first. `wait` says what to do about maintenance.
pub fn attempt(request: &Request, polite: bool, wait: Wait) -> Result<Tried<Token>, Refusal> {
    let Some(table) = LeaseTable::try_open(Access::Write, wait)? else {
        return Ok(Tried::Lost { until: server::now() + LOOK_AFTER_MAINTENANCE });
    };
    let table = &table;
    let chance = match acquire::look(table, request)? {
        Tried::Won(chance) => chance,
        Tried::Lost { until } => return Ok(Tried::Lost { until }),
    };
    if polite && !chance.reclaims && queue::somebody_waits(request.name) {
        return Ok(Tried::Lost { until: Micros::MAX });
    }
    match acquire::place(table, request, &chance)? {
        Tried::Lost { until } => Ok(Tried::Lost { until }),
        Tried::Won(place) => {
            let token = plant::early_or(|| token::draw(place.above()))?;
            acquire::write(table, request, &place, token)?;
            Ok(Tried::Won(token))
        }
    }
}

/// `lease_renew(name, token, ttl) → bigint`: a new, greater token and a deadline of now + ttl; NULL when the
/// token does not speak for the lease. Errors: 22004, 22023, 25006, 42501, 55000.
pub fn renew(args: Args) -> Result<Answer, Refusal> {
    let name = input::name(&args, 0)?;
    let token = input::token(&args, 1)?;
    let ttl_us = input::ttl(&args, 2)?;
    server::writable(c"lease_renew()");
    let table = LeaseTable::open(Access::Write)?;
    let Some((row, now)) = renewable(&table, &name, token)? else { return Ok(Answer::Null) };
    let fresh = token::draw(row.grant.greatest())?;
    prolong(&table, &row, fresh, now, ttl_us)?;
    Ok(fresh.into())
}

/// Writes a renewal, by default for the ttl last asked for.
pub fn prolong(
    table: &LeaseTable,
    row: &Row,
    fresh: Token,
    now: Micros,
    ttl_us: Option<Micros>,
) -> Result<(), Refusal> {
    let ttl_us = ttl_us.unwrap_or(row.ttl_us);
    table.renew(row, fresh, now, ttl_us)?;
    if now + ttl_us < row.grant.expires_at {
        // The head of the line may sleep for too long.
        queue::changed(&row.name());
    }
    Ok(())
}

/// The grant that this token may renew, locked, and the time of the decision.
pub fn renewable(
    table: &LeaseTable,
    name: &[u8],
    token: Token,
) -> Result<Option<(Row, Micros)>, Refusal> {
    let found = changeable(table, name, token, |row| {
        let now = server::now();
        row.grant.renewable(token, now).then_some(now)
    });
    if let Some((row, _)) = &found {
        check_role(name, row, false)?;
    }
    Ok(found)
}

/// `lease_release(name, token) → bigint`: the closing token; NULL when the token is none of a current grant's.
/// Errors: 22004, 22023, 25006, 42501, 55000.
pub fn release(args: Args) -> Result<Answer, Refusal> {
    let name = input::name(&args, 0)?;
    let token = input::token(&args, 1)?;
    server::writable(c"lease_release()");
    xact::release(|| release_one(&name, token))
}

fn release_one(name: &[u8], token: Token) -> Result<Answer, Refusal> {
    let table = LeaseTable::open(Access::Write)?;
    match releasable(&table, name, token)? {
        Releasable::Lost => Ok(Answer::Null),
        Releasable::Again(_, closing) => Ok(closing.into()),
        Releasable::Close(row) => {
            let closing = token::draw(row.grant.greatest())?;
            table.close(&row, closing, server::now())?;
            session_leases::ended(name, row.grant.tokens.first());
            queue::changed(name);
            Ok(closing.into())
        }
    }
}

/// What a release has found, its grant locked.
pub enum Releasable {
    /// A current grant.
    Close(Box<Row>),
    /// One that this transaction has closed, and its closing token.
    Again(Box<Row>, Token),
    /// The token is none of a current grant's.
    Lost,
}

/// Finds the grant that this token releases.
pub fn releasable(table: &LeaseTable, name: &[u8], token: Token) -> Result<Releasable, Refusal> {
    let found = changeable(table, name, token, |row| {
        let release = row.grant.release(token, server::now());
        (release != Release::Lost).then_some(release)
    });
    let Some((row, release)) = found else { return Ok(Releasable::Lost) };
    check_role(name, &row, false)?;
    Ok(match release {
        Release::Again(closing) => Releasable::Again(Box::new(row), closing),
        _ => Releasable::Close(Box::new(row)),
    })
}

/// Locks the grant that has this token against other changes, waiting for an open transaction that has
/// changed it, reads it again and decides. None, and nothing locked, when there is no such grant, now or
/// after the wait, or the decision is against it.
fn changeable<T>(
    table: &LeaseTable,
    name: &[u8],
    token: Token,
    decide: impl Fn(&Row) -> Option<T>,
) -> Option<(Row, T)> {
    loop {
        let rows = table.rows(name, AsOf::Now);
        let seen = find(&rows, token);
        let slot = match seen {
            // What is over does not come back: a caller who is too late locks nothing, and so keeps the
            // lease from nobody.
            Some(row) if decide(row).is_none() && row.deleter() != Deleter::Open => return None,
            Some(row) => row.grant.slot,
            // A token of an uncommitted grant may have been passed on: its transaction is waited for.
            None => slot_of(&table.rows_in_flight(name), token)?,
        };
        let lock = Tag::grant(name, slot);
        lock.take(Lock::Change, true);
        // Mostly nobody has changed it meanwhile.
        let row = seen.and_then(|row| table.again(row)).or_else(|| {
            let mut rows = table.rows(name, AsOf::Now).into_iter();
            rows.find(|r| r.grant.slot == slot && knows(r, token))
        });
        let again = row.is_none();
        if let Some(found) = row.and_then(|row| decide(&row).map(|decision| (row, decision))) {
            return Some(found);
        }
        unlock(name, slot);
        if !again {
            return None;
        }
    }
}

/// Gives back the lock of a grant that was not changed.
pub fn unlock(name: &[u8], slot: i32) {
    Tag::grant(name, slot).give(Lock::Change);
    // Who looked meanwhile found the lease locked.
    queue::wake(name);
}

/// The greatest token that any of these grants is known to have had.
pub fn greatest<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Token {
    rows.into_iter().map(|r| r.grant.greatest()).max().unwrap_or(0)
}

fn slot_of(rows: &[Row], token: Token) -> Option<i32> {
    find(rows, token).map(|r| r.grant.slot)
}

/// The grant that this token is of.
pub fn find(rows: &[Row], token: Token) -> Option<&Row> {
    rows.iter().find(|r| knows(r, token))
}

/// Is it one of the grant's tokens, the closing one included?
pub fn knows(row: &Row, token: Token) -> bool {
    row.grant.tokens.contains(token) || row.grant.closing == Some(token)
}

/// `lease_revoke(name) → bigint`: the closing token of whatever grants are current; NULL when none is.
/// Errors: 22004, 22023, 25006, 55000.
pub fn revoke(args: Args) -> Result<Answer, Refusal> {
    let name = input::name(&args, 0)?;
    server::writable(c"lease_revoke()");
    let table = LeaseTable::open(Access::Write)?;
    let held = |rows: Vec<Row>| -> Vec<Row> {
        let now = server::now();
        rows.into_iter().filter(|r| r.grant.phase(now) == Phase::Held).collect()
    };
    // Grants in the making count: their transactions are waited for.
    let mut slots: Vec<i32> =
        held(table.rows_in_flight(&name)).iter().map(|r| r.grant.slot).collect();
    slots.sort_unstable();
    slots.dedup();
    for slot in &slots {
        Tag::grant(&name, *slot).take(Lock::Change, true);
    }
    let mut rows = held(table.rows(&name, AsOf::Now));
    rows.retain(|r| slots.contains(&r.grant.slot));
    if rows.is_empty() {
        slots.iter().for_each(|slot| unlock(&name, *slot));
        return Ok(Answer::Null);
    }
    let closing = token::draw(greatest(&rows))?;
    let now = server::now();
    for row in &rows {
        table.close(row, closing, now)?;
        session_leases::ended(&name, row.grant.tokens.first());
    }
    queue::changed(&name);
    Ok(closing.into())
}

/// `lease_check(name, token) → boolean`: does the token speak for the lease at this instant? Works on a
/// standby. Errors: 22004, 22023.
pub fn check(args: Args) -> Result<Answer, Refusal> {
    let name = input::name(&args, 0)?;
    let token = input::token(&args, 1)?;
    let floor = token::floor_seen()?;
    let rows = LeaseTable::open(Access::Read)?.rows(&name, AsOf::Now);
    let now = server::now();
    Ok(rows.iter().any(|r| r.grant.speaks(token, now, floor)).into())
}

/// `lease_prune(older_than) → bigint`: deletes rows of grants that ended longer ago, never a guarded one, and
/// gives back their number. Errors: 22004, 22023, 25006.
pub fn prune(args: Args) -> Result<Answer, Refusal> {
    let older_than = input::older_than(&args, 0)?;
    server::writable(c"lease_prune()");
    let table = LeaseTable::open(Access::Write)?;
    let horizon = server::now().saturating_sub(older_than);
    let mut pruned = 0i64;
    table.each(|found| {
        if found.over_since() < horizon && prune_one(&table, &found.name(), found, horizon)? {
            pruned += 1;
        }
        Ok(())
    })?;
    xact::see_own_changes();
    Ok(pruned.into())
}

/// The lock is given back at once, for there may be millions of rows: an acquire sees by the row itself that
/// it is being deleted.
fn prune_one(
    table: &LeaseTable,
    name: &[u8],
    found: &Row,
    horizon: Micros,
) -> Result<bool, Refusal> {
    let slot = found.grant.slot;
    let lock = Tag::grant(name, slot);
    if guard::guards(name, slot) || !lock.take(Lock::Own, false) {
        return Ok(false);
    }
    let rows = table.rows(name, AsOf::Now);
    let row = rows
        .iter()
        .find(|r| r.grant.slot == slot && r.over_since() < horizon && r.deleter() == Deleter::None);
    let deleted = row.map_or(Ok(false), |row| table.delete(row))?;
    if deleted {
        guarded_commits::forget(name)?;
    }
    lock.give(Lock::Own);
    Ok(deleted)
}

/// 42501 unless the caller may act for the role that was granted the lease.
pub fn check_role(name: &[u8], row: &Row, in_trigger: bool) -> Result<(), Refusal> {
    let role = row.role();
    if server::acts_for(&role, in_trigger) {
        return Ok(());
    }
    let shown = relation::may_see_leases().then_some(role.as_slice());
    Err(errors::not_your_lease(name, shown))
}
