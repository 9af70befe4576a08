//! Refusals and losses, as types, and how to find them in an error of a driver or a pool.

use crate::lease_state::{Ask, Denial, is_in, passes};
use crate::statements::span;
use serde_json::{Map, Value};
use std::error::Error as StdError;
use std::fmt::{self, Display, Formatter};
use std::iter::successors;
use std::sync::Arc;
use std::time::Duration;

/// Everything that pg_fence and its client refuse or tell, and what else goes wrong.
#[derive(Debug, Clone)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Error {
    /// Somebody else has the lease, and kept it for as long as we waited: its holder, how long it
    /// lasts at the most, and what ends it, if that can be seen.
    LeaseTaken {
        names: Vec<String>,
        holder: Option<String>,
        remaining: Option<Duration>,
        waits_for: Option<WaitsFor>,
    },
    /// The lease is ours no more: stop, and report no failure of the work. Somebody else may have
    /// it by now. `other_role`: the lease belongs to the role that acquired it. `in_doubt`: a
    /// commit was on its way, which may have landed; the server has checked it.
    LeaseLost { names: Vec<String>, reason: Reason, other_role: bool, in_doubt: bool },
    /// The server refused a write, a guard or a call.
    Refused(Refused),
    /// The session ended under the transaction, or a statement of it failed unseen, or the work
    /// ended it by itself. Nothing of it has landed, unless `in_doubt`: it was the commit that
    /// failed, or the work has committed by itself. The lease may be held still.
    TransactionLost { message: String, sqlstate: Option<String>, in_doubt: bool },
    /// pg_fence is not created in this database, or not in a schema of the search path: the
    /// server's words.
    NotInstalled(String),
    /// The role may not use the lease (42501): the server's words.
    NotGranted { role: String, message: String },
    /// No server could be connected to in time, and nothing was sent: which ones, and what came of
    /// each try. The SQLSTATE is there if each of them was refused: by a server, or by the driver,
    /// which has no code for a password that is missing (28P01), or for a host or TLS (28000).
    NoConnection(String, Option<String>),
    /// The server has not answered in time. `in_doubt`: a grant may be there. It is released in the
    /// background unless the caller has named the holder, and ends at its ttl at the latest.
    NoAnswer { message: String, sqlstate: Option<String>, in_doubt: bool },
    /// The fence is closed.
    Closed,
    /// The request makes no sense.
    Invalid(&'static str),
    /// An error of the driver, of what opens connections, or of the system.
    Other(Arc<dyn StdError + Send + Sync>),
}

/// The server's refusal. `detail` is its DETAIL: `presented`, `stored`, `lease`, `holder`,
/// `expires_at`, `relation`, `key`.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Refused {
    pub sqlstate: String,
    pub message: String,
    pub hint: Option<String>,
    pub detail: Map<String, Value>,
}

/// Why a lease is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// It could not be renewed in time.
    Deadline,
    /// The server says so: it was taken over, revoked, or expired.
    Gone,
    /// The server will never renew it for us.
    Refused,
    /// The session that it was bound to has ended.
    Session,
    /// The thread that kept it has died.
    Heartbeat,
    /// It was to be held no longer.
    AtMost,
    /// Its holder gave it back.
    Released,
}

/// What ends a lease that is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitsFor {
    /// Its ttl, unless its holder renews it.
    Ttl,
    /// The commit of its acquire.
    Commit,
    /// The end of a transaction that guards it: its ttl is over.
    Guard,
}

/// The name of the reason in all clients.
impl Display for Reason {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Reason::AtMost => f.write_str("at_most"),
            other => f.write_str(&format!("{other:?}").to_lowercase()),
        }
    }
}

impl Error {
    /// An error that is none of those.
    pub fn other(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
        Error::Other(error.into().into())
    }

