//! A watch that is open already, and a put that it shows: it tells of a release and grants nothing.

use super::wire::{Connection, Watch};
use super::{start, Etcd, Way};
use crate::peer::{Locker, Peer};
use crate::workbench::Workbench;
use anyhow::Result;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

/// Its name in the report.
pub const NAME: &str = "etcd, watch alone, no lock";
const KEY: &str = "signal";

/// A server. Who has it, the clients' own process knows.
struct Alone {
    etcd: Etcd,
    taken: Arc<AtomicBool>,
}

pub fn prepare(bench: &Workbench) -> Result<Box<dyn Peer>> {
    Ok(Box::new(Alone { etcd: start(bench.lab.rundir(), Way::Watched)?, taken: Arc::default() }))
}

impl Peer for Alone {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn join(&self, _client: usize) -> Result<Box<dyn Locker>> {
        let mut etcd = Connection::open(self.etcd.port())?;
        let watch = etcd.watch(KEY)?;
        Ok(Box::new(Watcher { etcd, watch, taken: self.taken.clone() }))
    }

    fn is_postgres(&self) -> bool {
        false
    }
}

struct Watcher {
    etcd: Connection,
    watch: Watch,
    taken: Arc<AtomicBool>,
}

impl Locker for Watcher {
    fn acquire(&mut self, _name: &str) -> Result<Option<i64>> {
        Ok((!self.taken.swap(true, Ordering::SeqCst)).then_some(0))
    }

    fn release(&mut self, _name: &str, _token: i64) -> Result<()> {
        self.taken.store(false, Ordering::SeqCst);
        self.etcd.put(KEY)
    }

    fn wait(&mut self, name: &str) -> Result<i64> {
        loop {
            if let Some(token) = self.acquire(name)? {
                return Ok(token);
            }
            self.etcd.await_event(&mut self.watch, None, Duration::from_secs(1))?;
        }
    }
}
