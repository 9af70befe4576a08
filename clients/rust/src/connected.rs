//! Connections that can be broken off, whatever hangs on them.

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
use tokio_postgres::{CancelToken, Client, Config, Connection, Socket};

/// How long a connection that is not needed any more may take to say goodbye.
const GOODBYE: Duration = Duration::from_secs(5);

pub(crate) type Cancel = Arc<dyn Fn(CancelToken) -> BoxFuture<()> + Send + Sync>;
pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

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
    cancel: Cancel,
    /// Dropped with it, which the task sees.
    _in_use: oneshot::Sender<()>,
}

/// Opens a connection, and drives it in a task of its own.
pub async fn connect(url: &str, tls: impl Tls) -> Result<Connected, Error> {
    let config: Config = url.parse().map_err(Error::unclassified)?;
    open(&[config], tls, Duration::MAX).await
}

impl Connected {
    /// Drives `connection` in a task of its own. `tls` is what a request to cancel is encrypted by.
    pub fn new<S, T>(client: Client, connection: Connection<S, T>, tls: impl Tls) -> Connected
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (in_use, dropped) = oneshot::channel();
        let task = tokio::spawn(async move {
            let mut connection = pin!(connection);
            tokio::select! {
                ended = &mut connection => {
                    if let Err(error) = ended {
                        log::debug!("a connection has ended: {error}");
                    }
                }
                _ = dropped => drop(clock::within(GOODBYE, connection).await),
            }
        });
        let cancel: Cancel = Arc::new(move |token: CancelToken| {
            let tls = tls.clone();
            Box::pin(async move {
                if let Some(Err(error)) = clock::within(GOODBYE, token.cancel_query(tls)).await {
                    log::debug!("a statement could not be cancelled: {error}");
                }
            })
        });
        Connected { client, task, cancel, _in_use: in_use }
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

    /// Asks the server to end the statement that is under way, whose answer then comes.
    pub(crate) fn cancel(&self) -> impl Future<Output = ()> + use<> {
        (self.cancel)(self.client.cancel_token())
    }

    /// Its task is not to be waited for again after that.
    pub(crate) async fn until_ended(&mut self) {
        let _ = (&mut self.task).await;
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
