//! Connections that can be broken off, whatever hangs on them; and that of a fence, which is opened when it is needed.

use crate::clock;
use crate::error::Error;
use crate::open::open;
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinHandle};
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Connection, NoTls, Row, Socket};

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
    task: JoinHandle<()>,
    /// Dropped with it, which the task sees.
    _in_use: oneshot::Sender<()>,
    pub(crate) cut: Cut,
}

/// What ends whatever hangs on a connection: here, and in the server.
#[derive(Clone)]
pub struct Cut {
    pub connection: AbortHandle,
    pub cancel: Arc<dyn Fn() -> BoxFuture<()> + Send + Sync>,
}

/// Opens a connection, and drives it in a task of its own.
pub async fn connect(url: &str, tls: impl Tls) -> Result<Connected, Error> {
    open(&[url.parse()?], tls, Duration::MAX).await
}

impl Connected {
    /// Drives `connection`, which is not encrypted, in a task of its own.
    pub fn new<S, T>(client: Client, connection: Connection<S, T>) -> Connected
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        Connected::with_tls(client, connection, NoTls)
    }

    /// The same for one that was encrypted by `tls`.
    pub fn with_tls<S, T>(client: Client, connection: Connection<S, T>, tls: impl Tls) -> Connected
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
        let (connection, token) = (task.abort_handle(), client.cancel_token());
        let cancel = Arc::new(move || -> BoxFuture<()> {
            let (token, tls) = (token.clone(), tls.clone());
            Box::pin(async move { drop(clock::within(GOODBYE, token.cancel_query(tls)).await) })
        });
        Connected { client, task, _in_use: in_use, cut: Cut { connection, cancel } }
    }

    /// Closes it, and waits for that.
    pub async fn close(self) {
        let Connected { client, task, _in_use, .. } = self;
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

/// A statement and its arguments, whose types are said: so nothing is prepared, which poolers do not stand.
pub(crate) struct Call(pub String, pub Vec<(Box<dyn ToSql + Sync + Send>, Type)>);

/// A connection of the fence's own: broken off when a call takes longer than it may.
pub(crate) struct Line {
    open: Opener,
    connected: Option<Connected>,
    /// Which connection it is: another number after each.
    pub session: u64,
}

impl Line {
    pub fn new(open: Opener) -> Line {
        Line { open, connected: None, session: 0 }
    }

    /// One statement, a transaction of its own.
    pub async fn call(&mut self, limit: Duration, call: &Call) -> Result<Vec<Row>, Error> {
        let error = match self.rows(limit, call).await {
            Ok(rows) => return Ok(rows),
            Err(error) => error,
        };
        let mut role = None;
        if error.has_state("42501") {
            let whose = Call("SELECT current_user::text".to_owned(), Vec::new());
            role =
                self.rows(limit, &whose).await.ok().and_then(|rows| rows.first()?.try_get(0).ok());
        }
        Err(error.of_call(role))
    }

    async fn rows(&mut self, limit: Duration, Call(sql, values): &Call) -> Result<Vec<Row>, Error> {
        let until = clock::after(limit);
        self.look();
        if self.connected.is_none() {
            // A little less, so that it is told what was tried.
            let opened = clock::within(limit, (self.open)(limit / 10 * 9)).await;
            self.connected = Some(opened.unwrap_or(Err(Error::NoAnswer(limit)))?);
        }
        let Some(connected) = &self.connected else { return Err(Error::NoAnswer(limit)) };
        let values = values.iter().map(|(value, kind)| (value.as_ref() as _, kind.clone()));
        let values: Vec<(&(dyn ToSql + Sync), Type)> = values.collect();
        let outcome = clock::within(clock::left(until), connected.query_typed(sql, &values)).await;
        let outcome = outcome.map_or(Err(Error::NoAnswer(limit)), |rows| Ok(rows?));
        if outcome.as_ref().is_err_and(Error::is_of_connection) {
            connected.cut.connection.abort();
            self.take();
        }
        outcome
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

    pub fn adopt(&mut self, other: &mut Line) {
        if self.connected.is_none() {
            self.connected = other.take();
        }
    }
}
