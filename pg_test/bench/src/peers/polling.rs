//! The plain SQL lease that updates first, asked for again every 10 or 100 ms.

use super::sql::Client;
use super::update_first;
use crate::peer::{poll, Locker, Peer};
use crate::workbench::Workbench;
use anyhow::Result;
use pg_test::Conninfo;
use std::time::Duration;

/// How often it asks.
pub struct Polling {
    conninfo: Conninfo,
    pause: Duration,
}

pub fn prepare_10_ms(bench: &Workbench) -> Result<Box<dyn Peer>> {
    prepare(bench, Duration::from_millis(10))
}

pub fn prepare_100_ms(bench: &Workbench) -> Result<Box<dyn Peer>> {
    prepare(bench, Duration::from_millis(100))
}

fn prepare(bench: &Workbench, pause: Duration) -> Result<Box<dyn Peer>> {
    update_first::prepare(bench)?;
    Ok(Box::new(Polling { conninfo: bench.conninfo(), pause }))
}

impl Peer for Polling {
    fn name(&self) -> String {
        format!("SQL, polling every {} ms", self.pause.as_millis())
    }

    fn join(&self, client: usize) -> Result<Box<dyn Locker>> {
        let client = update_first::client(&self.conninfo, client)?;
        Ok(Box::new(Poller { client, pause: self.pause }))
    }
}

struct Poller {
    client: Client,
    pause: Duration,
}

impl Locker for Poller {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        self.client.acquire(name)
    }

    fn release(&mut self, name: &str, token: i64) -> Result<()> {
        self.client.release(name, token)
    }

    fn wait(&mut self, name: &str) -> Result<i64> {
        let pause = self.pause;
        poll(self, name, pause)
    }
}
