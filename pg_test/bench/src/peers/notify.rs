//! The plain SQL lease that updates first, with a NOTIFY in the releasing transaction: who waits
//! listens, and tries again when it is told to. And a NOTIFY alone, which tells of a release and grants nothing.

use super::sql::{Client, Sql, UPDATE_FIRST};
use crate::peer::{Locker, Peer};
use crate::workbench::Workbench;
use anyhow::Result;
use pg_test::Conninfo;
use postgres::fallible_iterator::FallibleIterator;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

/// Its name in the report.
pub const NAME: &str = "SQL, LISTEN/NOTIFY";
/// A NOTIFY and nothing else.
pub const NAME_ALONE: &str = "LISTEN/NOTIFY alone, no lease";

struct Notify {
    sql: Sql,
    conninfo: Conninfo,
    /// Where there is no lease, the clients' own process knows who has it.
    taken: Option<Arc<AtomicBool>>,
}

pub fn prepare(bench: &Workbench) -> Result<Box<dyn Peer>> {
    UPDATE_FIRST.prepare(bench)?;
    let release = "
        WITH released AS (UPDATE update_first SET expires_at = '-infinity'
                           WHERE name = $1 AND token = $2 RETURNING name)
        SELECT pg_notify('released', name) FROM released";
    let sql = Sql { name: NAME, release, ..UPDATE_FIRST };
    Ok(Box::new(Notify { sql, conninfo: bench.conninfo(), taken: None }))
}

pub fn prepare_alone(bench: &Workbench) -> Result<Box<dyn Peer>> {
    let release = "SELECT pg_notify('released', '')";
    let sql = Sql { name: NAME_ALONE, acquire: "SELECT 1", release, ..UPDATE_FIRST };
    Ok(Box::new(Notify { sql, conninfo: bench.conninfo(), taken: Some(Arc::default()) }))
}

impl Peer for Notify {
    fn name(&self) -> String {
        self.sql.name.to_owned()
    }

    fn join(&self, client: usize) -> Result<Box<dyn Locker>> {
        let holder = format!("client {client}");
        let mut client = Client::new(self.conninfo.connect()?, holder, &self.sql)?;
        client.session.run("LISTEN released")?;
        Ok(Box::new(Listener { client, taken: self.taken.clone() }))
    }
}

struct Listener {
    client: Client,
    taken: Option<Arc<AtomicBool>>,
}

impl Locker for Listener {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        match &self.taken {
            Some(taken) => Ok((!taken.swap(true, Ordering::SeqCst)).then_some(0)),
            None => self.client.acquire(name),
        }
    }

    fn release(&mut self, name: &str, token: i64) -> Result<()> {
        if let Some(taken) = &self.taken {
            taken.store(false, Ordering::SeqCst);
        }
        self.client.release(name, token)
    }

    fn wait(&mut self, name: &str) -> Result<i64> {
        loop {
            // A notification from before this try says nothing about later ones.
            while self.client.session.notifications().iter().next()?.is_some() {}
            if let Some(token) = self.acquire(name)? {
                return Ok(token);
            }
            // A lease that merely runs out notifies nobody, so a waiter must look now and then.
            let limit = Duration::from_secs(1);
            self.client.session.notifications().timeout_iter(limit).next()?;
        }
    }
}
