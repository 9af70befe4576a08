//! Bound rows whose fence is greater than the token that speaks for their lease: by an own renewal, a fellow under a shared
//! lease, or from elsewhere. They can be written, and keep what they have seen.

use crate::support::test_database::{later_trigger, shows, TestDatabase, ORDERS, ROW};
use crate::support::write_statements::{DELETES, TOUCHES, UPDATES, VIEWS_AND_FUNCTIONS};
use pg_test::{edition, ensure, lab_test, Lab, Result};

/// A fence that no server ever gives: 2^62.
const GARBAGE: i64 = 1 << 62;

/// The ways to bind a table in which a token that speaks is never stale.
const BOUND: &[&str] = &[
    "lease => 'order:{id}'",
    "lease => 'order:{id}', verify => true",
    "lease => 'order:{id}', mode => 'managed'",
    "lease => 'order:{id}', mode => 'managed', verify => true",
];

fn set(token: i64, sql: &str) -> String {
    format!("SET LOCAL pg_fence.token = '{token}'; {sql}")
}

/// Puts a fence into the rows of `orders`, past the triggers.
fn force(db: &mut TestDatabase, fence: i64) -> Result<()> {
    db.run(&format!(
        "SET session_replication_role = replica; UPDATE orders SET fence = {fence}; \
         RESET session_replication_role"
    ))
}

#[lab_test]
fn an_own_renewal_locks_nobody_out(lab: &Lab) -> Result<()> {
    for arguments in BOUND {
        let mut db = TestDatabase::orders(lab, arguments)?;
        let first = db.grant("order:1")?;
        let renewed: i64 = db.one("SELECT lease_renew('order:1', $1)", &[&first])?;
        let write = |token, v| {
            format!("BEGIN; {}; COMMIT", set(token, &format!("UPDATE orders SET v = {v}")))
        };
        db.run(&write(renewed, 1))?;
        db.run(&write(first, 2))?;
        shows(&mut db, ROW, &format!("2|{renewed}"))?;
        for path in ["UPDATE orders SET v = 7", "UPDATE orders SET v = 7, fence = fence"] {
            let guarded = format!("SELECT lease_guard('order:1', {first}); {path}");
            db.comes_to(&guarded, ROW, &format!("7|{renewed}"))?;
        }
        if !arguments.contains("managed") {
            let in_column = format!("UPDATE orders SET v = 7, fence = {first}");
            db.comes_to(&in_column, ROW, &format!("7|{renewed}"))?;
        }
        db.comes_to(&set(first, "DELETE FROM orders"), ROW, "")?;
        // Who takes over ends them all.
        let next = db.take_over("order:1")?;
        for token in [first, renewed] {
            let stale = set(token, "UPDATE orders SET v = 8");
            let sqlstate = if token < renewed { "PF001" } else { "PF004" };
            db.comes_to(&stale, ROW, sqlstate)?;
        }
        db.run(&write(next, 3))?;
        for token in [first, renewed] {
            db.comes_to(&set(token, "UPDATE orders SET v = 8"), ROW, "PF001")?;
            db.comes_to(&set(token, "DELETE FROM orders"), ROW, "PF001")?;
        }
        shows(&mut db, ROW, &format!("3|{next}"))?;
    }
    Ok(())
}

#[lab_test]
fn fellows_do_not_lock_each_other_out(lab: &Lab) -> Result<()> {
    for mode in ["shared => true", "slots => 2"] {
        for arguments in BOUND {
            let mut db = TestDatabase::orders(lab, arguments)?;
            let acquire = format!("SELECT lease_acquire('order:1', ttl => '1 h', {mode})");
            let (mut one, mut two) = (db.another()?, db.another()?);
            let (a, b): (i64, i64) = (one.one(&acquire, &[])?, two.one(&acquire, &[])?);
            let write =
                |token, v| format!("BEGIN; {}", set(token, &format!("UPDATE orders SET v = {v}")));
            one.run(&format!("{}; COMMIT", write(a, 1)))?;
            two.run(&format!("{}; COMMIT", write(b, 2)))?;
            one.run(&write(a, 3))?;
            // It is its own grant that it guards, not the fellow's.
            two.run(&format!("SELECT lease_release('order:1', {b})"))?;
            one.run("COMMIT")?;
            shows(&mut db, ROW, &format!("3|{b}"))?;
            if !arguments.contains("managed") {
                let in_column = format!("UPDATE orders SET v = 7, fence = {a}");
                db.comes_to(&in_column, ROW, &format!("7|{b}"))?;
            }
            db.comes_to(&set(b, "UPDATE orders SET v = 4"), ROW, "PF004")?;
            // An exclusive grant ends it for both.
            db.take_over("order:1")?;
            db.comes_to(&set(a, "UPDATE orders SET v = 4"), ROW, "PF001")?;
        }
    }
    Ok(())
}

