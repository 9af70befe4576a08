//! A lease of one's own in plain SQL, as it is mostly written: `INSERT … ON CONFLICT`.

use super::sql::Client;
use crate::peer::{Locker, Peer};
use crate::workbench::Workbench;
use anyhow::Result;
use pg_test::Conninfo;

/// Its name in the report.
pub const NAME: &str = "SQL, INSERT … ON CONFLICT";

/// A table of one row a name, made as needed.
pub struct InsertFirst(Conninfo);

pub fn prepare(bench: &Workbench) -> Result<Box<dyn Peer>> {
    bench.connect()?.run(
        "CREATE TABLE IF NOT EXISTS insert_first (name text COLLATE \"C\" PRIMARY KEY, holder text,
             token bigint NOT NULL, expires_at timestamptz NOT NULL) WITH (fillfactor = 50)",
    )?;
    Ok(Box::new(InsertFirst(bench.conninfo())))
}

impl Peer for InsertFirst {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn join(&self, client: usize) -> Result<Box<dyn Locker>> {
        let acquire = "
            INSERT INTO insert_first AS l (name, holder, token, expires_at)
            VALUES ($1, $2, 1, clock_timestamp() + '30 s')
            ON CONFLICT (name) DO UPDATE SET holder = EXCLUDED.holder, token = l.token + 1,
                expires_at = EXCLUDED.expires_at
             WHERE l.expires_at <= clock_timestamp() RETURNING token";
        let release =
            "UPDATE insert_first SET expires_at = '-infinity' WHERE name = $1 AND token = $2";
        Ok(Box::new(Client::join(&self.0, client, acquire, release)?))
    }
}
