//! The functions on one lease, and on several leases under one token, all of them or none.

use super::arguments;
use crate::errors::{self, Report};
use crate::leases::locks::Locked;
use crate::leases::prune::prune_row;
use crate::leases::request::Request;
use crate::leases::{adopt, change, guard, lookup, renew, wait};
use crate::pg::call::args::{Answer, Args};
use crate::pg::call::evaluation::{self, Evaluation};
use crate::pg::session::clock;
use crate::pg::session::commit::{self, WalSpan};
use crate::pg::session::settings;
use crate::pg::session::xact;
use crate::pg::state::lease_table::{Access, AsOf, LeaseTable};
use crate::pg::state::row::Row;
use crate::statistics::{self, Counter};
use pg_fence_rules::grant::Mode;
use std::ffi::CStr;
use std::time::Duration;

/// `lease_acquire(name, holder, ttl, wait, metadata, shared, slots, reclaim, session) → bigint`: the token, or NULL if
/// the lease stays taken for `wait`. Errors: 22004, 22023, 25006, 40001, 42501, 53200, 55000.
pub fn acquire(args: Args) -> Result<Answer, Report> {
    let (request, longest) = arguments::acquire_request(&args)?;
    xact::writable(c"lease_acquire()");
    acquire_each(&args, &[request], longest)
}

/// `lease_acquire_all(names, holder, ttl, metadata, session) → bigint`: one token that speaks for all the leases, or
/// NULL and none is taken. Never waits. Errors: 22004, 22023, 25006, 40001, 42501, 53200, 55000.
pub fn acquire_all(args: Args) -> Result<Answer, Report> {
    let requests = arguments::acquire_all(&args)?;
    xact::writable(c"lease_acquire_all()");
    acquire_each(&args, &requests, Duration::ZERO)
}

/// Acquires all the leases under one token, or none. Only a single lease can be waited for.
///
/// If READ COMMITTED evaluates a row again, an exclusive acquire returns the same token as before: a second acquire would
/// find the leases taken by its own grant. If that token is over by then, it acquires again.
fn acquire_each(args: &Args, requests: &[Request], wait: Duration) -> Result<Answer, Report> {
    let names = || requests.iter().map(|request| request.name.as_slice());
    let is_alone = requests.iter().all(|request| request.acquire.mode == Mode::Exclusive);
    let evaluation = is_alone.then(|| Evaluation::of(args, names()));
    if let Some(token) = evaluation.as_ref().and_then(Evaluation::earlier_answer) {
        let speaks = names().map(|name| lookup::speaks(name, token));
        if speaks.collect::<Result<Vec<_>, _>>()?.iter().all(|speaks| *speaks) {
            return Ok(token.into());
        }
    }
    let span = WalSpan::begin();
    let token = wait::until_granted(requests, wait)?;
    if may_lose_grants(requests.iter().all(|request| request.session)) {
        span.may_be_lost();
    }
    if let Some(evaluation) = evaluation {
        evaluation.answers(token);
    }
    if token.is_none() {
        statistics::count(Counter::TriesLost);
    }
    Ok(token.into())
}

/// Returns true if a crash may lose these grants or their renewals: all end with their session, and nobody waits for
/// standbys.
pub fn may_lose_grants(session: bool) -> bool {
    session && !commit::waits_for_standbys()
}

/// `lease_adopt(name, token, holder, wait, metadata) → bigint`: the adopted token; NULL if a transaction relied on an
/// older grant for all of `wait`. Errors: PF001, PF004, 22004, 22023, 25006, 42501, 53200, 55000.
pub fn adopt(args: Args) -> Result<Answer, Report> {
    let (adoption, longest) = arguments::adopt(&args)?;
    xact::writable(c"lease_adopt()");
    if adopt::adopt(&adoption, longest)? {
        Ok(adoption.token.into())
    } else {
        statistics::count(Counter::TriesLost);
        Ok(Answer::Null)
    }
}

