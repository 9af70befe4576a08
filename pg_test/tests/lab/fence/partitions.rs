//! Updates that move a row to another partition: the legitimate one passes, the stale one does not.

use crate::support::test_database::{shows, TestDatabase};
use pg_test::{ensure, lab_test, Lab, Result};

const TABLE: &str = "
    CREATE TABLE orders (fence bigint, id int, region text, v int DEFAULT 0, PRIMARY KEY (id, region))
        PARTITION BY LIST (region);
    CREATE TABLE eu PARTITION OF orders FOR VALUES IN ('eu');
    CREATE TABLE far PARTITION OF orders FOR VALUES IN ('us', 'asia') PARTITION BY LIST (region);
    CREATE TABLE us (v int DEFAULT 0, gone text, region text NOT NULL, id int NOT NULL, fence bigint);
    ALTER TABLE us DROP COLUMN gone;
    ALTER TABLE far ATTACH PARTITION us FOR VALUES IN ('us');
    CREATE TABLE asia PARTITION OF far FOR VALUES IN ('asia');
    INSERT INTO orders (id, region) VALUES (1, 'eu');
";
const ROWS: &str = "SELECT tableoid::regclass, id, region, v, fence FROM orders ORDER BY id";
const EVENTS: &[&str] = &[
    "update",
    "update,delete",
    "insert,update",
    "update,delete,truncate",
    "insert,update,delete,truncate",
];

fn db(lab: &Lab, arguments: &str) -> Result<TestDatabase> {
    let mut db = TestDatabase::new(lab)?;
    db.run(TABLE)?;
    db.protect(arguments)?;
    Ok(db)
}

fn set(token: i64, sql: &str) -> String {
    format!("SET LOCAL pg_fence.token = '{token}'; {sql}")
}

#[lab_test]
fn a_move_is_judged_as_the_update_that_it_is(lab: &Lab) -> Result<()> {
    let mut db = db(lab, "")?;
    let (a, b, c) = (db.token()?, db.token()?, db.token()?);
    db.run(&format!("UPDATE orders SET fence = {b}"))?;
    for mode in ["strict", "monotonic"] {
        for events in EVENTS {
            for further in ["", ", verify => true", ", always => true"] {
                if further.contains("verify") && !events.starts_with("insert,update,delete") {
                    continue; // refused, for what moves ends as an insert
                }
                db.protect(&format!("mode => '{mode}', events => '{events}'{further}"))?;
                let named = |t: i64| {
                    format!("UPDATE orders SET region = 'us', v = 7, fence = {t} WHERE id = 1")
                };
                let unnamed = "UPDATE orders SET region = 'us', v = 7 WHERE id = 1";
                let landed = format!("us|1|us|7|{c}");
                let equal =
                    if mode == "strict" { "PF001".to_owned() } else { format!("us|1|us|7|{b}") };
                for (sql, wanted) in [
                    (named(c), &*landed),
                    (set(c, unnamed), &*landed),
                    (set(a, &named(c)), &*landed),
                    (set(b, &named(c)), &*landed),
                    (set(c, &named(c)), &*landed),
                    (named(a), "PF001"),
                    (set(a, unnamed), "PF001"),
                    (set(c, &named(a)), "PF001"),
                    (named(b), &*equal),
                    (set(b, unnamed), &*equal),
                    (unnamed.to_owned(), "PF002"),
                    (named(c + 1), "PF003"),
                    (set(c + 1, unnamed), "PF003"),
                ] {
                    db.comes_to(&sql, ROWS, wanted)
                        .map_err(|e| e.context(format!("{mode} {events}{further}")))?;
                }
            }
        }
    }
    shows(&mut db, ROWS, &format!("eu|1|eu|0|{b}"))
}

#[lab_test]
fn a_move_of_a_bound_row_is_judged_as_the_update_that_it_is(lab: &Lab) -> Result<()> {
    let mut db = db(lab, "")?;
    let old = db.grant("order:1")?;
    db.run(&format!("UPDATE orders SET fence = {old}"))?;
    let new = db.take_over("order:1")?;
    let foreign = db.token()?;
    for mode in ["strict", "monotonic"] {
        for events in EVENTS {
            for further in ["", ", verify => true"] {
                if further.contains("verify") && !events.starts_with("insert,update,delete") {
                    continue;
                }
                db.protect(&format!(
                    "lease => 'order:{{id}}', mode => '{mode}', events => '{events}'{further}"
                ))?;
                let named = |t: i64| {
                    format!("UPDATE orders SET region = 'us', v = 7, fence = {t} WHERE id = 1")
                };
                let unnamed = "UPDATE orders SET region = 'us', v = 7 WHERE id = 1";
                let guard = |sql: &str| format!("SELECT lease_guard('order:1', {new}); {sql}");
                let landed = format!("us|1|us|7|{new}");
                let refused = if mode == "strict" { "PF001" } else { "PF004" };
                for (sql, wanted) in [
                    (named(new), &*landed),
                    (set(new, unnamed), &*landed),
                    (set(old, &named(new)), &*landed),
                    (set(foreign, &named(new)), &*landed),
                    (guard(unnamed), &*landed),
                    (guard(&named(new)), &*landed),
                    (named(old), refused),
                    (set(old, unnamed), refused),
                    (named(foreign), "PF004"),
                    (set(foreign, unnamed), "PF004"),
                    (unnamed.to_owned(), "PF002"),
                ] {
                    db.comes_to(&sql, ROWS, wanted)
                        .map_err(|e| e.context(format!("{mode} {events}{further}")))?;
                }
            }
        }
    }
    shows(&mut db, ROWS, &format!("eu|1|eu|0|{old}"))
}

