//! The errors of the client as types, and how to find them in an error of a driver or a pool.

use crate::lease_state::{Denial, Options, is_one_of, is_transient};
use crate::statements::span;
use serde_json::{Map, Value};
use std::error::Error as StdError;
use std::fmt::{self, Display, Formatter};
use std::iter::successors;
use std::sync::Arc;
use std::time::Duration;

/// An error of pg_fence, its client, or the driver.
#[derive(Debug, Clone)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Error {
    /// Another holder has the lease, and kept it until the wait was over. `remaining` is the
    /// longest time until its ttl is over unless it is renewed, and `waits_for` is what ends it.
    /// Each of these is None if it is not known.
    LeaseTaken {
        names: Vec<String>,
        holder: Option<String>,
        remaining: Option<Duration>,
        waits_for: Option<WaitsFor>,
    },
    /// The lease is not held any more, and another holder may have it by now: stop, and report no
    /// failure of the work. `other_role`: the lease belongs to the role that acquired it.
    /// `in_doubt`: a commit was sent, and may have succeeded, in which case the server has checked
    /// the lease.
    LeaseLost { names: Vec<String>, reason: Reason, other_role: bool, in_doubt: bool },
    /// The server refused a write, a guard or a call.
    Refused(Refused),
    /// The transaction's session has ended, or the work has ignored an error of a statement, or has
    /// ended the transaction itself. Nothing is committed, unless `in_doubt`: the commit has
    /// failed, or the work may have committed itself. The lease may still be held.
    TransactionLost { message: String, sqlstate: Option<String>, in_doubt: bool },
    /// pg_fence is not created in this database, or not in a schema of the search path. The text is
    /// the server's message.
    NotInstalled(String),
    /// The role may not use the lease (42501). `message` is the server's.
    NotGranted { role: String, message: String },
    /// No connection could be opened in time, and nothing was sent. The text names the servers with
    /// the error of each. The SQLSTATE is there if each attempt was refused, by a server or by the
    /// driver. The driver refuses with 28P01 (a password is missing) or 28000 (a host is missing, or
    /// TLS fails).
    NoConnection(String, Option<String>),
    /// The server has not answered in time. `in_doubt`: the server may have granted the lease. Such
    /// a grant is released in the background, unless the program has named the holder, and ends at
    /// its ttl at the latest.
    NoAnswer { message: String, sqlstate: Option<String>, in_doubt: bool },
    /// The fence is closed.
    Closed,
    /// The request is not valid.
    Invalid(&'static str),
    /// An error of the driver, of the function that opens connections, or of the system.
    Other(Arc<dyn StdError + Send + Sync>),
}

/// An error of the server. `detail` are the fields of its DETAIL: `presented`, `stored`, `lease`,
/// `holder`, `expires_at`, `relation`, `key`.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Refused {
    pub sqlstate: String,
    pub message: String,
    pub hint: Option<String>,
    pub detail: Map<String, Value>,
}

/// Why a lease is not held any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The lease could not be renewed in time.
    Deadline,
    /// The server says that the lease was taken over or revoked, or has expired.
    Gone,
    /// The server refuses to renew the lease for this client, and always will.
    Refused,
    /// The session of a session lease has ended.
    Session,
    /// The thread of the heartbeat has died.
    Heartbeat,
    /// The time that `at_most` gave is over.
    AtMost,
    /// The program has released the lease.
    Released,
}

/// What ends a lease that another holder has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitsFor {
    /// The end of its ttl, unless its holder renews it.
    Ttl,
    /// The commit of the transaction that acquires it.
    Commit,
    /// The end of a transaction that guards it: its ttl is over already.
    Guard,
}

/// Writes the name that the reason has in all clients.
impl Display for Reason {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Reason::AtMost => f.write_str("at_most"),
            other => f.write_str(&format!("{other:?}").to_lowercase()),
        }
    }
}

impl Error {
    /// Wraps any other error.
    pub fn other(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
        Error::Other(error.into().into())
    }

    /// Returns the server's SQLSTATE, also if its error is a cause of this one.
    pub fn sqlstate(&self) -> Option<String> {
        match self {
            Error::Refused(refused) => Some(refused.sqlstate.clone()),
            Error::NoConnection(_, sqlstate)
            | Error::NoAnswer { sqlstate, .. }
            | Error::TransactionLost { sqlstate, .. } => sqlstate.clone(),
            _ => server_error(self).map(|error| error.sqlstate),
        }
    }

