//! A connection of the client's own: opened when it is needed, broken off when a call takes longer than it may.

use crate::clock;
use crate::connected::{BoxFuture, Connected};
use crate::error::{Error, TimedOut};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

/// Opens a connection, within so long.
pub(crate) type Opener = Arc<dyn Fn(Duration) -> BoxFuture<Result<Connected, Error>> + Send + Sync>;

/// A statement and its arguments, whose types are said: so nothing is prepared, which poolers do not stand.
pub(crate) struct Call {
    pub sql: String,
    pub arguments: Vec<(Argument, Type)>,
}

pub(crate) type Argument = Box<dyn ToSql + Sync + Send>;

pub(crate) fn argument(value: impl ToSql + Sync + Send + 'static, kind: Type) -> (Argument, Type) {
    (Box::new(value), kind)
}

impl Call {
    pub async fn rows(&self, client: &Client) -> Result<Vec<Row>, tokio_postgres::Error> {
        let arguments: Vec<(&(dyn ToSql + Sync), Type)> = self
            .arguments
            .iter()
            .map(|(value, kind)| (value.as_ref() as _, kind.clone()))
            .collect();
        client.query_typed(&self.sql, &arguments).await
    }

    /// The same in a transaction of its own, where the server does not let it go on, or wait, for ever either.
    async fn rows_within(&self, client: &Client, limits: Limits) -> Result<Vec<Row>, Error> {
        // More than an int holds is refused.
        let text = |limit: Duration| limit.as_millis().clamp(1, i32::MAX as u128).to_string();
        let (call, lock) = (text(limits.call), text(limits.lock));
        let limits: [(&(dyn ToSql + Sync), Type); 2] = [(&call, Type::TEXT), (&lock, Type::TEXT)];
        // For this transaction only: behind a pooler the session is others', too.
        let set = "SELECT set_config('statement_timeout', $1, true), set_config('lock_timeout', $2, true)";
        // All of it is on its way at once: the first poll of each sends.
        let (begun, set, rows, committed) = tokio::join!(
            biased;
            client.batch_execute("BEGIN"),
            client.query_typed(set, &limits),
            self.rows(client),
            client.batch_execute("COMMIT"),
        );
        begun.and(set.map(drop)).map_err(Error::unclassified)?;
        let rows = rows.map_err(Error::unclassified)?;
        committed.map_err(Error::unclassified)?;
        Ok(rows)
    }
}

/// How long a call may take, and how long of that it may wait for somebody's lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub call: Duration,
    pub lock: Duration,
}

/// The only value of the only row.
pub(crate) fn only_value(rows: &[Row]) -> Result<Option<i64>, tokio_postgres::Error> {
    rows.first().map_or(Ok(None), |row| row.try_get(0))
}

/// How long a statement that was cancelled may take to end.
const CANCEL_AGAIN: Duration = Duration::from_secs(1);

pub(crate) struct OwnConnection {
    open: Opener,
    connected: Option<Connected>,
}

impl OwnConnection {
    pub fn new(open: Opener) -> OwnConnection {
        OwnConnection { open, connected: None }
    }

    /// Whether it has been opened. It may have ended since, which the next call shows.
    pub fn is_open(&self) -> bool {
        self.connected.is_some()
    }

    /// Uses that one, where it has none.
    pub fn take_over(&mut self, spare: Option<Connected>) {
        self.connected = self.connected.take().or(spare);
    }

    pub fn hand_over(&mut self) -> Option<Connected> {
        self.connected.take()
    }

    /// Has the next call open another where this one has ended.
    pub fn leave_ended(&mut self) {
        if self.connected.as_ref().is_some_and(Connected::has_ended) {
            self.break_off();
        }
    }

    /// One statement, a transaction of its own. When `given_up` comes first, the server is asked to end it.
    pub async fn call(
        &mut self,
        limit: Duration,
        call: &Call,
        given_up: impl Future<Output = ()>,
    ) -> Result<Vec<Row>, Error> {
        let connected = self.connect(limit).await?;
        let mut is_cancelled = false;
        let outcome = clock::within(limit, async {
            let mut rows = pin!(call.rows(connected));
            tokio::select! {
                biased;
                rows = &mut rows => return rows,
                () = given_up => is_cancelled = true,
            }
            loop {
                // A request that comes before the statement does is lost, hence more than one. The answer is waited
                // for: some poolers do not survive a client that cancels and hangs up.
                tokio::select! {
                    rows = &mut rows => return rows,
                    () = async { tokio::join!(connected.cancel(), clock::sleep(CANCEL_AGAIN)); } => {}
                }
            }
        });
        let outcome = outcome.await.map(|outcome| outcome.map_err(Error::unclassified));
        if is_cancelled {
            // A request that is late would hit the next statement: the release of a grant that came all the same.
            self.connected = None;
        }
        self.settle(outcome, limit)
    }

    /// In a transaction of its own, where the server does not let it go on for ever either.
    pub async fn call_within(&mut self, limits: Limits, call: &Call) -> Result<Vec<Row>, Error> {
        let connected = self.connect(limits.call).await?;
        let outcome = clock::within(limits.call, call.rows_within(connected, limits)).await;
        self.settle(outcome, limits.call)
    }

    /// Opens it, if it is not open.
    pub async fn connect(&mut self, limit: Duration) -> Result<&Connected, Error> {
        if !self.is_open() {
            let opened = clock::within(limit, (self.open)(limit / 10 * 9)).await;
            self.connected = Some(opened.ok_or_else(|| Error::other(TimedOut(limit)))??);
        }
        self.connected.as_ref().ok_or_else(|| Error::other("there is no connection"))
    }

    /// A connection whose call did not come to an end, or whose session did, serves no more.
    fn settle(
        &mut self,
        outcome: Option<Result<Vec<Row>, Error>>,
        limit: Duration,
    ) -> Result<Vec<Row>, Error> {
        let outcome = outcome.unwrap_or_else(|| Err(Error::other(TimedOut(limit))));
        if outcome.as_ref().is_err_and(|error| is_timeout(error) || error.is_end_of_session()) {
            self.break_off();
        }
        outcome
    }

    /// Resolves when the session ends by itself.
    pub async fn until_ended(&mut self) {
        match &mut self.connected {
            Some(connected) => connected.until_ended().await,
            None => std::future::pending().await,
        }
    }

    /// Ends what hangs on it.
    pub fn break_off(&mut self) {
        if let Some(connected) = self.connected.take() {
            connected.breaker().abort();
        }
    }

    pub async fn close(&mut self) {
        if let Some(connected) = self.connected.take() {
            connected.close().await;
        }
    }
}

pub(crate) fn is_timeout(error: &Error) -> bool {
    matches!(error, Error::Other(cause) if cause.is::<TimedOut>())
}
