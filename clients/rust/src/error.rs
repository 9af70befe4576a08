//! What can be refused or told, as types, and how to find it in what a driver or a pool returned.

use serde_json::{Map, Value};
use std::error::Error as StdError;
use std::fmt::{self, Display, Formatter};
use std::sync::Arc;
use std::time::Duration;

/// Everything that pg_fence and its client refuse or tell, and what else goes wrong.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Error {
    /// Somebody else has the lease, and kept it for as long as we waited.
    LeaseTaken(LeaseTaken),
    /// The lease is ours no more: stop, and report no failure of the work. Somebody else may have it by now.
    LeaseLost(LeaseLost),
    /// The server refused a write, a guard or a call.
    Refused(Refused),
    /// The session ended under the transaction, or a statement of it failed unseen, or the work ended it by itself. Nothing
    /// of it has landed, unless that is in doubt. The lease may be held still.
    TransactionLost(TransactionLost),
    /// pg_fence is not created in this database, or not in a schema of the search path.
    NotInstalled(String),
    /// The role may not use the lease (42501).
    NotGranted(String),
    /// No server could be connected to: which ones, and what came of each try. With the SQLSTATE, where it is a server
    /// that has refused each of them.
    NotConnected(String, Option<String>),
    /// The server did not answer within that time. What it granted all the same ends at its ttl.
    NoAnswer(Duration),
    /// What was asked for makes no sense, or the fence is closed.
    Invalid(String),
    /// None of pg_fence's business: an error of the driver or of what opens connections; or its thread has died.
    Other(Arc<dyn StdError + Send + Sync>),
}

/// Who has it, and for how long at the most unless it is renewed, where that can be seen.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct LeaseTaken {
    pub names: Vec<String>,
    pub holder: Option<String>,
    pub remaining: Option<Duration>,
}

impl Display for LeaseTaken {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "the lease {} is taken", self.names.join(", "))?;
        self.holder.iter().try_for_each(|holder| write!(f, " by {holder}"))?;
        let mut left = self.remaining.iter().map(Duration::as_secs);
        left.try_for_each(|left| write!(f, ", for {left} s at the most unless it is renewed"))
    }
}

/// Which lease, and why. `in_doubt`: a commit was on its way, which may have landed; the server has judged it.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct LeaseLost {
    pub names: Vec<String>,
    pub reason: Reason,
    pub in_doubt: bool,
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

/// `in_doubt`: it was the commit that failed, or the work has committed by itself.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct TransactionLost {
    pub message: String,
    pub sqlstate: Option<String>,
    pub in_doubt: bool,
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
    /// What kept it has died.
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
            Error::TransactionLost(lost) => lost.sqlstate.clone(),
            _ => told_in(self).map(|told| told.sqlstate),
        }
    }

    pub(crate) fn has_state(&self, state: &str) -> bool {
        self.sqlstate().as_deref() == Some(state)
    }

    /// As one of our own calls tells it.
    pub(crate) fn of_call(self, role: Option<&str>) -> Error {
        let Some(told) = told_in(&self) else { return self };
        let (message, role) = (&told.message, role.unwrap_or("…"));
        match (told.sqlstate.as_str(), told.sqlstate.get(..2)) {
            ("42883" | "3F000", _) => Error::NotInstalled(format!(
                "pg_fence is not created in this database (CREATE EXTENSION pg_fence), or its schema is neither named nor \
                 on the search_path: {message}"
            )),
            ("42501", _) => Error::NotGranted(format!(
                "the role {role} may not use the lease: {message} (an administrator grants it: SELECT fence_grant('{role}'))"
            )),
            ("55P03" | "40001", _) => self,
            (_, Some("PF" | "22" | "55" | "0A" | "53")) => Error::Refused(told),
            _ => self,
        }
    }

    /// Whether the same would be refused again.
    pub(crate) fn is_permanent(&self) -> bool {
        let state = self.sqlstate().unwrap_or_default();
        matches!(state.get(..2), Some("22" | "28" | "3D" | "3F" | "42"))
    }

    /// Whether it says that a session has ended, or that none could be had.
    pub(crate) fn is_of_connection(&self) -> bool {
        use Error::{NoAnswer, NotConnected, TransactionLost};
        matches!(classify(self), Some(NotConnected(..) | NoAnswer(_) | TransactionLost(_)))
    }
}

