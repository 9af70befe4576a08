//! Several sessions at once, and sessions in the queue.

pub use pg_test::calls::nothing_is_left;
use pg_test::{Background, Database, Result, ensure};
use std::str::FromStr;

/// Returns the number of rounds: `PG_FENCE_RACE_ROUNDS`, or else `few`, which is small enough for every test run.
pub fn rounds<N: FromStr>(few: N) -> N {
    let setting = std::env::var("PG_FENCE_RACE_ROUNDS").ok();
    setting.and_then(|text| text.parse().ok()).unwrap_or(few)
}

/// A call that waits in the queue for `job`, for ten minutes at most.
pub const WAIT: &str = "SELECT lease_acquire('job', ttl => '1 h', wait => '10 min')";

/// Starts a session with this statement and waits until it is blocked.
pub fn waiting(db: &Database, sql: &str) -> Result<Background> {
    let mut session = Background::connect(&db.conninfo())?;
    session.send(sql)?;
    session.wait_until_blocked()?;
    Ok(session)
}

/// Returns the token that a waiting session gets.
pub fn token_of(session: &mut Background) -> Result<i64> {
    let rows = session.rows()?;
    let text = rows.last().and_then(|row| row[0].clone());
    ensure!(text.is_some(), "NULL, not a token: {rows:?}");
    Ok(text.unwrap_or_default().parse()?)
}
