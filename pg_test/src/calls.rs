//! Short forms of the calls on leases.

use crate::client::{Rows, Session, literal};
use crate::process::{PATIENCE, wait_until};
use anyhow::{Context, Result, bail, ensure};

/// Waits until neither a call nor a row that it waited for has a lock in the session's database.
pub fn nothing_is_left(session: &mut Session) -> Result<()> {
    let sql = "SELECT l.pid, l.mode, l.granted, l.objsubid FROM pg_locks l \
               JOIN pg_database d ON d.oid = l.database \
               WHERE d.datname = current_database() AND l.locktype IN ('advisory', 'tuple')";
    let mut rows = Rows::new();
    wait_until("no lock is left", PATIENCE, || {
        rows = session.rows(sql).unwrap_or_default();
        rows.is_empty()
    })
    .with_context(|| format!("{rows:?}"))
}

/// Short ways for a session to use leases.
pub trait Calls {
    /// Runs a statement with one value, a token or NULL.
    fn token(&mut self, sql: &str) -> Result<Option<i64>>;
    /// Runs a statement that must return a token.
    fn granted(&mut self, sql: &str) -> Result<i64>;
    /// Runs a statement that must return NULL.
    fn nothing(&mut self, sql: &str) -> Result<()>;
    /// Runs a statement that returns a boolean.
    fn truth(&mut self, sql: &str) -> Result<bool>;
    /// Acquires the lease for `ttl`; it must be free.
    fn acquire(&mut self, name: &str, ttl: &str) -> Result<i64>;
    /// Returns true if a try finds the lease taken.
    fn is_taken(&mut self, name: &str) -> Result<bool>;
    /// Calls `lease_renew` with a token.
    fn renew(&mut self, name: &str, token: i64) -> Result<Option<i64>>;
    /// Calls `lease_release` with a token.
    fn release(&mut self, name: &str, token: i64) -> Result<Option<i64>>;
    /// Calls `lease_check` with a token.
    fn speaks(&mut self, name: &str, token: i64) -> Result<bool>;
    /// Acquires the lease with a deadline that has passed when the call returns.
    fn acquire_expired(&mut self, name: &str) -> Result<i64>;
    /// Lets the grant expire now, by a renewal for a microsecond, which a guard of another session does not block. So a
    /// test can keep a grant alive as long as needed.
    fn expire_now(&mut self, name: &str, token: i64) -> Result<()>;
    /// Waits until the lease's deadline has passed.
    fn wait_expired(&mut self, name: &str) -> Result<()>;
    /// The last token drawn in the database.
    fn last_token(&mut self) -> Result<i64>;
}

impl Calls for Session {
    fn token(&mut self, sql: &str) -> Result<Option<i64>> {
        match self.text(sql)? {
            Some(text) => Ok(Some(text.parse().with_context(|| format!("{text}: {sql}"))?)),
            None => Ok(None),
        }
    }

    fn granted(&mut self, sql: &str) -> Result<i64> {
        self.token(sql)?.with_context(|| format!("NULL, not a token: {sql}"))
    }

    fn nothing(&mut self, sql: &str) -> Result<()> {
        let token = self.token(sql)?;
        ensure!(token.is_none(), "{token:?}, not NULL: {sql}");
        Ok(())
    }

    fn truth(&mut self, sql: &str) -> Result<bool> {
        match self.text(sql)?.as_deref() {
            Some("t") => Ok(true),
            Some("f") => Ok(false),
            other => bail!("{other:?}, not a boolean: {sql}"),
        }
    }

    fn acquire(&mut self, name: &str, ttl: &str) -> Result<i64> {
        self.granted(&format!("SELECT lease_acquire({}, ttl => '{ttl}')", literal(name)))
    }

    fn is_taken(&mut self, name: &str) -> Result<bool> {
        // A grant is rolled back, and a try that waits is an error.
        self.run("BEGIN; SET LOCAL lock_timeout = '10 s'")?;
        let taken = self.truth(&format!("SELECT lease_acquire({}) IS NULL", literal(name)));
        self.run("ROLLBACK")?;
        taken
    }

    fn renew(&mut self, name: &str, token: i64) -> Result<Option<i64>> {
        self.token(&format!("SELECT lease_renew({}, {token})", literal(name)))
    }

    fn release(&mut self, name: &str, token: i64) -> Result<Option<i64>> {
        self.token(&format!("SELECT lease_release({}, {token})", literal(name)))
    }

    fn speaks(&mut self, name: &str, token: i64) -> Result<bool> {
        self.truth(&format!("SELECT lease_check({}, {token})", literal(name)))
    }

    fn acquire_expired(&mut self, name: &str) -> Result<i64> {
        let token = self.acquire(name, "1 us")?;
        self.wait_expired(name)?;
        Ok(token)
    }

    fn expire_now(&mut self, name: &str, token: i64) -> Result<()> {
        let renew = format!("SELECT lease_renew({}, {token}, '1 us')", literal(name));
        let renewed = self.granted(&renew)?;
        while self.speaks(name, renewed)? {}
        Ok(())
    }

    fn wait_expired(&mut self, name: &str) -> Result<()> {
        // The server's clock decides: sleep a little longer than the remaining time, and repeat if necessary.
        let left = format!(
            "SELECT max(extract(epoch FROM expires_at - clock_timestamp())) FROM fence.leases \
             WHERE name = {} AND state = 'held'",
            literal(name)
        );
        while let Some(seconds) = self.text(&left)? {
            let seconds: f64 = seconds.parse()?;
            std::thread::sleep(std::time::Duration::from_secs_f64(seconds.max(0.0) + 0.001));
        }
        Ok(())
    }

    fn last_token(&mut self) -> Result<i64> {
        self.granted("SELECT last_token FROM fence_status()")
    }
}
