//! `verify`: what other BEFORE triggers make of a row that the fence has judged; and `always`.

use crate::support::test_database::{later_trigger, shows, TestDatabase, ORDERS, ROW};
use pg_test::{lab_test, Lab, Result};

#[lab_test]
fn a_later_trigger_lowers_the_fence_unless_verified(lab: &Lab) -> Result<()> {
    for mode in ["strict", "monotonic"] {
        let mut db = TestDatabase::orders(lab, &format!("mode => '{mode}'"))?;
        let (a, b, c, d) = (db.token()?, db.token()?, db.token()?, db.token()?);
        db.run(&format!("UPDATE orders SET fence = {b}"))?;
        let verified =
            format!("mode => '{mode}', verify => true, events => 'insert,update,delete'");
        for (value, by_verify) in [
            (a.to_string(), "PF001"),
            (b.to_string(), "PF001"),
            ("NULL".to_owned(), "PF002"),
            (d.to_string(), "PF001"),
            ((1i64 << 60).to_string(), "PF001"),
        ] {
            db.protect(&format!("mode => '{mode}'"))?;
            later_trigger(&mut db, &format!("NEW.fence := {value}"))?;
            let shown = if value == "NULL" { "-" } else { &value };
            let update = format!("UPDATE orders SET v = 7, fence = {c}");
            db.comes_to(&update, ROW, &format!("7|{shown}"))?;
            db.protect(&verified)?;
            let by_setting = format!("SET LOCAL pg_fence.token = '{c}'; UPDATE orders SET v = 7");
            let insert = format!("INSERT INTO orders VALUES (2, 7, {c})");
            for sql in [update, by_setting, insert] {
                db.comes_to(&sql, ROW, by_verify).or_else(|error| {
                    // A token that was never issued may be called so.
                    db.comes_to(&sql, ROW, "PF003").map_err(|_| error)
                })?;
            }
        }
        shows(&mut db, ROW, &format!("0|{b}"))?;
    }
    Ok(())
}

#[lab_test]
fn a_later_trigger_changes_the_lease_unless_verified(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "lease => 'order:{id}'")?;
    let token = db.grant("order:1")?;
    db.grant("order:9")?;
    later_trigger(&mut db, "NEW.id := 9")?;
    let nine = "SELECT v, fence FROM orders WHERE id = 9";
    let update = format!("UPDATE orders SET v = 7, fence = {token} WHERE id = 1");
    db.comes_to(&update, nine, &format!("7|{token}"))?;
    db.protect("lease => 'order:{id}', verify => true")?;
    db.comes_to(&update, nine, "PF004")?;
    let guarded = format!("SELECT lease_guard('order:1', {token}); UPDATE orders SET v = 7");
    db.comes_to(&guarded, nine, "PF004")?;
    db.comes_to(
        &format!("DELETE FROM orders; INSERT INTO orders VALUES (1, 7, {token})"),
        nine,
        "PF002",
    )?;
    let again = format!("SET LOCAL pg_fence.token = '{token}'; DELETE FROM orders; INSERT INTO orders VALUES (1, 7)");
    db.comes_to(&again, nine, "PF004")
}

#[lab_test]
fn a_legitimate_write_passes_the_second_check(lab: &Lab) -> Result<()> {
    for (mode, lease) in
        [("strict", ""), ("monotonic", ""), ("monotonic", ", lease => 'order:{id}'")]
    {
        let arguments =
            format!("mode => '{mode}', verify => true, events => 'insert,update,delete'{lease}");
        let mut db = TestDatabase::orders(lab, &arguments)?;
        later_trigger(&mut db, "NEW.v := NEW.v + 100")?;
        db.run("INSERT INTO orders VALUES (2)").err();
        let mut token = db.grant("order:1")?;
        for write in [
            "UPDATE orders SET v = 1, fence = {t} WHERE id = 1",
            "BEGIN; SET LOCAL pg_fence.token = '{t}'; UPDATE orders SET v = 1 WHERE id = 1; COMMIT",
            "BEGIN; SELECT lease_guard('order:1', {t}); UPDATE orders SET v = 1 WHERE id = 1; COMMIT",
            "INSERT INTO orders VALUES (1, 0, {t}) ON CONFLICT (id) DO UPDATE SET v = 1, fence = excluded.fence",
            "MERGE INTO orders USING (VALUES (1)) AS s (id) ON s.id = orders.id WHEN MATCHED THEN UPDATE SET v = 1, fence = {t}",
            "BEGIN; SET LOCAL pg_fence.token = '{t}'; SAVEPOINT s; DELETE FROM orders; ROLLBACK TO s; UPDATE orders SET v = 1; COMMIT",
        ] {
            db.run(&write.replace("{t}", &token.to_string()))?;
            shows(&mut db, ROW, &format!("101|{token}"))?;
            token = db.one("SELECT lease_renew('order:1', $1)", &[&token])?;
        }
        if mode == "monotonic" {
            let twice = format!("UPDATE orders SET v = 1, fence = {token}");
            db.run(&format!("{twice}; {twice}"))?;
        }
        db.run(&format!("UPDATE orders SET fence = lease_release('order:1', {token})"))?;
    }
    Ok(())
}

