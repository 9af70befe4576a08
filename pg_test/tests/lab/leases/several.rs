//! Several leases under one token: crowds that ask for them never hang. The rest is in several.script.

use crate::support::concurrency::{at_once, nothing_is_left, sessions, tokens};
use pg_test::{ensure, lab_test, Calls, Lab, Result};

#[lab_test]
fn crossing_callers_never_deadlock(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    let mut crowd = sessions(&db, 8)?;
    let orders = ["{a, b, c, d}", "{d, c, b, a}", "{b, d}", "{c, a, b}"];
    let mut won = 0;
    for round in 0..30 {
        let outcomes = at_once(&mut crowd, |i| {
            let names = orders[(i + round) % orders.len()];
            format!(
                "BEGIN; SELECT lease_acquire_all('{names}', ttl => '1 h'); \
                 SELECT lease_acquire('e', ttl => '1 h'); COMMIT"
            )
        });
        // Each lease has one holder, and who has one of his list has all of it.
        for outcome in outcomes {
            won += outcome?.first().is_some_and(|row| row[0].is_some()) as usize;
        }
        let split = admin.granted(
            "SELECT count(*) FROM (SELECT token, string_agg(name, ',' ORDER BY name) AS names \
               FROM fence.leases WHERE state = 'held' AND name <> 'e' GROUP BY token) s \
             WHERE names NOT IN ('a,b,c,d', 'b,d', 'a,b,c')",
        )?;
        ensure!(split == 0, "{:?}", admin.rows("SELECT name, token FROM fence.leases")?);
        admin.run("SELECT lease_revoke(name) FROM fence.leases WHERE state = 'held'")?;
    }
    ensure!(won > 0, "nobody ever won");
    nothing_is_left(&mut admin)
}

#[lab_test]
fn crossing_renewals_and_releases_never_deadlock(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    let mut crowd = sessions(&db, 6)?;
    for _ in 0..15 {
        let token = admin.granted("SELECT lease_acquire_all('{a, b, c}', ttl => '1 h')")?;
        let got = tokens(at_once(&mut crowd, |i| {
            let names = ["{a, b, c}", "{c, b, a}", "{b, c, a}"][i % 3];
            match i {
                5 => format!("SELECT lease_release_all('{names}', {token})"),
                _ => format!("SELECT lease_renew_all('{names}', {token})"),
            }
        }))?;
        let mut renewed: Vec<i64> = got[..5].iter().copied().flatten().collect();
        renewed.sort_unstable();
        renewed.dedup();
        let closing = got[5].expect("the token spoke until then");
        ensure!(renewed.len() == got[..5].iter().flatten().count(), "a token twice: {got:?}");
        ensure!(renewed.iter().all(|t| *t < closing), "renewed after the release: {got:?}");
        let held = "SELECT count(*) FROM fence.leases WHERE state = 'held'";
        ensure!(admin.granted(held)? == 0);
    }
    nothing_is_left(&mut admin)
}
