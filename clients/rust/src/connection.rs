//! Connections that can be cut, whatever hangs on them, and how they are opened: each server, and
//! each of its addresses, has a time of its own.

use crate::clock;
use crate::errors::{Error, innermost, refused_by_driver};
use crate::statements::Statement;
use std::hash::{BuildHasher, RandomState};
use std::ops::{Deref, DerefMut};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::lookup_host;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_postgres::config::{Host, LoadBalanceHosts};
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, Connection, Row, Socket};

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

/// A tokio-postgres [`Client`], to which it dereferences, together with the task that drives its
/// connection.
///
/// A lease that is lost can break it off, so that nothing hangs on it any more. The task ends soon
/// after this is dropped, also where the server does not answer.
pub struct Connected {
    client: Client,
    pub(crate) task: JoinHandle<()>,
    /// The role that has logged in.
    pub(crate) role: String,
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
        let role = connection.parameter("session_authorization").unwrap_or_default().to_owned();
        let task = tokio::spawn(async move {
            let mut connection = pin!(connection);
            tokio::select! {
                _ = &mut connection => {}
                _ = dropped => drop(clock::within(GOODBYE, connection).await),
            }
        });
        Connected { client, task, role, _in_use: in_use }
    }

    /// Closes it, and waits for that.
    pub async fn close(self) {
        let Connected { client, task, _in_use, .. } = self;
        drop((client, _in_use));
        // It is bounded by itself; and whether it was broken off is of no interest any more.
        let _ = task.await;
    }

    /// Runs a statement in autocommit.
    pub(crate) async fn rows(
        &self,
        Statement(sql, values): &Statement,
    ) -> Result<Vec<Row>, tokio_postgres::Error> {
        let values = values.iter().map(|(value, kind)| (value.as_ref() as _, kind.clone()));
        let values: Vec<(&(dyn ToSql + Sync), Type)> = values.collect();
        self.query_typed(sql, &values).await
    }

    /// True if the session has ended, as far as can be seen.
    pub(crate) fn has_ended(&self) -> bool {
        self.is_closed() || self.task.is_finished()
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

const USUAL_PORT: u16 = 5432;

/// Opens a connection, and drives it in a task of its own.
pub async fn connect(url: &str, tls: impl Tls) -> Result<Connected, Error> {
    open(&[url.parse()?], tls, Duration::MAX).await
}

/// The first of these servers that takes us, within `limit`. `connect_timeout` bounds all that is
/// said with one address, until it has let us in; and of the limit each of them gets its part, so
/// that one that is silent leaves time for the next.
pub async fn open(configs: &[Config], tls: impl Tls, limit: Duration) -> Result<Connected, Error> {
    let until = clock::after(limit);
    let (hosts, mut all) = (configs.iter().flat_map(hosts).collect::<Vec<_>>(), Vec::new());
    for (left, host) in (1..=hosts.len() as u32).rev().zip(hosts) {
        let found = clock::within(clock::left(until) / left, addresses(&host)).await.flatten();
        // A name that is not found is left to the driver, which says so.
        all.extend(found.unwrap_or_else(|| vec![host]));
    }
    if configs.iter().any(|one| one.get_load_balance_hosts() == LoadBalanceHosts::Random) {
        let random = RandomState::new();
        all.sort_by_cached_key(|one| random.hash_one(place(one)));
    }
    let (mut tried, mut state) = (Vec::new(), Some(String::new()));
    for (left, config) in (1..=all.len() as u32).rev().zip(&all) {
        let part = clock::left(until) / left;
        let limit = config.get_connect_timeout().map_or(part, |limit| part.min(*limit));
        // Where one of them was not refused by a server, trying again may help.
        let said = match clock::within(limit, config.connect(tls.clone())).await {
            Some(Ok((client, connection))) => return Ok(Connected::new(client, connection)),
            Some(Err(error)) => {
                let code = error.code().map(|code| code.code().to_owned());
                state = state.and(code.or_else(|| refused_by_driver(&error)));
                innermost(&error)
            }
            None => {
                state = None;
                "no answer in time".to_owned()
            }
        };
        tried.push(format!("{}: {said}", place(config)));
    }
    Err(Error::NoConnection(tried.join("; "), state.filter(|state| !state.is_empty())))
}

/// A config for each host that it names. If it names none, the driver says so.
fn hosts(config: &Config) -> Vec<Config> {
    let (hosts, addresses) = (config.get_hosts(), config.get_hostaddrs());
    let host = |at| {
        let (mut one, ports) = (without_places(config), config.get_ports());
        let port = ports.get(at).or(ports.first()).copied().unwrap_or(USUAL_PORT);
        match (one.port(port), hosts.get(at)) {
            (one, Some(Host::Tcp(host))) => one.host(host),
            (one, Some(Host::Unix(path))) => one.host_path(path),
            (one, None) => one,
        };
        addresses.get(at).map(|address| one.hostaddr(*address));
        one
    };
    (0..hosts.len().max(addresses.len()).max(1)).map(host).collect()
}

/// A config for each address of its host. None: it is not to be looked for, or is not found.
async fn addresses(host: &Config) -> Option<Vec<Config>> {
    let (None, [Host::Tcp(name)]) = (host.get_hostaddrs().first(), host.get_hosts()) else {
        return None;
    };
    let found = lookup_host((name.as_str(), port(host))).await.ok()?;
    Some(found.map(|at| host.clone().hostaddr(at.ip()).clone()).collect())
}

fn port(config: &Config) -> u16 {
    config.get_ports().first().copied().unwrap_or(USUAL_PORT)
}

/// The driver has no other way to leave them out.
fn without_places(config: &Config) -> Config {
    let mut bare = Config::new();
    config.get_user().map(|user| bare.user(user));
    config.get_password().map(|password| bare.password(password));
    config.get_dbname().map(|dbname| bare.dbname(dbname));
    config.get_options().map(|options| bare.options(options));
    config.get_application_name().map(|name| bare.application_name(name));
    config.get_connect_timeout().map(|limit| bare.connect_timeout(*limit));
    config.get_tcp_user_timeout().map(|limit| bare.tcp_user_timeout(*limit));
    config.get_keepalives_interval().map(|interval| bare.keepalives_interval(interval));
    config.get_keepalives_retries().map(|retries| bare.keepalives_retries(retries));
    bare.ssl_mode(config.get_ssl_mode()).ssl_negotiation(config.get_ssl_negotiation());
    bare.keepalives(config.get_keepalives()).keepalives_idle(config.get_keepalives_idle());
    bare.target_session_attrs(config.get_target_session_attrs());
    bare.channel_binding(config.get_channel_binding());
    bare
}

/// As it is said to people.
fn place(config: &Config) -> String {
    let port = port(config);
    let user = config.get_user().unwrap_or_default();
    let address = config.get_hostaddrs().first().map(ToString::to_string);
    let at = match (config.get_hosts().first(), address) {
        (Some(Host::Unix(path)), _) => format!("socket \"{}/.s.PGSQL.{port}\"", path.display()),
        (Some(Host::Tcp(host)), Some(address)) if *host != address => {
            format!("\"{host}\" ({address}), port {port},")
        }
        (Some(Host::Tcp(host)), _) => format!("\"{host}\", port {port},"),
        (None, Some(address)) => format!("\"{address}\", port {port},"),
        (None, None) => "no host,".to_owned(),
    };
    format!("{at} as user \"{user}\"")
}

#[cfg(test)]
#[path = "../tests/unit/connection.rs"]
mod tests;
