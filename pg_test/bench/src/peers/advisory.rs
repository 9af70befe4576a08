//! PostgreSQL's session-level advisory locks: no time to live, no token, bound to the connection.

use crate::peer::{Locker, Peer};
use crate::workbench::Workbench;
use anyhow::{Context, Result};
use pg_test::{Conninfo, Session};
use postgres::Statement;

/// Its name in the report.
pub const NAME: &str = "advisory lock";

/// Locks on the hash of the name.
pub struct Advisory(Conninfo);

pub fn prepare(bench: &Workbench) -> Result<Box<dyn Peer>> {
    Ok(Box::new(Advisory(bench.conninfo())))
}

impl Peer for Advisory {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn join(&self, _client: usize) -> Result<Box<dyn Locker>> {
        client(self.0.connect()?)
    }
}

/// A client by this session.
pub fn client(mut session: Session) -> Result<Box<dyn Locker>> {
    let acquire = session.prepare("SELECT pg_try_advisory_lock(hashtextextended($1, 0))")?;
    let wait = session.prepare("SELECT pg_advisory_lock(hashtextextended($1, 0))")?;
    let release = session.prepare("SELECT pg_advisory_unlock(hashtextextended($1, 0))")?;
    Ok(Box::new(Client { session, acquire, wait, release }))
}

struct Client {
    session: Session,
    acquire: Statement,
    wait: Statement,
    release: Statement,
}

impl Locker for Client {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        let locked: bool = self.session.query_one(&self.acquire, &[&name])?.get(0);
        Ok(locked.then_some(0))
    }

    fn release(&mut self, name: &str, _token: i64) -> Result<()> {
        let unlocked: bool = self.session.query_one(&self.release, &[&name])?.get(0);
        unlocked.then_some(()).context("the lock was lost")
    }

    fn wait(&mut self, name: &str) -> Result<i64> {
        self.session.query_one(&self.wait, &[&name])?;
        Ok(0)
    }
}