#[lab_test]
fn a_fence_that_no_server_gives_is_no_obstacle(lab: &Lab) -> Result<()> {
    for arguments in BOUND {
        let managed = arguments.contains("managed");
        let mut db = TestDatabase::orders(lab, arguments)?;
        db.run(VIEWS_AND_FUNCTIONS)?;
        let token = db.grant("order:1")?;
        let (foreign, unknown) = (db.token()?, token + 1_000_000);
        force(&mut db, GARBAGE)?;
        let landed = format!("7|{GARBAGE}");
        for path in UPDATES.iter().map(|path| path.replace("{t}", &token.to_string())) {
            if managed {
                db.comes_to(&path, ROW, "PF002")?;
                db.comes_to(&set(token, &path), ROW, &landed)?;
            } else {
                db.comes_to(&path, ROW, &landed)?;
            }
        }
        for path in TOUCHES {
            db.comes_to(path, ROW, "PF002")?;
            db.comes_to(&set(token, path), ROW, &landed)?;
            db.comes_to(&set(foreign, path), ROW, "PF001")?;
            db.comes_to(&set(unknown, path), ROW, "PF003")?;
        }
        for path in DELETES {
            db.comes_to(path, ROW, "PF002")?;
            db.comes_to(&set(token, path), ROW, "")?;
            db.comes_to(&set(foreign, path), ROW, "PF001")?;
            db.comes_to(&set(unknown, path), ROW, "PF003")?;
        }
        if !managed {
            // Nobody presents it, for it was never drawn.
            for same in ["fence", &GARBAGE.to_string()] {
                let named = format!("UPDATE orders SET v = 7, fence = {same}");
                db.comes_to(&named, ROW, "PF003")?;
            }
        }
        // The statement is told what is stored.
        db.run("BEGIN")?;
        let returning = set(token, "UPDATE orders SET v = 8 RETURNING fence");
        ensure!(db.try_rows(&returning)?.last() == Some(&vec![Some(GARBAGE.to_string())]));
        db.run("COMMIT")?;
        db.take_over("order:1")?;
        db.comes_to(&set(token, "UPDATE orders SET v = 9"), ROW, "PF001")?;
    }
    Ok(())
}

#[lab_test]
fn strict_and_unbound_rows_compare_all_the_same(lab: &Lab) -> Result<()> {
    for arguments in [
        "",
        "mode => 'monotonic'",
        "mode => 'managed'",
        "lease => 'order:{id}', mode => 'strict'",
        "lease => 'order:{id}', mode => 'strict', verify => true",
    ] {
        let mut db = TestDatabase::orders(lab, arguments)?;
        let first = db.grant("order:1")?;
        let renewed: i64 = db.one("SELECT lease_renew('order:1', $1)", &[&first])?;
        for stored in [renewed, GARBAGE] {
            force(&mut db, stored)?;
            db.comes_to(&set(first, "UPDATE orders SET v = 7"), ROW, "PF001")?;
            db.comes_to(&set(first, "DELETE FROM orders"), ROW, "PF001")?;
            let guarded =
                format!("SELECT lease_guard('order:1', {first}); UPDATE orders SET v = 7");
            db.comes_to(&guarded, ROW, "PF001")?;
            if !arguments.contains("managed") {
                let in_column = format!("UPDATE orders SET v = 7, fence = {first}");
                db.comes_to(&in_column, ROW, "PF001")?;
            }
        }
    }
    Ok(())
}

#[lab_test]
fn an_apply_worker_s_fence_compares_the_order_alone(lab: &Lab) -> Result<()> {
    for mode in ["monotonic", "managed"] {
        let arguments = format!("lease => 'order:{{id}}', mode => '{mode}', always => true");
        let mut db = TestDatabase::orders(lab, &arguments)?;
        let token = db.grant("order:1")?;
        db.run(&format!("BEGIN; {}; COMMIT", set(token, "UPDATE orders SET v = 1")))?;
        let applied = "SET LOCAL session_replication_role = replica";
        let lower = format!("{applied}; UPDATE orders SET v = 7, fence = {}", token - 1);
        db.comes_to(&lower, ROW, "PF001")?;
        // What the publisher's row has kept is what it had.
        let kept = format!("{applied}; UPDATE orders SET v = 7, fence = {token}");
        db.comes_to(&kept, ROW, &format!("7|{token}"))?;
    }
    Ok(())
}

