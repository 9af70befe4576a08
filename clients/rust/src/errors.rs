//! The errors of the client as types, and how to find them in an error of a driver or a pool.

use crate::lease_state::{
    Denial, ErrorType, GuardStage, GuardedBy, Options, Reason, Session, WaitsFor, guard_failed,
};
use crate::statements::{quoted, span};
use serde_json::{Map, Value};
#[cfg(feature = "sqlx")]
use sqlx::postgres::{PgDatabaseError, PgSeverity};
use std::error::Error as StdError;
use std::fmt::{self, Display, Formatter};
use std::iter::successors;
use std::sync::Arc;
use std::time::Duration;
use tokio_postgres::error::{DbError, Severity};

/// Any error of the work.
pub type BoxError = Box<dyn StdError + Send + Sync>;

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
    /// The lease is lost, and another holder may have it: stop, and report no failure of the work. `other_role`: the lease belongs to the role that acquired it.
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

    /// Returns this error of a server as an error of the given type. `role` has sent the statement,
    /// and `table` is the table of a row lease.
    pub(crate) fn typed(self, kind: Option<ErrorType>, role: &str, table: Option<&str>) -> Error {
        let (Some(kind), Some(refused)) = (kind, server_error(&self)) else { return self };
        match kind {
            ErrorType::NotInstalled => Error::NotInstalled(refused.message),
            ErrorType::NotGranted => {
                let role = if role.is_empty() { "…" } else { role }.to_owned();
                let message = match table {
                    Some(table) => format!("rows of {table} {NEED_RIGHTS}: {}", refused.message),
                    None => refused.message,
                };
                Error::NotGranted { role, message }
            }
            _ => Error::Refused(refused),
        }
    }

    /// Returns the error of a transaction that an error with this code has ended.
    pub(crate) fn transaction_lost(
        error: &(dyn StdError + 'static),
        code: &str,
        in_doubt: bool,
    ) -> Error {
        let refused = server_error(error);
        let message = match (code, &refused) {
            ("25P02", _) => HAS_FAILED.to_owned(),
            ("no transaction", _) => HAS_ENDED.to_owned(),
            (_, Some(refused)) => refused.message.clone(),
            (_, None) => error.to_string(),
        };
        Error::TransactionLost { message, sqlstate: refused.map(|one| one.sqlstate), in_doubt }
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
            Denial::LeaseLost { reason, other_role } => Error::lost(&names, reason, other_role),
            Denial::Closed => Error::Closed,
            Denial::GivenUp => Error::Invalid("nobody waits for the lease any more"),
            Denial::Failed(ErrorType::NoConnection) => match cause {
                Some(error @ Error::NoConnection(..)) => error,
                Some(own) if own.is_own() => own,
                _ => Error::NoConnection(message("no connection to the server"), sqlstate),
            },
            Denial::Failed(ErrorType::NoAnswer) => {
                let message = match (&cause, &sqlstate) {
                    // It has answered, with an error that may go away.
                    (Some(cause), Some(_)) => cause.to_string(),
                    _ => message("the server did not answer in time"),
                };
                Error::NoAnswer { message, sqlstate, in_doubt }
            }
            Denial::Failed(_) => {
                cause.unwrap_or(Error::Invalid("the server returned an unexpected result"))
            }
        }
    }
}

