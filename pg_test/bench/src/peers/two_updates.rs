//! A limit, not a lease: two single-row HOT updates, each committed, as little as any lease that is
//! a row can do. It excludes nobody.

use super::sql::{Sql, Statements};
use crate::peer::Peer;
use crate::workbench::{Workbench, NAMES};
use anyhow::Result;

/// Its name in the report.
pub const NAME: &str = "limit: two updates";

/// Makes a table of one row a name.
pub fn prepare(bench: &Workbench) -> Result<Box<dyn Peer>> {
    bench.connect()?.run(&format!(
        "CREATE TABLE IF NOT EXISTS two_updates (name text COLLATE \"C\" PRIMARY KEY, n bigint NOT NULL)
             WITH (fillfactor = 50);
         INSERT INTO two_updates SELECT 'name' || i, 0 FROM generate_series(0, {NAMES} - 1) i
             ON CONFLICT DO NOTHING;
         ANALYZE two_updates"
    ))?;
    let update = || "UPDATE two_updates SET n = n + 1 WHERE name = $1 RETURNING n".to_owned();
    let (acquire, release, renew) = (update(), update(), Some(update()));
    let statements = Statements { acquire, release, renew, wait: None };
    Ok(Box::new(Sql { name: NAME, conninfo: bench.conninfo(), statements }))
}
