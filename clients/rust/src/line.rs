//! A connection of the fence's own: opened when it is needed, broken off when a call takes longer than it may.

use crate::clock::{self, Moment};
use crate::connected::Connected;
use crate::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Opens a connection, within so long.
pub(crate) type Opener = Arc<dyn Fn(Duration) -> BoxFuture<Result<Connected, Error>> + Send + Sync>;

/// A statement and its arguments, whose types are said: so nothing is prepared, which poolers do not stand.
pub(crate) struct Call {
    pub sql: String,
    pub arguments: Vec<(Box<dyn ToSql + Sync + Send>, Type)>,
}

impl Call {
    pub fn new(sql: impl Into<String>) -> Call {
        Call { sql: sql.into(), arguments: Vec::new() }
    }

    pub fn with(mut self, value: impl ToSql + Sync + Send + 'static, kind: Type) -> Call {
        self.arguments.push((Box::new(value), kind));
        self
    }

    /// Times are texts: the driver has no type for them.
    pub fn with_time(self, time: Duration) -> Call {
        self.with(format!("{} microseconds", time.as_micros()), Type::TEXT)
    }

    pub async fn rows(&self, client: &tokio_postgres::Client) -> Result<Vec<Row>, Error> {
        let arguments: Vec<(&(dyn ToSql + Sync), Type)> = self
            .arguments
            .iter()
            .map(|(value, kind)| (value.as_ref() as _, kind.clone()))
            .collect();
        Ok(client.query_typed(&self.sql, &arguments).await?)
    }
}

#[derive(Default)]
pub(crate) struct Line {
    connected: Option<Connected>,
    /// Which connection it is: another number after each.
    pub session: u64,
}

impl Line {
    /// One statement, a transaction of its own.
    pub async fn call(
        &mut self,
        open: &Opener,
        limit: Duration,
        call: &Call,
    ) -> Result<Vec<Row>, Error> {
        let until = Moment::now() + limit;
        let outcome = match self.ready(open, limit).await {
            Ok(connected) => {
                let outcome = clock::within(until.remaining(), call.rows(connected)).await;
                outcome.unwrap_or(Err(Error::NoAnswer(limit)))
            }
            Err(error) => return Err(error),
        };
        if outcome.as_ref().is_err_and(Error::is_of_connection) {
            self.break_off();
        }
        outcome
    }

    async fn ready(&mut self, open: &Opener, limit: Duration) -> Result<&Connected, Error> {
        self.look();
        if self.connected.is_none() {
            // A little less, so that it is told what was tried.
            let opened = clock::within(limit, open(limit / 10 * 9)).await;
            self.connected = Some(opened.unwrap_or(Err(Error::NoAnswer(limit)))?);
        }
        self.connected.as_ref().ok_or(Error::NoAnswer(limit))
    }

    pub fn is_open(&self) -> bool {
        self.connected.is_some()
    }

    /// Notices that the session has ended.
    pub fn look(&mut self) {
        if self.connected.as_ref().is_some_and(Connected::has_ended) {
            self.break_off();
        }
    }

    /// Ends what hangs on it.
    fn break_off(&mut self) {
        if let Some(connected) = self.take() {
            connected.breaker().abort();
        }
    }

    pub fn take(&mut self) -> Option<Connected> {
        self.session += u64::from(self.connected.is_some());
        self.connected.take()
    }

    pub fn adopt(&mut self, other: &mut Line) {
        if self.connected.is_none() {
            self.connected = other.take();
        }
    }
}