#[lab_test]
fn a_row_that_changes_its_lease_needs_both_behind_its_fence_too(lab: &Lab) -> Result<()> {
    for arguments in BOUND {
        let mut db = TestDatabase::orders(lab, arguments)?;
        let (one, two) = (db.grant("order:1")?, db.grant("order:2")?);
        force(&mut db, GARBAGE)?;
        let rename = "UPDATE orders SET id = 2";
        let rows = "SELECT id, fence FROM orders";
        for token in [one, two] {
            db.comes_to(&set(token, rename), rows, "PF001")?;
        }
        let guards = format!("SELECT lease_guard('order:1', {one}), lease_guard('order:2', {two})");
        db.comes_to(&format!("{guards}; {rename}"), rows, "PF001")?;
        db.run(&format!(
            "SELECT lease_release('order:1', {one}), lease_release('order:2', {two})"
        ))?;
        let both: i64 = db.one("SELECT lease_acquire_all('{order:1,order:2}', 't', '1 h')", &[])?;
        db.comes_to(&set(both, rename), rows, &format!("2|{GARBAGE}"))?;
    }
    Ok(())
}

#[lab_test]
fn rows_of_one_statement_keep_or_get_each_its_own(lab: &Lab) -> Result<()> {
    for further in ["", ", verify => true", ", mode => 'managed'"] {
        let mut db = TestDatabase::new(lab)?;
        db.run(ORDERS)?;
        db.run("INSERT INTO orders SELECT n FROM generate_series(2, 6) AS n")?;
        db.protect(&format!("lease => 'batch'{further}"))?;
        let first = db.grant("batch")?;
        let renewed: i64 = db.one("SELECT lease_renew('batch', $1)", &[&first])?;
        db.run(&format!(
            "SET session_replication_role = replica; \
             UPDATE orders SET fence = CASE id WHEN 2 THEN {renewed} WHEN 4 THEN {GARBAGE} WHEN 5 THEN {first} END; \
             RESET session_replication_role"
        ))?;
        let column = if further.contains("managed") { "1" } else { &first.to_string() };
        db.run(&format!(
            "BEGIN; {}; COMMIT",
            set(first, &format!("UPDATE orders SET v = 1, fence = {column}"))
        ))?;
        shows(
            &mut db,
            "SELECT v, fence FROM orders ORDER BY id",
            &format!("1|{first} 1|{renewed} 1|{first} 1|{GARBAGE} 1|{first} 1|{first}"),
        )?;
        // A stale one still stops the statement where it comes last.
        db.run("SELECT lease_revoke('batch')")?;
        db.refused(&format!("BEGIN; {}", set(first, "UPDATE orders SET v = 2")), "PF004")
            .map(drop)?;
        db.run("ROLLBACK")?;
    }
    Ok(())
}

#[lab_test]
fn a_guard_of_a_smaller_token_excludes_a_take_over(lab: &Lab) -> Result<()> {
    for arguments in BOUND {
        let mut db = TestDatabase::orders(lab, arguments)?;
        let token = db.grant("order:1")?;
        force(&mut db, GARBAGE)?;
        db.run(&format!("BEGIN; {}", set(token, "UPDATE orders SET v = 7")))?;
        let mut other = db.another()?;
        other.run("SELECT lease_revoke('order:1')")?;
        let next: Option<i64> = other.one("SELECT lease_acquire('order:1')", &[])?;
        ensure!(next.is_none(), "taken over while it was written: {arguments}");
        db.run("SAVEPOINT s; UPDATE orders SET v = 8; ROLLBACK TO s; COMMIT")?;
        let next: Option<i64> = other.one("SELECT lease_acquire('order:1')", &[])?;
        ensure!(next.is_some());
    }
    Ok(())
}

#[lab_test]
fn after_a_jump_a_smaller_token_is_told_to_renew(lab: &Lab) -> Result<()> {
    for arguments in BOUND {
        let mut db = TestDatabase::orders(lab, arguments)?;
        let first = db.grant("order:1")?;
        let renewed: i64 = db.one("SELECT lease_renew('order:1', $1)", &[&first])?;
        db.run(&format!("BEGIN; {}; COMMIT", set(renewed, "UPDATE orders SET v = 1")))?;
        db.run("SELECT fence_new_epoch()")?;
        db.run("BEGIN")?;
        let fault = db.refused(&set(first, "UPDATE orders SET v = 2"), "PF004")?;
        ensure!(fault.json()?["renew_first"] == true, "{fault}");
        db.run("ROLLBACK")?;
        db.run(&format!("SELECT lease_renew('order:1', {first})"))?;
        db.comes_to(&set(first, "UPDATE orders SET v = 2"), ROW, &format!("2|{renewed}"))?;
    }
    Ok(())
}

