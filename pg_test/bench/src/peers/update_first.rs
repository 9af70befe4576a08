//! A lease of one's own in plain SQL that updates first: the row of each name is there beforehand,
//! so one UPDATE is all it takes. A caller that knows its names could do no better.

use super::sql::{Sql, Statements};
use crate::peer::Peer;
use crate::workbench::{Workbench, NAMES};
use anyhow::Result;

/// Its name in the report.
pub const NAME: &str = "SQL, UPDATE first";

const ACQUIRE: &str = "
    UPDATE update_first
       SET holder = $2, token = token + 1, expires_at = clock_timestamp() + '30 s'
     WHERE name = $1 AND expires_at <= clock_timestamp() RETURNING token";
const RELEASE: &str = "
    UPDATE update_first SET expires_at = '-infinity' WHERE name = $1 AND token = $2 RETURNING token";

pub fn statements() -> Statements {
    let (acquire, release) = (ACQUIRE.to_owned(), RELEASE.to_owned());
    Statements { acquire, release, ..Statements::default() }
}

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
    Ok(Box::new(Sql { name: NAME, conninfo: bench.conninfo(), statements: statements() }))
}
