//! What can be refused or told, as types, and how to find it in what a driver or a pool returned.

use serde_json::{Map, Value};
use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio_postgres::error::{DbError, Severity, SqlState};

/// Everything that pg_fence and its client refuse or tell, and what else goes wrong.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Error {
    /// PF001: the row has seen the same or a greater token. Stop.
    StaleToken(Refusal),
    /// PF002: the write presented no token. It ran outside of `guard` and `present`.
    NoToken(Refusal),
    /// PF003: this database never issued that token.
    NeverIssued(Refusal),
    /// PF004: the token does not speak for the lease.
    NotSpeaking(Refusal),
    /// PF005: a statement that cannot be fenced (TRUNCATE).
    CannotBeFenced(Refusal),
    /// The lease is ours no more.
    LeaseLost(LeaseLost),
    /// Somebody else has the lease, and kept it for as long as we waited.
    LeaseTaken(LeaseTaken),
    /// The server did not answer an acquire in time. Where it was granted all the same, it ends at its ttl.
    AcquireTimeout(AcquireTimeout),
    /// pg_fence is not created in this database, or not in a schema of the search path.
    NotInstalled(NotInstalled),
    /// No server could be connected to.
    NotConnected(Arc<NotConnected>),
    /// The session has ended under the transaction. The lease may well be held still.
    TransactionLost(TransactionLost),
    /// Another error of the server or of the driver, which is no business of pg_fence.
    Postgres(Arc<tokio_postgres::Error>),
    /// The same of sqlx.
    #[cfg(feature = "sqlx")]
    Sqlx(Arc<sqlx::Error>),
    /// Anything else: what opened a connection has failed, or a call took longer than it may.
    Other(Arc<dyn StdError + Send + Sync>),
}

impl Error {
    /// An error that is none of those.
    pub fn other(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
        Error::Other(error.into().into())
    }

    /// The server's SQLSTATE.
    pub fn sqlstate(&self) -> Option<&str> {
        match self {
            Error::TransactionLost(lost) => lost.sqlstate(),
            Error::NotInstalled(missing) => missing.cause.sqlstate(),
            Error::NotConnected(failed) => failed.sqlstate(),
            Error::Postgres(error) => error.code().map(SqlState::code),
            #[cfg(feature = "sqlx")]
            Error::Sqlx(error) => {
                let told = error.as_database_error()?;
                Some(told.try_downcast_ref::<sqlx::postgres::PgDatabaseError>()?.code())
            }
            _ => self.refusal().map(|refusal| refusal.0.sqlstate.as_str()),
        }
    }

    /// What the server refused, if it did.
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            Error::StaleToken(refusal)
            | Error::NoToken(refusal)
            | Error::NeverIssued(refusal)
            | Error::NotSpeaking(refusal)
            | Error::CannotBeFenced(refusal) => Some(refusal),
            _ => None,
        }
    }

    /// Whether it was the commit that failed: then the transaction may have landed all the same.
    pub fn is_in_doubt(&self) -> bool {
        match self {
            Error::LeaseLost(lost) => lost.in_doubt,
            Error::TransactionLost(lost) => lost.in_doubt,
            _ => false,
        }
    }

    pub(crate) fn in_doubt(mut self) -> Error {
        match &mut self {
            Error::LeaseLost(lost) => lost.in_doubt = true,
            Error::TransactionLost(lost) => lost.in_doubt = true,
            _ => {}
        }
        self
    }

    /// As the driver returned it: where no transaction was open, none can be lost.
    pub(crate) fn unclassified(error: tokio_postgres::Error) -> Error {
        Error::Postgres(Arc::new(error))
    }

    /// Whether a heartbeat that failed so will fail again, so that there is nothing to wait for.
    pub(crate) fn is_permanent(&self) -> bool {
        let state = self.sqlstate().unwrap_or_default();
        let class = state.get(..2).unwrap_or_default();
        matches!(class, "22" | "28" | "3D" | "3F" | "42") || matches!(state, "0A000" | "55000")
    }

    /// Whether the statement was refused, so that another one may succeed on the same server.
    pub(crate) fn is_of_statement(&self) -> bool {
        let is_of_server = matches!(self.sqlstate(), Some("25006" | "53100" | "57P03"));
        let Error::Postgres(error) = self else { return self.refusal().is_some() };
        let severity = error.as_db_error().and_then(DbError::parsed_severity);
        severity == Some(Severity::Error) && !is_of_server && !self.is_end_of_session()
    }

    /// As an acquire of these names tells it.
    pub(crate) fn of_acquire(self, names: &Arc<[String]>) -> Error {
        match &self {
            Error::Other(cause) => match cause.downcast_ref::<TimedOut>() {
                Some(TimedOut(after)) => {
                    Error::AcquireTimeout(AcquireTimeout { names: names.clone(), after: *after })
                }
                None => self,
            },
            _ => self.of_extension(),
        }
    }

    /// As a call of a function of the extension tells it.
    pub(crate) fn of_extension(self) -> Error {
        let is_missing = match self.sqlstate() {
            // The name of the function is in it, in whichever language.
            Some("42883") => self.to_string().contains("lease_"),
            Some("3F000") => true,
            _ => false,
        };
        match is_missing {
            true => Error::NotInstalled(NotInstalled { cause: Arc::new(self) }),
            false => self,
        }
    }

    /// Whether it says that the session has ended.
    pub(crate) fn is_end_of_session(&self) -> bool {
        matches!(classify(self), Some(Error::TransactionLost(_)))
    }
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
            match error {
                None => f.write_str("no answer in time")?,
                Some(error) => f.write_str(&innermost(error))?,
            }
        }
        Ok(())
    }
}

