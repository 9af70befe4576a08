//! What can be refused or told, as types, and how to find it in what a driver or a pool returned.

use serde_json::{Map, Value};
use std::error::Error as StdError;
use std::fmt;
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
    /// No server could be connected to.
    NotConnected(Arc<NotConnected>),
    /// The server did not answer within that time. What it granted all the same ends at its ttl.
    NoAnswer(Duration),
    /// What was asked for makes no sense, or the fence is closed.
    Invalid(String),
    /// Another error of the server or of the driver, which is no business of pg_fence.
    Postgres(Arc<tokio_postgres::Error>),
    /// The same of sqlx.
    #[cfg(feature = "sqlx")]
    Sqlx(Arc<sqlx::Error>),
    /// Anything else: what opened a connection has failed, or what keeps the leases has died.
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

impl Reason {
    /// As all clients call it.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Deadline => "deadline",
            Reason::Gone => "gone",
            Reason::Refused => "refused",
            Reason::Session => "session",
            Reason::Keeper => "keeper",
            Reason::Released => "released",
        }
    }
}

impl Error {
    /// An error that is none of those.
    pub fn other(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
        Error::Other(error.into().into())
    }

    /// Whether what failed may have landed all the same.
    pub fn is_in_doubt(&self) -> bool {
        match self {
            Error::LeaseLost(lost) => lost.in_doubt,
            Error::TransactionLost(lost) => lost.in_doubt,
            _ => false,
        }
    }

    /// The server's SQLSTATE, however deep it is.
    pub fn sqlstate(&self) -> Option<String> {
        match self {
            Error::Refused(refused) => Some(refused.sqlstate.clone()),
            Error::NotConnected(failed) => failed.sqlstate().map(str::to_owned),
            _ => told_in(self).map(|told| told.sqlstate),
        }
    }

    /// The answer to a commit that was on its way.
    pub(crate) fn of_commit(mut self) -> Error {
        match &mut self {
            Error::LeaseLost(lost) => lost.in_doubt = true,
            Error::TransactionLost(lost) => lost.in_doubt = true,
            _ => {}
        }
        self
    }

    /// As one of our own calls tells it.
    pub(crate) fn of_call(self, role: Option<&str>) -> Error {
        let Some(told) = told_in(&self) else { return self };
        let message = &told.message;
        match (told.sqlstate.as_str(), told.sqlstate.get(..2)) {
            ("42883" | "3F000", _) => Error::NotInstalled(format!(
                "pg_fence is not created in this database (CREATE EXTENSION pg_fence), or its schema is neither named nor \
                 on the search_path: {message}"
            )),
            ("42501", _) => {
                let who =
                    role.map_or_else(|| "the role".to_owned(), |role| format!("the role {role}"));
                let grant = role.unwrap_or("…");
                Error::NotGranted(format!(
                    "{who} may not use the lease: {message} (an administrator grants it: SELECT fence_grant('{grant}'))"
                ))
            }
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
        matches!(self, Error::NotConnected(_) | Error::NoAnswer(_))
            || matches!(classify(self), Some(Error::TransactionLost(_)))
    }
}

/// The typed error in what the driver, a pool or the work returned, however deep it is wrapped. None: it is no
/// business of pg_fence.
pub fn classify(error: &(dyn StdError + 'static)) -> Option<Error> {
    for one in chain(error) {
        match one.downcast_ref::<Error>() {
            Some(Error::Postgres(_) | Error::Other(_)) | None => {}
            #[cfg(feature = "sqlx")]
            Some(Error::Sqlx(_)) => {}
            Some(ours) => return Some(ours.clone()),
        }
    }
    let lost = |message: String| {
        Some(Error::TransactionLost(TransactionLost { message, in_doubt: false }))
    };
    if let Some(told) = told_in(error) {
        return match told.sqlstate.as_str() {
            state if state.starts_with("PF") => Some(Error::Refused(told)),
            "25P03" | "25P04" | "57P01" | "57P02" | "57P03" | "57P05" => lost(told.message),
            state if state.starts_with("08") => lost(told.message),
            _ => None,
        };
    }
    chain(error).any(is_broken).then(|| lost(error.to_string())).flatten()
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
    chain(error)
        .find_map(|one| {
            if let Some(told) = one.downcast_ref::<tokio_postgres::Error>()?.as_db_error() {
                let (hint, detail) = (told.hint(), told.detail());
                return Some(refused(told.code().code(), told.message(), hint, detail));
            }
            None
        })
        .or_else(|| told_by_sqlx(error))
}

#[cfg(not(feature = "sqlx"))]
fn told_by_sqlx(_: &(dyn StdError + 'static)) -> Option<Refused> {
    None
}

#[cfg(feature = "sqlx")]
fn told_by_sqlx(error: &(dyn StdError + 'static)) -> Option<Refused> {
    chain(error).find_map(|one| {
        let told = one.downcast_ref::<sqlx::Error>()?.as_database_error()?;
        let told = told.try_downcast_ref::<sqlx::postgres::PgDatabaseError>()?;
        Some(refused(told.code(), told.message(), told.hint(), told.detail()))
    })
}

fn refused(sqlstate: &str, message: &str, hint: Option<&str>, detail: Option<&str>) -> Refused {
    let detail = detail.and_then(|detail| serde_json::from_str(detail).ok()).unwrap_or_default();
    let hint = hint.map(str::to_owned);
    Refused { sqlstate: sqlstate.to_owned(), message: message.to_owned(), hint, detail }
}

/// An error and its causes.
fn chain<'e>(
    error: &'e (dyn StdError + 'static),
) -> impl Iterator<Item = &'e (dyn StdError + 'static)> {
    let mut next = Some(error);
    std::iter::from_fn(move || {
        let one = next?;
        next = one.source();
        Some(one)
    })
}

/// Where it was tried to connect, and what came of each try.
#[derive(Debug, Default)]
pub struct NotConnected {
    tries: Vec<(String, Option<tokio_postgres::Error>)>,
}

impl NotConnected {
    pub(crate) fn add(&mut self, place: String, error: Option<tokio_postgres::Error>) {
        self.tries.push((place, error));
    }