    pub(crate) fn has_state(&self, state: &str) -> bool {
        self.sqlstate().as_deref() == Some(state)
    }

    /// Returns the code of a failed opening: the SQLSTATE; `connect`, if another try may open the
    /// connection; or `misconfigured`, if the program's function has failed by itself.
    pub(crate) fn opening_code(&self) -> String {
        let code = self.sqlstate().or_else(|| chain(self).find_map(refused_by_driver));
        code.unwrap_or_else(|| if self.is_own() { "misconfigured" } else { "connect" }.to_owned())
    }

    /// True if this is not an error of a server, a driver or the network.
    fn is_own(&self) -> bool {
        let is_known = |error: &(dyn StdError + 'static)| {
            let message = error.to_string();
            let is_late =
                ["timed out", "timeout", "elapsed"].iter().any(|word| message.contains(word));
            error.is::<tokio_postgres::Error>() || error.is::<std::io::Error>() || is_late
        };
        matches!(self, Error::Other(_)) && !chain(self).any(is_known)
    }

    /// Returns the type of an error of the client's own statements. `role` has sent the statement,
    /// and `table` is the table of a row lease.
    pub(crate) fn of_call(self, role: &str, table: Option<&str>) -> Error {
        let Some(refused) = server_error(&self) else { return self };
        let role = if role.is_empty() { "…" } else { role }.to_owned();
        match (&*refused.sqlstate, table) {
            ("42883", _) | ("3F000", None) => Error::NotInstalled(refused.message),
            ("42501", None) => Error::NotGranted { role, message: refused.message },
            ("42501", Some(table)) => {
                let message = format!("rows of {table} {NEED_RIGHTS}: {}", refused.message);
                Error::NotGranted { role, message }
            }
            ("55P03", _) => self,
            (state, _) if is_one_of(&["PF", "22", "55", "0A", "53"], state) => {
                Error::Refused(refused)
            }
            _ => self,
        }
    }

    /// The error of a lease that was lost or released.
    pub(crate) fn lost(names: &[String], reason: Reason, other_role: bool) -> Error {
        Error::LeaseLost { names: names.to_vec(), reason, other_role, in_doubt: false }
    }

    /// The error of an acquire that got no lease. `cause` is the error of its last call.
    pub(crate) fn of_denial(
        denial: Denial,
        (options, cause): (&Options, Option<Error>),
        (sqlstate, in_doubt): (Option<String>, bool),
    ) -> Error {
        let message = |summary: &str| match &cause {
            Some(cause) => format!("{summary}: {cause}"),
            None => summary.to_owned(),
        };
        let names = options.display_names();
        match denial {
            Denial::LeaseTaken { holder, remaining, waits_for } => Error::LeaseTaken {
                names,
                remaining: waits_for.map(|_| span(remaining)),
                holder: Some(holder).filter(|holder| !holder.is_empty()),
                waits_for,
            },
            Denial::LeaseLost { reason, is_other_role } => {
                match cause.filter(|_| reason == Reason::Refused) {
                    Some(cause) if options.table.is_some() => cause,
                    _ => Error::lost(&names, reason, is_other_role),
                }
            }
            Denial::Closed => Error::Closed,
            Denial::GivenUp => Error::Invalid("nobody waits for the lease any more"),
            Denial::NoConnection => match cause {
                Some(error @ Error::NoConnection(..)) => error,
                Some(own) if own.is_own() => own,
                _ => Error::NoConnection(message("no connection to the server"), sqlstate),
            },
            Denial::NoAnswer => {
                let message = message("the server did not answer in time");
                Error::NoAnswer { message, sqlstate, in_doubt }
            }
            Denial::NotGranted | Denial::NotInstalled | Denial::Refused => {
                cause.unwrap_or(Error::Invalid("the server returned an unexpected result"))
            }
        }
    }