/// The driver's own words are hardly ever more than where it happened.
fn innermost(error: &tokio_postgres::Error) -> String {
    let mut cause: &dyn StdError = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// What the server refused.
#[derive(Debug, Clone)]
pub struct Refusal(Arc<Refused>);

#[derive(Debug)]
struct Refused {
    sqlstate: String,
    message: String,
    hint: Option<String>,
    detail: String,
    /// The driver's own; there is none to keep where it cannot be cloned.
    cause: Option<DbError>,
}

impl Refusal {
    /// One line for people.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// What to do.
    pub fn hint(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// For programs: `presented`, `stored`, `lease`, `holder`, `expires_at`, `relation`, `key`, as they apply.
    pub fn detail(&self) -> Map<String, Value> {
        serde_json::from_str(&self.0.detail).unwrap_or_default()
    }

    /// The error of tokio-postgres, where it is one.
    pub fn db_error(&self) -> Option<&DbError> {
        self.0.cause.as_ref()
    }
}

/// Why a lease was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// It could not be renewed in time.
    Deadline,
    /// The server says so: it was taken over, revoked, or expired.
    Gone,
    /// The server will not renew it, and trying again will not help.
    Denied,
    /// The session that it was bound to has ended.
    Session,
    /// Its holder gave it back.
    Released,
}

impl Reason {
    /// As all clients call it.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Deadline => "deadline",
            Reason::Gone => "gone",
            Reason::Denied => "denied",
            Reason::Session => "session",
            Reason::Released => "released",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The lease is ours no more: stop, and report no failure of the work. Somebody else may have it by now.
#[derive(Debug, Clone)]
pub struct LeaseLost {
    reason: Reason,
    names: Arc<[String]>,
    in_doubt: bool,
    cause: Option<Arc<Error>>,
}

impl LeaseLost {
    pub(crate) fn new(reason: Reason, names: &Arc<[String]>, cause: Option<Error>) -> LeaseLost {
        let (names, cause) = (names.clone(), cause.map(Arc::new));
        LeaseLost { reason, names, in_doubt: false, cause }
    }

    /// The same loss, as `error` showed it.
    pub(crate) fn shown_by(&self, error: Error) -> LeaseLost {
        LeaseLost { cause: Some(Arc::new(error)), ..self.clone() }
    }

    /// Why.
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// What it was a lease of.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Whether a commit was on its way, which may have landed. The server has judged it: it was not stale.
    pub fn is_in_doubt(&self) -> bool {
        self.in_doubt
    }
}

/// Somebody else has the lease, and kept it for as long as we waited.
#[derive(Debug, Clone)]
pub struct LeaseTaken(pub(crate) Arc<[String]>);

impl LeaseTaken {
    /// What it is a lease of.
    pub fn names(&self) -> &[String] {
        &self.0
    }
}

/// The server did not answer an acquire in time, and its connection was broken off.
#[derive(Debug, Clone)]
pub struct AcquireTimeout {
    names: Arc<[String]>,
    after: Duration,
}

impl AcquireTimeout {
    /// What was to be acquired.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// How long it was waited for: a third of the ttl, beside the wait in line.
    pub fn after(&self) -> Duration {
        self.after
    }
}

/// The functions of pg_fence are not found.
#[derive(Debug, Clone)]
pub struct NotInstalled {
    cause: Arc<Error>,
}

impl NotInstalled {
    /// As the server said it.
    pub fn cause(&self) -> &Error {
        &self.cause
    }
}

/// The session has ended under the transaction: nothing of it has landed, unless it was the commit that failed.
#[derive(Debug, Clone)]
pub struct TransactionLost {
    sqlstate: Option<String>,
    message: String,
    in_doubt: bool,
}

impl TransactionLost {
    /// What the server said last, if it did.
    pub fn sqlstate(&self) -> Option<&str> {
        self.sqlstate.as_deref()
    }

    /// Whether it was the commit that failed.
    pub fn is_in_doubt(&self) -> bool {
        self.in_doubt
    }
}

/// A call that took longer than it may.
#[derive(Debug)]
pub(crate) struct TimedOut(pub Duration);

impl fmt::Display for TimedOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the server did not answer within {:?}", self.0)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::LeaseLost(lost) => lost.fmt(f),
            Error::LeaseTaken(taken) => taken.fmt(f),
            Error::TransactionLost(lost) => lost.fmt(f),
            Error::AcquireTimeout(timeout) => timeout.fmt(f),
            Error::NotInstalled(missing) => missing.fmt(f),
            Error::NotConnected(failed) => failed.fmt(f),
            // Of its own it says no more than "db error".
            Error::Postgres(error) => match error.as_db_error() {
                Some(told) => told.fmt(f),
                None => error.fmt(f),
            },
            #[cfg(feature = "sqlx")]
            Error::Sqlx(error) => error.fmt(f),
            Error::Other(error) => error.fmt(f),
            _ => f.write_str(self.refusal().map_or("", Refusal::message)),
        }
    }
}

