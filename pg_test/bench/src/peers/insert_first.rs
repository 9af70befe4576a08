//! A lease of one's own in plain SQL, as it is mostly written: `INSERT … ON CONFLICT`.

use super::sql::{Sql, Statements};
use crate::peer::Peer;
use crate::workbench::Workbench;
use anyhow::Result;

/// Its name in the report.
pub const NAME: &str = "SQL, INSERT … ON CONFLICT";

const ACQUIRE: &str = "
    INSERT INTO insert_first AS l (name, holder, token, expires_at)
    VALUES ($1, $2, 1, clock_timestamp() + '30 s')
    ON CONFLICT (name) DO UPDATE SET holder = EXCLUDED.holder, token = l.token + 1,
        expires_at = EXCLUDED.expires_at
     WHERE l.expires_at <= clock_timestamp() RETURNING token";
const RELEASE: &str = "
    UPDATE insert_first SET expires_at = '-infinity' WHERE name = $1 AND token = $2 RETURNING token";

/// A table of one row a name, made as needed.
pub fn prepare(bench: &Workbench) -> Result<Box<dyn Peer>> {
    bench.connect()?.run(
        "CREATE TABLE IF NOT EXISTS insert_first (name text COLLATE \"C\" PRIMARY KEY, holder text,
             token bigint NOT NULL, expires_at timestamptz NOT NULL) WITH (fillfactor = 50)",
    )?;
    let (acquire, release) = (ACQUIRE.to_owned(), RELEASE.to_owned());
    let statements = Statements { acquire, release, ..Statements::default() };
    Ok(Box::new(Sql { name: NAME, conninfo: bench.conninfo(), statements }))
}
