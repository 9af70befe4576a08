//! etcd over its own protocol (gRPC), one member, on the same disk. Two ways: a key put where there
//! is none and deleted again, which nothing ends if the client dies; and, as is recommended, the key
//! tied to an etcd lease: granted, put in a transaction, revoked. To wait, two ways: a watch that the
//! client keeps open, and a transaction when it shows that the key was deleted; or etcd's own lock service.
//!
//! That service watches from a revision of the past. etcd brings such watches up to date only every 100 ms,
//! so a client that asks for a lock that is released sooner than that waits for up to 100 ms: an effect of short
//! turns, which the watch that is open already does not have.

use crate::peer::{poll, Locker, Peer, TTL};
use crate::workbench::Workbench;
use anyhow::{ensure, Context, Result};
use pg_test::rundir::RunDir;
use pg_test::service::{self, Service};
use std::time::Duration;
use wire::{Connection, Kind, Revision, Watch};

pub mod alone;
mod wire;

/// Its names in the report.
pub const NAME: &str = "etcd, lease + transaction";
/// The variant without a lease.
pub const NAME_PUT: &str = "etcd, transaction only";
/// To wait by a watch.
pub const NAME_WATCH: &str = "etcd, watch + transaction";
/// To wait by its lock service.
pub const NAME_LOCK: &str = "etcd, lock service";

/// An etcd that was started for the bench and ends with it.
pub struct Etcd {
    server: Service,
    way: Way,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Leased,
    Put,
    Watched,
    Locked,
}

/// Starts a server; each acquire grants a lease and puts a key that is tied to it.
pub fn prepare(bench: &Workbench) -> Result<Box<dyn Peer>> {
    Ok(Box::new(start(bench.lab.rundir(), Way::Leased)?))
}

/// Starts a server; each acquire only puts a key.
pub fn prepare_put(bench: &Workbench) -> Result<Box<dyn Peer>> {
    Ok(Box::new(start(bench.lab.rundir(), Way::Put)?))
}

/// Starts a server; who waits watches the key. The lease is one for each client.
pub fn prepare_watch(bench: &Workbench) -> Result<Box<dyn Peer>> {
    Ok(Box::new(watched(bench.lab.rundir())?))
}

/// As [`prepare_watch`], in any run directory.
pub fn watched(rundir: &RunDir) -> Result<Etcd> {
    start(rundir, Way::Watched)
}

/// Starts a server; to acquire is to wait, by its lock service.
pub fn prepare_lock(bench: &Workbench) -> Result<Box<dyn Peer>> {
    Ok(Box::new(start(bench.lab.rundir(), Way::Locked)?))
}

fn start(rundir: &RunDir, way: Way) -> Result<Etcd> {
    Ok(Etcd { server: service::etcd(rundir, &[])?, way })
}

impl Peer for Etcd {
    fn name(&self) -> String {
        let name = match self.way {
            Way::Leased => NAME,
            Way::Put => NAME_PUT,
            Way::Watched => NAME_WATCH,
            Way::Locked => NAME_LOCK,
        };
        name.to_owned()
    }

    fn join(&self, client: usize) -> Result<Box<dyn Locker>> {
        let session = Duration::from_secs(3600);
        let client =
            Client::open(self.server.port(), format!("client {client}"), self.way, session)?;
        Ok(Box::new(client))
    }

    fn is_postgres(&self) -> bool {
        false
    }
}

impl Etcd {
    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.server.port()
    }
}

/// A client of the server on this port that watches the key; what it holds ends after so long.
pub fn client(port: u16, holder: String, ttl: Duration) -> Result<Box<dyn Locker>> {
    Ok(Box::new(Client::open(port, holder, Way::Watched, ttl)?))
}

struct Client {
    etcd: Connection,
    holder: String,
    way: Way,
    session: i64,
    held: Option<Held>,
    watch: Option<Watch>,
}

enum Held {
    Key,
    Leased(i64),
    Lock(Vec<u8>),
}

impl Locker for Client {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        let lease = match self.way {
            Way::Leased => self.etcd.grant(TTL)?,
            Way::Put => 0,
            Way::Watched | Way::Locked => self.session,
        };
        let put = self.etcd.put_if_absent(name, &self.holder, lease)?;
        let leased = self.way == Way::Leased;
        match put {
            Some(_) if leased => self.held = Some(Held::Leased(lease)),
            Some(_) => self.held = Some(Held::Key),
            None if leased => self.etcd.revoke(lease)?,
            None => {}
        }
        Ok(put.map(|Revision(revision)| revision))
    }

    fn release(&mut self, name: &str, token: i64) -> Result<()> {
        match self.held.take().context("nothing is held")? {
            Held::Leased(lease) => self.etcd.revoke(lease),
            Held::Lock(key) => self.etcd.unlock(key),
            Held::Key => {
                let deleted = self.etcd.delete_if(name, Revision(token))?;
                ensure!(deleted, "the key was lost");
                Ok(())
            }
        }
    }

    fn wait(&mut self, name: &str) -> Result<i64> {
        match self.way {
            Way::Leased | Way::Put => poll(self, name, Duration::from_millis(10)),
            Way::Watched => self.watch_and_try(name),
            Way::Locked => {
                let (key, Revision(revision)) =
                    self.etcd.lock(name, self.session).context("etcd's lock service")?;
                self.held = Some(Held::Lock(key));
                Ok(revision)
            }
        }
    }
}

impl Client {
    fn open(port: u16, holder: String, way: Way, session: Duration) -> Result<Client> {
        let mut etcd = Connection::open(port)?;
        let session = etcd.grant(session)?;
        Ok(Client { etcd, holder, way, session, held: None, watch: None })
    }

    fn watch_and_try(&mut self, name: &str) -> Result<i64> {
        let mut watch = match self.watch.take() {
            Some(watch) => watch,
            None => self.etcd.watch(name)?,
        };
        let revision = loop {
            if let Some(revision) = self.acquire(name)? {
                break revision;
            }
            // An event of the past only makes it try once more.
            self.etcd.await_event(&mut watch, Some(Kind::Deleted), Duration::from_secs(1))?;
        };
        self.watch = Some(watch);
        Ok(revision)
    }
}