    /// The last one's, where each of them was refused by a server: else trying again may help.
    pub fn sqlstate(&self) -> Option<&str> {
        let mut states = self.tries.iter().map(|(_, error)| Some(error.as_ref()?.code()?.code()));
        states.try_fold("", |_, state| state).filter(|state| !state.is_empty())
    }
}

impl fmt::Display for NotConnected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cannot connect to a server")?;
        for (at, (place, error)) in self.tries.iter().enumerate() {
            write!(f, "{} {place}: ", if at == 0 { ":" } else { ";" })?;
            match error.as_ref().and_then(|error| chain(error).last()) {
                None => f.write_str("no answer in time")?,
                // The driver's own words are hardly ever more than where it happened.
                Some(innermost) => write!(f, "{innermost}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::LeaseTaken(taken) => {
                write!(f, "the lease {} is taken", taken.names.join(", "))?;
                let holder = taken.holder.as_ref().map(|holder| write!(f, " by {holder}"));
                holder.transpose()?;
                let left = taken.remaining.map(|left| {
                    write!(f, ", for {} s at the most unless it is renewed", left.as_secs())
                });
                left.transpose().map(drop)
            }
            Error::LeaseLost(lost) => {
                write!(f, "the lease {} is lost ({})", lost.names.join(", "), lost.reason.as_str())
            }
            Error::Refused(Refused { message, hint: Some(hint), .. }) => {
                write!(f, "{message} ({hint})")
            }
            Error::Refused(refused) => f.write_str(&refused.message),
            Error::TransactionLost(lost) => {
                write!(f, "the transaction is lost: {}", lost.message)
            }
            Error::NotInstalled(told) | Error::NotGranted(told) | Error::Invalid(told) => {
                f.write_str(told)
            }
            Error::NotConnected(failed) => failed.fmt(f),
            Error::NoAnswer(limit) => write!(f, "the server did not answer within {limit:?}"),
            // Of its own it says no more than "db error".
            Error::Postgres(error) => match error.as_db_error() {
                Some(told) => told.fmt(f),
                None => error.fmt(f),
            },
            #[cfg(feature = "sqlx")]
            Error::Sqlx(error) => error.fmt(f),
            Error::Other(error) => error.fmt(f),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Error::Postgres(error) => Some(error.as_ref()),
            #[cfg(feature = "sqlx")]
            Error::Sqlx(error) => Some(error.as_ref()),
            Error::Other(error) => Some(error.as_ref()),
            _ => None,
        }
    }
}

impl From<tokio_postgres::Error> for Error {
    fn from(error: tokio_postgres::Error) -> Error {
        classify(&error).unwrap_or_else(|| Error::Postgres(Arc::new(error)))
    }
}

#[cfg(feature = "sqlx")]
impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Error {
        classify(&error).unwrap_or_else(|| Error::Sqlx(Arc::new(error)))
    }
}