#[lab_test]
fn a_move_passes_beside_other_triggers(lab: &Lab) -> Result<()> {
    let mut db = db(lab, "events => 'insert,update,delete'")?;
    let (a, b, c) = (db.token()?, db.token()?, db.token()?);
    db.run(&format!("UPDATE orders SET fence = {b}"))?;
    // Users' triggers run SQL, and write to other fenced tables, before and after the fence.
    db.run(&format!(
        "CREATE TABLE log (line text); CREATE TABLE other (id int, v int, fence bigint); \
         INSERT INTO other VALUES (1, 0); SELECT fence_protect('other', mode => 'monotonic'); \
         CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             INSERT INTO log VALUES (TG_NAME || TG_OP); PERFORM count(*) FROM log; \
             UPDATE other SET v = v + 1, fence = {c}; \
             RETURN coalesce(NEW, OLD); END $$",
    ))?;
    let moving =
        |t: i64| format!("UPDATE orders SET region = 'us', v = 7, fence = {t} WHERE id = 1");
    for trigger in [
        "CREATE TRIGGER a_tell BEFORE INSERT OR UPDATE OR DELETE ON orders FOR EACH ROW EXECUTE FUNCTION tell()",
        "CREATE TRIGGER z_tell BEFORE INSERT OR UPDATE OR DELETE ON orders FOR EACH ROW EXECUTE FUNCTION tell()",
    ] {
        db.run(trigger)?;
        for (sql, wanted) in [
            (moving(c), &*format!("us|1|us|7|{c}")),
            (set(c, "UPDATE orders SET region = 'us', v = 7"), &*format!("us|1|us|7|{c}")),
            (moving(a), "PF001"),
        ] {
            db.comes_to(&sql, ROWS, wanted).map_err(|e| e.context(trigger))?;
        }
    }
    Ok(())
}

#[lab_test]
fn many_rows_move_in_one_statement(lab: &Lab) -> Result<()> {
    let mut db = db(lab, "events => 'update,delete'")?;
    db.run("INSERT INTO orders (id, region) SELECT n, 'eu' FROM generate_series(2, 300) AS n")?;
    let (a, b, c) = (db.token()?, db.token()?, db.token()?);
    db.run(&format!("UPDATE orders SET fence = {a}"))?;
    let count = "SELECT region, count(*), min(fence) FROM orders GROUP BY 1 ORDER BY 1";
    let half = |t: i64| {
        format!(
            "UPDATE orders SET region = CASE WHEN id % 2 = 0 THEN 'us' ELSE 'eu' END, fence = {t}"
        )
    };
    db.comes_to(&half(c), count, &format!("eu|150|{c} us|150|{c}"))?;
    db.run(&format!("UPDATE orders SET fence = {b} WHERE id = 200"))?;
    db.comes_to(&half(b), count, "PF001")?;
    db.run(&half(c))?;
    db.refused(&format!("UPDATE orders SET region = 'asia', fence = {b}"), "PF001")?;
    shows(&mut db, count, &format!("eu|150|{c} us|150|{c}"))
}

#[lab_test]
fn a_move_by_merge_is_judged(lab: &Lab) -> Result<()> {
    let mut db = db(lab, "events => 'insert,update,delete'")?;
    let (a, b, c) = (db.token()?, db.token()?, db.token()?);
    db.run(&format!("UPDATE orders SET fence = {b}"))?;
    let merge = |t: i64| {
        format!(
            "MERGE INTO orders USING (VALUES (1)) AS s (id) ON s.id = orders.id \
             WHEN MATCHED THEN UPDATE SET region = 'us', v = 7, fence = {t}"
        )
    };
    db.comes_to(&merge(c), ROWS, &format!("us|1|us|7|{c}"))?;
    db.comes_to(&merge(a), ROWS, "PF001")?;
    db.comes_to(&merge(b), ROWS, "PF001")
}