    /// Returns the specification's name of an error after which a leader may go on, or `own` for an
    /// error of the work's own.
    pub(crate) fn cause(error: &(dyn StdError + 'static), is_of_acquire: bool) -> &'static str {
        let typed = classify(error);
        let typed = typed.as_ref().or_else(|| error.downcast_ref::<Error>());
        let state = typed.and_then(Error::sqlstate);
        let state = state.or_else(|| Some(server_error(error)?.sqlstate)).unwrap_or_default();
        match typed {
            Some(Error::LeaseTaken { .. }) => "LeaseTaken",
            Some(Error::TransactionLost { .. }) => "TransactionLost",
            Some(Error::NoAnswer { .. }) => "NoAnswer",
            Some(Error::LeaseLost { .. }) => "LeaseLost",
            // The server refuses the token. The next renewal decides if the lease is lost.
            _ if state == "PF001" || state == "PF004" => "LeaseLost",
            _ if is_of_acquire && is_transient(&state) => "transient",
            // Any other SQLSTATE of an opening is permanent.
            Some(Error::NoConnection(..))
                if matches!(state.get(..2), None | Some("08" | "53" | "57")) =>
            {
                "NoConnection"
            }
            // The server has no connection left for the work.
            _ if state == "53300" => "ConnectionLost",
            _ => "own",
        }
    }
}

/// Finds the typed error in an error that the driver, a pool or the work returned, also if it is a
/// cause of that error. Returns None if the error does not come from pg_fence or a lost session.
pub fn classify(error: &(dyn StdError + 'static)) -> Option<Error> {
    let mut typed = chain(error).filter_map(|cause| cause.downcast_ref::<Error>());
    if let Some(typed) = typed.find(|typed| !matches!(typed, Error::Other(_))) {
        return Some(typed.clone());
    }
    let lost = |message, sqlstate| Error::TransactionLost { message, sqlstate, in_doubt: false };
    let Some(refused) = server_error(error) else {
        return chain(error).any(is_broken).then(|| lost(error.to_string(), None));
    };
    match &*refused.sqlstate {
        state if is_one_of(&["PF"], state) => Some(Error::Refused(refused)),
        state
            if is_one_of(&["08", "25P03", "25P04", "57P01", "57P02", "57P03", "57P05"], state) =>
        {
            Some(lost(refused.message, Some(refused.sqlstate)))
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

/// Returns an SQLSTATE for an error of the driver after which it can never open the connection. The
/// driver has no codes, so the code is the one that a server has for the same fault.
pub(crate) fn refused_by_driver(error: &(dyn StdError + 'static)) -> Option<String> {
    let message = innermost(error.downcast_ref::<tokio_postgres::Error>()?);
    let is_of_tls = error.to_string() == "error performing TLS handshake";
    let code = match &*message {
        // A server that asks for a password will ask again.
        "password missing" => "28P01",
        "both host and hostaddr are missing" => "28000",
        _ if is_of_tls && (message.contains(" TLS") || message.contains("certificate")) => "28000",
        _ => return None,
    };
    Some(code.to_owned())
}

/// Finds the error of the server in the errors of either driver.
fn server_error(error: &(dyn StdError + 'static)) -> Option<Refused> {
    let refused =
        |sqlstate: &str, message: &str, hint: Option<&str>, detail: Option<&str>| Refused {
            sqlstate: sqlstate.to_owned(),
            message: message.to_owned(),
            hint: hint.map(str::to_owned),
            detail: detail.and_then(|detail| serde_json::from_str(detail).ok()).unwrap_or_default(),
        };
    chain(error).find_map(|one| {
        #[cfg(feature = "sqlx")]
        if let Some(sqlx::Error::Database(one)) = one.downcast_ref() {
            let one = one.try_downcast_ref::<sqlx::postgres::PgDatabaseError>()?;
            return Some(refused(one.code(), one.message(), one.hint(), one.detail()));
        }
        let one = one.downcast_ref::<tokio_postgres::error::DbError>()?;
        Some(refused(one.code().code(), one.message(), one.hint(), one.detail()))
    })
}

/// What to do if the login role changes while a lease is held.
const OTHER_ROLE: &str = "a lease is used by the role that acquired it, and by its members: where login \
     roles change, let all of them act as one role (options=-c role=…, or SET ROLE)";

/// The cause of 42501 for a row lease.
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
            // The driver's error itself says no more than "db error".
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

/// Iterates over an error and its causes.
fn chain<'e>(
    error: &'e (dyn StdError + 'static),
) -> impl Iterator<Item = &'e (dyn StdError + 'static)> {
    successors(Some(error), |error| StdError::source(*error))
}

/// Returns the message of the last cause: the driver's own errors say little more than where the
/// error happened.
pub(crate) fn innermost(error: &(dyn StdError + 'static)) -> String {
    chain(error).last().map(ToString::to_string).unwrap_or_default()
}

macro_rules! of_drivers {
    ($($error:ty)*) => {$(
        impl From<$error> for Error {
            fn from(error: $error) -> Error {
                classify(&error).unwrap_or_else(|| Error::other(error))
            }
        }
    )*};
}

of_drivers! { tokio_postgres::Error }
#[cfg(feature = "sqlx")]
of_drivers! { sqlx::Error }
