//! etcd over its own protocol (gRPC): one member, on the same disk. As recommended, a key is put if it does not exist,
//! tied to an etcd lease. The etcd lease is granted and revoked with each key or, if the client waits with an open
//! watch, kept throughout.

use crate::peer::{Locker, Peer, TTL, poll};
use crate::workbench::Workbench;
use anyhow::{Result, ensure};
use pg_test::service::{self, Service};
use std::time::Duration;
use wire::{Connection, Revision, Watch};

mod wire;

/// The peers' names in the report.
pub const NAME: &str = "etcd, lease + transaction";
/// The variant that waits with a watch.
pub const NAME_WATCH: &str = "etcd, watch + transaction";

/// An etcd server that is stopped with the bench.
struct Etcd {
    server: Service,
    watches: bool,
}

/// Starts a server. Each acquire grants an etcd lease and puts a key tied to it. With `watches`, clients wait by
/// watching the key, and each has one etcd lease.
pub fn start(bench: &Workbench, watches: bool) -> Result<Box<dyn Peer>> {
    Ok(Box::new(Etcd { server: service::etcd(bench.harness.rundir(), &[])?, watches }))
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
    /// The client's permanent etcd lease.
    session: Option<i64>,
    /// The etcd lease to which the key is tied.
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
            // A past event only causes one more attempt.
            self.etcd.await_deletion(&mut watch, Duration::from_secs(1))?;
        };
        self.watch = Some(watch);
        Ok(revision)
    }
}
