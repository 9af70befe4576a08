//! Connections that can be cut, whatever hangs on them, and how they are opened: the time is
//! divided among the servers and their addresses.

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
use tokio_postgres::error::SqlState;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, Connection, Row, SimpleQueryMessage, Socket};

/// How long a connection may take to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Opens a connection within the given time.
pub(crate) type Opener = Arc<dyn Fn(Duration) -> BoxFuture<Result<Connected, Error>> + Send + Sync>;

/// The encryption of connections: any TLS of tokio-postgres, or `NoTls` for none.
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
/// The loss of a lease can cut the connection, so that nothing hangs on it any more. The task ends
/// soon after this is dropped, also if the server does not answer.
pub struct Connected {
    client: Client,
    pub(crate) task: JoinHandle<()>,
    /// The role that has logged in.
    pub(crate) role: String,
    /// Its drop tells the task to close the connection.
    _in_use: oneshot::Sender<()>,
}

impl Connected {
    /// Drives `connection` in a new task.
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
                _ = dropped => drop(clock::within(CLOSE_TIMEOUT, connection).await),
            }
        });
        Connected { client, task, role, _in_use: in_use }
    }

    /// Closes the connection, and waits for its end.
    pub async fn close(self) {
        let Connected { client, task, _in_use, .. } = self;
        drop((client, _in_use));
        // The task limits its own time. An error means that the connection was cut before.
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

    /// Fails if the connection is in a transaction, which the driver does not know: a grant would
    /// not be committed. Any other transaction begins with its first statement, if that is sent as
    /// a text.
    pub(crate) async fn check_idle(&self) -> Result<(), Error> {
        let answer = self.simple_query("SELECT now() < statement_timestamp()").await;
        let is_in_transaction = match answer {
            Err(error) if error.code() == Some(&SqlState::IN_FAILED_SQL_TRANSACTION) => true,
            answer => answer?.iter().any(|message| {
                matches!(message, SimpleQueryMessage::Row(row) if row.get(0) == Some("t"))
            }),
        };
        match is_in_transaction {
            true => Err(Error::other("a fence takes connections that are not in a transaction")),
            false => Ok(()),
        }
    }

    /// True if the session has ended, as far as the client has noticed.
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

const DEFAULT_PORT: u16 = 5432;

/// Opens a connection, and drives it in a new task.
pub async fn connect(url: &str, tls: impl Tls) -> Result<Connected, Error> {
    open(&[url.parse()?], tls, Duration::MAX).await
}

/// Connects to the first of these servers that accepts, within `limit`. The limit is divided among
/// the addresses of the servers, so that one that is silent leaves time for the next.
/// `connect_timeout` limits the whole handshake with one address.
pub async fn open(configs: &[Config], tls: impl Tls, limit: Duration) -> Result<Connected, Error> {
    let until = clock::after(limit);
    let hosts: Vec<_> = configs.iter().flat_map(each_host).collect();
    let mut servers = Vec::new();
    for (left, host) in (1..=hosts.len() as u32).rev().zip(hosts) {
        let part = clock::left(until) / left;
        let found = clock::within(part, each_address(&host)).await.flatten();
        // A name that is not found is left to the driver, whose error says so.
        servers.extend(found.unwrap_or_else(|| vec![host]));
    }
    let is_random = |config: &Config| config.get_load_balance_hosts() == LoadBalanceHosts::Random;
    if configs.iter().any(is_random) {
        let random = RandomState::new();
        servers.sort_by_cached_key(|server| random.hash_one(description(server)));
    }
    // The last SQLSTATE, if all servers so far have refused: if one has failed in another way,
    // another try may succeed.
    let (mut errors, mut state) = (Vec::new(), Some(String::new()));
    for (left, config) in (1..=servers.len() as u32).rev().zip(&servers) {
        let part = clock::left(until) / left;
        let limit = config.get_connect_timeout().map_or(part, |limit| part.min(*limit));
        let error = match clock::within(limit, config.connect(tls.clone())).await {
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
        errors.push(format!("{}: {error}", description(config)));
    }
    Err(Error::NoConnection(errors.join("; "), state.filter(|state| !state.is_empty())))
}

/// Returns a config for each host of a config. A config that names no host is left to the driver,
/// whose error says so.
fn each_host(config: &Config) -> Vec<Config> {
    let (hosts, addresses) = (config.get_hosts(), config.get_hostaddrs());
    let host = |index| {
        let (mut server, ports) = (without_servers(config), config.get_ports());
        let port = ports.get(index).or(ports.first()).copied().unwrap_or(DEFAULT_PORT);
        match (server.port(port), hosts.get(index)) {
            (server, Some(Host::Tcp(host))) => server.host(host),
            (server, Some(Host::Unix(path))) => server.host_path(path),
            (server, None) => server,
        };
        addresses.get(index).map(|address| server.hostaddr(*address));
        server
    };
    (0..hosts.len().max(addresses.len()).max(1)).map(host).collect()
}

/// Returns a config for each address of a host. Returns None if the host needs no lookup, or its
/// name is not found.
async fn each_address(host: &Config) -> Option<Vec<Config>> {
    let (None, [Host::Tcp(name)]) = (host.get_hostaddrs().first(), host.get_hosts()) else {
        return None;
    };
    let found = lookup_host((name.as_str(), port(host))).await.ok()?;
    Some(found.map(|address| host.clone().hostaddr(address.ip()).clone()).collect())
}

/// Returns the port of a config that has one host.
fn port(config: &Config) -> u16 {
    config.get_ports().first().copied().unwrap_or(DEFAULT_PORT)
}

/// Copies a config without its servers. The driver has no other way to remove them.
fn without_servers(config: &Config) -> Config {
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

/// Describes a server in an error.
fn description(config: &Config) -> String {
    let port = port(config);
    let user = config.get_user().unwrap_or_default();
    let address = config.get_hostaddrs().first().map(ToString::to_string);
    let server = match (config.get_hosts().first(), address) {
        (Some(Host::Unix(path)), _) => format!("socket \"{}/.s.PGSQL.{port}\"", path.display()),
        (Some(Host::Tcp(host)), Some(address)) if *host != address => {
            format!("\"{host}\" ({address}), port {port},")
        }
        (Some(Host::Tcp(host)), _) => format!("\"{host}\", port {port},"),
        (None, Some(address)) => format!("\"{address}\", port {port},"),
        (None, None) => "no host,".to_owned(),
    };
    format!("{server} as user \"{user}\"")
}

#[cfg(test)]
#[path = "../tests/unit/connection.rs"]
mod tests;
