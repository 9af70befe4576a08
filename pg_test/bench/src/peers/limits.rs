//! Limits, not leases: the least statements that a lease could be made of, one where a lease takes two.

use crate::peer::{Locker, Peer};
use crate::peers::two_updates;
use crate::workbench::Workbench;
use anyhow::Result;
use pg_test::{Conninfo, Session};
use postgres::Statement;

/// Its names in the report.
pub const SELECT: &str = "limit: SELECT 1";
/// A number of a sequence.
pub const NEXTVAL: &str = "limit: nextval";
/// A single-row HOT update.
pub const UPDATE: &str = "limit: one update";

/// One prepared statement, committed by itself.
struct Limit {
    conninfo: Conninfo,
    name: &'static str,
    sql: &'static str,
}

/// The smallest round trip.
pub fn prepare_select(bench: &Workbench) -> Result<Box<dyn Peer>> {
    prepare(bench, SELECT, "SELECT 1::bigint WHERE $1 <> ''")
}

/// What draws a token, at the least.
pub fn prepare_nextval(bench: &Workbench) -> Result<Box<dyn Peer>> {
    bench.connect()?.run("CREATE SEQUENCE IF NOT EXISTS limit_seq")?;
    prepare(bench, NEXTVAL, "SELECT nextval('limit_seq') WHERE $1 <> ''")
}

/// What changes a lease, at the least.
pub fn prepare_update(bench: &Workbench) -> Result<Box<dyn Peer>> {
    two_updates::prepare(bench)?;
    prepare(bench, UPDATE, "UPDATE two_updates SET n = n + 1 WHERE name = $1 RETURNING n")
}

fn prepare(bench: &Workbench, name: &'static str, sql: &'static str) -> Result<Box<dyn Peer>> {
    Ok(Box::new(Limit { conninfo: bench.conninfo(), name, sql }))
}

impl Peer for Limit {
    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn join(&self, _client: usize) -> Result<Box<dyn Locker>> {
        let mut session = self.conninfo.connect()?;
        let statement = session.prepare(self.sql)?;
        Ok(Box::new(Client { session, statement }))
    }
}

struct Client {
    session: Session,
    statement: Statement,
}

impl Locker for Client {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        Ok(Some(self.session.query_one(&self.statement, &[&name])?.get(0)))
    }

    fn release(&mut self, _name: &str, _token: i64) -> Result<()> {
        Ok(())
    }
}
