//! A way to take a lease.

use anyhow::{Result, bail};
use std::time::Duration;

/// The ttl of all leases in the measurements.
pub const TTL: Duration = Duration::from_secs(30);

/// A system that gives out leases.
pub trait Peer: Sync {
    /// The peer's name in the report.
    fn name(&self) -> String;

    /// Makes a client with its own connection. `client` is a number that no other concurrent client has.
    fn join(&self, client: usize) -> Result<Box<dyn Locker>>;
}

/// A client of a peer, with its own connection.
pub trait Locker {
    /// Tries once. Returns a token, or `None` if another client has the lease.
    fn acquire(&mut self, name: &str) -> Result<Option<i64>>;

    fn release(&mut self, name: &str, token: i64) -> Result<()>;

    /// Renews the lease; only for peers that take part in that race.
    fn renew(&mut self, _name: &str, _token: i64) -> Result<()> {
        bail!("it does not renew here")
    }

    /// Waits for the lease in the peer's natural way, or by trying again if it has none.
    fn wait(&mut self, name: &str) -> Result<i64> {
        poll(self, name)
    }
}

/// Tries again every 10 ms.
pub fn poll(locker: &mut (impl Locker + ?Sized), name: &str) -> Result<i64> {
    loop {
        if let Some(token) = locker.acquire(name)? {
            return Ok(token);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A lease that is released on drop.
pub struct Held {
    pub locker: Box<dyn Locker>,
    pub name: String,
    pub token: i64,
}

impl Held {
    pub fn renew(&mut self) -> Result<()> {
        self.locker.renew(&self.name, self.token)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.locker.release(&self.name, self.token);
    }
}