/// Finds the typed error in an error that the driver, a pool or the work returned, also if it is a
/// cause of that error. Returns None if the error does not come from pg_fence or a lost session.
pub fn classify(error: &(dyn StdError + 'static)) -> Option<Error> {
    if let Some(typed) = typed_in(error) {
        return Some(typed.clone());
    }
    // A fatal error may be of a connection that could not be opened, and is no end then.
    let (code, is_fatal, session) = (code_of(error), false, Session::Unknown);
    let of = GuardedBy::Names;
    match guard_failed(GuardStage::Work, &code, is_fatal, session, of, false, false).error? {
        ErrorType::TransactionLost => Some(Error::transaction_lost(error, &code, false)),
        _ => server_error(error).map(Error::Refused),
    }
}

/// Finds an error of this package, other than `Other`, in an error and its causes.
fn typed_in<'e>(error: &'e (dyn StdError + 'static)) -> Option<&'e Error> {
    let mut typed = chain(error).filter_map(|cause| cause.downcast_ref::<Error>());
    typed.find(|typed| !matches!(typed, Error::Other(_)))
}

/// Returns the type of an error as `LeadState` takes it.
pub(crate) fn type_of(error: &(dyn StdError + 'static)) -> Option<ErrorType> {
    match typed_in(error)? {
        Error::LeaseTaken { .. } => Some(ErrorType::LeaseTaken),
        Error::LeaseLost { .. } => Some(ErrorType::LeaseLost),
        Error::TransactionLost { .. } => Some(ErrorType::TransactionLost),
        Error::NoConnection(..) => Some(ErrorType::NoConnection),
        Error::NoAnswer { .. } => Some(ErrorType::NoAnswer),
        _ => None,
    }
}

/// Returns the SQLSTATE; without one `ended`, if the error says that a session has ended, or else
/// an empty text.
pub(crate) fn code_of(error: &(dyn StdError + 'static)) -> String {
    let server = || server_error(error).map(|error| error.sqlstate);
    let state = typed_in(error).map_or_else(server, Error::sqlstate);
    let has_ended = || chain(error).any(is_broken);
    state.unwrap_or_else(|| if has_ended() { "ended" } else { "" }.to_owned())
}

/// Returns what an error of a guard's own call says about the guard's session.
pub(crate) fn session_of(error: &(dyn StdError + 'static)) -> Session {
    // After a fatal error the server ends the session.
    if is_fatal(error) || chain(error).any(is_broken) { Session::Closed } else { Session::Open }
}

/// True if the error says that the connection has ended, or that a loss cuts it.
fn is_broken(error: &(dyn StdError + 'static)) -> bool {
    #[cfg(feature = "sqlx")]
    if let Some(sqlx::Error::Io(_) | sqlx::Error::WorkerCrashed) = error.downcast_ref() {
        return true;
    }
    let is_loss = matches!(error.downcast_ref(), Some(Error::LeaseLost { .. }));
    is_loss
        || error.downcast_ref::<tokio_postgres::Error>().is_some_and(|error| {
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
pub(crate) fn server_error(error: &(dyn StdError + 'static)) -> Option<Refused> {
    database_error(error).map(|(error, _)| error)
}

/// True if the severity of the server's error is FATAL or PANIC.
pub(crate) fn is_fatal(error: &(dyn StdError + 'static)) -> bool {
    database_error(error).is_some_and(|(_, is_fatal)| is_fatal)
}

/// As `server_error`, with true if the error is fatal.
fn database_error(error: &(dyn StdError + 'static)) -> Option<(Refused, bool)> {
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
            let one = one.try_downcast_ref::<PgDatabaseError>()?;
            let is_fatal = matches!(one.severity(), PgSeverity::Fatal | PgSeverity::Panic);
            return Some((refused(one.code(), one.message(), one.hint(), one.detail()), is_fatal));
        }
        let one = one.downcast_ref::<DbError>()?;
        // Some poolers have only the text, which a server may write in another language.
        let is_fatal = matches!(one.parsed_severity(), Some(Severity::Fatal | Severity::Panic))
            || matches!(one.severity(), "FATAL" | "PANIC");
        Some((refused(one.code().code(), one.message(), one.hint(), one.detail()), is_fatal))
    })
}

/// What to do if the login role changes while a lease is held.
const OTHER_ROLE: &str = "a lease is used by the role that acquired it, and by its members: where login \
     roles change, let all of them act as one role (options=-c role=…, or SET ROLE)";

const HAS_FAILED: &str = "a statement of the transaction has failed: all of it is rolled back";

const HAS_ENDED: &str =
    "the work has ended the transaction itself: what it did after that was not guarded";

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
                // The server reads the text as an identifier.
                let is_plain = |c| matches!(c, 'a'..='z' | '0'..='9' | '_' | '…');
                let role = match role.chars().all(is_plain) {
                    true => role.clone(),
                    false => quoted(role).replace('\'', "''"),
                };
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
