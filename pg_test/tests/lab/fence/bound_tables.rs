//! Many renewals of a grant, and writes by each of their tokens. The rest is in bound_tables.script.

use crate::support::test_database::{bound, shows, ROW};
use pg_test::{ensure, lab_test, Lab, Result};

#[lab_test]
fn the_acquire_s_token_serves_as_long_as_the_grant_lives(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    let first = db.grant("order:1")?;
    let mut renewals = Vec::new();
    for _ in 0..18 {
        let token: i64 = db.one("SELECT lease_renew('order:1', $1)", &[&first])?;
        renewals.push(token);
    }
    // A heartbeat in another thread disturbs nobody; the latest 16 renewals are good too.
    db.run(&format!("UPDATE orders SET v = 1, fence = {first}"))?;
    for (n, token) in renewals.iter().enumerate() {
        let write = format!("UPDATE orders SET v = 7, fence = {token}");
        db.run("BEGIN")?;
        if n < 2 {
            db.refused(&write, "PF004")?;
        } else {
            db.run(&write)?;
            shows(&mut db, ROW, &format!("7|{token}"))?;
        }
        db.run("ROLLBACK")?;
    }
    // A token of another lease that falls between two of them is none of them.
    let between = db.token()?;
    let last: i64 = db.one("SELECT lease_renew('order:1', $1)", &[&first])?;
    ensure!(renewals[17] < between && between < last);
    db.refused(&format!("UPDATE orders SET v = 7, fence = {between}"), "PF004").map(drop)
}
