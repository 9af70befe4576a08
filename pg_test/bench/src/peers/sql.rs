//! Leases taken with SQL: prepared statements, and a session for each client.

use crate::peer::{Locker, Peer, poll};
use crate::workbench::Workbench;
use anyhow::{Context, Result};
use pg_test::{Conninfo, Session};
use postgres::Statement;
use postgres::types::{ToSql, Type};

/// The statements of a client. `$1` is the name of the lease and `$2` the holder or the token, if used. A row means
/// success, and its first column is the token if it is a number. No row, NULL or false means that the lease is taken.
#[derive(Clone, Copy)]
pub struct Sql {
    /// The peer's name in the report.
    pub name: &'static str,
    /// Creates the tables and functions.
    pub setup: &'static str,
    pub acquire: &'static str,
    pub release: &'static str,
    pub renew: Option<&'static str>,
    /// The statement that waits; without one the client tries again every 10 ms.
    pub wait: Option<&'static str>,
}

/// pg_fence itself.
pub const OURS: Sql = Sql {
    name: "pg_fence",
    setup: "",
    acquire: "SELECT lease_acquire($1, $2)",
    release: "SELECT lease_release($1, $2)",
    renew: Some("SELECT lease_renew($1, $2)"),
    wait: Some("SELECT lease_acquire($1, $2, wait => '10 min')"),
};

/// pg_fence with session leases.
pub const SESSION: Sql = Sql {
    name: "pg_fence, session => true",
    acquire: "SELECT lease_acquire($1, $2, session => true)",
    wait: Some("SELECT lease_acquire($1, $2, session => true, wait => '10 min')"),
    ..OURS
};

/// pg_fence with leases that soon expire.
pub const SHORT: Sql = Sql {
    name: "pg_fence, ttl of 1 s alone",
    acquire: "SELECT lease_acquire($1, $2, ttl => '1 s')",
    ..OURS
};

/// PostgreSQL's session-level locks: no time to live, no token, bound to the connection.
pub const ADVISORY: Sql = Sql {
    name: "advisory lock",
    setup: "",
    acquire: "SELECT pg_try_advisory_lock(hashtextextended($1, 0))",
    release: "SELECT pg_advisory_unlock(hashtextextended($1, 0))",
    renew: None,
    wait: Some("SELECT pg_advisory_lock(hashtextextended($1, 0))"),
};

