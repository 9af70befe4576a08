//! A lease of one's own in plpgsql functions that update first.

use super::sql::{Sql, Statements};
use crate::peer::Peer;
use crate::workbench::Workbench;
use anyhow::Result;

/// Its name in the report.
pub const NAME: &str = "plpgsql, UPDATE first";

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
";

/// Makes the table and the functions.
pub fn prepare(bench: &Workbench) -> Result<Box<dyn Peer>> {
    bench.connect()?.run(SETUP)?;
    let acquire = "SELECT plpgsql_acquire($1, $2)".to_owned();
    let release = "SELECT plpgsql_release($1, $2)".to_owned();
    let statements = Statements { acquire, release, ..Statements::default() };
    Ok(Box::new(Sql { name: NAME, conninfo: bench.conninfo(), statements }))
}
