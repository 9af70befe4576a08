//! Verdicts: what a transaction has found out once, it relies on as long as its lock stands.

use crate::support::test_database::{bound, granted, shown, shows, TestDatabase, ORDERS, ROW};
use pg_test::calls::within_ttl;
use pg_test::{ensure, lab_test, Calls, Context, Lab, Result};

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

/// The lease of order 1 is taken over after the verdict went, and the old token must be refused in the
/// very transaction that had it.
fn verdict_is_gone(db: &mut TestDatabase, old: i64) -> Result<()> {
    let mut other = db.another()?;
    other.run("SELECT lease_revoke('order:1')")?;
    let new: Option<i64> = other.one("SELECT lease_acquire('order:1', ttl => '1 h')", &[])?;
    let new = new.context("the lock outlived the savepoint")?;
    db.run("SAVEPOINT again")?;
    db.refused(&format!("UPDATE orders SET v = 9, fence = {old}"), "PF004")?;
    db.run("ROLLBACK TO again")?;
    db.refused(&format!("SELECT lease_guard('order:1', {old})"), "PF004")?;
    db.run("ROLLBACK TO again")?;
    db.refused("UPDATE orders SET v = 9", "PF002")?;
    db.run("ROLLBACK")?;
    other.run(&format!("SELECT lease_release('order:1', {new})"))
}

#[lab_test]
fn a_verdict_goes_with_a_rolled_back_savepoint(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    for opening in [
        "SAVEPOINT s; SELECT lease_guard('order:1', {t}); ROLLBACK TO s",
        "SAVEPOINT s; UPDATE orders SET v = 1, fence = {t}; ROLLBACK TO s",
        "SAVEPOINT s; SAVEPOINT inner1; UPDATE orders SET v = 1, fence = {t}; RELEASE inner1; ROLLBACK TO s",
        "SAVEPOINT s; SET LOCAL pg_fence.token = '{t}'; UPDATE orders SET v = 1; UPDATE orders SET v = 2; ROLLBACK TO s",
        "DO $$ BEGIN BEGIN UPDATE orders SET v = 1, fence = {t}; RAISE 'no'; EXCEPTION WHEN others THEN NULL; END; END $$",
    ] {
        let old = db.grant("order:1")?;
        db.run(&format!("BEGIN; {}", opening.replace("{t}", &old.to_string())))?;
        verdict_is_gone(&mut db, old).context(opening)?;
    }
    Ok(())
}

#[lab_test]
fn a_verdict_does_not_outlive_its_transaction(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    for end in [
        "COMMIT",
        "ROLLBACK",
        "PREPARE TRANSACTION 'verdict'; COMMIT PREPARED 'verdict'",
        "PREPARE TRANSACTION 'verdict'; ROLLBACK PREPARED 'verdict'",
    ] {
        let old = db.grant("order:1")?;
        db.run(&format!("BEGIN; UPDATE orders SET v = 1, fence = {old}"))?;
        for part in end.split("; ") {
            db.run(part)?;
        }
        db.take_over("order:1")?;
        db.comes_to(&format!("UPDATE orders SET v = 7, fence = {old}"), ROW, "PF004")?;
        db.comes_to("UPDATE orders SET v = 7", ROW, "PF002")?;
        db.run("SELECT lease_revoke('order:1')")?;
    }
    Ok(())
}

#[lab_test]
fn the_check_costs_once_per_lease_and_transaction(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(ORDERS)?;
    db.run("INSERT INTO orders SELECT n FROM generate_series(2, 2000) AS n")?;
    db.protect("lease => 'batch'")?;
    let token = db.grant("batch")?;
    let read =
        "SELECT coalesce(sum(seq_tup_read + idx_tup_fetch), 0) FROM pg_stat_xact_user_tables \
                WHERE schemaname = 'fence' AND relname = 'lease'";
    db.run("BEGIN; UPDATE orders SET v = 1, fence = 0 WHERE false")?;
    db.run(&format!("UPDATE orders SET v = 1, fence = {token} WHERE id = 1"))?;
    let locks = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND objsubid = 20550";
    let (locked, fetched) = (shown(&mut db, locks)?, shown(&mut db, read)?);
    ensure!(locked == "1", "{locked} locks");
    db.run(&format!("UPDATE orders SET v = 2, fence = {token}"))?;
    db.run("UPDATE orders SET v = 3; DELETE FROM orders WHERE id > 1000")?;
    shows(&mut db, locks, &locked)?;
    shows(&mut db, read, &fetched)?;
    db.run("COMMIT")
}
