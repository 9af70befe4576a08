//! Refusals and losses, as types, and how to find them in an error of a driver or a pool.

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
    /// Somebody else has the lease, and kept it for as long as we waited. The holder, and for how long at the most
    /// unless it is renewed, where that can be seen.
    LeaseTaken { names: Vec<String>, holder: Option<String>, remaining: Option<Duration> },
    /// The lease is ours no more: stop, and report no failure of the work. Somebody else may have it by now. `in_doubt`: a
    /// commit was on its way, which may have landed; the server has judged it.
    LeaseLost { names: Vec<String>, reason: Reason, in_doubt: bool },
    /// The server refused a write, a guard or a call.
    Refused(Refused),
    /// The session ended under the transaction, or a statement of it failed unseen, or the work ended it by itself. Nothing
    /// of it has landed, unless `in_doubt`: it was the commit that failed, or the work has committed by itself. The lease
    /// may be held still.
    TransactionLost { message: String, sqlstate: Option<String>, in_doubt: bool },
    /// pg_fence is not created in this database, or not in a schema of the search path: the server's words.
    NotInstalled(String),
    /// The role may not use the lease (42501): the server's words.
    NotGranted { role: String, message: String },
    /// No server could be connected to: which ones, and what came of each try. With the SQLSTATE, where it is a server
    /// that has refused each of them.
    NotConnected(String, Option<String>),
    /// The server did not answer within that time. A lease that it granted all the same ends at its ttl.
    NoAnswer(Duration),
    /// The request makes no sense, or the fence is closed.
    Invalid(&'static str),
    /// None of pg_fence's business: an error of the driver or of what opens connections; or its thread has died.
    Other(Arc<dyn StdError + Send + Sync>),
}

/// As the server said it; `detail` is its DETAIL: `presented`, `stored`, `lease`, `holder`, `expires_at`, `relation`, `key`.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Refused {
    pub sqlstate: String,
    pub message: String,
    pub hint: Option<String>,
    pub detail: Map<String, Value>,
}

impl Refused {
    /// The class of its SQLSTATE, and the rest. A proxy may say anything.
    fn class(&self) -> (&str, &str) {
        self.sqlstate.split_at_checked(2).unwrap_or_default()
    }
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
    Keeper,
    /// Its holder gave it back.
    Released,
}

/// As all clients call it.
impl Display for Reason {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
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
            Error::NotConnected(_, state) => state.clone(),
            Error::TransactionLost { sqlstate, .. } => sqlstate.clone(),
            _ => told_in(self).map(|told| told.sqlstate),
        }
    }

    pub(crate) fn has_state(&self, state: &str) -> bool {
        self.sqlstate().as_deref() == Some(state)
    }

    /// As one of our own calls tells it, of a role whose name is not known here.
    pub(crate) fn of_call(self) -> Error {
        let Some(told) = told_in(&self) else { return self };
        match told.class() {
            ("42", "883") | ("3F", "000") => Error::NotInstalled(told.message),
            ("42", "501") => Error::NotGranted { role: "…".to_owned(), message: told.message },
            ("55", "P03") => self,
            ("PF" | "22" | "55" | "0A" | "53", _) => Error::Refused(told),
            _ => self,
        }
    }

    /// Whether it says that a session has ended, or that none could be had.
    pub(crate) fn is_of_connection(&self) -> bool {
        use Error::{NoAnswer, NotConnected, TransactionLost};
        matches!(classify(self), Some(NotConnected(..) | NoAnswer(_) | TransactionLost { .. }))
    }
}

/// The typed error in what the driver, a pool or the work returned, however deep it is wrapped. None: it is no
/// business of pg_fence.
pub fn classify(error: &(dyn StdError + 'static)) -> Option<Error> {
    let mut ours = chain(error).filter_map(|one| one.downcast_ref::<Error>());
    if let Some(ours) = ours.find(|ours| !matches!(ours, Error::Other(_))) {
        return Some(ours.clone());
    }
    let lost = |message, sqlstate| Error::TransactionLost { message, sqlstate, in_doubt: false };
    let Some(told) = told_in(error) else {
        return chain(error).any(is_broken).then(|| lost(error.to_string(), None));
    };
    match told.class() {
        ("PF", _) => Some(Error::Refused(told)),
        ("08", _) | ("25", "P03" | "P04") | ("57", "P01" | "P02" | "P03" | "P05") => {
            Some(lost(told.message, Some(told.sqlstate)))
        }
        _ => None,
    }
}

fn is_broken(error: &(dyn StdError + 'static)) -> bool {
    #[cfg(feature = "sqlx")]
    if let Some(sqlx::Error::Io(_) | sqlx::Error::WorkerCrashed) = error.downcast_ref() {
        return true;
    }
    error.downcast_ref::<tokio_postgres::Error>().is_some_and(|error| {
        error.is_closed() || error.source().is_some_and(|cause| cause.is::<std::io::Error>())
    })
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

impl Display for Error {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Error::LeaseTaken { names, holder, remaining } => {
                write!(f, "the lease {} is taken", names.join(", "))?;
                holder.iter().try_for_each(|holder| write!(f, " by {holder}"))?;
                remaining.iter().map(|left| left.as_secs_f64().ceil()).try_for_each(|left| {
                    write!(f, ", for {left} s at the most unless it is renewed")
                })
            }
            Error::LeaseLost { names, reason, .. } => {
                write!(f, "the lease {} is lost ({reason})", names.join(", "))
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
                "pg_fence is not created in this database (CREATE EXTENSION pg_fence), or its schema is neither named nor \
                 on the search_path: {message}"
            ),
            Error::NotGranted { role, message }
                if message.contains("was granted to another role") =>
            {
                write!(
                    f,
                    "the role {role} may not use the lease: {message}; a lease is used by the role that acquired it, and by its \
                 members: where login roles change, let all of them act as one role (options=-c role=…, or SET ROLE)"
                )
            }
            Error::NotGranted { role, message } => write!(
                f,
                "the role {role} may not use the lease: {message} (an administrator grants it: SELECT fence_grant('{role}'{}))",
                if message.contains("lease_adopt") { ", 'adopter'" } else { "" }
            ),
            Error::NotConnected(tries, _) => write!(f, "cannot connect to a server: {tries}"),
            Error::NoAnswer(limit) => write!(f, "the server did not answer within {limit:?}"),
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
