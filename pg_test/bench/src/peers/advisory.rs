//! PostgreSQL's session-level advisory locks: no time to live, no token, bound to the connection.

use super::sql::{Sql, Statements};
use crate::peer::Peer;
use crate::workbench::Workbench;
use anyhow::Result;

/// Its name in the report.
pub const NAME: &str = "advisory lock";

/// Locks on the hash of the name.
pub fn statements() -> Statements {
    let of = |function: &str| format!("SELECT {function}(hashtextextended($1, 0))");
    Statements {
        acquire: of("pg_try_advisory_lock"),
        release: of("pg_advisory_unlock"),
        renew: None,
        wait: Some(of("pg_advisory_lock")),
    }
}

pub fn prepare(bench: &Workbench) -> Result<Box<dyn Peer>> {
    Ok(Box::new(Sql { name: NAME, conninfo: bench.conninfo(), statements: statements() }))
}
