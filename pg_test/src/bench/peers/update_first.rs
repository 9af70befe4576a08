//! A lease of one's own in plain SQL that updates first: the row of each name is there beforehand,
//! so one UPDATE is all it takes. A caller that knows its names could do no better.

use crate::bench::bed::{Bed, NAMES};
use crate::bench::peer::{Locker, Peer};
use crate::{Conninfo, Session};
use anyhow::{ensure, Result};
use postgres::Statement;

/// Its name in the report.
pub const NAME: &str = "SQL, UPDATE first";

/// A table of one row a name.
pub struct UpdateFirst(Conninfo);

/// Makes the table, its rows, and one more for each race that uses one name.
pub fn prepare(bed: &Bed) -> Result<Box<dyn Peer>> {
    bed.connect()?.run(&format!(
        "CREATE TABLE IF NOT EXISTS update_first (name text COLLATE \"C\" PRIMARY KEY, holder text,
             token bigint NOT NULL, expires_at timestamptz NOT NULL) WITH (fillfactor = 50);
         INSERT INTO update_first
             SELECT 'name' || i, NULL, 0, '-infinity'::timestamptz FROM generate_series(0, {NAMES} - 1) i
             UNION ALL SELECT unnest('{{held,churn,handover}}'::text[]), NULL, 0, '-infinity'
             ON CONFLICT DO NOTHING;
         ANALYZE update_first"
    ))?;
    Ok(Box::new(UpdateFirst(bed.conninfo())))
}

impl Peer for UpdateFirst {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn join(&self, client: usize) -> Result<Box<dyn Locker>> {
        Ok(Box::new(Client::join(&self.0, client)?))
    }
}

/// A client; others build on it.
pub struct Client {
    /// Its connection.
    pub session: Session,
    holder: String,
    acquire: Statement,
    release: Statement,
}

impl Client {
    /// Connects and prepares.
    pub fn join(conninfo: &Conninfo, client: usize) -> Result<Client> {
        let mut session = conninfo.connect()?;
        let acquire = session.prepare(
            "UPDATE update_first
                SET holder = $2, token = token + 1, expires_at = clock_timestamp() + '30 s'
              WHERE name = $1 AND expires_at <= clock_timestamp() RETURNING token",
        )?;
        let release = session.prepare(
            "UPDATE update_first SET expires_at = '-infinity' WHERE name = $1 AND token = $2",
        )?;
        Ok(Client { session, holder: format!("client {client}"), acquire, release })
    }
}

impl Locker for Client {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        let row = self.session.query_opt(&self.acquire, &[&name, &self.holder])?;
        Ok(row.map(|row| row.get(0)))
    }

    fn release(&mut self, name: &str, token: i64) -> Result<()> {
        let rows = self.session.execute(&self.release, &[&name, &token])?;
        ensure!(rows == 1, "the lease was lost");
        Ok(())
    }
}
