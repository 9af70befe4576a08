//! The functions that show the state, and the one that begins a new epoch.

use super::arguments;
use crate::errors::Report;
use crate::pg::call::args::{Answer, Args, interval_datum, text_datum};
use crate::pg::call::composite;
use crate::pg::locks::lock::LockTag;
use crate::pg::locks::session_lock::SessionLock;
use crate::pg::session::clock;
use crate::pg::session::server;
use crate::pg::session::xact;
use crate::pg::state::lease_table::{Access, AsOf, LeaseTable};
use crate::pg::state::relation;
use crate::pg::state::role_prefix;
use crate::pg::state::row::{self, Row};
use crate::tokens;
use pg_fence_rules::grant::{Grant, Mode, Phase, RENEWALS_KEPT, Tokens};
use pg_fence_rules::locks::{Lock, TAKE_SLOT};
use pg_fence_rules::{Instant, NAME_MAX, Span, Token};

/// The name argument; `None` if it is NULL, or too long for any lease.
fn name(args: &Args) -> Option<Vec<u8>> {
    args.text(0, NAME_MAX).ok().flatten()
}

/// `fence_new_epoch() → bigint`: begins a new epoch and returns the number to which the token sequence advanced.
/// Errors: 25006, 55000.
pub fn new_epoch(_: Args) -> Result<Answer, Report> {
    xact::writable(c"fence_new_epoch()");
    Ok(tokens::new_epoch()?.into())
}

/// `fence_status()`: one row. Writes nothing, and works on a standby, where the last token is NULL.
pub fn status(args: Args) -> Result<Answer, Report> {
    let version = relation::sql_version();
    Ok(composite::row(
        args,
        &[
            tokens::last()?.map(|last| last.bigint().into()),
            Some((server::timeline() as i32).into()),
            Some((server::system_identifier() as i64).into()),
            Some(tokens::epochs_begun()?.into()),
            Some(server::in_recovery().into()),
            Some(text_datum(relation::LIBRARY_VERSION.as_bytes())),
            version.map(|v| text_datum(v.as_bytes())),
        ],
    ))
}

/// `fence.blocking_pids(name, slot) → integer[]`: the sessions that keep a grant from being replaced, as guards do; 0
/// stands for a prepared transaction. NULL if the caller may not see the lease.
pub fn blocking_pids(args: Args) -> Result<Answer, Report> {
    let name = name(&args).filter(|name| role_prefix::may_see(name));
    let (Some(name), Some(slot)) = (name, args.value(1)) else { return Ok(Answer::Null) };
    // Only guards block for long. Renewals and uncommitted grants are over soon.
    Ok(composite::int4_array(
        &LockTag::new(Lock::Grant, &name, slot).conflicting_pids(TAKE_SLOT.mode),
    ))
}

/// `fence.queue_key(name) → bigint`: the key of the lock for which the lease's waiters queue. NULL if the caller may
/// not see the lease.
pub fn queue_key(args: Args) -> Result<Answer, Report> {
    let name = name(&args).filter(|name| role_prefix::may_see(name));
    Ok(name.map(|name| LockTag::queue(&name).key() as i64).into())
}

/// `fence.grant_state(name, mode, first_token, renewal_tokens, closing_token, expires_at, session_bound)`: the columns of
/// fence.leases that are not in the table. A standby cannot see sessions of the primary and assumes that they live.
pub fn grant_state(args: Args) -> Result<Answer, Report> {
    let (Some(name), Some(mode), Some(first)) = (name(&args), args.value::<i8>(1), args.token(2))
    else {
        return Ok(Answer::Null);
    };
    let Some(expires_at) = args.instant(5) else { return Ok(Answer::Null) };
    // A row with more renewals was not written by this extension.
    let renewals = (args.count(3) <= RENEWALS_KEPT).then(|| args.bigints(3)).flatten();
    let renewals: Vec<Token> =
        renewals.into_iter().flatten().flatten().map(Token::from_bigint).collect();
    let mode = row::mode(mode as u8, 0);
    let mut grant = Grant {
        slot: 0,
        mode,
        tokens: Tokens::new(first, &renewals),
        closing: args.token(4),
        closed_here: false,
        expires_at,
        abandoned: false,
        adopted: None,
    };
    let now = clock::now();
    if grant.phase(now) == Phase::Held && args.value(6) == Some(true) {
        grant.abandoned = !session_lives(&name, first)?;
    }
    let phase = grant.phase(now);
    let remaining = match phase {
        // Before PostgreSQL 17 there is no infinite interval.
        Phase::Held if expires_at == Instant::LATEST => None,
        Phase::Held => Some(expires_at.since(now)),
        _ => Some(Span::ZERO),
    };
    Ok(composite::row(
        args,
        &[
            Some(text_datum(name_of_mode(mode).as_bytes())),
            Some(text_datum(name_of_state(phase).as_bytes())),
            Some(grant.greatest().bigint().into()),
            remaining.map(interval_datum),
        ],
    ))
}

