//! Several leases under one token: all or none, and never a deadlock, for names are taken in their order.

use super::arguments;
use super::lease::{is_losable, once_for_each_row};
use crate::errors::Refusal;
use crate::leases::change::{self, Releasable};
use crate::leases::guard;
use crate::leases::request::Request;
use crate::leases::try_acquire::try_acquire_all;
use crate::pg::call::args::{Answer, Args};
use crate::pg::session::commit;
use crate::pg::session::server;
use crate::pg::session::settings;
use crate::pg::state::lease_table::{Access, LeaseTable};
use crate::pg::state::row::Row;
use crate::statistics::{self, Counter};
use crate::tokens;
use pg_fence_rules::grant::{Ask, Mode};
use pg_fence_rules::{Span, Token};

/// `lease_acquire_all(names, holder, ttl, metadata, session) → bigint`: one token that speaks for all of them, or NULL
/// and none of them taken. Never waits. Errors: 22004, 22023, 25006, 40001, 42501, 55000.
pub fn acquire_all(args: Args) -> Result<Answer, Refusal> {
    let names = arguments::names(&args, 0)?;
    let holder = arguments::holder(&args, 1)?;
    let session = args.boolean(4).unwrap_or(false);
    let ttl = arguments::first_ttl(&args, 2, session)?;
    let metadata = arguments::metadata(&args, 3)?;
    server::writable(c"lease_acquire_all()");
    let request = |name| Request {
        name,
        holder: holder.clone(),
        ttl,
        metadata,
        session,
        ask: Ask { mode: Mode::Exclusive, reclaim: false },
    };
    let requests: Vec<Request> = names.into_iter().map(request).collect();
    let names: Vec<&Vec<u8>> = requests.iter().map(|request| &request.name).collect();
    let token = once_for_each_row(&args, &names, || {
        commit::losable(|| Ok((try_acquire_all(&requests)?, is_losable(session))))
    })?;
    if token.is_none() {
        statistics::count(Counter::TriesLost);
    }
    Ok(token.into())
}

/// `lease_renew_all(names, token, ttl) → bigint`: one new token for all of them, or NULL and none renewed.
/// Errors: 22004, 22023, 25006, 42501, 55000.
pub fn renew_all(args: Args) -> Result<Answer, Refusal> {
    let names = arguments::names(&args, 0)?;
    let token = arguments::token(&args, 1)?;
    let ttl = arguments::ttl(&args, 2)?;
    server::writable(c"lease_renew_all()");
    commit::losable(|| renew_each(&names, token, ttl))
}

/// The answer, and whether a crash may lose it.
fn renew_each(
    names: &[Vec<u8>],
    token: Token,
    ttl: Option<Span>,
) -> Result<(Answer, bool), Refusal> {
    let table = LeaseTable::open(Access::Write)?;
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        match change::renewable(&table, name, token)? {
            Some((locked, _)) => found.push(locked),
            // What is locked so far is given back.
            None => {
                arguments::check_lost_ttl(ttl, &table, name)?;
                return Ok(lost());
            }
        }
    }
    // The locks were waited for one by one: the time of the decision is after the last.
    let now = server::now();
    if !found.iter().all(|f| f.row.grant.renewable(token, now)) {
        return Ok(lost());
    }
    found.iter().try_for_each(|f| arguments::check_renewed_ttl(ttl, &f.row))?;
    let fresh = tokens::draw(change::greatest(found.iter().map(|f| &f.row)))?;
    let rows: Vec<Row> = found.into_iter().map(|f| f.keep()).collect();
    for row in &rows {
        change::renew(&table, row, fresh, now, ttl)?;
    }
    Ok((fresh.into(), is_losable(rows.iter().all(Row::ends_with_session))))
}

/// The answer to a renewal that has found one of the leases lost.
fn lost() -> (Answer, bool) {
    statistics::count(Counter::RenewalsLost);
    (Answer::Null, false)
}

/// `lease_release_all(names, token) → bigint`: the closing token of all of them, or NULL and none released.
/// Errors: 22004, 22023, 25006, 42501, 55000.
pub fn release_all(args: Args) -> Result<Answer, Refusal> {
    let names = arguments::names(&args, 0)?;
    let token = arguments::token(&args, 1)?;
    server::writable(c"lease_release_all()");
    commit::losable(|| Ok((release_each(&names, token)?, true)))
}

fn release_each(names: &[Vec<u8>], token: Token) -> Result<Answer, Refusal> {
    let table = LeaseTable::open(Access::Write)?;
    let mut current = Vec::with_capacity(names.len());
    let mut closed_before = Vec::new();
    for name in names {
        match change::releasable(&table, name, token)? {
            Releasable::Close(locked) => current.push(*locked),
            Releasable::Again(locked, closing) => closed_before.push((locked.keep(), closing)),
            // What is locked so far is given back.
            Releasable::Lost => return Ok(Answer::Null),
        }
    }
    // Several leases under one number of somebody else's are released one by one.
    let found = current.iter().map(|f| &f.row).chain(closed_before.iter().map(|(row, _)| row));
    found.into_iter().try_for_each(change::refuse_adopted)?;
    let now = server::now();
    if !current.iter().all(|f| f.row.grant.renewable(token, now)) {
        return Ok(Answer::Null);
    }
    if let [(_, first), others @ ..] = closed_before.as_slice() {
        if current.is_empty() && others.iter().all(|(_, closing)| closing == first) {
            return Ok((*first).into());
        }
    }
    // What this transaction released one by one gets the closing token of all.
    let before = closed_before.iter().map(|(row, _)| row);
    let closing = tokens::draw(change::greatest(current.iter().map(|f| &f.row).chain(before)))?;
    let rows: Vec<Row> = current.into_iter().map(|f| f.keep()).collect();
    for row in rows.iter().chain(closed_before.iter().map(|(row, _)| row)) {
        change::close(&table, row, closing, now)?;
    }
    statistics::add(Counter::Releases, rows.len());
    Ok(closing.into())
}

/// `lease_guard_all(names, token) → bigint`: the token; until the transaction ends nobody else can be granted any of them,
/// and the token is the transaction's `pg_fence.token`. Errors: PF004, 22004, 22023, 25006, 40001, 42501, 53200, 55000.
pub fn guard_all(args: Args) -> Result<Answer, Refusal> {
    let names = arguments::names(&args, 0)?;
    let token = arguments::token(&args, 1)?;
    server::writable(c"lease_guard_all()");
    // In the order of the names, as every call on several leases: so two such calls never wait for each other.
    names.iter().try_for_each(|name| guard::require_in_call(name, token))?;
    settings::set_local(token);
    // One warning is enough for all.
    names.into_iter().take(1).for_each(guard::note_call);
    Ok(token.into())
}
