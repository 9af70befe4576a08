//! etcd over its own protocol (gRPC), one member, on the same disk. Two ways: a key put where there
//! is none and deleted again, which nothing ends if the client dies; and, as is recommended, the key
//! tied to an etcd lease: granted, put in a transaction, revoked. To wait, etcd's own lock service.

use crate::bench::bed::{Bed, Daemon};
use crate::bench::peer::{Locker, Peer, TTL};
use crate::process::wait_until;
use crate::setup::Package;
use anyhow::{ensure, Context, Result};
use std::time::Duration;
use wire::{Connection, Revision};

mod wire;

/// Its names in the report.
pub const NAME: &str = "etcd, lease + transaction";
/// The variant without a lease.
pub const NAME_PUT: &str = "etcd, transaction only";

/// A server.
pub struct Etcd {
    daemon: Daemon,
    leased: bool,
}

/// Starts a server; each acquire grants a lease and puts a key that is tied to it.
pub fn prepare(bed: &Bed) -> Result<Box<dyn Peer>> {
    start(bed, true)
}

/// Starts a server; each acquire only puts a key.
pub fn prepare_put(bed: &Bed) -> Result<Box<dyn Peer>> {
    start(bed, false)
}

fn start(bed: &Bed, leased: bool) -> Result<Box<dyn Peer>> {
    let package = Package::new("etcd-server", "/usr/bin/etcd").without_service("etcd");
    let other = crate::cluster::free_port()?;
    let daemon = Daemon::start(bed.lab.rundir(), package, "etcd", |dir, port| {
        let (clients, peers) =
            (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{other}"));
        let option = |name: &str, value: &str| format!("--{name}={value}");
        vec![
            option("name", "bench"),
            option("data-dir", &dir.join("data").to_string_lossy()),
            option("listen-client-urls", &clients),
            option("advertise-client-urls", &clients),
            option("listen-peer-urls", &peers),
            option("initial-advertise-peer-urls", &peers),
            option("initial-cluster", &format!("bench={peers}")),
            option("log-level", "error"),
        ]
    })?;
    wait_until("etcd has a leader", Duration::from_secs(20), || {
        Connection::open(daemon.port).is_ok_and(|mut etcd| etcd.grant(TTL).is_ok())
    })?;
    Ok(Box::new(Etcd { daemon, leased }))
}

impl Peer for Etcd {
    fn name(&self) -> String {
        if self.leased { NAME } else { NAME_PUT }.to_owned()
    }

    fn join(&self, client: usize) -> Result<Box<dyn Locker>> {
        let mut etcd = Connection::open(self.daemon.port)?;
        let session = etcd.grant(Duration::from_secs(3600))?;
        let holder = format!("client {client}");
        Ok(Box::new(Client { etcd, holder, leased: self.leased, session, held: Held::Nothing }))
    }

    fn is_postgres(&self) -> bool {
        false
    }
}

struct Client {
    etcd: Connection,
    holder: String,
    leased: bool,
    session: i64,
    held: Held,
}

enum Held {
    Nothing,
    Key,
    Leased(i64),
    Lock(Vec<u8>),
}

impl Locker for Client {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        let lease = if self.leased { self.etcd.grant(TTL)? } else { 0 };
        let Some(Revision(revision)) = self.etcd.put_if_absent(name, &self.holder, lease)? else {
            if self.leased {
                self.etcd.revoke(lease)?;
            }
            return Ok(None);
        };
        self.held = if self.leased { Held::Leased(lease) } else { Held::Key };
        Ok(Some(revision))
    }

    fn release(&mut self, name: &str, token: i64) -> Result<()> {
        match std::mem::replace(&mut self.held, Held::Nothing) {
            Held::Nothing => Err(anyhow::anyhow!("nothing is held")),
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
        let (key, Revision(revision)) =
            self.etcd.lock(name, self.session).context("etcd's lock service")?;
        self.held = Held::Lock(key);
        Ok(revision)
    }
}
