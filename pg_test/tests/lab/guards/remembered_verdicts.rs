//! A verdict that outlives the ttl. The rest is in remembered_verdicts.script.

use crate::support::test_database::{bound, granted, shows, ROW};
use pg_test::calls::within_ttl;
use pg_test::{ensure, lab_test, Calls, Lab, Result};

#[lab_test]
fn a_verdict_stands_for_its_transaction_though_the_ttl_passes(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    let mut other = db.another()?;
    for opening in ["SELECT lease_guard('order:1', {t})", "UPDATE orders SET v = 1, fence = {t}"] {
        let older = db.grant("order:1")?;
        db.run(&format!("SELECT lease_release('order:1', {older})"))?;
        let token = within_ttl(|ttl| {
            let first = db.acquire("order:1", ttl)?;
            let Some(renewed) = db.renew("order:1", first)? else { return Ok(None) };
            let opening = opening.replace("{t}", &first.to_string());
            let opened = db.run(&format!("BEGIN; {opening}"));
            if opened.is_err() {
                db.run("ROLLBACK")?;
            }
            Ok(opened.map(|()| renewed).ok())
        })?;
        other.wait_expired("order:1")?;
        shows(&mut other, "SELECT state FROM lease_info('order:1')", "expired")?;
        ensure!(!granted(&mut other, "order:1")?, "a guarded lease was taken over");
        // It is the grant's: another of its tokens is as good, and that of an older grant is not.
        db.run("SAVEPOINT s")?;
        db.refused(&format!("SELECT lease_guard('order:1', {older})"), "PF004")?;
        db.run("ROLLBACK TO s")?;
        db.run(&format!(
            "UPDATE orders SET v = 7, fence = {token}; SELECT lease_guard('order:1', {token})"
        ))?;
        db.run("COMMIT")?;
        // Then it is over for good.
        db.refused(&format!("UPDATE orders SET v = 8, fence = {token}"), "PF004")?;
        let next = db.grant("order:1")?;
        db.run(&format!("SELECT lease_release('order:1', {next})"))?;
        shows(&mut db, ROW, &format!("7|{token}"))?;
    }
    Ok(())
}
