//! Connections that can be broken off, whatever hangs on them; and that of a fence, which is opened when it is needed.

use crate::asked::{Call, whoami};
use crate::clock;
use crate::error::Error;
use std::ops::{Deref, DerefMut};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Connection, Row, Socket};

/// How long a connection that is not needed any more may take to say goodbye.
const GOODBYE: Duration = Duration::from_secs(1);

pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Opens a connection, within so long.
pub(crate) type Opener = Arc<dyn Fn(Duration) -> BoxFuture<Result<Connected, Error>> + Send + Sync>;

/// Whatever encrypts connections, `NoTls` for nothing.
pub trait Tls:
    MakeTlsConnect<
        Socket,
        Stream: Send + 'static,
        TlsConnect: TlsConnect<Socket, Future: Send> + Send,
    > + Clone
    + Send
    + Sync
    + 'static
{
}

impl<T> Tls for T
where
    T: MakeTlsConnect<Socket, Stream: Send + 'static> + Clone + Send + Sync + 'static,
    T::TlsConnect: TlsConnect<Socket, Future: Send> + Send,
{
}

/// A tokio-postgres [`Client`], to which it dereferences, together with the task that drives its connection.
///
/// A lease that is lost can break it off, so that nothing hangs on it any more. The task ends soon after this is
/// dropped, also where the server does not answer.
pub struct Connected {
    client: Client,
    pub(crate) task: JoinHandle<()>,
    /// Dropped with it, which the task sees.
    _in_use: oneshot::Sender<()>,
}

impl Connected {
    /// Drives `connection` in a task of its own.
    pub fn new<S, T>(client: Client, connection: Connection<S, T>) -> Connected
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (in_use, dropped) = oneshot::channel();
        let task = tokio::spawn(async move {
            let mut connection = pin!(connection);
            tokio::select! {
                _ = &mut connection => {}
                _ = dropped => drop(clock::within(GOODBYE, connection).await),
            }
        });
        Connected { client, task, _in_use: in_use }
    }

    /// Closes it, and waits for that.
    pub async fn close(self) {
        let Connected { client, task, _in_use } = self;
        drop((client, _in_use));
        // It is bounded by itself; and whether it was broken off is of no interest any more.
        let _ = task.await;
    }
}

impl Deref for Connected {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl DerefMut for Connected {
    fn deref_mut(&mut self) -> &mut Client {
        &mut self.client
    }
}

/// A connection of the fence's own: broken off when a call takes longer than it may.
pub(crate) struct Line {
    open: Opener,
    pub connected: Option<Connected>,
    /// Which connection it is: another number after each.
    pub session: u64,
}

impl Line {
    pub fn new(open: Opener) -> Line {
        Line { open, connected: None, session: 0 }
    }

    /// One statement, a transaction of its own.
    pub async fn call(&mut self, limit: Duration, call: &Call) -> Result<Vec<Row>, Error> {
        let (until, mut rows) = (clock::after(limit), self.rows(limit, call).await);
        // The role's transactions are SERIALIZABLE.
        while rows.as_ref().is_err_and(|error| error.has_state("40001")) && clock::now() < until {
            rows = self.rows(limit, call).await;
        }
        let mut rows = rows.map_err(Error::of_call);
        if let Err(Error::NotGranted { role, .. }) = &mut rows
            && let Ok(answer) = self.rows(limit, &whoami()).await
        {
            *role = answer[0].get(0);
        }
        rows
    }

    async fn rows(&mut self, limit: Duration, Call(sql, values): &Call) -> Result<Vec<Row>, Error> {
        let until = clock::after(limit);
        self.look();
        let connected = match self.connected.take() {
            Some(connected) => connected,
            // A little less, so that it is told what was tried.
            None => clock::within(limit, (self.open)(limit / 10 * 9))
                .await
                .unwrap_or(Err(Error::NoAnswer(limit)))?,
        };
        let connected = self.connected.insert(connected);
        let values = values.iter().map(|(value, kind)| (value.as_ref() as _, kind.clone()));
        let values: Vec<(&(dyn ToSql + Sync), Type)> = values.collect();
        let rows = clock::within(clock::left(until), connected.query_typed(sql, &values)).await;
        let rows = rows.map_or(Err(Error::NoAnswer(limit)), |rows| Ok(rows?));
        if rows.as_ref().is_err_and(Error::is_of_connection) {
            connected.task.abort();
            self.take();
        }
        rows
    }

    /// Notices that the session has ended. Whether one goes on.
    pub fn look(&mut self) -> bool {
        let has_ended = |one: &Connected| one.is_closed() || one.task.is_finished();
        if self.connected.as_ref().is_some_and(has_ended) {
            self.take();
        }
        self.connected.is_some()
    }

    pub fn take(&mut self) -> Option<Connected> {
        self.session += u64::from(self.connected.is_some());
        self.connected.take()
    }
}
