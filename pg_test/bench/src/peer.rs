//! A way to take a lease.

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

    /// Waits for it, by whatever is natural; by asking again where nothing else is.
    fn wait(&mut self, name: &str) -> Result<i64> {
        poll(self, name)
    }
}

/// Asks again every 10 ms.
pub fn poll(locker: &mut (impl Locker + ?Sized), name: &str) -> Result<i64> {
    loop {
        if let Some(token) = locker.acquire(name)? {
            return Ok(token);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A lease that is given back when this is dropped.
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
