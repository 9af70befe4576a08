//! Several sessions at once: in the queue one behind the other.

pub use pg_test::calls::nothing_is_left;
use pg_test::{bail, ensure, Background, Cluster, Context, Database, Lab, Result, Session};
use std::str::FromStr;
use std::time::Duration;

/// How many rounds: as many as `PG_FENCE_RACE_ROUNDS` says, or else so `few` that they are no burden every day.
pub fn rounds<N: FromStr>(few: N) -> N {
    let asked = std::env::var("PG_FENCE_RACE_ROUNDS").ok();
    asked.and_then(|text| text.parse().ok()).unwrap_or(few)
}

/// A call that waits in the queue for `job`, for ten minutes at most.
pub const WAIT: &str = "SELECT lease_acquire('job', ttl => '1 h', wait => '10 min')";

/// A session that runs this statement and has begun to wait.
pub fn waiting(db: &Database, sql: &str) -> Result<Background> {
    let mut session = Background::connect(&db.conninfo())?;
    session.send(sql)?;
    session.wait_until_blocked()?;
    Ok(session)
}

/// The head of a queue looks by itself a second after it came, and not sooner; what comes sooner was woken.
const LOOKS_AFTER: f64 = 0.98;

/// A server on which nothing but a change of a lease wakes who waits for it: no other database's changes of catalogs,
/// no look for deadlocks.
pub fn undisturbed_server(lab: &Lab) -> Result<Cluster> {
    lab.builder().set("deadlock_timeout", "1h").set("autovacuum", "off").start()
}

/// Each round serves a waiter and says how many seconds it had been in the queue. In one of them it must have been woken,
/// as against having found out by itself; not in the first, for the machine may be busy.
pub fn is_woken(mut round: impl FnMut() -> Result<f64>) -> Result<()> {
    let mut took = Vec::new();
    while took.len() < 30 {
        let seconds = round()?;
        if seconds < LOOKS_AFTER {
            return Ok(());
        }
        took.push(seconds);
    }
    bail!("not woken, but found out after so many seconds: {took:?}")
}

/// A session that waits for `job`, and since when by the server's clock.
pub struct Waiter {
    session: Background,
    since: String,
}

impl Waiter {
    /// It has begun to wait.
    pub fn comes(db: &Database, admin: &mut Session) -> Result<Waiter> {
        let mut session = Background::connect(&db.conninfo())?;
        let since = admin.text("SELECT clock_timestamp()")?.context("a time")?;
        session.send(WAIT)?;
        session.wait_until_blocked()?;
        Ok(Waiter { session, since })
    }

    /// Its token, and after how many seconds it was granted; the disk that makes it durable does not count.
    pub fn served(mut self, admin: &mut Session) -> Result<(i64, f64)> {
        let (token, since) = (token_of(&mut self.session)?, self.since);
        let took = format!(
            "SELECT extract(epoch FROM acquired_at - '{since}')::float8 \
             FROM lease_info('job') WHERE token = {token}"
        );
        Ok((token, admin.one(&took, &[])?))
    }
}

/// The token that a waiting session gets.
pub fn token_of(session: &mut Background) -> Result<i64> {
    let rows = session.rows()?;
    let text = rows.last().and_then(|row| row[0].clone());
    ensure!(text.is_some(), "NULL, not a token: {rows:?}");
    Ok(text.unwrap_or_default().parse()?)
}

/// None of these has been served.
pub fn still_wait<'a>(sessions: impl IntoIterator<Item = &'a mut Background>) -> Result<()> {
    for (i, session) in sessions.into_iter().enumerate() {
        ensure!(!session.is_finished(), "number {i} of those who wait was served: {:?}", {
            session.outcome(Duration::ZERO)
        });
    }
    Ok(())
}