/// `lease_renew(name, token, ttl) → bigint`: a new, greater token, with a deadline of now + ttl; NULL if the token
/// cannot renew the lease. Errors: 22004, 22023, 25006, 42501, 53200, 55000.
pub fn renew(args: Args) -> Result<Answer, Report> {
    renew_each(&args, &[arguments::name(&args, 0)?], c"lease_renew()")
}

/// `lease_renew_all(names, token, ttl) → bigint`: one new token for all the leases, or NULL and none is renewed.
/// Errors: 22004, 22023, 25006, 42501, 53200, 55000.
pub fn renew_all(args: Args) -> Result<Answer, Report> {
    renew_each(&args, &arguments::names(&args, 0)?, c"lease_renew_all()")
}

fn renew_each(args: &Args, names: &[Vec<u8>], call: &CStr) -> Result<Answer, Report> {
    let token = arguments::token(args, 1)?;
    let ttl = arguments::ttl(args, 2)?;
    xact::writable(call);
    let span = WalSpan::begin();
    let table = LeaseTable::open(Access::Write)?;
    let Some((found, now)) = renew::all_renewable(&table, names, token)? else {
        names.iter().try_for_each(|name| arguments::check_lost_ttl(ttl, &table, name))?;
        statistics::count(Counter::RenewalsLost);
        return Ok(Answer::Null);
    };
    let of_grant = |locked: &Locked| arguments::check_renewed_ttl(ttl, &locked.row);
    found.iter().try_for_each(of_grant)?;
    let renewed = renew::renew(&table, found, now, ttl)?;
    if may_lose_grants(renewed.iter().all(|one| one.ends_with_session)) {
        span.may_be_lost();
    }
    Ok(renewed.first().map(|one| one.token).into())
}

/// `lease_release(name, token) → bigint`: the closing token; NULL if the token belongs to no current grant. Errors:
/// 22004, 22023, 25006, 42501, 53200, 55000.
pub fn release(args: Args) -> Result<Answer, Report> {
    release_each(&args, &[arguments::name(&args, 0)?], c"lease_release()")
}

/// `lease_release_all(names, token) → bigint`: one closing token for all the leases, or NULL and none is released.
/// Errors: 22004, 22023, 25006, 42501, 53200, 55000.
pub fn release_all(args: Args) -> Result<Answer, Report> {
    release_each(&args, &arguments::names(&args, 0)?, c"lease_release_all()")
}

fn release_each(args: &Args, names: &[Vec<u8>], call: &CStr) -> Result<Answer, Report> {
    let token = arguments::token(args, 1)?;
    xact::writable(call);
    let span = WalSpan::begin();
    let closing = change::release(names, token)?;
    // A release that is lost in a crash leaves the lease taken until its deadline.
    span.may_be_lost();
    Ok(closing.into())
}

/// `lease_revoke(name) → bigint`: the closing token of all current grants; NULL if there are none. Errors: 22004,
/// 22023, 25006, 53200, 55000.
pub fn revoke(args: Args) -> Result<Answer, Report> {
    let name = arguments::name(&args, 0)?;
    xact::writable(c"lease_revoke()");
    let table = LeaseTable::open(Access::Write)?;
    Ok(change::revoke(&table, &name, |_| true)?.into())
}

/// `lease_evict(name, token) → bigint`: the closing token of the grant to which the token belongs; NULL if that grant
/// is not current. Errors: 22004, 22023, 25006, 53200, 55000.
pub fn evict(args: Args) -> Result<Answer, Report> {
    let name = arguments::name(&args, 0)?;
    let token = arguments::token(&args, 1)?;
    xact::writable(c"lease_evict()");
    let table = LeaseTable::open(Access::Write)?;
    Ok(change::revoke(&table, &name, |row| row.grant.tokens.contains(token))?.into())
}

/// `lease_guard(name, token) → bigint`: the token. Until the transaction ends nobody else is granted the lease, and
/// `pg_fence.token` has the token. Errors: PF004, 22004, 22023, 25006, 40001, 42501, 53200, 55000.
pub fn guard(args: Args) -> Result<Answer, Report> {
    guard_each(&args, vec![arguments::name(&args, 0)?], c"lease_guard()")
}

