//! A lease of one's own in plpgsql functions that update first, in two variants: with a release that
//! is as durable as anything else, and with one that does not wait for the disk.

use super::sql::Client;
use crate::peer::{Locker, Peer};
use crate::workbench::Workbench;
use anyhow::{Context, Result};
use pg_test::Conninfo;

/// Its names in the report.
pub const NAME: &str = "plpgsql, UPDATE first";
/// The variant whose release does not wait for the disk.
pub const NAME_LAZY: &str = "plpgsql, release without the disk";

/// A table and three functions.
pub struct Plpgsql {
    conninfo: Conninfo,
    lazy: bool,
}

const SETUP: &str = "
CREATE TABLE IF NOT EXISTS plpgsql_lease (name text COLLATE \"C\" PRIMARY KEY, holder text,
    token bigint NOT NULL, expires_at timestamptz NOT NULL) WITH (fillfactor = 50);

CREATE OR REPLACE FUNCTION plpgsql_acquire(the_name text, the_holder text) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    granted bigint;
BEGIN
    UPDATE plpgsql_lease
       SET holder = the_holder, token = token + 1, expires_at = clock_timestamp() + '30 s'
     WHERE name = the_name AND expires_at <= clock_timestamp() RETURNING token INTO granted;
    IF NOT FOUND THEN
        INSERT INTO plpgsql_lease VALUES (the_name, the_holder, 1, clock_timestamp() + '30 s')
            ON CONFLICT DO NOTHING RETURNING token INTO granted;
    END IF;
    RETURN granted;
END$$;

CREATE OR REPLACE FUNCTION plpgsql_release(the_name text, the_token bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE plpgsql_lease SET expires_at = '-infinity' WHERE name = the_name AND token = the_token;
    RETURN FOUND;
END$$;

CREATE OR REPLACE FUNCTION plpgsql_release_lazy(the_name text, the_token bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    UPDATE plpgsql_lease SET expires_at = '-infinity' WHERE name = the_name AND token = the_token;
    RETURN FOUND;
END$$;
";

/// Makes the table and the functions.
pub fn prepare(bench: &Workbench) -> Result<Box<dyn Peer>> {
    bench.connect()?.run(SETUP)?;
    Ok(Box::new(Plpgsql { conninfo: bench.conninfo(), lazy: false }))
}

/// The same, with the release that does not wait.
pub fn prepare_lazy(bench: &Workbench) -> Result<Box<dyn Peer>> {
    bench.connect()?.run(SETUP)?;
    Ok(Box::new(Plpgsql { conninfo: bench.conninfo(), lazy: true }))
}

impl Peer for Plpgsql {
    fn name(&self) -> String {
        if self.lazy { NAME_LAZY } else { NAME }.to_owned()
    }

    fn join(&self, client: usize) -> Result<Box<dyn Locker>> {
        let release = if self.lazy {
            "SELECT plpgsql_release_lazy($1, $2)"
        } else {
            "SELECT plpgsql_release($1, $2)"
        };
        let acquire = "SELECT plpgsql_acquire($1, $2)";
        Ok(Box::new(Caller(Client::join(&self.conninfo, client, acquire, release)?)))
    }
}

/// Its release answers with a boolean.
struct Caller(Client);

impl Locker for Caller {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        self.0.acquire(name)
    }

    fn release(&mut self, name: &str, token: i64) -> Result<()> {
        let Client { session, release, .. } = &mut self.0;
        let found: bool = session.query_one(&*release, &[&name, &token])?.get(0);
        found.then_some(()).context("the lease was lost")
    }
}