impl fmt::Display for LeaseLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the lease {} is lost ({})", self.names.join(", "), self.reason)
    }
}

impl fmt::Display for LeaseTaken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the lease {} is taken", self.0.join(", "))
    }
}

impl fmt::Display for AcquireTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (names, after) = (self.names.join(", "), self.after);
        write!(f, "the server did not answer within {after:?} whether the lease {names} is granted")
    }
}

impl fmt::Display for NotInstalled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "pg_fence is not created in this database, or not in a schema of the search_path \
             (CREATE EXTENSION pg_fence, or Fence::in_schema): {}",
            self.cause
        )
    }
}

impl fmt::Display for TransactionLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the session ended under the transaction: {}", self.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Error::LeaseLost(lost) => lost.source(),
            Error::LeaseTaken(_) | Error::TransactionLost(_) | Error::AcquireTimeout(_) => None,
            Error::NotConnected(_) => None,
            Error::NotInstalled(missing) => missing.cause.source(),
            Error::Postgres(error) => Some(error.as_ref()),
            #[cfg(feature = "sqlx")]
            Error::Sqlx(error) => Some(error.as_ref()),
            Error::Other(error) => error.source(),
            _ => Some(self.refusal()?.db_error()?),
        }
    }
}

impl StdError for LeaseLost {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.cause.as_deref().map(|cause| cause as _)
    }
}

impl StdError for LeaseTaken {}
impl StdError for AcquireTimeout {}
impl StdError for NotConnected {}
impl StdError for NotInstalled {}
impl StdError for TransactionLost {}
impl StdError for TimedOut {}

impl From<LeaseLost> for Error {
    fn from(lost: LeaseLost) -> Error {
        Error::LeaseLost(lost)
    }
}

