//! Several leases under one token: all or none, and never a deadlock, for names are taken in their order.

use crate::acquire::{self, FreeSlot, Request, Tried};
use crate::errors::Refusal;
use crate::lease::{self, Releasable};
use crate::pg::args::{Answer, Args};
use crate::pg::keyed::Access;
use crate::pg::lease_table::LeaseTable;
use crate::pg::relation_lock::Wait;
use crate::pg::row::Row;
use crate::pg::{server, xact};
use crate::{input, queue, session_leases, token};
use pg_fence_rules::grant::{Ask, Mode};
use pg_fence_rules::Token;

/// `lease_acquire_all(names, holder, ttl, metadata, session) → bigint`: one token that speaks for all of them, or NULL
/// and none of them taken. Never waits. Errors: 22004, 22023, 25006, 40001, 55000.
pub fn acquire_all(args: Args) -> Result<Answer, Refusal> {
    let names = input::names(&args, 0)?;
    let holder = input::holder(&args, 1)?;
    let ttl_us = input::first_ttl(&args, 2)?;
    let metadata = input::metadata(&args, 3)?;
    let session = args.boolean(4).unwrap_or(false);
    server::writable(c"lease_acquire_all()");
    let Some(table) = LeaseTable::try_open(Access::Write, Wait::Holders)? else {
        return Ok(Answer::Null);
    };
    let requests: Vec<Request> = names
        .iter()
        .map(|name| Request {
            name,
            holder: holder.as_deref(),
            ttl_us,
            metadata,
            session,
            ask: Ask { mode: Mode::Exclusive, reclaim: false },
        })
        .collect();
    let mut chances = Vec::with_capacity(requests.len());
    for request in &requests {
        match acquire::look(&table, request)? {
            Tried::Won(chance) if !queue::somebody_waits(request.name) => chances.push(chance),
            _ => return Ok(Answer::Null),
        }
    }
    let mut places: Vec<FreeSlot> = Vec::with_capacity(requests.len());
    for (request, chance) in requests.iter().zip(&chances) {
        match acquire::place(&table, request, chance)? {
            Tried::Won(place) => places.push(place),
            Tried::Lost { .. } => {
                for (place, request) in places.into_iter().zip(&requests) {
                    place.abandon(request.name);
                }
                return Ok(Answer::Null);
            }
        }
    }
    let above = places.iter().map(FreeSlot::above).max().unwrap_or(0);
    let token = token::draw(above)?;
    for (request, place) in requests.iter().zip(&places) {
        acquire::write(&table, request, place, token)?;
    }
    Ok(token.into())
}

/// `lease_renew_all(names, token, ttl) → bigint`: one new token for all of them, or NULL and none renewed.
/// Errors: 22004, 22023, 25006, 42501, 55000.
pub fn renew_all(args: Args) -> Result<Answer, Refusal> {
    let names = input::names(&args, 0)?;
    let token = input::token(&args, 1)?;
    let ttl_us = input::ttl(&args, 2)?;
    server::writable(c"lease_renew_all()");
    let table = LeaseTable::open(Access::Write)?;
    let mut rows = Vec::with_capacity(names.len());
    for name in &names {
        match lease::renewable(&table, name, token)? {
            Some((row, _)) => rows.push(row),
            None => return Ok(give_back(&rows)),
        }
    }
    // The locks were waited for one by one: the time of the decision is after the last.
    let now = server::now();
    if !rows.iter().all(|r| r.grant.renewable(token, now)) {
        return Ok(give_back(&rows));
    }
    let fresh = token::draw(lease::greatest(&rows))?;
    for row in &rows {
        lease::prolong(&table, row, fresh, now, ttl_us)?;
    }
    Ok(fresh.into())
}

/// `lease_release_all(names, token) → bigint`: the closing token of all of them, or NULL and none released.
/// Errors: 22004, 22023, 25006, 42501, 55000.
pub fn release_all(args: Args) -> Result<Answer, Refusal> {
    let names = input::names(&args, 0)?;
    let token = input::token(&args, 1)?;
    server::writable(c"lease_release_all()");
    xact::release(|| release_each(&names, token))
}

fn release_each(names: &[Vec<u8>], token: Token) -> Result<Answer, Refusal> {
    let table = LeaseTable::open(Access::Write)?;
    let mut rows = Vec::with_capacity(names.len());
    let mut closed_before = Vec::new();
    for name in names {
        match lease::releasable(&table, name, token)? {
            Releasable::Close(row) => rows.push(*row),
            Releasable::Again(row, closing) => closed_before.push((*row, closing)),
            Releasable::Lost => return Ok(give_back(&rows)),
        }
    }
    let now = server::now();
    if !rows.iter().all(|r| r.grant.renewable(token, now)) {
        return Ok(give_back(&rows));
    }
    if let [(_, first), others @ ..] = closed_before.as_slice() {
        if rows.is_empty() && others.iter().all(|(_, closing)| closing == first) {
            return Ok((*first).into());
        }
    }
    // What this transaction released one by one gets the closing token of all.
    rows.extend(closed_before.into_iter().map(|(row, _)| row));
    let closing = token::draw(lease::greatest(&rows))?;
    for row in &rows {
        table.close(row, closing, now)?;
        session_leases::ended(&row.name(), row.grant.tokens.first());
        queue::changed(&row.name());
    }
    Ok(closing.into())
}

/// NULL: what was locked so far is not changed after all.
fn give_back(rows: &[Row]) -> Answer {
    for row in rows {
        lease::unlock(&row.name(), row.grant.slot);
    }
    Answer::Null
}