/// `lease_guard_all(names, token) → bigint`: guards all the leases. Errors: as `guard`.
pub fn guard_all(args: Args) -> Result<Answer, Report> {
    guard_each(&args, arguments::names(&args, 0)?, c"lease_guard_all()")
}

fn guard_each(args: &Args, names: Vec<Vec<u8>>, call: &CStr) -> Result<Answer, Report> {
    let token = arguments::token(args, 1)?;
    xact::writable(call);
    // Every call on several leases locks them in the order of their names, so that no two calls wait for each other.
    names.iter().try_for_each(|name| guard::require_in_call(name, token))?;
    settings::set_local(token);
    // One warning is enough for all the leases.
    if evaluation::is_in_client_select(args) {
        names.into_iter().take(1).for_each(guard::note_call);
    }
    Ok(token.into())
}

/// `lease_check(name, token) → boolean`: true if the token speaks for the lease now. Works on a standby. Errors: 22004,
/// 22023, 55000.
pub fn check(args: Args) -> Result<Answer, Report> {
    let name = arguments::name(&args, 0)?;
    let token = arguments::token(&args, 1)?;
    Ok(lookup::speaks(&name, token)?.into())
}

/// `lease_prune(older_than) → bigint`: deletes the rows of grants that ended earlier, but never a guarded one, and
/// returns their number. Errors: 22023, 25006, 53200, 55000.
pub fn prune(args: Args) -> Result<Answer, Report> {
    let older_than = arguments::older_than(&args, 0)?;
    xact::writable(c"lease_prune()");
    let table = LeaseTable::open(Access::Write)?;
    let now = clock::now();
    // Rows of adopted names stay: they show which numbers are stale.
    let is_prunable =
        |row: &Row| row.grant.adopted.is_none() && row.over_since(now) < now - older_than;
    Ok(prune_all(&table, is_prunable)?.into())
}

/// `lease_forget(name) → bigint`: deletes the row of an adopted name that is free, and returns the number of rows.
/// Errors: 22004, 22023, 25006, 53200, 55000.
pub fn forget(args: Args) -> Result<Answer, Report> {
    let name = arguments::name(&args, 0)?;
    xact::writable(c"lease_forget()");
    let table = LeaseTable::open(Access::Write)?;
    let mut forgotten = 0i64;
    for row in table.rows(&name, AsOf::Now) {
        if row.grant.adopted.is_none() {
            return Err(errors::granted_name(&name));
        }
        forgotten += i64::from(prune_row(&table, &row, is_free_adopted)?);
    }
    xact::see_own_changes();
    Ok(forgotten.into())
}

/// `lease_forget_older(than) → bigint`: deletes the rows of adopted names that have been free for longer, and returns
/// their number. Errors: 22004, 22023, 25006, 53200, 55000.
pub fn forget_older(args: Args) -> Result<Answer, Report> {
    let than = arguments::than(&args, 0)?;
    xact::writable(c"lease_forget_older()");
    let table = LeaseTable::open(Access::Write)?;
    let now = clock::now();
    let is_prunable = |row: &Row| is_free_adopted(row) && row.over_since(now) < now - than;
    Ok(prune_all(&table, is_prunable)?.into())
}

fn is_free_adopted(row: &Row) -> bool {
    row.grant.adopted.is_some() && row.grant.closing.is_some()
}

/// Deletes the rows for which `is_prunable` holds, except for those of guarded grants.
fn prune_all(table: &LeaseTable, is_prunable: impl Fn(&Row) -> bool) -> Result<i64, Report> {
    let mut pruned = 0i64;
    table.each(|found| {
        if is_prunable(found) && prune_row(table, found, &is_prunable)? {
            pruned += 1;
        }
        Ok(())
    })?;
    xact::see_own_changes();
    Ok(pruned)
}