#[lab_test]
fn the_hint_of_a_stale_token_fits_the_table(lab: &Lab) -> Result<()> {
    let (renew, bind) = ("use lease_renew's token, or monotonic mode", "bind the table");
    let stop = "A newer holder may have taken the lease over";
    for (arguments, said) in [
        ("", [stop, renew].as_slice()),
        ("mode => 'monotonic'", &[stop, bind]),
        ("mode => 'managed'", &[stop, bind]),
        ("lease => 'order:{id}', mode => 'strict'", &[stop, renew]),
        ("lease => 'order:{id}'", &[stop]),
        ("lease => 'order:{id}', mode => 'managed'", &[stop]),
    ] {
        let mut db = TestDatabase::orders(lab, arguments)?;
        let old = db.grant("order:1")?;
        let new = db.take_over("order:1")?;
        force(&mut db, new)?;
        db.run("BEGIN")?;
        let fault = db.refused(&set(old, "UPDATE orders SET v = 2"), "PF001")?;
        db.run("ROLLBACK")?;
        let hint = fault.hint.as_deref().unwrap_or_default();
        for words in [stop, renew, bind] {
            ensure!(hint.contains(words) == said.contains(&words), "{arguments}: {fault}");
        }
    }
    // A holder that wrote an old value back is not told of a newer one, though the row has a greater fence than its own.
    let mut db = TestDatabase::orders(lab, BOUND[0])?;
    let old = db.grant("order:1")?;
    let own = db.take_over("order:1")?;
    force(&mut db, GARBAGE)?;
    db.run(&format!("BEGIN; SELECT lease_guard('order:1', {own})"))?;
    let fault = db.refused(&format!("UPDATE orders SET v = 2, fence = {old}"), "PF001")?;
    let hint = fault.hint.as_deref().unwrap_or_default();
    ensure!(!hint.contains(stop) && hint.contains("leave the column out"), "{fault}");
    Ok(())
}

#[lab_test]
fn the_second_check_lets_a_kept_fence_pass_and_no_other(lab: &Lab) -> Result<()> {
    for arguments in BOUND.iter().filter(|arguments| arguments.contains("verify")) {
        let mut db = TestDatabase::orders(lab, arguments)?;
        let first = db.grant("order:1")?;
        let renewed: i64 = db.one("SELECT lease_renew('order:1', $1)", &[&first])?;
        let nine = db.grant("order:9")?;
        for stored in [renewed, GARBAGE] {
            db.run("DROP TRIGGER IF EXISTS zz ON orders")?;
            force(&mut db, stored)?;
            let write = set(first, "UPDATE orders SET v = 7");
            let landed = format!("7|{stored}");
            db.comes_to(&write, ROW, &landed)?;
            db.comes_to(&format!("{write}; {write}"), ROW, &landed)?;
            for harmless in ["NEW.v := 7", "NEW.fence := OLD.fence"] {
                later_trigger(&mut db, harmless)?;
                db.comes_to(&write, ROW, &landed)?;
            }
            for value in [first, stored - 1, stored + 1, nine, 0, -1] {
                later_trigger(&mut db, &format!("NEW.fence := {value}"))?;
                db.comes_to(&write, ROW, "PF001")?;
            }
            later_trigger(&mut db, "NEW.fence := NULL")?;
            db.comes_to(&write, ROW, "PF002")?;
            // Nor another lease's row, though that lease is guarded, too.
            later_trigger(&mut db, "NEW.id := 9")?;
            db.comes_to(&write, ROW, "PF004")?;
            let guarded = format!(
                "SELECT lease_guard('order:9', {nine}), lease_guard('order:1', {first}); \
                 UPDATE orders SET v = 7"
            );
            db.comes_to(&guarded, ROW, "PF004")?;
        }
        // A greater one is put back to what was stored: that is not what was accepted.
        db.run("DROP TRIGGER zz ON orders")?;
        force(&mut db, first)?;
        later_trigger(&mut db, "NEW.fence := OLD.fence")?;
        db.comes_to(&set(renewed, "UPDATE orders SET v = 7"), ROW, "PF001")?;
    }
    Ok(())
}

const PARTITIONED: &str = "
    CREATE TABLE orders (fence bigint, id int, region text, v int DEFAULT 0) PARTITION BY LIST (region);
    CREATE TABLE eu PARTITION OF orders FOR VALUES IN ('eu');
    CREATE TABLE us (v int DEFAULT 0, gone text, region text, id int, fence bigint);
    ALTER TABLE us DROP COLUMN gone;
    ALTER TABLE orders ATTACH PARTITION us FOR VALUES IN ('us');
    INSERT INTO orders (id, region) VALUES (1, 'eu'), (2, 'eu');