fn name_of_mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "exclusive",
        Mode::Shared => "shared",
        Mode::Slots(_) => "slots",
    }
}

fn name_of_state(phase: Phase) -> &'static str {
    match phase {
        Phase::Held => "held",
        Phase::Expired => "expired",
        Phase::Abandoned => "abandoned",
        Phase::Free => "free",
    }
}

/// Returns true if the session lives that acquired the session lease with this first token. A caller that may not see
/// all leases gets true only for a token of this lease, if it may see the lease.
fn session_lives(name: &[u8], first: Token) -> Result<bool, Report> {
    if !role_prefix::may_see_all() {
        let is_its_token = role_prefix::may_see(name) && {
            let rows = LeaseTable::open(Access::Read)?.rows(name, AsOf::InFlight);
            rows.iter().any(|row| row.grant.tokens.first() == first)
        };
        if !is_its_token {
            return Ok(false);
        }
    }
    Ok(SessionLock::of(first).is_held())
}

/// `fence.is_visible(name) → boolean`: true if the caller may see this lease.
pub fn is_visible(args: Args) -> Result<Answer, Report> {
    Ok(name(&args).map_or(Answer::Null, |name| role_prefix::may_see(&name).into()))
}

/// `fence.role_prefix_changed()`, a row trigger: tells every session that rows of fence.role_prefix have changed.
pub fn role_prefix_changed(_: Args) -> Result<Answer, Report> {
    role_prefix::changed()?;
    Ok(Answer::Value(pgrx::pg_sys::Datum::from(0)))
}

/// `fence.visible_grants(name) → setof fence.lease`: the grants of one lease as of this call, also if the transaction
/// keeps an older snapshot. With NULL, the grants of all leases that the caller may see, as the statement sees them. A
/// filter in a query would count the others, and EXPLAIN would show their number.
pub fn visible_grants(args: Args) -> Result<Answer, Report> {
    let all = args.datum(0).is_none();
    let tuples = match name(&args).filter(|name| role_prefix::may_see(name)) {
        // A caller that may see all leases gets them from the view, which reads the table itself.
        _ if all && role_prefix::may_see_all() => Vec::new(),
        _ if all => LeaseTable::open(Access::Read)?.wanted(role_prefix::may_see),
        Some(name) => {
            let table = LeaseTable::open(Access::Read)?;
            let tuple = |row: &Row| match row.is_own() {
                true => table.self_contained(row),
                false => Some(row.tuple()),
            };
            table.rows(&name, AsOf::Now).iter().filter_map(tuple).collect()
        }
        None => Vec::new(),
    };
    Ok(composite::rows(args, tuples.into_iter()))
}

/// `fence.uncommitted_grants(name) → setof fence.lease`: the uncommitted grants of other sessions, of one lease or of
/// all that the caller may see. None on a standby, which has the rows but cannot tell whose they are.
pub fn uncommitted_grants(args: Args) -> Result<Answer, Report> {
    let name = match (args.datum(0).is_some(), name(&args)) {
        _ if server::in_recovery() => return Ok(composite::rows(args, std::iter::empty())),
        (_, Some(name)) => Some(name),
        // The whole table is read only if any session is writing a grant.
        (false, _) if LockTag::others_write_grants() => None,
        _ => return Ok(composite::rows(args, std::iter::empty())),
    };
    let table = LeaseTable::open(Access::Read)?;
    let mut rows = table.uncommitted(name.as_deref());
    rows.retain(|row| role_prefix::may_see(row.name()));
    Ok(composite::rows(args, rows.iter().filter_map(|row| table.self_contained(row))))
}

/// `fence.checked_lease_name(name, token) → text`: the name, after the usual checks of both arguments.
pub fn checked_lease_name(args: Args) -> Result<Answer, Report> {
    let name = arguments::name(&args, 0)?;
    if args.token(1).is_some() {
        arguments::token(&args, 1)?;
    }
    Ok(Answer::Value(text_datum(&name)))
}

/// `fence.record_creation()`: begins the first epoch of a database, when the extension is created.
pub fn record_creation(_: Args) -> Result<Answer, Report> {
    tokens::record_creation()?;
    Ok(Answer::Null)
}
