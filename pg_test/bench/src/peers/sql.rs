//! A client of a lease that is made in SQL: what takes it and what releases it, as prepared statements.

use crate::peer::Locker;
use anyhow::{ensure, Result};
use pg_test::{Conninfo, Session};
use postgres::Statement;

/// A client; others build on it.
pub struct Client {
    pub session: Session,
    pub release: Statement,
    acquire: Statement,
    holder: String,
}

impl Client {
    /// Connects and prepares `acquire` (of a name and a holder: the token, or else NULL or no row) and `release`
    /// (of a name and a token: one row is changed).
    pub fn join(
        conninfo: &Conninfo,
        client: usize,
        acquire: &str,
        release: &str,
    ) -> Result<Client> {
        let mut session = conninfo.connect()?;
        let acquire = session.prepare(acquire)?;
        let release = session.prepare(release)?;
        Ok(Client { session, release, acquire, holder: format!("client {client}") })
    }
}

impl Locker for Client {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        let row = self.session.query_opt(&self.acquire, &[&name, &self.holder])?;
        Ok(row.and_then(|row| row.get(0)))
    }

    fn release(&mut self, name: &str, token: i64) -> Result<()> {
        let rows = self.session.execute(&self.release, &[&name, &token])?;
        ensure!(rows == 1, "the lease was lost");
        Ok(())
    }
}
