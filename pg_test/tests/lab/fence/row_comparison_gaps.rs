//! The gaps of a fence that only compares row with row. Each scenario is played twice: without the
//! binding the stale write lands, with it the write is refused (or the take-over waits for it).

use crate::support::test_database::{shows, TestDatabase, ORDERS};
use pg_test::{ensure, lab_test, Lab, Result, Session};

const UNBOUND: &[&str] = &[
    "",
    "mode => 'monotonic'",
    "events => 'insert,update,delete,truncate'",
    "verify => true, events => 'insert,update'",
];
const BOUND: &[&str] = &[
    "lease => 'order:{id}'",
    "lease => 'order:{id}', mode => 'strict'",
    "lease => 'order:{id}', verify => true, always => true",
];

/// Plays a scenario on a fresh row under each kind of fence.
fn play(
    lab: &Lab,
    scenario: fn(&mut TestDatabase, &mut Session, bool) -> Result<()>,
) -> Result<()> {
    let kinds = UNBOUND.iter().map(|a| (a, false)).chain(BOUND.iter().map(|a| (a, true)));
    for (arguments, bound) in kinds {
        let mut db = TestDatabase::new(lab)?;
        db.run(ORDERS)?;
        db.protect(arguments)?;
        let mut stale_worker = db.another()?;
        scenario(&mut db, &mut stale_worker, bound)
            .map_err(|error| error.context(format!("fence_protect('orders', {arguments})")))?;
    }
    Ok(())
}

/// The stale write: it lands where the table is not bound, and does not where it is.
fn stale(stale_worker: &mut Session, sql: &str, bound: bool) -> Result<()> {
    if bound {
        stale_worker.refused(sql, "PF004").map(drop)
    } else {
        stale_worker.run(sql)
    }
}

#[lab_test]
fn between_the_grant_and_its_first_write_the_older_token_lands_unless_bound(
    lab: &Lab,
) -> Result<()> {
    play(lab, |db, stale_worker, bound| {
        let t33 = db.grant("order:1")?;
        let t34 = db.take_over("order:1")?;
        stale(stale_worker, &format!("UPDATE orders SET v = 33, fence = {t33}"), bound)?;
        db.run(&format!("UPDATE orders SET v = v + 1, fence = {t34}"))?;
        shows(db, "SELECT v FROM orders", if bound { "1" } else { "34" })
    })
}

#[lab_test]
fn a_row_that_the_new_holder_read_changes_under_it_unless_bound(lab: &Lab) -> Result<()> {
    play(lab, |db, stale_worker, bound| {
        let t33 = db.grant("order:1")?;
        let t34 = db.take_over("order:1")?;
        db.run(&format!(
            "CREATE TABLE report (v int); BEGIN; SELECT lease_guard('order:1', {t34})"
        ))?;
        db.run("INSERT INTO report SELECT v FROM orders WHERE id = 1")?;
        stale(stale_worker, &format!("UPDATE orders SET v = 33, fence = {t33}"), bound)?;
        db.run("INSERT INTO report SELECT v FROM orders WHERE id = 1; COMMIT")?;
        shows(db, "SELECT count(DISTINCT v) FROM report", if bound { "1" } else { "2" })
    })
}

#[lab_test]
fn a_write_that_commits_late_is_overlooked_unless_bound(lab: &Lab) -> Result<()> {
    play(lab, |db, stale_worker, bound| {
        let t33: i64 = db.one("SELECT lease_acquire('order:1', ttl => '1 h')", &[])?;
        stale_worker.run(&format!("BEGIN; UPDATE orders SET v = 33, fence = {t33}"))?;
        // Frozen here; its lease ends, and somebody else looks at the row.
        db.run("SELECT lease_revoke('order:1')")?;
        let next: Option<i64> = db.one("SELECT lease_acquire('order:1', ttl => '1 h')", &[])?;
        ensure!(next.is_none() == bound, "the take-over {next:?} must wait only where bound");
        let seen: i32 = db.one("SELECT v FROM orders", &[])?;
        stale_worker.run("COMMIT")?;
        let then: i32 = db.one("SELECT v FROM orders", &[])?;
        if bound {
            db.grant("order:1")?;
        } else {
            ensure!((seen, then) == (0, 33), "the new holder saw {seen}, and it became {then}");
        }
        Ok(())
    })
}

#[lab_test]
fn a_deleted_row_comes_back_by_a_stale_insert_unless_bound(lab: &Lab) -> Result<()> {
    play(lab, |db, stale_worker, bound| {
        let t33 = db.grant("order:1")?;
        let t34 = db.take_over("order:1")?;
        db.run(&format!("BEGIN; SET LOCAL pg_fence.token = '{t34}'; DELETE FROM orders; COMMIT"))?;
        stale(stale_worker, &format!("INSERT INTO orders VALUES (1, 33, {t33})"), bound)?;
        shows(db, "SELECT count(*) FROM orders", if bound { "0" } else { "1" })
    })
}

#[lab_test]
fn a_greater_token_of_another_lease_passes_unless_bound(lab: &Lab) -> Result<()> {
    play(lab, |db, stale_worker, bound| {
        let t34 = db.grant("order:1")?;
        db.run(&format!("UPDATE orders SET v = 34, fence = {t34}"))?;
        let other = db.grant("order:2")?;
        ensure!(other > t34);
        stale(
            stale_worker,
            &format!("UPDATE orders SET v = 35, fence = {other} WHERE id = 1"),
            bound,
        )?;
        shows(db, "SELECT v FROM orders", if bound { "34" } else { "35" })
    })
}

#[lab_test]
fn the_end_of_a_lease_stops_its_writer_only_where_bound(lab: &Lab) -> Result<()> {
    play(lab, |db, stale_worker, bound| {
        let t33 = db.grant("order:1")?;
        db.run("SELECT lease_revoke('order:1')")?;
        stale(stale_worker, &format!("UPDATE orders SET v = 33, fence = {t33}"), bound)
    })
}
