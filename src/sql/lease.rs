//! The functions on one lease.

use super::arguments;
use crate::errors::{self, Refusal};
use crate::leases::change::{self, Releasable};
use crate::leases::prune::prune_row;
use crate::leases::request::{Request, Tried};
use crate::leases::try_acquire::try_acquire;
use crate::leases::{adopt, guard, wait};
use crate::pg::call::args::{Answer, Args};
use crate::pg::call::evaluation::Evaluation;
use crate::pg::session::commit;
use crate::pg::session::server;
use crate::pg::session::settings;
use crate::pg::session::xact;
use crate::pg::state::lease_table::{Access, AsOf, LeaseTable};
use crate::pg::state::opened::IfLocked;
use crate::pg::state::row::Row;
use crate::statistics::{self, Counter};
use crate::{known_bugs, tokens};
use pg_fence_rules::grant::Mode;
use pg_fence_rules::{Instant, Span, Token};
use std::time::Duration;

/// `lease_acquire(name, holder, ttl, wait, metadata, shared, slots, reclaim, session) → bigint`: the token, or NULL
/// when the lease is taken and stayed so for `wait`. Errors: 22004, 22023, 25006, 40001, 42501, 55000.
pub fn acquire(args: Args) -> Result<Answer, Refusal> {
    let (request, longest) = arguments::acquire_request(&args)?;
    server::writable(c"lease_acquire()");
    known_bugs::draw_early(|| tokens::draw(Token::BEFORE_ALL))?;
    let acquire = || {
        let acquire = || Ok((acquire_one(&request, longest)?, is_losable(request.session)));
        commit::losable(acquire)
    };
    let token = match request.ask.mode {
        Mode::Exclusive => once_for_each_row(&args, &[&request.name], acquire)?,
        _ => acquire()?,
    };
    if token.is_none() {
        statistics::count(Counter::TriesLost);
    }
    Ok(token.into())
}

/// Acquires leases for a row, and answers the same token where READ COMMITTED evaluates the row anew, unless that token is
/// over: for the call itself would find them taken, by its own grant.
pub fn once_for_each_row(
    args: &Args,
    names: &[&Vec<u8>],
    acquire: impl FnOnce() -> Result<Option<Token>, Refusal>,
) -> Result<Option<Token>, Refusal> {
    let evaluation = Evaluation::of(args);
    // No name contains a zero.
    let asked = names.iter().map(|name| name.as_slice()).collect::<Vec<_>>().join(&0);
    if let Some(token) = evaluation.repeats(&asked) {
        let speaks = names.iter().map(|name| change::speaks(name, token));
        if speaks.collect::<Result<Vec<_>, _>>()?.iter().all(|speaks| *speaks) {
            return Ok(Some(token));
        }
    }
    let token = acquire()?;
    evaluation.answers(asked, token);
    Ok(token)
}

/// May a crash lose a grant or its renewal, so that its commit need not wait for the disk? `session`: it ends with its
/// session.
pub fn is_losable(session: bool) -> bool {
    session && !commit::waits_for_standbys()
}

fn acquire_one(request: &Request, longest: Duration) -> Result<Option<Token>, Refusal> {
    if !longest.is_zero() {
        return wait::until_granted(request, longest);
    }
    Ok(match try_acquire(request, true, IfLocked::WaitForHolders)? {
        Tried::Won(token) => Some(token),
        Tried::Lost { .. } => None,
    })
}

/// `lease_adopt(name, token, holder, wait, metadata) → bigint`: the token, which somebody else has granted; NULL when a
/// transaction relied on an older grant for all of `wait`. Errors: PF001, 22004, 22023, 25006, 42501, 55000.
pub fn adopt(args: Args) -> Result<Answer, Refusal> {
    let (adoption, longest) = arguments::adopt(&args)?;
    server::writable(c"lease_adopt()");
    if adopt::adopt(&adoption, longest)? {
        Ok(adoption.token.into())
    } else {
        statistics::count(Counter::TriesLost);
        Ok(Answer::Null)
    }
}

/// `lease_renew(name, token, ttl) → bigint`: a new, greater token and a deadline of now + ttl; NULL when the
/// token does not speak for the lease. Errors: 22004, 22023, 25006, 42501, 55000.
pub fn renew(args: Args) -> Result<Answer, Refusal> {
    let name = arguments::name(&args, 0)?;
    let token = arguments::token(&args, 1)?;
    let ttl = arguments::ttl(&args, 2)?;
    server::writable(c"lease_renew()");
    commit::losable(|| renew_one(&name, token, ttl))
}

/// The answer, and whether a crash may lose it.
fn renew_one(name: &[u8], token: Token, ttl: Option<Span>) -> Result<(Answer, bool), Refusal> {
    let table = LeaseTable::open(Access::Write)?;
    let Some((locked, now)) = change::renewable(&table, name, token)? else {
        arguments::check_lost_ttl(ttl, &table, name)?;
        statistics::count(Counter::RenewalsLost);
        return Ok((Answer::Null, false));
    };
    arguments::check_renewed_ttl(ttl, &locked.row)?;
    let fresh = tokens::draw(locked.row.grant.greatest())?;
    let row = locked.keep();
    change::renew(&table, &row, fresh, now, ttl)?;
    Ok((fresh.into(), is_losable(row.ends_with_session())))
}