impl From<LeaseTaken> for Error {
    fn from(taken: LeaseTaken) -> Error {
        Error::LeaseTaken(taken)
    }
}

impl From<tokio_postgres::Error> for Error {
    fn from(error: tokio_postgres::Error) -> Error {
        classify(&error).unwrap_or_else(|| Error::unclassified(error))
    }
}

#[cfg(feature = "sqlx")]
impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Error {
        classify(&error).unwrap_or_else(|| Error::Sqlx(Arc::new(error)))
    }
}

/// The typed error in what the driver, a pool or the work returned, however deep it is wrapped. None: it is no
/// business of pg_fence.
pub fn classify(error: &(dyn StdError + 'static)) -> Option<Error> {
    let mut next = Some(error);
    while let Some(one) = next {
        if let Some(found) = known(one) {
            return Some(found);
        }
        next = one.source();
    }
    None
}

fn known(error: &(dyn StdError + 'static)) -> Option<Error> {
    if let Some(ours) = error.downcast_ref::<Error>() {
        let is_typed = match ours {
            Error::Postgres(_) | Error::Other(_) => false,
            #[cfg(feature = "sqlx")]
            Error::Sqlx(_) => false,
            _ => true,
        };
        return is_typed.then(|| ours.clone());
    }
    if let Some(lost) = error.downcast_ref::<LeaseLost>() {
        return Some(lost.clone().into());
    }
    if let Some(taken) = error.downcast_ref::<LeaseTaken>() {
        return Some(taken.clone().into());
    }
    #[cfg(feature = "sqlx")]
    if let Some(error) = error.downcast_ref::<sqlx::Error>() {
        return typed_of_sqlx(error);
    }
    error.downcast_ref::<tokio_postgres::Error>().and_then(typed)
}

fn typed(error: &tokio_postgres::Error) -> Option<Error> {
    let Some(told) = error.as_db_error() else {
        let is_broken =
            error.is_closed() || error.source().is_some_and(|cause| cause.is::<io::Error>());
        let message = error.source().map_or_else(|| error.to_string(), |cause| cause.to_string());
        return is_broken.then(|| session_lost(None, message));
    };
    told_by_server(Refused {
        sqlstate: told.code().code().to_owned(),
        message: told.message().to_owned(),
        hint: told.hint().map(str::to_owned),
        detail: told.detail().unwrap_or_default().to_owned(),
        cause: Some(told.clone()),
    })
}

#[cfg(feature = "sqlx")]
fn typed_of_sqlx(error: &sqlx::Error) -> Option<Error> {
    use sqlx::postgres::PgDatabaseError;
    let told = match error {
        sqlx::Error::Database(told) => told.try_downcast_ref::<PgDatabaseError>()?,
        sqlx::Error::Io(_) | sqlx::Error::WorkerCrashed => {
            return Some(session_lost(None, error.to_string()));
        }
        _ => return None,
    };
    told_by_server(Refused {
        sqlstate: told.code().to_owned(),
        message: told.message().to_owned(),
        hint: told.hint().map(str::to_owned),
        detail: told.detail().unwrap_or_default().to_owned(),
        cause: None,
    })
}

fn session_lost(sqlstate: Option<String>, message: String) -> Error {
    Error::TransactionLost(TransactionLost { sqlstate, message, in_doubt: false })
}

fn told_by_server(told: Refused) -> Option<Error> {
    let kind = match told.sqlstate.as_str() {
        "PF001" => Error::StaleToken,
        "PF002" => Error::NoToken,
        "PF003" => Error::NeverIssued,
        "PF004" => Error::NotSpeaking,
        "PF005" => Error::CannotBeFenced,
        state if ends_session(state) => {
            return Some(session_lost(Some(told.sqlstate), told.message));
        }
        _ => return None,
    };
    Some(kind(Refusal(Arc::new(told))))
}

/// idle_in_transaction_session_timeout, transaction_timeout, terminated, crashed, idle_session_timeout, and what
/// drivers and poolers call a broken connection.
fn ends_session(state: &str) -> bool {
    state.starts_with("08") || matches!(state, "25P03" | "25P04" | "57P01" | "57P02" | "57P05")
}
