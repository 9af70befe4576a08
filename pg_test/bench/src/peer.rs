//! A way to take a lease.

use crate::workbench::Workbench;
use anyhow::{bail, Result};
use std::time::Duration;

/// How long a lease is asked for, everywhere.
pub const TTL: Duration = Duration::from_secs(30);

/// Something that gives out leases.
pub trait Peer: Sync {
    /// Its name in the report.
    fn name(&self) -> String;

    /// A client of its own connection. `client` differs from those of all other clients at a time.
    fn join(&self, client: usize) -> Result<Box<dyn Locker>>;

    /// Whether it lives in the bench's own PostgreSQL.
    fn is_postgres(&self) -> bool {
        true
    }
}

/// One client of a peer, with a connection of its own.
pub trait Locker {
    /// Tries once: a token, or nothing when somebody else has the lease.
    fn acquire(&mut self, name: &str) -> Result<Option<i64>>;

    fn release(&mut self, name: &str, token: i64) -> Result<()>;

    /// Prolongs it, for those that take part in that race.
    fn renew(&mut self, _name: &str, _token: i64) -> Result<()> {
        bail!("it does not renew here")
    }

    /// Waits for it, by whatever is natural; by asking again every 10 ms where nothing else is.
    fn wait(&mut self, name: &str) -> Result<i64> {
        poll(self, name, Duration::from_millis(10))
    }
}

/// Asks again and again.
pub fn poll(locker: &mut (impl Locker + ?Sized), name: &str, pause: Duration) -> Result<i64> {
    loop {
        if let Some(token) = locker.acquire(name)? {
            return Ok(token);
        }
        std::thread::sleep(pause);
    }
}

/// Makes the tables or starts the server of a peer; an error says why it cannot take part.
pub type Prepare = fn(&Workbench) -> Result<Box<dyn Peer>>;

/// Prepares peers; those that cannot take part are named in the report.
pub fn prepare(bench: &Workbench, wanted: &[(&str, Prepare)]) -> Vec<Box<dyn Peer>> {
    let mut peers = Vec::new();
    for (name, prepare) in wanted {
        match prepare(bench) {
            Ok(peer) => peers.push(peer),
            Err(error) => bench.skip(name, &error),
        }
    }
    peers
}
