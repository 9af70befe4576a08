//! A lease of one's own in plain SQL, as it is mostly written: `INSERT … ON CONFLICT`.

use crate::bench::bed::Bed;
use crate::bench::peer::{Locker, Peer};
use crate::{Conninfo, Session};
use anyhow::{ensure, Result};
use postgres::Statement;

/// Its name in the report.
pub const NAME: &str = "SQL, INSERT … ON CONFLICT";

/// A table of one row a name, made as needed.
pub struct InsertFirst(Conninfo);

/// Makes the table.
pub fn prepare(bed: &Bed) -> Result<Box<dyn Peer>> {
    bed.connect()?.run(
        "CREATE TABLE IF NOT EXISTS insert_first (name text COLLATE \"C\" PRIMARY KEY, holder text,
             token bigint NOT NULL, expires_at timestamptz NOT NULL) WITH (fillfactor = 50)",
    )?;
    Ok(Box::new(InsertFirst(bed.conninfo())))
}

impl Peer for InsertFirst {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn join(&self, client: usize) -> Result<Box<dyn Locker>> {
        let mut session = self.0.connect()?;
        let acquire = session.prepare(
            "INSERT INTO insert_first AS l (name, holder, token, expires_at)
             VALUES ($1, $2, 1, clock_timestamp() + '30 s')
             ON CONFLICT (name) DO UPDATE SET holder = EXCLUDED.holder, token = l.token + 1,
                 expires_at = EXCLUDED.expires_at
              WHERE l.expires_at <= clock_timestamp() RETURNING token",
        )?;
        let release = session.prepare(
            "UPDATE insert_first SET expires_at = '-infinity' WHERE name = $1 AND token = $2",
        )?;
        Ok(Box::new(Client { session, holder: format!("client {client}"), acquire, release }))
    }
}

struct Client {
    session: Session,
    holder: String,
    acquire: Statement,
    release: Statement,
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