    /// The server's SQLSTATE, however deep it is.
    pub fn sqlstate(&self) -> Option<String> {
        match self {
            Error::Refused(refused) => Some(refused.sqlstate.clone()),
            Error::NoConnection(_, sqlstate)
            | Error::NoAnswer { sqlstate, .. }
            | Error::TransactionLost { sqlstate, .. } => sqlstate.clone(),
            _ => told_in(self).map(|told| told.sqlstate),
        }
    }

    pub(crate) fn has_state(&self, state: &str) -> bool {
        self.sqlstate().as_deref() == Some(state)
    }

    /// The code of a failed opening: the SQLSTATE; `connect`, if another try may open it; or
    /// `misconfigured`: what opens connections has failed by itself.
    pub(crate) fn code_of_opening(&self) -> String {
        let code = self.sqlstate().or_else(|| chain(self).find_map(refused_by_driver));
        code.unwrap_or_else(|| if self.is_own() { "misconfigured" } else { "connect" }.to_owned())
    }

    /// True if it is no error of a server, a driver or the network.
    fn is_own(&self) -> bool {
        let is_known = |one: &(dyn StdError + 'static)| {
            let said = one.to_string();
            let is_late =
                ["timed out", "timeout", "elapsed"].iter().any(|late| said.contains(late));
            one.is::<tokio_postgres::Error>() || one.is::<std::io::Error>() || is_late
        };
        matches!(self, Error::Other(_)) && !chain(self).any(is_known)
    }

    /// The meaning of an error of one of our own statements, which that role has sent, and which may
    /// be of a table of work.
    pub(crate) fn of_call(self, role: &str, table: Option<&str>) -> Error {
        let Some(told) = told_in(&self) else { return self };
        let role = if role.is_empty() { "…" } else { role }.to_owned();
        match (&*told.sqlstate, table) {
            ("42883", _) | ("3F000", None) => Error::NotInstalled(told.message),
            ("42501", None) => Error::NotGranted { role, message: told.message },
            ("42501", Some(table)) => {
                let message = format!("rows of {table} {NEED_RIGHTS}: {}", told.message);
                Error::NotGranted { role, message }
            }
            ("55P03", _) => self,
            (state, _) if is_in(&["PF", "22", "55", "0A", "53"], state) => Error::Refused(told),
            _ => self,
        }
    }

    /// A lease that was lost, or given back.
    pub(crate) fn lost(names: &[String], reason: Reason, other_role: bool) -> Error {
        Error::LeaseLost { names: names.to_vec(), reason, other_role, in_doubt: false }
    }

    /// Why an acquire has no lease. The cause is the error of its last call.
    pub(crate) fn of_denial(
        denial: Denial,
        (ask, cause): (&Ask, Option<Error>),
        (sqlstate, in_doubt): (Option<String>, bool),
    ) -> Error {
        let message = |usual: &str| match &cause {
            Some(cause) => format!("{usual}: {cause}"),
            None => usual.to_owned(),
        };
        let names = ask.told();
        match denial {
            Denial::LeaseTaken { holder, remaining, waits_for } => Error::LeaseTaken {
                names,
                remaining: waits_for.map(|_| span(remaining)),
                holder: Some(holder).filter(|holder| !holder.is_empty()),
                waits_for,
            },
            Denial::LeaseLost { reason, is_other_role } => {
                match cause.filter(|_| reason == Reason::Refused) {
                    Some(cause) if ask.table.is_some() => cause,
                    _ => Error::lost(&names, reason, is_other_role),
                }
            }
            Denial::Closed => Error::Closed,
            Denial::GivenUp => Error::Invalid("nobody waits for the lease any more"),
            Denial::NoConnection => match cause {
                Some(told @ Error::NoConnection(..)) => told,
                Some(own) if own.is_own() => own,
                _ => Error::NoConnection(message("no connection to the server"), sqlstate),
            },
            Denial::NoAnswer => {
                let message = message("the server did not answer in time");
                Error::NoAnswer { message, sqlstate, in_doubt }
            }
            Denial::NotGranted | Denial::NotInstalled | Denial::Refused => cause
                .unwrap_or(Error::Invalid("the server's answer has another form than is known")),
        }
    }

