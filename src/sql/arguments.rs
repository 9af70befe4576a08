//! Checks of the callers' arguments: 22004 for NULL if a value is needed, 22023 for a value out of its range. NULL
//! means the default if there is one, because wrappers pass NULL for omitted arguments.

use crate::errors::{self, Report};
use crate::leases::adopt::Adoption;
use crate::leases::keep::Pair;
use crate::leases::request::Request;
use crate::pg::call::args::{Args, ArgumentError, Text};
use crate::pg::session::settings;
use crate::pg::state::lease_table::{AsOf, LeaseTable};
use crate::pg::state::role_prefix;
use crate::pg::state::row::Row;
use pg_fence_rules::grant::{AcquireRequest, Mode};
use pg_fence_rules::{NAME_MAX, Span, TTL_MAX, Token};
use std::time::Duration;

/// The longest holder's name, in bytes.
pub const HOLDER_MAX: usize = 512;
/// The largest metadata, in bytes of uncompressed jsonb.
pub const METADATA_MAX: usize = 65_536;
/// The default ttl: 30 s.
const TTL_DEFAULT: Span = Span::from_secs(30);
/// The age up to which `lease_prune` keeps rows by default: a day.
const OLDER_THAN_DEFAULT: Span = Span::from_secs(86_400);
/// The longest ttl of a session lease: 100,000 years, each of twelve months of 30 days, as in an interval given in
/// years. The deadline stays within the range of `timestamptz`, which ends in the year 294276.
const SESSION_TTL_MAX: Span = Span::from_secs(100_000 * 12 * 30 * 86_400);
/// The number of leases that one call of `lease_keep` may renew.
const KEPT_MAX: usize = 10_000;
/// The number of leases that other calls may take.
pub const NAMES_MAX: usize = 1_000;

/// The name of a lease: 1 to 512 bytes.
pub fn name(args: &Args, n: usize) -> Result<Vec<u8>, Report> {
    let name = args.text(n, NAME_MAX).map_err(|_| long_name("name"))?;
    let name = name.ok_or_else(|| errors::null_argument("name"))?;
    check_name(&name, "name").map(|()| name)
}

fn check_name(name: &[u8], argument: &'static str) -> Result<(), Report> {
    if name.is_empty() {
        return Err(errors::bad_argument(
            argument,
            "a lease needs a name",
            "Name what only one may do at a time, as 'invoice-run' or 'order:7'.",
        ));
    }
    Ok(())
}

fn long_name(argument: &'static str) -> Report {
    errors::bad_argument(
        argument,
        "the name of a lease is at most 512 bytes long",
        "Use a hash of the long name.",
    )
}

/// The holder's name, if given: at most 512 bytes, because errors and logs show it.
fn holder(args: &Args, n: usize) -> Result<Option<Vec<u8>>, Report> {
    args.text(n, HOLDER_MAX).map_err(|_| {
        errors::bad_argument(
            "holder",
            "a holder is at most 512 bytes long",
            "Name the worker, as 'invoices@host7'; what else is to be shown goes into metadata.",
        )
    })
}

/// A jsonb value to be shown with the lease: at most 64 kB, because every renewal writes it again.
fn metadata(args: &Args, n: usize) -> Result<Option<pgrx::pg_sys::Datum>, Report> {
    if args.raw_size(n) > METADATA_MAX {
        return Err(errors::bad_argument(
            "metadata",
            "metadata is at most 64 kB",
            "Every renewal writes it again: keep the work's data in a table of its own.",
        ));
    }
    Ok(args.datum(n))
}