/// `lease_release(name, token) → bigint`: the closing token; NULL when the token is none of a current grant's.
/// Errors: 22004, 22023, 25006, 42501, 55000.
pub fn release(args: Args) -> Result<Answer, Refusal> {
    let name = arguments::name(&args, 0)?;
    let token = arguments::token(&args, 1)?;
    server::writable(c"lease_release()");
    commit::losable(|| Ok((release_one(&name, token)?, true)))
}

fn release_one(name: &[u8], token: Token) -> Result<Answer, Refusal> {
    let table = LeaseTable::open(Access::Write)?;
    match change::releasable(&table, name, token)? {
        Releasable::Lost => Ok(Answer::Null),
        Releasable::Again(locked, closing) => {
            locked.keep();
            Ok(closing.into())
        }
        Releasable::Close(locked) => {
            let closing = change::closing_token(&locked.row)?;
            change::close(&table, &locked.keep(), closing, server::now())?;
            statistics::count(Counter::Releases);
            Ok(closing.into())
        }
    }
}

/// `lease_revoke(name) → bigint`: the closing token of whatever grants are current; NULL when none is.
/// Errors: 22004, 22023, 25006, 55000.
pub fn revoke(args: Args) -> Result<Answer, Refusal> {
    let name = arguments::name(&args, 0)?;
    server::writable(c"lease_revoke()");
    let table = LeaseTable::open(Access::Write)?;
    Ok(change::revoke(&table, &name, |_| true)?.into())
}

/// `lease_evict(name, token) → bigint`: the closing token of the one grant that the token is of; NULL when it is of none
/// that is current. Errors: 22004, 22023, 25006, 55000.
pub fn evict(args: Args) -> Result<Answer, Refusal> {
    let name = arguments::name(&args, 0)?;
    let token = arguments::token(&args, 1)?;
    server::writable(c"lease_evict()");
    let table = LeaseTable::open(Access::Write)?;
    Ok(change::revoke(&table, &name, |row| row.grant.tokens.contains(token))?.into())
}

/// `lease_guard(name, token) → bigint`: the token; until the transaction ends nobody else can be granted
/// the lease, and the token is the transaction's `pg_fence.token`. Errors: PF004, 22004, 22023, 25006,
/// 40001, 42501, 55000.
pub fn guard(args: Args) -> Result<Answer, Refusal> {
    let name = arguments::name(&args, 0)?;
    let token = arguments::token(&args, 1)?;
    server::writable(c"lease_guard()");
    guard::require_in_call(&name, token)?;
    settings::set_local(token);
    guard::note_call(name);
    Ok(token.into())
}

/// `lease_check(name, token) → boolean`: does the token speak for the lease at this instant? Works on a
/// standby. Errors: 22004, 22023.
pub fn check(args: Args) -> Result<Answer, Refusal> {
    let name = arguments::name(&args, 0)?;
    let token = arguments::token(&args, 1)?;
    Ok(change::speaks(&name, token)?.into())
}

/// `lease_prune(older_than) → bigint`: deletes rows of grants that ended longer ago, never a guarded one, and
/// gives back their number. Errors: 22004, 22023, 25006.
pub fn prune(args: Args) -> Result<Answer, Refusal> {
    let older_than = arguments::older_than(&args, 0)?;
    server::writable(c"lease_prune()");
    let table = LeaseTable::open(Access::Write)?;
    let horizon = server::now() - older_than;
    // What was adopted is remembered: it tells which numbers are stale.
    let pruned =
        prune_all(&table, |row| row.grant.adopted.is_none() && row.over_since() < horizon)?;
    Ok(pruned.into())
}

/// `lease_forget(name) → bigint`: deletes the row of an adopted name that is free, and gives back how many there were.
/// Errors: 22004, 22023, 25006, 55000.
pub fn forget(args: Args) -> Result<Answer, Refusal> {
    let name = arguments::name(&args, 0)?;
    server::writable(c"lease_forget()");
    let table = LeaseTable::open(Access::Write)?;
    let mut forgotten = 0i64;
    for row in table.rows(&name, AsOf::Now) {
        if row.grant.adopted.is_none() {
            return Err(errors::granted_name(&name));
        }
        forgotten +=
            i64::from(prune_row(&table, &row, |row| is_forgettable(row, Instant::LATEST))?);
    }
    xact::see_own_changes();
    Ok(forgotten.into())
}

/// `lease_forget_older(than) → bigint`: deletes the rows of adopted names that have been free for longer, and gives back
/// their number. Errors: 22004, 22023, 25006.
pub fn forget_older(args: Args) -> Result<Answer, Refusal> {
    let older_than = arguments::age(&args, 0)?;
    server::writable(c"lease_forget_older()");
    let table = LeaseTable::open(Access::Write)?;
    let horizon = server::now() - older_than;
    Ok(prune_all(&table, |row| is_forgettable(row, horizon))?.into())
}

fn is_forgettable(row: &Row, horizon: Instant) -> bool {
    row.grant.adopted.is_some() && row.grant.closing.is_some() && row.over_since() < horizon
}

/// Deletes the rows of which this is so, but for those that somebody relies on.
fn prune_all(table: &LeaseTable, is_to_go: impl Fn(&Row) -> bool) -> Result<i64, Refusal> {
    let mut pruned = 0i64;
    table.each(|found| {
        if is_to_go(found) && prune_row(table, found, &is_to_go)? {
            pruned += 1;
        }
        Ok(())
    })?;
    xact::see_own_changes();
    Ok(pruned)
}
