//! The plain SQL lease that updates first, with a NOTIFY in the releasing transaction: a waiter listens, and tries
//! again after a notification. Also a NOTIFY alone, which reports a release and grants nothing.

use super::sql::{Client, Sql, UPDATE_FIRST};
use crate::peer::{Locker, Peer};
use crate::workbench::Workbench;
use anyhow::Result;
use pg_test::Conninfo;
use postgres::fallible_iterator::FallibleIterator;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The peer's name in the report.
pub const NAME: &str = "SQL, LISTEN/NOTIFY";
/// The peer without a lease, with a NOTIFY only.
pub const NAME_ALONE: &str = "LISTEN/NOTIFY alone, no lease";

struct Notify {
    sql: Sql,
    conninfo: Conninfo,
    /// Without a lease, this flag in the clients' own process says whether it is taken.
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
            // A notification from before this attempt says nothing about later ones.
            while self.client.session.notifications().iter().next()?.is_some() {}
            if let Some(token) = self.acquire(name)? {
                return Ok(token);
            }
            // The expiry of a lease notifies nobody, so a waiter must try from time to time.
            let limit = Duration::from_secs(1);
            self.client.session.notifications().timeout_iter(limit).next()?;
        }
    }
}
