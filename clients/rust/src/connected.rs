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
use tokio_postgres::{CancelToken, Client, Connection, NoTls, Row, Socket};

/// How long a connection that is not needed any more may take to say goodbye.
const GOODBYE: Duration = Duration::from_secs(1);

pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Opens a connection, within so long.
pub(crate) type Opener = Arc<dyn Fn(Duration) -> BoxFuture<Result<Connected, Error>> + Send + Sync>;

/// Whatever encrypts connections, `NoTls` for nothing.
pub trait Tls:
    MakeTlsConnect<Socket, Stream: Send + 'static, TlsConnect: HandsOver>
    + Clone
    + Send
    + Sync
    + 'static
{
}

/// Part of [`Tls`].
pub trait HandsOver: TlsConnect<Socket, Future: Send> + Send {}

impl<T: TlsConnect<Socket, Future: Send> + Send> HandsOver for T {}

impl<T> Tls for T
where
    T: MakeTlsConnect<Socket, Stream: Send + 'static, TlsConnect: HandsOver>,
    T: Clone + Send + Sync + 'static,
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
    /// Asks the server to end the statement that is under way.
    cancel: Arc<dyn Fn(CancelToken) -> BoxFuture<()> + Send + Sync>,
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
        let cancel = Arc::new(move |token: CancelToken| -> BoxFuture<()> {
            let tls = tls.clone();
            Box::pin(async move { drop(clock::within(GOODBYE, token.cancel_query(tls)).await) })
        });
        Connected { client, task, _in_use: in_use, cancel }
    }

    /// Closes it, and waits for that.
    pub async fn close(self) {
        let Connected { client, task, _in_use, .. } = self;
        drop((client, _in_use));
        // It is bounded by itself; and whether it was broken off is of no interest any more.
        let _ = task.await;
    }

    pub(crate) fn cut(&self) -> Cut {
        let (token, cancel) = (self.client.cancel_token(), self.cancel.clone());
        Cut {
            connection: self.task.abort_handle(),
            cancel: Arc::new(move || cancel(token.clone())),
        }
    }

    fn has_ended(&self) -> bool {
        self.client.is_closed() || self.task.is_finished()
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

/// What ends whatever hangs on a connection: here, and in the server.
#[derive(Clone)]
pub struct Cut {
    pub connection: AbortHandle,
    pub cancel: Arc<dyn Fn() -> BoxFuture<()> + Send + Sync>,
}

/// A statement and its arguments, whose types are said: so nothing is prepared, which poolers do not stand.
pub(crate) struct Call(pub String, pub Vec<(Box<dyn ToSql + Sync + Send>, Type)>);

impl Call {
    pub async fn rows(&self, client: &Client) -> Result<Vec<Row>, Error> {
        let arguments = self.1.iter().map(|(value, kind)| (value.as_ref() as _, kind.clone()));
        let arguments: Vec<(&(dyn ToSql + Sync), Type)> = arguments.collect();
        Ok(client.query_typed(&self.0, &arguments).await?)
    }
}

/// A connection of the fence's own: broken off when a call takes longer than it may.
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
        let until = clock::after(limit);
        self.look();
        if self.connected.is_none() {
            // A little less, so that it is told what was tried.
            let opened = clock::within(limit, open(limit / 10 * 9)).await;
            self.connected = Some(opened.unwrap_or(Err(Error::NoAnswer(limit)))?);
        }
        let Some(connected) = &self.connected else { return Err(Error::NoAnswer(limit)) };
        let outcome = clock::within(clock::left(until), call.rows(connected)).await;
        let outcome = outcome.unwrap_or(Err(Error::NoAnswer(limit)));
        if outcome.as_ref().is_err_and(Error::is_of_connection) {
            self.break_off();
        }
        outcome
    }

    /// Notices that the session has ended. Whether one goes on.
    pub fn look(&mut self) -> bool {
        if self.connected.as_ref().is_some_and(Connected::has_ended) {
            self.break_off();
        }
        self.connected.is_some()
    }

    /// Ends what hangs on it.
    fn break_off(&mut self) {
        if let Some(connected) = self.take() {
            connected.task.abort();
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