/// A lower bound rather than a lease: two single-row HOT updates, each committed, which is the least that any lease in
/// a row can do. It excludes nobody.
pub const TWO_UPDATES: Sql = Sql {
    name: "limit: two updates",
    setup: "
        CREATE TABLE IF NOT EXISTS two_updates (name text COLLATE \"C\" PRIMARY KEY, n bigint NOT NULL)
            WITH (fillfactor = 50);
        INSERT INTO two_updates SELECT 'name' || i, 0 FROM generate_series(0, 9999) i ON CONFLICT DO NOTHING;
        ANALYZE two_updates",
    acquire: UPDATE,
    release: UPDATE,
    renew: Some(UPDATE),
    wait: None,
};
const UPDATE: &str = "UPDATE two_updates SET n = n + 1 WHERE name = $1 RETURNING n";

/// A hand-written lease in plain SQL that updates first: the row of each name exists beforehand, with one more for each
/// race on a single name. A caller that knows its names could do no better.
pub const UPDATE_FIRST: Sql = Sql {
    name: "SQL, UPDATE first",
    setup: "
        CREATE TABLE IF NOT EXISTS update_first (name text COLLATE \"C\" PRIMARY KEY, holder text,
            token bigint NOT NULL, expires_at timestamptz NOT NULL) WITH (fillfactor = 50);
        INSERT INTO update_first
            SELECT 'name' || i, NULL, 0, '-infinity'::timestamptz FROM generate_series(0, 9999) i
            UNION ALL SELECT unnest('{held,churn,handover}'::text[]), NULL, 0, '-infinity'
            ON CONFLICT DO NOTHING;
        ANALYZE update_first",
    acquire: "
        UPDATE update_first
           SET holder = $2, token = token + 1, expires_at = clock_timestamp() + '30 s'
         WHERE name = $1 AND expires_at <= clock_timestamp() RETURNING token",
    release: "
        UPDATE update_first SET expires_at = '-infinity' WHERE name = $1 AND token = $2 RETURNING token",
    renew: None,
    wait: None,
};

/// The same lease as it is usually written: a table with a row per name, inserted as needed.
pub const INSERT_FIRST: Sql = Sql {
    name: "SQL, INSERT … ON CONFLICT",
    setup: "
        CREATE TABLE IF NOT EXISTS insert_first (name text COLLATE \"C\" PRIMARY KEY, holder text,
            token bigint NOT NULL, expires_at timestamptz NOT NULL) WITH (fillfactor = 50)",
    acquire: "
        INSERT INTO insert_first AS l (name, holder, token, expires_at)
        VALUES ($1, $2, 1, clock_timestamp() + '30 s')
        ON CONFLICT (name) DO UPDATE SET holder = EXCLUDED.holder, token = l.token + 1,
            expires_at = EXCLUDED.expires_at
         WHERE l.expires_at <= clock_timestamp() RETURNING token",
    release: "
        UPDATE insert_first SET expires_at = '-infinity' WHERE name = $1 AND token = $2 RETURNING token",
    renew: None,
    wait: None,
};

/// The same lease in functions that update first.
pub const PLPGSQL: Sql = Sql {
    name: "plpgsql, UPDATE first",
    setup: "
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
        END$$",
    acquire: "SELECT plpgsql_acquire($1, $2)",
    release: "SELECT plpgsql_release($1, $2)",
    renew: None,
    wait: None,
};

/// The peers that take part in races of all peers.
pub const ALL: [Sql; 7] =
    [OURS, SESSION, ADVISORY, TWO_UPDATES, UPDATE_FIRST, INSERT_FIRST, PLPGSQL];

impl Sql {
    /// Creates the tables and makes the peer.
    pub fn prepare(self, bench: &Workbench) -> Result<Box<dyn Peer>> {
        bench.connect()?.run(self.setup)?;
        Ok(self.at(bench.conninfo()))
    }

    /// The peer at this address.
    pub fn at(self, conninfo: Conninfo) -> Box<dyn Peer> {
        Box::new(SqlPeer { sql: self, conninfo })
    }
}

struct SqlPeer {
    sql: Sql,
    conninfo: Conninfo,
}

impl Peer for SqlPeer {
    fn name(&self) -> String {
        self.sql.name.to_owned()
    }

    fn join(&self, client: usize) -> Result<Box<dyn Locker>> {
        let holder = format!("client {client}");
        Ok(Box::new(Client::new(self.conninfo.connect()?, holder, &self.sql)?))
    }
}

/// A client, on which others build.
pub struct Client {
    pub session: Session,
    holder: String,
    acquire: Statement,
    release: Statement,
    renew: Option<Statement>,
    wait: Option<Statement>,
}

impl Client {
    pub fn new(mut session: Session, holder: String, sql: &Sql) -> Result<Client> {
        let (acquire, release) = (session.prepare(sql.acquire)?, session.prepare(sql.release)?);
        let mut prepare = |sql: Option<&str>| sql.map(|sql| session.prepare(sql)).transpose();
        let (renew, wait) = (prepare(sql.renew)?, prepare(sql.wait)?);
        Ok(Client { session, holder, acquire, release, renew, wait })
    }
}

fn call(
    session: &mut Session,
    statement: &Statement,
    name: &str,
    second: &(dyn ToSql + Sync),
) -> Result<Option<i64>> {
    let given = [&name as &(dyn ToSql + Sync), second];
    let row = session.query_opt(statement, &given[..statement.params().len()])?;
    Ok(row.and_then(|row| match *row.columns()[0].type_() {
        Type::BOOL => row.get::<_, bool>(0).then_some(0),
        Type::INT8 => row.get(0),
        _ => Some(0),
    }))
}

impl Locker for Client {
    fn acquire(&mut self, name: &str) -> Result<Option<i64>> {
        call(&mut self.session, &self.acquire, name, &self.holder)
    }

    fn release(&mut self, name: &str, token: i64) -> Result<()> {
        let released = call(&mut self.session, &self.release, name, &token)?;
        released.map(drop).context("the lease was lost")
    }

    fn renew(&mut self, name: &str, token: i64) -> Result<()> {
        let renew = self.renew.as_ref().context("it does not renew here")?;
        call(&mut self.session, renew, name, &token)?.map(drop).context("the lease was lost")
    }

    fn wait(&mut self, name: &str) -> Result<i64> {
        let Some(wait) = &self.wait else { return poll(self, name) };
        call(&mut self.session, wait, name, &self.holder)?.context("waited in vain")
    }
}
