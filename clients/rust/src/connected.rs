//! Connections that can be broken off, whatever hangs on them.

use crate::clock;
use crate::error::Error;
use crate::line::BoxFuture;
use crate::open::open;
use std::ops::{Deref, DerefMut};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinHandle};
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{CancelToken, Client, Config, Connection, NoTls, Socket};

/// How long a connection that is not needed any more may take to say goodbye.
const GOODBYE: Duration = Duration::from_secs(1);

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
impl<T> Tls for T where
    T: MakeTlsConnect<Socket, Stream: Send + 'static, TlsConnect: HandsOver>
        + Clone
        + Send
        + Sync
        + 'static
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
    cancel: Cancel,
}

/// Asks the server to end the statement that is under way.
pub(crate) type Cancel = Arc<dyn Fn(CancelToken) -> BoxFuture<()> + Send + Sync>;

/// As one that is encrypted so.
pub(crate) fn cancel_by(tls: impl Tls) -> Cancel {
    Arc::new(move |token: CancelToken| {
        let tls = tls.clone();
        Box::pin(async move { drop(clock::within(GOODBYE, token.cancel_query(tls)).await) })
    })
}

/// Opens a connection, and drives it in a task of its own.
pub async fn connect(url: &str, tls: impl Tls) -> Result<Connected, Error> {
    let config: Config = url.parse()?;
    open(&[config], tls, Duration::MAX).await
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
        Connected { client, task, _in_use: in_use, cancel: cancel_by(NoTls) }
    }

    pub(crate) fn cancelled_by(self, cancel: Cancel) -> Connected {
        Connected { cancel, ..self }
    }

    pub(crate) fn cancel(&self) -> BoxFuture<()> {
        (self.cancel)(self.client.cancel_token())
    }

    /// Closes it, and waits for that.
    pub async fn close(self) {
        let Connected { client, task, _in_use, .. } = self;
        drop((client, _in_use));
        // It is bounded by itself; and whether it was broken off is of no interest any more.
        let _ = task.await;
    }

    pub(crate) fn breaker(&self) -> AbortHandle {
        self.task.abort_handle()
    }

    pub(crate) fn has_ended(&self) -> bool {
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
