//! pg_fence itself.

use super::sql::{Sql, Statements};
use crate::peer::Peer;
use crate::workbench::Workbench;
use anyhow::Result;

/// Its name in the report.
pub const NAME: &str = "pg_fence";
/// With leases that end with their session.
pub const NAME_SESSION: &str = "pg_fence, session => true";
pub const SESSION: &str = ", session => true";

/// The extension's functions, an acquire with these further arguments.
pub fn statements(arguments: &str) -> Statements {
    let acquire = |more: &str| format!("SELECT lease_acquire($1, $2{arguments}{more})");
    Statements {
        acquire: acquire(""),
        release: "SELECT lease_release($1, $2)".to_owned(),
        renew: Some("SELECT lease_renew($1, $2)".to_owned()),
        wait: Some(acquire(", wait => '10 min'")),
    }
}

pub fn prepare(bench: &Workbench) -> Result<Box<dyn Peer>> {
    Ok(Box::new(Sql { name: NAME, conninfo: bench.conninfo(), statements: statements("") }))
}

pub fn prepare_session(bench: &Workbench) -> Result<Box<dyn Peer>> {
    let (conninfo, statements) = (bench.conninfo(), statements(SESSION));
    Ok(Box::new(Sql { name: NAME_SESSION, conninfo, statements }))
}
