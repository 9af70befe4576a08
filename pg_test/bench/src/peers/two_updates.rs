//! A limit, not a lease: two single-row HOT updates, each committed, as little as any lease that is
//! a row can do. It excludes nobody.

use crate::peer::{Locker, Peer};
use crate::workbench::{Workbench, NAMES};
use anyhow::Result;
use pg_test::{Conninfo, Session};
use postgres::Statement;

/// Its name in the report.
pub const NAME: &str = "limit: two updates";

/// A table of one row a name.
pub struct TwoUpdates(Conninfo);

/// Makes the table and its rows.
pub fn prepare(bench: &Workbench) -> Result<Box<dyn Peer>> {
    bench.connect()?.run(&format!(
        "CREATE TABLE IF NOT EXISTS two_updates (name text COLLATE \"C\" PRIMARY KEY, n bigint NOT NULL)
             WITH (fillfactor = 50);
         INSERT INTO two_updates SELECT 'name' || i, 0 FROM generate_series(0, {NAMES} - 1) i
             ON CONFLICT DO NOTHING;
         ANALYZE two_updates"
    ))?;
    Ok(Box::new(TwoUpdates(bench.conninfo())))
}

impl Peer for TwoUpdates {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn join(&self, _client: usize) -> Result<Box<dyn Locker>> {
        let mut session = self.0.connect()?;
        let update =
            session.prepare("UPDATE two_updates SET n = n + 1 WHERE name = $1 RETURNING n")?;
        Ok(Box::new(Client { session, update }))
    }
}

struct Client {
    session: Session,
    update: Statement,
}

impl Locker for Client {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        Ok(Some(self.session.query_one(&self.update, &[&name])?.get(0)))
    }

    fn release(&mut self, name: &str, _token: i64) -> Result<()> {
        self.acquire(name).map(drop)
    }

    fn renew(&mut self, name: &str, _token: i64) -> Result<()> {
        self.acquire(name).map(drop)
    }
}