    /// What a leader goes on after, as the specification names it, or `own`.
    pub(crate) fn cause(error: &(dyn StdError + 'static), is_of_acquire: bool) -> &'static str {
        let told = classify(error);
        let told = told.as_ref().or_else(|| error.downcast_ref::<Error>());
        let state = told.and_then(Error::sqlstate).or_else(|| Some(told_in(error)?.sqlstate));
        let state = state.unwrap_or_default();
        match told {
            Some(Error::LeaseTaken { .. }) => "LeaseTaken",
            Some(Error::TransactionLost { .. }) => "TransactionLost",
            Some(Error::NoAnswer { .. }) => "NoAnswer",
            Some(Error::LeaseLost { .. }) => "LeaseLost",
            // The next renewal tells.
            _ if state == "PF001" || state == "PF004" => "LeaseLost",
            _ if is_of_acquire && passes(&state) => "transient",
            // Any other SQLSTATE of an opening is there to stay.
            Some(Error::NoConnection(..))
                if matches!(state.get(..2), None | Some("08" | "53" | "57")) =>
            {
                "NoConnection"
            }
            _ => "own",
        }
    }
}

/// The typed error in what the driver, a pool or the work returned, however deep it is wrapped.
/// None: it is no business of pg_fence.
pub fn classify(error: &(dyn StdError + 'static)) -> Option<Error> {
    let mut ours = chain(error).filter_map(|one| one.downcast_ref::<Error>());
    if let Some(ours) = ours.find(|ours| !matches!(ours, Error::Other(_))) {
        return Some(ours.clone());
    }
    let lost = |message, sqlstate| Error::TransactionLost { message, sqlstate, in_doubt: false };
    let Some(told) = told_in(error) else {
        return chain(error).any(is_broken).then(|| lost(error.to_string(), None));
    };
    match &*told.sqlstate {
        state if is_in(&["PF"], state) => Some(Error::Refused(told)),
        state if is_in(&["08", "25P03", "25P04", "57P01", "57P02", "57P03", "57P05"], state) => {
            Some(lost(told.message, Some(told.sqlstate)))
        }
        _ => None,
    }
}

/// True if the error says that the connection has ended.
pub(crate) fn is_broken(error: &(dyn StdError + 'static)) -> bool {
    #[cfg(feature = "sqlx")]
    if let Some(sqlx::Error::Io(_) | sqlx::Error::WorkerCrashed) = error.downcast_ref() {
        return true;
    }
    error.downcast_ref::<tokio_postgres::Error>().is_some_and(|error| {
        error.is_closed() || error.source().is_some_and(|cause| cause.is::<std::io::Error>())
    })
}

/// The SQLSTATE that a server would give, of an error by which the driver never opens the
/// connection. The driver has no code for these.
pub(crate) fn refused_by_driver(error: &(dyn StdError + 'static)) -> Option<String> {
    let said = innermost(error.downcast_ref::<tokio_postgres::Error>()?);
    let is_of_tls = error.to_string() == "error performing TLS handshake";
    let code = match &*said {
        // A server that asks for a password will ask again.
        "password missing" => "28P01",
        "both host and hostaddr are missing" => "28000",
        said if is_of_tls && (said.contains(" TLS") || said.contains("certificate")) => "28000",
        _ => return None,
    };
    Some(code.to_owned())
}

/// The server's error, in whichever driver's words.
fn told_in(error: &(dyn StdError + 'static)) -> Option<Refused> {
    let of = |sqlstate: &str, message: &str, hint: Option<&str>, detail: Option<&str>| Refused {
        sqlstate: sqlstate.to_owned(),
        message: message.to_owned(),
        hint: hint.map(str::to_owned),
        detail: detail.and_then(|detail| serde_json::from_str(detail).ok()).unwrap_or_default(),
    };
    chain(error).find_map(|one| {
        #[cfg(feature = "sqlx")]
        if let Some(sqlx::Error::Database(one)) = one.downcast_ref() {
            let one = one.try_downcast_ref::<sqlx::postgres::PgDatabaseError>()?;
            return Some(of(one.code(), one.message(), one.hint(), one.detail()));
        }
        let one = one.downcast_ref::<tokio_postgres::error::DbError>()?;
        Some(of(one.code().code(), one.message(), one.hint(), one.detail()))
    })
}

/// The remedy if the login role changes while a lease is held.
const OTHER_ROLE: &str = "a lease is used by the role that acquired it, and by its members: where login \
     roles change, let all of them act as one role (options=-c role=…, or SET ROLE)";

/// What 42501 of a row lease comes of.
const NEED_RIGHTS: &str = "need SELECT and UPDATE";

impl Display for Error {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Error::LeaseTaken { names, holder, remaining, waits_for } => {
                write!(f, "the lease {} is taken", names.join(", "))?;
                holder.iter().try_for_each(|holder| write!(f, " by {holder}"))?;
                match (waits_for, remaining) {
                    (Some(WaitsFor::Commit), _) => {
                        f.write_str(", whose acquire is not committed yet")
                    }
                    (Some(WaitsFor::Guard), _) => f.write_str(
                        ", until a transaction ends that guards it, for its ttl is over",
                    ),
                    (_, Some(left)) => {
                        let left = left.as_secs_f64().ceil();
                        write!(f, ", for {left} s at the most unless it is renewed")
                    }
                    _ => Ok(()),
                }
            }
            Error::LeaseLost { names, reason, other_role, .. } => {
                write!(f, "the lease {} is lost ({reason})", names.join(", "))?;
                if *other_role { write!(f, ": it is another role's; {OTHER_ROLE}") } else { Ok(()) }
            }
            Error::Refused(Refused { message, hint, .. }) => {
                f.write_str(message)?;
                hint.iter().try_for_each(|hint| write!(f, " ({hint})"))
            }
            Error::TransactionLost { message, .. } => {
                write!(f, "the transaction is lost: {message}")
            }
            Error::NotInstalled(message) => write!(
                f,
                "pg_fence is not created in this database (CREATE EXTENSION pg_fence), or its schema \
                 is neither named nor on the search_path: {message}"
            ),
            Error::NotGranted { role, message } => {
                write!(f, "the role {role} may not use the lease: {message}")?;
                if message.contains("was granted to another role") {
                    return write!(f, "; {OTHER_ROLE}");
                }
                if message.contains(NEED_RIGHTS) {
                    return Ok(());
                }
                let level = if message.contains("lease_adopt") { ", 'adopter'" } else { "" };
                write!(f, " (an administrator grants it: SELECT fence_grant('{role}'{level}))")
            }
            Error::NoConnection(tries, _) => write!(f, "cannot connect to a server: {tries}"),
            Error::NoAnswer { message, .. } => f.write_str(message),
            Error::Closed => f.write_str("the fence is closed"),
            Error::Invalid(message) => f.write_str(message),
            // Of its own the driver says no more than "db error".
            Error::Other(error) if error.is::<tokio_postgres::Error>() => {
                f.write_str(&innermost(error))
            }
            Error::Other(error) => error.fmt(f),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let Error::Other(error) = self else { return None };
        Some(error.as_ref())
    }
}

/// An error and its causes.
fn chain<'e>(
    error: &'e (dyn StdError + 'static),
) -> impl Iterator<Item = &'e (dyn StdError + 'static)> {
    successors(Some(error), |one| StdError::source(*one))
}

/// The driver's own words are hardly ever more than where it happened.
pub(crate) fn innermost(error: &(dyn StdError + 'static)) -> String {
    chain(error).last().map(ToString::to_string).unwrap_or_default()
}

macro_rules! of_drivers {
    ($($of:ty)*) => {$(
        impl From<$of> for Error {
            fn from(error: $of) -> Error {
                classify(&error).unwrap_or_else(|| Error::other(error))
            }
        }
    )*};
}

of_drivers! { tokio_postgres::Error }
#[cfg(feature = "sqlx")]
of_drivers! { sqlx::Error }
