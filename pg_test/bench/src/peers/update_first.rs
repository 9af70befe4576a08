//! A lease of one's own in plain SQL that updates first: the row of each name is there beforehand,
//! so one UPDATE is all it takes. A caller that knows its names could do no better.

use super::sql::Client;
use crate::peer::{Locker, Peer};
use crate::workbench::{Workbench, NAMES};
use anyhow::Result;
use pg_test::Conninfo;

/// Its name in the report.
pub const NAME: &str = "SQL, UPDATE first";

/// A table of one row a name.
pub struct UpdateFirst(Conninfo);

/// Makes the table, its rows, and one more for each race that uses one name.
pub fn prepare(bench: &Workbench) -> Result<Box<dyn Peer>> {
    bench.connect()?.run(&format!(
        "CREATE TABLE IF NOT EXISTS update_first (name text COLLATE \"C\" PRIMARY KEY, holder text,
             token bigint NOT NULL, expires_at timestamptz NOT NULL) WITH (fillfactor = 50);
         INSERT INTO update_first
             SELECT 'name' || i, NULL, 0, '-infinity'::timestamptz FROM generate_series(0, {NAMES} - 1) i
             UNION ALL SELECT unnest('{{held,churn,handover}}'::text[]), NULL, 0, '-infinity'
             ON CONFLICT DO NOTHING;
         ANALYZE update_first"
    ))?;
    Ok(Box::new(UpdateFirst(bench.conninfo())))
}

impl Peer for UpdateFirst {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn join(&self, client: usize) -> Result<Box<dyn Locker>> {
        Ok(Box::new(self::client(&self.0, client)?))
    }
}

/// A client; others build on it.
pub fn client(conninfo: &Conninfo, client: usize) -> Result<Client> {
    let release = "UPDATE update_first SET expires_at = '-infinity' WHERE name = $1 AND token = $2";
    Client::join(conninfo, client, ACQUIRE, release)
}

pub const ACQUIRE: &str = "
    UPDATE update_first
       SET holder = $2, token = token + 1, expires_at = clock_timestamp() + '30 s'
     WHERE name = $1 AND expires_at <= clock_timestamp() RETURNING token";