#[lab_test]
fn an_accepted_update_is_no_licence_for_a_delete(lab: &Lab) -> Result<()> {
    let mut db = db(lab, "events => 'update,delete'")?;
    db.run("INSERT INTO orders (id, region) VALUES (2, 'eu')")?;
    let (a, b) = (db.token()?, db.token()?);
    db.run(&format!("UPDATE orders SET fence = {a}"))?;
    let update = format!("UPDATE orders SET v = 7, fence = {b} WHERE id = 1");
    for sql in [
        format!("{update}; DELETE FROM orders WHERE id = 1"),
        format!("{update}; DELETE FROM orders WHERE id = 2"),
        format!("WITH u AS ({update} RETURNING id) DELETE FROM orders WHERE id = 2"),
        format!("UPDATE orders SET region = 'us', fence = {b} WHERE id = 1; DELETE FROM orders"),
        format!("WITH u AS (UPDATE orders SET region = 'us', fence = {b} WHERE id = 1 RETURNING id) DELETE FROM orders WHERE id = 2"),
        format!("SAVEPOINT s; {update}; ROLLBACK TO s; DELETE FROM orders WHERE id = 1"),
    ] {
        db.comes_to(&sql, ROWS, "PF002")?;
    }
    Ok(())
}

const BEHIND: &str =
    "CREATE TRIGGER zz BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION behind()";

#[lab_test]
fn an_update_that_is_skipped_is_no_licence_for_a_delete(lab: &Lab) -> Result<()> {
    for verify in ["", ", verify => true"] {
        let mut db = db(lab, &format!("events => 'insert,update,delete'{verify}"))?;
        db.run(
            "CREATE FUNCTION behind() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        )?;
        db.run(BEHIND)?;
        let token = db.token()?;
        let update = format!("UPDATE orders SET v = 7, fence = {token} WHERE id = 1");
        for sql in [
            format!("{update}; DELETE FROM orders WHERE id = 1"),
            format!("SAVEPOINT s; {update}; RELEASE s; DELETE FROM orders WHERE id = 1"),
        ] {
            db.comes_to(&sql, ROWS, "PF002")?;
        }
    }
    Ok(())
}

#[lab_test]
fn a_move_passes_beside_a_trigger_that_catches_an_error(lab: &Lab) -> Result<()> {
    let mut db = db(lab, "events => 'update,delete'")?;
    db.run(
        "CREATE FUNCTION behind() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
             BEGIN PERFORM 1 / 0; EXCEPTION WHEN division_by_zero THEN NULL; END;
             RETURN NEW;
         END$$",
    )?;
    db.run(BEHIND)?;
    let token = db.token()?;
    db.run(&format!("UPDATE orders SET region = 'us', fence = {token}"))?;
    let moved: String = db.one("SELECT tableoid::regclass::text FROM orders", &[])?;
    ensure!(moved == "us", "{moved}");
    Ok(())
}

#[lab_test]
fn a_move_that_changes_the_lease_needs_both(lab: &Lab) -> Result<()> {
    let mut db = db(lab, "lease => 'region:{region}'")?;
    let (eu, us) = (db.grant("region:eu")?, db.grant("region:us")?);
    db.run(&format!("UPDATE orders SET fence = {eu}"))?;
    let moving = |t: i64| format!("UPDATE orders SET region = 'us', fence = {t}");
    for one in [eu, us] {
        db.comes_to(&moving(one), ROWS, "PF004")?;
        db.comes_to(&set(one, "UPDATE orders SET region = 'us'"), ROWS, "PF004")?;
    }
    db.run(&format!("SELECT lease_release('region:eu', {eu}), lease_release('region:us', {us})"))?;
    let both: i64 =
        db.one("SELECT lease_acquire_all('{region:us,region:eu}', 'test', '1 h')", &[])?;
    db.comes_to(&moving(both), ROWS, &format!("us|1|us|0|{both}"))?;
    db.comes_to(&set(both, "UPDATE orders SET region = 'us'"), ROWS, &format!("us|1|us|0|{both}"))
}

#[lab_test]
fn a_write_to_the_partition_itself_is_fenced(lab: &Lab) -> Result<()> {
    let mut db = db(lab, "")?;
    let (a, b, c) = (db.token()?, db.token()?, db.token()?);
    db.run(&format!("UPDATE orders SET fence = {b}, region = 'us'"))?;
    db.comes_to(&format!("UPDATE us SET v = 7, fence = {c}"), ROWS, &format!("us|1|us|7|{c}"))?;
    db.comes_to(&set(c, "UPDATE far SET v = 7"), ROWS, &format!("us|1|us|7|{c}"))?;
    db.comes_to(&set(c, "UPDATE far SET region = 'asia'"), ROWS, &format!("asia|1|asia|0|{c}"))?;
    db.comes_to(&format!("UPDATE us SET v = 7, fence = {a}"), ROWS, "PF001")?;
    db.comes_to("UPDATE us SET v = 7", ROWS, "PF002")?;
    db.comes_to("DELETE FROM us", ROWS, "PF002")
}

#[lab_test]
fn truncate_is_refused_on_every_level(lab: &Lab) -> Result<()> {
    let mut db = db(lab, "")?;
    for table in ["orders", "eu", "far", "us", "asia"] {
        db.comes_to(&format!("TRUNCATE {table}"), ROWS, "PF005")?;
        db.comes_to(&format!("TRUNCATE ONLY {table}"), ROWS, "PF005").or_else(|error| {
            // Postgres itself refuses ONLY for a partitioned table.
            db.comes_to(&format!("TRUNCATE ONLY {table}"), ROWS, "42809").map_err(|_| error)
        })?;
    }
    Ok(())
}
