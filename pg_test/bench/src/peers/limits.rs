//! Limits, not leases: the least statements that a lease could be made of, one where a lease takes two.

use crate::bed::Bed;
use crate::peer::{Locker, Peer};
use crate::peers::two_updates;
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
pub fn prepare_select(bed: &Bed) -> Result<Box<dyn Peer>> {
    prepare(bed, SELECT, "SELECT 1::bigint WHERE $1 <> ''")
}

/// What draws a token, at the least.
pub fn prepare_nextval(bed: &Bed) -> Result<Box<dyn Peer>> {
    bed.connect()?.run("CREATE SEQUENCE IF NOT EXISTS limit_seq")?;
    prepare(bed, NEXTVAL, "SELECT nextval('limit_seq') WHERE $1 <> ''")
}

/// What changes a lease, at the least.
pub fn prepare_update(bed: &Bed) -> Result<Box<dyn Peer>> {
    two_updates::prepare(bed)?;
    prepare(bed, UPDATE, "UPDATE two_updates SET n = n + 1 WHERE name = $1 RETURNING n")
}

fn prepare(bed: &Bed, name: &'static str, sql: &'static str) -> Result<Box<dyn Peer>> {
    Ok(Box::new(Limit { conninfo: bed.conninfo(), name, sql }))
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
