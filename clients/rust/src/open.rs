//! Connecting: each server, and each of its addresses, has a time of its own.

use crate::clock::{self, Moment};
use crate::connected::{Connected, Tls, cancel_by};
use crate::error::{Error, NotConnected};
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;
use tokio::net::lookup_host;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, LoadBalanceHosts};

const USUAL_PORT: u16 = 5432;

/// The first of these servers that takes us, within `limit`. `connect_timeout` bounds all that is said with one address,
/// until it has let us in; and of the limit each of them gets its part, so that one that is silent leaves time for the
/// next.
pub async fn open(configs: &[Config], tls: impl Tls, limit: Duration) -> Result<Connected, Error> {
    let until = Moment::now() + limit;
    let mut places = Vec::new();
    for config in configs {
        for server in servers(config) {
            match clock::within(until.remaining(), addresses(server)).await {
                Some(found) => places.extend(found),
                None => break,
            }
        }
    }
    let mut failed = NotConnected::default();
    let count = places.len() as u32;
    for (left, config) in (1..=count).rev().zip(&places) {
        let part = until.remaining() / left;
        let limit = config.get_connect_timeout().map_or(part, |limit| part.min(*limit));
        match clock::within(limit, config.connect(tls.clone())).await {
            Some(Ok((client, connection))) => {
                return Ok(Connected::new(client, connection).cancelled_by(cancel_by(tls)));
            }
            Some(Err(error)) => failed.add(place(config), Some(error)),
            None => failed.add(place(config), None),
        }
    }
    Err(Error::NotConnected(failed.into()))
}

/// A config for each server that it names.
fn servers(config: &Config) -> Vec<Config> {
    let (hosts, addresses, ports) =
        (config.get_hosts(), config.get_hostaddrs(), config.get_ports());
    let one = |at: usize| {
        let mut one = without_places(config);
        match hosts.get(at) {
            Some(Host::Tcp(host)) => drop(one.host(host)),
            #[cfg(unix)]
            Some(Host::Unix(path)) => drop(one.host_path(path)),
            None => {}
        }
        if let Some(address) = addresses.get(at) {
            one.hostaddr(*address);
        }
        one.port(ports.get(at).or(ports.first()).copied().unwrap_or(USUAL_PORT));
        one
    };
    let mut servers: Vec<Config> = (0..hosts.len().max(addresses.len())).map(one).collect();
    if config.get_load_balance_hosts() == LoadBalanceHosts::Random {
        let random = RandomState::new();
        servers.sort_by_cached_key(|one| random.hash_one(place(one)));
    }
    servers
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
    bare.ssl_mode(config.get_ssl_mode())
        .ssl_negotiation(config.get_ssl_negotiation())
        .keepalives(config.get_keepalives())
        .keepalives_idle(config.get_keepalives_idle())
        .target_session_attrs(config.get_target_session_attrs())
        .channel_binding(config.get_channel_binding());
    bare
}

/// Of a name that has several addresses each is a server of its own. One that is not found is left to the driver, which
/// says so.
async fn addresses(server: Config) -> Vec<Config> {
    let (Some(Host::Tcp(name)), []) = (server.get_hosts().first(), server.get_hostaddrs()) else {
        return vec![server];
    };
    let port = server.get_ports().first().copied().unwrap_or(USUAL_PORT);
    let Ok(found) = lookup_host((name.as_str(), port)).await else { return vec![server] };
    let at = |address: std::net::SocketAddr| {
        let mut one = server.clone();
        one.hostaddr(address.ip());
        one
    };
    found.map(at).collect()
}

/// As it is said to people.
fn place(config: &Config) -> String {
    let port = config.get_ports().first().copied().unwrap_or(USUAL_PORT);
    let user = config.get_user().unwrap_or_default();
    let address = config.get_hostaddrs().first();
    match (config.get_hosts().first(), address) {
        #[cfg(unix)]
        (Some(Host::Unix(path)), _) => {
            format!("socket \"{}/.s.PGSQL.{port}\" as user \"{user}\"", path.display())
        }
        (Some(Host::Tcp(host)), Some(address)) if *host != address.to_string() => {
            format!("\"{host}\" ({address}), port {port}, as user \"{user}\"")
        }
        (Some(Host::Tcp(host)), _) => format!("\"{host}\", port {port}, as user \"{user}\""),
        (None, Some(address)) => format!("\"{address}\", port {port}, as user \"{user}\""),
        (None, None) => format!("no host, as user \"{user}\""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_tried_one_by_one_with_all_that_was_said() {
        let said = "host=a,/tmp,c hostaddr=10.0.0.1,10.0.0.2,10.0.0.3 port=1,2,3 user=me password=x dbname=shop \
                    options=-cx=1 application_name=app sslmode=require connect_timeout=3 keepalives=0 \
                    target_session_attrs=read-write channel_binding=require tcp_user_timeout=4 \
                    keepalives_idle=5 keepalives_interval=6 keepalives_retries=7 sslnegotiation=direct";
        let all: Config = said.parse().unwrap();
        let servers = servers(&all);
        let mut last = without_places(&all);
        last.host("c").hostaddr([10, 0, 0, 3].into()).port(3);
        assert_eq!(servers[2], last);
        assert_eq!(place(&servers[0]), "\"a\" (10.0.0.1), port 1, as user \"me\"");
        assert_eq!(place(&servers[1]), "socket \"/tmp/.s.PGSQL.2\" as user \"me\"");
        // Nothing else was lost on the way.
        let mut again = without_places(&all);
        for server in &servers {
            if let Some(Host::Tcp(host)) = server.get_hosts().first() {
                again.host(host);
            } else {
                again.host_path("/tmp");
            }
            again.hostaddr(server.get_hostaddrs()[0]).port(server.get_ports()[0]);
        }
        assert_eq!(again, all);
    }
}
