//! etcd over its own protocol (gRPC), one member, on the same disk. As is recommended, a key is put where there is none,
//! tied to an etcd lease: one that is granted for it and revoked again, or, where the client waits by a watch that it
//! keeps open, one that it has throughout.

use crate::peer::{poll, Locker, Peer, TTL};
use crate::workbench::Workbench;
use anyhow::{ensure, Result};
use pg_test::service::{self, Service};
use std::time::Duration;
use wire::{Connection, Revision, Watch};

mod wire;

/// Its names in the report.
pub const NAME: &str = "etcd, lease + transaction";
/// To wait by a watch.
pub const NAME_WATCH: &str = "etcd, watch + transaction";

/// An etcd that was started for the bench and ends with it.
struct Etcd {
    server: Service,
    watches: bool,
}

/// Starts a server. Each acquire grants a lease and puts a key that is tied to it; or who waits `watches` the key, and
/// the lease is one for each client.
pub fn start(bench: &Workbench, watches: bool) -> Result<Box<dyn Peer>> {
    Ok(Box::new(Etcd { server: service::etcd(bench.lab.rundir(), &[])?, watches }))
}

impl Peer for Etcd {
    fn name(&self) -> String {
        if self.watches { NAME_WATCH } else { NAME }.to_owned()
    }

    fn join(&self, client: usize) -> Result<Box<dyn Locker>> {
        let mut etcd = Connection::open(self.server.port())?;
        let session = match self.watches {
            true => Some(etcd.grant(Duration::from_secs(3600))?),
            false => None,
        };
        let holder = format!("client {client}");
        Ok(Box::new(Client { etcd, holder, session, held: 0, watch: None }))
    }
}

struct Client {
    etcd: Connection,
    holder: String,
    /// The etcd lease that it has throughout.
    session: Option<i64>,
    /// The one that its key is tied to.
    held: i64,
    watch: Option<Watch>,
}

impl Locker for Client {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        let lease = match self.session {
            Some(session) => session,
            None => self.etcd.grant(TTL)?,
        };
        let put = self.etcd.put_if_absent(name, &self.holder, lease)?;
        match put {
            Some(_) => self.held = lease,
            None if self.session.is_none() => self.etcd.revoke(lease)?,
            None => {}
        }
        Ok(put.map(|Revision(revision)| revision))
    }

    fn release(&mut self, name: &str, token: i64) -> Result<()> {
        if self.session.is_none() {
            return self.etcd.revoke(self.held);
        }
        ensure!(self.etcd.delete_if(name, Revision(token))?, "the key was lost");
        Ok(())
    }

    fn wait(&mut self, name: &str) -> Result<i64> {
        if self.session.is_none() {
            return poll(self, name);
        }
        let mut watch = match self.watch.take() {
            Some(watch) => watch,
            None => self.etcd.watch(name)?,
        };
        let revision = loop {
            if let Some(revision) = self.acquire(name)? {
                break revision;
            }
            // An event of the past only makes it try once more.
            self.etcd.await_deletion(&mut watch, Duration::from_secs(1))?;
        };
        self.watch = Some(watch);
        Ok(revision)
    }
}