/// The typed error in what the driver, a pool or the work returned, however deep it is wrapped. None: it is no
/// business of pg_fence.
pub fn classify(error: &(dyn StdError + 'static)) -> Option<Error> {
    let mut ours = chain(error).filter_map(|one| one.downcast_ref::<Error>());
    if let Some(ours) = ours.find(|ours| !matches!(ours, Error::Other(_))) {
        return Some(ours.clone());
    }
    let Some(told) = told_in(error) else {
        return chain(error).any(is_broken).then(|| lost(error.to_string(), None));
    };
    match told.sqlstate.as_str() {
        state if state.starts_with("PF") => Some(Error::Refused(told)),
        "25P03" | "25P04" | "57P01" | "57P02" | "57P03" | "57P05" => {
            Some(lost(told.message, Some(told.sqlstate)))
        }
        state if state.starts_with("08") => Some(lost(told.message, Some(told.sqlstate))),
        _ => None,
    }
}

fn lost(message: String, sqlstate: Option<String>) -> Error {
    Error::TransactionLost(TransactionLost { message, sqlstate, in_doubt: false })
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

/// What the server said, in whichever driver's words.
fn told_in(error: &(dyn StdError + 'static)) -> Option<Refused> {
    let told = |one: &(dyn StdError + 'static)| {
        #[cfg(feature = "sqlx")]
        if let Some(one) = one.downcast_ref::<sqlx::Error>() {
            let one =
                one.as_database_error()?.try_downcast_ref::<sqlx::postgres::PgDatabaseError>()?;
            return Some(refused(one.code(), one.message(), one.hint(), one.detail()));
        }
        let one = one.downcast_ref::<tokio_postgres::error::DbError>()?;
        Some(refused(one.code().code(), one.message(), one.hint(), one.detail()))
    };
    chain(error).find_map(told)
}

fn refused(sqlstate: &str, message: &str, hint: Option<&str>, detail: Option<&str>) -> Refused {
    let detail = detail.and_then(|detail| serde_json::from_str(detail).ok()).unwrap_or_default();
    let hint = hint.map(str::to_owned);
    Refused { sqlstate: sqlstate.to_owned(), message: message.to_owned(), hint, detail }
}

impl Display for Error {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Error::LeaseTaken(taken) => taken.fmt(f),
            Error::LeaseLost(lost) => {
                write!(f, "the lease {} is lost ({})", lost.names.join(", "), lost.reason)
            }
            Error::Refused(Refused { message, hint: Some(hint), .. }) => {
                write!(f, "{message} ({hint})")
            }
            Error::TransactionLost(lost) => write!(f, "the transaction is lost: {}", lost.message),
            Error::Refused(Refused { message, .. })
            | Error::NotInstalled(message)
            | Error::NotGranted(message)
            | Error::Invalid(message) => f.write_str(message),
            Error::NotConnected(tries, _) => write!(f, "cannot connect to a server: {tries}"),
            Error::NoAnswer(limit) => write!(f, "the server did not answer within {limit:?}"),
            // Of its own the driver says no more than "db error".
            Error::Other(error) if error.is::<tokio_postgres::Error>() => {
                chain(error.as_ref()).last().map_or(Ok(()), |innermost| write!(f, "{innermost}"))
            }
            Error::Other(error) => error.fmt(f),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Error::Other(error) => Some(error.as_ref()),
            _ => None,
        }
    }
}

/// An error and its causes.
pub(crate) fn chain<'e>(
    error: &'e (dyn StdError + 'static),
) -> impl Iterator<Item = &'e (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |one| {
        let one: &'e (dyn StdError + 'static) = *one;
        one.source()
    })
}

impl From<tokio_postgres::Error> for Error {
    fn from(error: tokio_postgres::Error) -> Error {
        classify(&error).unwrap_or_else(|| Error::other(error))
    }
}

#[cfg(feature = "sqlx")]
impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Error {
        classify(&error).unwrap_or_else(|| Error::other(error))
    }
}