const PARTITIONED: &str = "
    CREATE TABLE orders (id int, region text, v int DEFAULT 0, fence bigint) PARTITION BY LIST (region);
    CREATE TABLE eu PARTITION OF orders FOR VALUES IN ('eu');
    CREATE TABLE us PARTITION OF orders FOR VALUES IN ('us');
    INSERT INTO orders VALUES (1, 'eu');
";

#[lab_test]
fn a_row_that_moves_is_verified_too(lab: &Lab) -> Result<()> {
    for events in ["", ", events => 'insert,update,delete'"] {
        let mut db = TestDatabase::new(lab)?;
        db.run(PARTITIONED)?;
        // What moves ends as an insert, without which there is nothing to verify it by.
        let sql = "SELECT fence_protect('orders', verify => true, events => 'update,delete')";
        db.refused(sql, "22023")?;
        db.protect(&format!("verify => true{events}"))?;
        let (a, b, c) = (db.token()?, db.token()?, db.token()?);
        db.run(&format!("UPDATE orders SET fence = {b}"))?;
        let moving = format!("UPDATE orders SET region = 'us', v = 7, fence = {c}");
        db.comes_to(&moving, "SELECT v, fence FROM us", &format!("7|{c}"))?;
        for (value, sqlstate) in [(a.to_string(), "PF001"), ("NULL".to_owned(), "PF002")] {
            later_trigger(&mut db, &format!("NEW.fence := {value}"))?;
            db.comes_to(&moving, "SELECT v, fence FROM us", sqlstate)
                .map_err(|error| error.context(format!("verify{events}")))?;
        }
    }
    Ok(())
}

#[lab_test]
fn a_later_trigger_of_a_partition_is_verified_too(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(PARTITIONED)?;
    db.protect("verify => true, events => 'insert,update,delete'")?;
    let (a, b, c) = (db.token()?, db.token()?, db.token()?);
    db.run(&format!("UPDATE orders SET fence = {b}"))?;
    db.run(&format!(
        "CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS $$ \
         BEGIN NEW.fence := {a}; RETURN NEW; END $$; \
         CREATE TRIGGER zz BEFORE INSERT OR UPDATE ON us FOR EACH ROW EXECUTE FUNCTION meddle()"
    ))?;
    let count = "SELECT count(*), max(fence) FROM orders";
    db.comes_to(&format!("UPDATE orders SET v = 7, fence = {c}"), count, &format!("1|{c}"))?;
    db.comes_to(&format!("UPDATE orders SET region = 'us', fence = {c}"), count, "PF001")?;
    db.comes_to(&format!("INSERT INTO orders VALUES (2, 'us', 0, {c})"), count, "PF001")
}

#[lab_test]
fn an_earlier_trigger_s_value_is_judged_as_presented(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(ORDERS)?;
    db.protect("verify => true")?;
    let (a, b, c) = (db.token()?, db.token()?, db.token()?);
    db.run(&format!("UPDATE orders SET fence = {b}"))?;
    for (value, wanted) in
        [(a, "PF001".to_owned()), (c, format!("7|{c}")), (1 << 60, "PF003".to_owned())]
    {
        db.run(&format!(
            "CREATE OR REPLACE FUNCTION earlier() RETURNS trigger LANGUAGE plpgsql AS $$ \
             BEGIN NEW.fence := {value}; RETURN NEW; END $$; \
             CREATE OR REPLACE TRIGGER aa BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION earlier()"
        ))?;
        db.comes_to("UPDATE orders SET v = 7", ROW, &wanted)?;
    }
    Ok(())
}

#[lab_test]
fn always_fires_where_triggers_are_switched_off(lab: &Lab) -> Result<()> {
    for always in [false, true] {
        let mut db = TestDatabase::orders(lab, &format!("always => {always}, verify => true"))?;
        let (a, b) = (db.token()?, db.token()?);
        db.run(&format!("UPDATE orders SET fence = {b}; SET session_replication_role = replica"))?;
        let stale = format!("UPDATE orders SET v = 7, fence = {a}");
        let wanted = if always { "PF001".to_owned() } else { format!("7|{a}") };
        db.comes_to(&stale, ROW, &wanted)?;
        let c = db.token()?;
        db.comes_to(&format!("UPDATE orders SET v = 7, fence = {c}"), ROW, &format!("7|{c}"))?;
    }
    Ok(())
}
