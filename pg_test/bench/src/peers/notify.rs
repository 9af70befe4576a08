//! The plain SQL lease that updates first, with a NOTIFY in the releasing transaction: who waits
//! listens, and tries again when it is told to. And a NOTIFY alone, which tells of a release and grants nothing.

use super::sql::{Client, Statements};
use super::update_first;
use crate::peer::{Locker, Peer};
use crate::workbench::Workbench;
use anyhow::Result;
use pg_test::{Conninfo, Session};
use postgres::fallible_iterator::FallibleIterator;
use postgres::Statement;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

/// Its name in the report.
pub const NAME: &str = "SQL, LISTEN/NOTIFY";

/// A NOTIFY and nothing else.
pub const NAME_ALONE: &str = "LISTEN/NOTIFY alone, no lease";

/// The table of the lease that updates first.
pub struct Notify(Conninfo);

/// The clients' own process knows who has it.
pub struct Alone {
    conninfo: Conninfo,
    taken: Arc<AtomicBool>,
}

pub fn prepare_alone(bench: &Workbench) -> Result<Box<dyn Peer>> {
    Ok(Box::new(Alone { conninfo: bench.conninfo(), taken: Arc::default() }))
}

pub fn prepare(bench: &Workbench) -> Result<Box<dyn Peer>> {
    update_first::prepare(bench)?;
    Ok(Box::new(Notify(bench.conninfo())))
}

impl Peer for Notify {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn join(&self, client: usize) -> Result<Box<dyn Locker>> {
        let release = "
            WITH released AS (UPDATE update_first SET expires_at = '-infinity'
                               WHERE name = $1 AND token = $2 RETURNING name)
            SELECT pg_notify('released', name) FROM released";
        let statements = Statements { release: release.to_owned(), ..update_first::statements() };
        let holder = format!("client {client}");
        let mut client = Client::new(self.0.connect()?, holder, &statements)?;
        client.session.run("LISTEN released")?;
        Ok(Box::new(Notified(client)))
    }
}

struct Notified(Client);

impl Locker for Notified {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        self.0.acquire(name)
    }

    fn release(&mut self, name: &str, token: i64) -> Result<()> {
        self.0.release(name, token)
    }

    fn wait(&mut self, name: &str) -> Result<i64> {
        loop {
            // A notification from before this try says nothing about later ones.
            while self.0.session.notifications().iter().next()?.is_some() {}
            if let Some(token) = self.acquire(name)? {
                return Ok(token);
            }
            // A lease that merely runs out notifies nobody, so a waiter must look now and then.
            let limit = Duration::from_secs(1);
            self.0.session.notifications().timeout_iter(limit).next()?;
        }
    }
}

impl Peer for Alone {
    fn name(&self) -> String {
        NAME_ALONE.to_owned()
    }

    fn join(&self, _client: usize) -> Result<Box<dyn Locker>> {
        let mut session = self.conninfo.connect()?;
        session.run("LISTEN signal")?;
        let release = session.prepare("SELECT pg_notify('signal', '')")?;
        Ok(Box::new(Listener { session, release, taken: self.taken.clone() }))
    }
}

struct Listener {
    session: Session,
    release: Statement,
    taken: Arc<AtomicBool>,
}

impl Locker for Listener {
    fn acquire(&mut self, _name: &str) -> Result<Option<i64>> {
        Ok((!self.taken.swap(true, Ordering::SeqCst)).then_some(0))
    }

    fn release(&mut self, _name: &str, _token: i64) -> Result<()> {
        self.taken.store(false, Ordering::SeqCst);
        self.session.query(&self.release, &[])?;
        Ok(())
    }

    fn wait(&mut self, name: &str) -> Result<i64> {
        while self.session.notifications().iter().next()?.is_some() {}
        loop {
            if let Some(token) = self.acquire(name)? {
                return Ok(token);
            }
            let limit = Duration::from_secs(1);
            self.session.notifications().timeout_iter(limit).next()?;
        }
    }
}