";

#[lab_test]
fn a_row_that_moves_keeps_its_greater_fence(lab: &Lab) -> Result<()> {
    for events in ["update", "update,delete", "insert,update", "insert,update,delete,truncate"] {
        for further in
            ["", ", verify => true", ", mode => 'managed'", ", mode => 'managed', verify => true"]
        {
            if !further.is_empty() && events != "insert,update,delete,truncate" {
                continue;
            }
            let mut db = TestDatabase::new(lab)?;
            db.run(PARTITIONED)?;
            db.protect(&format!("lease => 'order:{{id}}', events => '{events}'{further}"))?;
            let first = db.grant("order:1")?;
            let renewed: i64 = db.one("SELECT lease_renew('order:1', $1)", &[&first])?;
            let second = db.grant("order:2")?;
            for stored in [renewed, GARBAGE] {
                // There a move of such a row is refused: what carries its fence is a setting, which anybody may set.
                if edition::is_lite() && stored == GARBAGE {
                    continue;
                }
                force(&mut db, stored)?;
                let moving = "UPDATE orders SET region = 'us', v = 7 WHERE id = 1";
                let rows = "SELECT tableoid::regclass, v, fence FROM orders WHERE id = 1";
                let landed = format!("us|7|{stored}");
                let mut comes_to = |sql: &str, wanted: &str| {
                    let context = format!("events {events}{further}");
                    db.comes_to(sql, rows, wanted).map_err(|error| error.context(context))
                };
                comes_to(&set(first, moving), &landed)?;
                comes_to(&format!("SELECT lease_guard('order:1', {first}); {moving}"), &landed)?;
                comes_to(&set(second, moving), if second < stored { "PF001" } else { "PF004" })?;
                comes_to(moving, "PF002")?;
                let merge = "MERGE INTO orders USING (VALUES (1)) AS s (id) ON s.id = orders.id \
                             WHEN MATCHED THEN UPDATE SET region = 'us', v = 7";
                comes_to(&set(first, merge), &landed)?;
                if !further.contains("managed") {
                    let named = format!(
                        "UPDATE orders SET region = 'us', v = 7, fence = {first} WHERE id = 1"
                    );
                    comes_to(&named, &landed)?;
                }
                // Each with its own token.
                let both = format!(
                    "SELECT lease_guard('order:1', {first}), lease_guard('order:2', {second}); \
                     UPDATE orders SET region = 'us', v = 7"
                );
                comes_to(&both, &landed)?;
            }
        }
    }
    Ok(())
}

#[lab_test]
fn a_move_is_no_licence_for_a_fence_that_was_never_drawn(lab: &Lab) -> Result<()> {
    for further in ["", ", verify => true"].into_iter().filter(|way| edition::has(way)) {
        let mut db = TestDatabase::new(lab)?;
        db.run(PARTITIONED)?;
        db.protect(&format!("lease => 'order:{{id}}'{further}"))?;
        let (first, third) = (db.grant("order:1")?, db.grant("order:3")?);
        force(&mut db, GARBAGE)?;
        let rows = "SELECT id, tableoid::regclass, fence FROM orders ORDER BY id";
        let guards =
            format!("SELECT lease_guard('order:1', {first}), lease_guard('order:3', {third})");
        for (region, insert) in [("eu", "us"), ("us", "us"), ("us", "eu")] {
            let sql = format!(
                "{guards}; WITH u AS (UPDATE orders SET region = '{region}' WHERE id = 1 RETURNING id) \
                 INSERT INTO orders (id, region, fence) SELECT 3, '{insert}', {GARBAGE} FROM u"
            );
            db.comes_to(&sql, rows, "PF003").map_err(|error| error.context(further))?;
        }
        // A trigger on the way must not change what is kept, where that is verified.
        if further.is_empty() {
            continue;
        }
        let moving = set(first, "UPDATE orders SET region = 'us' WHERE id = 1");
        for value in [first, third, GARBAGE - 1] {
            later_trigger(&mut db, &format!("NEW.fence := {value}"))?;
            db.comes_to(&moving, rows, "PF001")?;
        }
        later_trigger(&mut db, "IF TG_OP = 'INSERT' THEN NEW.id := 3; END IF")?;
        db.comes_to(&moving, rows, "PF004")?;
        db.comes_to(
            &format!("{guards}; UPDATE orders SET region = 'us' WHERE id = 1"),
            rows,
            "PF004",
        )?;
    }
    Ok(())
}