/// The names of leases, sorted and without duplicates. At least one, and at most 1000 including duplicates.
pub fn names(args: &Args, n: usize) -> Result<Vec<Vec<u8>>, Report> {
    let given =
        args.texts(n, NAMES_MAX, NAME_MAX).map_err(|unfit| unfit_names(unfit, NAMES_MAX))?;
    let checked = |name: Option<Text>| {
        let name = name.ok_or_else(|| errors::null_argument("names"))?.bytes().to_vec();
        check_name(&name, "names").map(|()| name)
    };
    let given = given.ok_or_else(|| errors::null_argument("names"))?;
    let mut names = given.into_iter().map(checked).collect::<Result<Vec<_>, _>>()?;
    if names.is_empty() {
        return Err(errors::bad_argument(
            "names",
            "names must have at least one name",
            "Pass the names of the leases.",
        ));
    }
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

fn unfit_names(error: ArgumentError, most: usize) -> Report {
    match error {
        ArgumentError::TooLong => long_name("names"),
        ArgumentError::TooMany => errors::bad_argument(
            "names",
            &format!("names must have at most {most} elements"),
            "Pass the others in another call.",
        ),
    }
}

/// The arguments of `lease_acquire_all(names, holder, ttl, metadata, session)`: a request for each name.
pub fn acquire_all(args: &Args) -> Result<Vec<Request>, Report> {
    let names = names(args, 0)?;
    let session = args.value(4).unwrap_or(false);
    let one = Request {
        name: Vec::new(),
        holder: holder(args, 1)?,
        ttl: first_ttl(args, 2, session)?,
        metadata: metadata(args, 3)?,
        session,
        acquire: AcquireRequest { mode: Mode::Exclusive, reclaim: false },
    };
    Ok(names.into_iter().map(|name| Request { name, ..one.clone() }).collect())
}

/// The pairs of `lease_keep(names, tokens)`, in the given order.
pub fn pairs(args: &Args) -> Result<Vec<(Text, Token)>, Report> {
    args.datum(0).ok_or_else(|| errors::null_argument("names"))?;
    args.datum(1).ok_or_else(|| errors::null_argument("tokens"))?;
    if args.count(0) != args.count(1) {
        return Err(errors::bad_argument(
            "tokens",
            "names and tokens must have as many elements",
            "Pass one token for each name, in the same order.",
        ));
    }
    // A name that is too long gets an answer of its own instead of an error.
    let names = args.texts(0, KEPT_MAX, i32::MAX as usize);
    let names = names.map_err(|unfit| unfit_names(unfit, KEPT_MAX))?;
    let pair = |(name, token): (Option<Text>, Option<i64>)| {
        let name = name.ok_or_else(|| errors::null_argument("names"))?;
        Ok((name, token.map(Token::from_bigint).ok_or_else(errors::null_token)?))
    };
    names.into_iter().flatten().zip(args.bigints(1).into_iter().flatten()).map(pair).collect()
}

/// The pair, if it can be a lease's name and its token.
pub fn fit_pair((name, token): &(Text, Token)) -> Pair {
    let name = name.bytes();
    let fits = (1..=NAME_MAX).contains(&name.len()) && *token > Token::BEFORE_ALL;
    fits.then(|| (name.to_vec(), *token))
}

/// A token: at least 1.
pub fn token(args: &Args, n: usize) -> Result<Token, Report> {
    match args.token(n) {
        None => Err(errors::null_token()),
        Some(token) if token > Token::BEFORE_ALL => Ok(token),
        Some(_) => Err(errors::bad_argument(
            "token",
            "a fencing token is at least 1",
            "Pass the token that lease_acquire, lease_renew or the service of an adopted lease returned.",
        )),
    }
}

/// The ttl of a new grant: positive and at most 366 days, or more if the grant ends with its session.
fn first_ttl(args: &Args, n: usize, session: bool) -> Result<Span, Report> {
    let ttl = args.interval_us(n).map_or(TTL_DEFAULT, Span::from_micros);
    check_ttl(ttl, session)?;
    Ok(ttl)
}

/// The ttl of a renewal; `None` for NULL. Its limit depends on the grant: see `check_renewed_ttl` and `check_lost_ttl`.
pub fn ttl(args: &Args, n: usize) -> Result<Option<Span>, Report> {
    let ttl = args.interval_us(n).map(Span::from_micros);
    ttl.map_or(Ok(()), |ttl| check_ttl(ttl, true))?;
    Ok(ttl)
}

/// Errors with 22023 if the ttl is too long for this grant.
pub fn check_renewed_ttl(ttl: Option<Span>, grant: &Row) -> Result<(), Report> {
    ttl.map_or(Ok(()), |ttl| check_ttl(ttl, grant.ends_with_session()))
}

/// Errors with 22023 if the ttl is too long for any grant of this lease. The token belongs to none of them.
pub fn check_lost_ttl(ttl: Option<Span>, table: &LeaseTable, lease: &[u8]) -> Result<(), Report> {
    match ttl {
        Some(ttl) if ttl > TTL_MAX => {
            let rows = table.rows(lease, AsOf::Now);
            // A caller that may not see the lease is answered as if it had no grants.
            let session = role_prefix::may_see(lease) && rows.iter().any(Row::ends_with_session);
            check_ttl(ttl, session)
        }
        _ => Ok(()),
    }
}

fn check_ttl(ttl: Span, session: bool) -> Result<(), Report> {
    let (longest, message, hint) = if session {
        (
            SESSION_TTL_MAX,
            "ttl must be positive and at most 100000 years",
            "'1000 years' is a lease that ends with its session only.",
        )
    } else {
        (
            TTL_MAX,
            "ttl must be positive and at most 366 days",
            "A heartbeat renews each third of the ttl: '30 s' is usual. Only a lease with session => true may have a longer one.",
        )
    };
    if ttl <= Span::ZERO || ttl > longest {
        return Err(errors::bad_argument("ttl", message, hint));
    }
    settings::check_ttl("ttl", ttl)
}

/// The longest time to wait.
fn wait(args: &Args, n: usize) -> Result<Duration, Report> {
    let message = match args.interval_us(n).unwrap_or(0) {
        i64::MAX => "wait must be finite",
        us @ 0.. => return Ok(Duration::from_micros(us.unsigned_abs())),
        _ => "wait must not be negative",
    };
    let hint = "Zero tries once and never blocks; '10 s' waits in the queue.";
    Err(errors::bad_argument("wait", message, hint))
}

/// The arguments of `lease_acquire(name, holder, ttl, wait, metadata, shared, slots, reclaim, session)`: the request,
/// and the longest time to wait.
pub fn acquire_request(args: &Args) -> Result<(Request, Duration), Report> {
    let name = name(args, 0)?;
    let holder = holder(args, 1)?;
    let session = args.value(8).unwrap_or(false);
    let ttl = first_ttl(args, 2, session)?;
    let wait = wait(args, 3)?;
    let shared = args.value(5).unwrap_or(false);
    let slots = args.value(6).unwrap_or(1);
    let reclaim = args.value(7).unwrap_or(false);
    if slots < 1 {
        return Err(errors::bad_argument(
            "slots",
            "slots must be at least 1",
            "Pass how many grants of the lease may live together, or leave it out.",
        ));
    }
    if shared && slots > 1 {
        return Err(errors::bad_argument(
            "slots",
            "shared and slots above 1 exclude each other",
            "Leave one of them out: shared has no limit, slots has one.",
        ));
    }
    if reclaim && holder.is_none() {
        return Err(errors::bad_argument(
            "reclaim",
            "reclaim needs a holder",
            "Only a holder that names itself can be known again: pass holder.",
        ));
    }
    let mode = match (shared, slots) {
        (true, _) => Mode::Shared,
        (false, 1) => Mode::Exclusive,
        (false, n) => Mode::Slots(n),
    };
    let metadata = metadata(args, 4)?;
    let acquire = AcquireRequest { mode, reclaim };
    Ok((Request { name, holder, ttl, metadata, session, acquire }, wait))
}

/// The arguments of `lease_adopt(name, token, holder, wait, metadata)`: the adoption, and the longest time to wait.
pub fn adopt(args: &Args) -> Result<(Adoption, Duration), Report> {
    let name = name(args, 0)?;
    let token = match args.token(1) {
        None => Err(errors::null_number()),
        Some(_) => token(args, 1),
    }?;
    let (holder, wait) = (holder(args, 2)?, wait(args, 3)?);
    Ok((Adoption { name, token, holder, metadata: metadata(args, 4)? }, wait))
}

/// The age above which grants are deleted; NULL means the default.
pub fn older_than(args: &Args, n: usize) -> Result<Span, Report> {
    Ok(age(args, n, "older_than")?.unwrap_or(OLDER_THAN_DEFAULT))
}

/// An age that the caller must give.
pub fn than(args: &Args, n: usize) -> Result<Span, Report> {
    age(args, n, "than")?.ok_or_else(|| errors::null_argument("than"))
}

fn age(args: &Args, n: usize, argument: &'static str) -> Result<Option<Span>, Report> {
    let age = args.interval_us(n);
    if age.is_some_and(|us| us < 0) {
        let message = format!("{argument} must not be negative");
        let hint = "'1 day' keeps what ended within the last day.";
        return Err(errors::bad_argument(argument, &message, hint));
    }
    Ok(age.map(Span::from_micros))
}
