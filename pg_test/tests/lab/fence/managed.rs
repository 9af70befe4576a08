//! `managed` mode: whatever a statement writes into the fence column is replaced, and only the guard of the
//! row's lease or the setting presents a token.

use crate::support::test_database::{shows, TestDatabase, ORDERS, ROW};
use crate::support::write_statements::{DELETES, INSERTS, TOUCHES, UPDATES, VIEWS_AND_FUNCTIONS};
use pg_test::{ensure, lab_test, Background, Fault, Lab, Result};
use std::io::Write;

const MANAGED: &str = "mode => 'managed'";
const HUGE: i64 = 1 << 60;

fn set(token: i64, sql: &str) -> String {
    format!("SET LOCAL pg_fence.token = '{token}'; {sql}")
}

/// A managed table whose only row has the second of three tokens.
fn with_three_tokens(lab: &Lab, arguments: &str) -> Result<(TestDatabase, [i64; 3])> {
    let mut db = TestDatabase::orders(lab, arguments)?;
    let tokens = [db.token()?, db.token()?, db.token()?];
    db.run(&set(tokens[1], "UPDATE orders SET v = 0"))?;
    shows(&mut db, ROW, &format!("0|{}", tokens[1]))?;
    Ok((db, tokens))
}

#[lab_test]
fn what_a_statement_writes_into_the_column_counts_for_nothing(lab: &Lab) -> Result<()> {
    let (mut db, [a, b, c]) = with_three_tokens(lab, MANAGED)?;
    let values = [a, b, c, 0, -1, HUGE].map(|value| value.to_string());
    let values = values.iter().map(String::as_str).chain(["NULL", "fence", "fence + 1"]);
    for value in values {
        let write = format!("UPDATE orders SET v = 7, fence = {value} WHERE id = 1");
        db.comes_to(&write, ROW, "PF002")?;
        db.comes_to(&set(a, &write), ROW, "PF001")?;
        db.comes_to(&set(b, &write), ROW, &format!("7|{b}"))?;
        db.comes_to(&set(c, &write), ROW, &format!("7|{c}"))?;
        db.comes_to(&set(HUGE, &write), ROW, "PF003")?;
        // A refused write left the row to the next one.
        db.comes_to(&set(c, &format!("{write}; {write}; {write}")), ROW, &format!("7|{c}"))?;
        let older = format!("{}; {}", set(c, &write), set(b, &write));
        db.comes_to(&older, ROW, "PF001")?;
    }
    // What was shown is what is stored.
    let returning = format!("UPDATE orders SET fence = {a} RETURNING fence");
    db.run("BEGIN")?;
    ensure!(db.try_rows(&set(c, &returning))?.last() == Some(&vec![Some(c.to_string())]));
    db.run("ROLLBACK")?;
    shows(&mut db, ROW, &format!("0|{b}"))
}

#[lab_test]
fn every_path_presents_the_setting_and_nothing_else(lab: &Lab) -> Result<()> {
    for arguments in [MANAGED, "mode => 'managed', verify => true"] {
        let (mut db, [a, b, c]) = with_three_tokens(lab, arguments)?;
        db.run(VIEWS_AND_FUNCTIONS)?;
        for value in [a, b, c, HUGE].map(|value| value.to_string()) {
            let updates = UPDATES.iter().map(|path| path.replace("{t}", &value));
            for path in updates.chain(TOUCHES.iter().map(ToString::to_string)) {
                db.comes_to(&path, ROW, "PF002")?;
                db.comes_to(&set(a, &path), ROW, "PF001")?;
                db.comes_to(&set(b, &path), ROW, &format!("7|{b}"))?;
                db.comes_to(&set(c, &path), ROW, &format!("7|{c}"))?;
                db.comes_to(&set(HUGE, &path), ROW, "PF003")?;
            }
        }
        for path in DELETES {
            db.comes_to(path, ROW, "PF002")?;
            db.comes_to(&set(a, path), ROW, "PF001")?;
            db.comes_to(&set(b, path), ROW, "")?;
            db.comes_to(&set(c, path), ROW, "")?;
            db.comes_to(&set(HUGE, path), ROW, "PF003")?;
        }
        let row = "SELECT v, fence FROM orders WHERE id = 2";
        for path in INSERTS {
            for value in ["NULL".to_owned(), a.to_string(), HUGE.to_string()] {
                let path = path.replace("{t}", &value);
                db.comes_to(&path, row, if value == "NULL" { "7|-" } else { "PF002" })?;
                db.comes_to(&set(a, &path), row, &format!("7|{a}"))?;
                db.comes_to(&set(HUGE, &path), row, "PF003")?;
            }
        }
        db.comes_to("TRUNCATE orders", ROW, "PF005")?;
        db.comes_to(&set(c, "TRUNCATE orders"), ROW, "PF005")?;
        shows(&mut db, "TABLE orders", &format!("1|0|{b}"))?;
    }
    Ok(())
}

#[lab_test]
fn every_path_to_a_bound_row_presents_its_guard_or_the_setting(lab: &Lab) -> Result<()> {
    for further in ["", ", verify => true"] {
        let arguments = format!("mode => 'managed', lease => 'order:{{id}}'{further}");
        let mut db = TestDatabase::orders(lab, &arguments)?;
        db.run(VIEWS_AND_FUNCTIONS)?;
        let old = db.grant("order:1")?;
        db.run(&set(old, "UPDATE orders SET v = 0"))?;
        let new = db.take_over("order:1")?;
        let (second, foreign) = (db.grant("order:2")?, db.token()?);
        let guarded = |sql: &str| format!("SELECT lease_guard('order:1', {new}); {sql}");
        let landed = format!("7|{new}");
        for value in [old, new, foreign, HUGE].map(|value| value.to_string()) {
            let updates = UPDATES.iter().map(|path| path.replace("{t}", &value));
            for path in updates.chain(TOUCHES.iter().map(ToString::to_string)) {
                db.comes_to(&path, ROW, "PF002")?;
                db.comes_to(&set(new, &path), ROW, &landed)?;
                db.comes_to(&guarded(&path), ROW, &landed)?;
                // The guard of the row's own lease comes before whatever else is set.
                db.comes_to(&guarded(&set(foreign, &path)), ROW, &landed)?;
                for stale in [old, second, foreign] {
                    db.comes_to(&set(stale, &path), ROW, "PF004")?;
                }
            }
        }
        for path in DELETES {
            db.comes_to(path, ROW, "PF002")?;
            db.comes_to(&guarded(path), ROW, "")?;
            db.comes_to(&set(old, path), ROW, "PF004")?;
        }
        let row = "SELECT v, fence FROM orders WHERE id = 2";
        for path in INSERTS {
            for value in ["NULL".to_owned(), second.to_string(), foreign.to_string()] {
                let path = path.replace("{t}", &value);
                db.comes_to(&path, row, "PF002")?;
                db.comes_to(&set(second, &path), row, &format!("7|{second}"))?;
                db.comes_to(&set(new, &path), row, "PF004")?;
            }
        }
        // A key that changes needs the old and the new lease, under one token.
        let rename = "UPDATE orders SET id = 2, fence = NULL";
        db.comes_to(&set(new, rename), row, "PF004")?;
        db.run(&format!(
            "SELECT lease_release('order:1', {new}), lease_release('order:2', {second})"
        ))?;
        let both: i64 = db.one("SELECT lease_acquire_all('{order:1,order:2}', 't', '1 h')", &[])?;
        db.comes_to(&set(both, rename), row, &format!("0|{both}"))?;
    }
    Ok(())
}

#[lab_test]
fn a_row_is_created_without_a_token_only_where_no_lease_guards_it(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, MANAGED)?;
    let rows = "SELECT id, fence FROM orders WHERE id > 1 ORDER BY id";
    // What is no token is replaced, so that the first to come may write the row. A fence is not blanked in silence.
    let mixed = "INSERT INTO orders VALUES (2, 0, NULL), (3, 0, 0), (4, 0, -1)";
    db.comes_to(mixed, rows, "2|- 3|- 4|-")?;
    db.run(mixed)?;
    for fence in [1, HUGE] {
        let restored = format!("INSERT INTO orders VALUES (5, 0, NULL), (6, 0, {fence})");
        let refusal = db.refused(&restored, "PF002")?;
        let hint = refusal.hint.as_deref().unwrap_or_default();
        ensure!(hint.contains("pg_restore") && hint.contains("session_replication_role"), "{hint}");
    }
    let token = db.token()?;
    db.comes_to(
        &set(token, "UPDATE orders SET v = 7 WHERE id > 1"),
        rows,
        &format!("2|{token} 3|{token} 4|{token}"),
    )?;
    db.comes_to("UPDATE orders SET v = 7 WHERE id = 2", rows, "PF002")?;
    db.protect("lease => 'order:{id}'")?;
    shows(
        &mut db,
        "SELECT pg_get_triggerdef(oid) LIKE '%INSERT%(''fence'', ''managed'', ''order:{id}'')' \
         FROM pg_trigger WHERE tgname = 'fenced'",
        "t",
    )?;
    db.comes_to("INSERT INTO orders VALUES (5, 0, NULL)", rows, "PF002")?;
    let five = db.grant("order:5")?;
    let insert = "INSERT INTO orders VALUES (5, 0, 1)";
    db.comes_to(&set(five, insert), "SELECT fence FROM orders WHERE id = 5", &five.to_string())
}

#[lab_test]
fn a_row_whose_key_the_database_makes_is_created_without_its_lease(lab: &Lab) -> Result<()> {
    for verify in ["", ", verify => true"] {
        let mut db = TestDatabase::new(lab)?;
        db.run(
            "CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v int, fence bigint)",
        )?;
        db.protect(&format!(
            "mode => 'managed', lease => 'order:{{id}}', events => 'update,delete,truncate'{verify}"
        ))?;
        // The web application creates, with no right on leases.
        let shop = db.database().role("shop")?;
        db.run(&format!("GRANT SELECT, INSERT, UPDATE ON orders TO {shop}"))?;
        let mut web = db.database().connect_as(&shop)?;
        let foreign = db.token()?;
        for fence in ["NULL", "0", "-1", "NULL"] {
            web.run(&format!("INSERT INTO orders (v, fence) VALUES (0, {fence})"))?;
        }
        for fence in [1, HUGE, foreign] {
            let brought = format!(
                "INSERT INTO orders (id, v, fence) OVERRIDING SYSTEM VALUE VALUES (9, 0, {fence})"
            );
            db.comes_to(&brought, "SELECT FROM orders WHERE id = 9", "PF002")?;
            db.comes_to(&set(foreign, &brought), "SELECT FROM orders WHERE id = 9", "PF002")?;
        }
        // A token that is at hand is no token of the new row's lease.
        web.run(&format!("BEGIN; {}; COMMIT", set(foreign, "INSERT INTO orders (v) VALUES (0)")))?;
        let rows = "SELECT id, v, fence FROM orders ORDER BY id";
        shows(&mut db, rows, "1|0|- 2|0|- 3|0|- 4|0|- 5|0|-")?;
        web.refused("UPDATE orders SET v = 9 WHERE id = 1", "PF002")?;
        web.refused("INSERT INTO orders (id, v) VALUES (1, 9)", "428C9")?;
        // Workers process, each order under its lease.
        let token = db.grant("order:3")?;
        db.run(&set(token, "UPDATE orders SET v = 7 WHERE id = 3"))?;
        db.refused(&set(token, "UPDATE orders SET v = 7 WHERE id = 4"), "PF004")?;
        db.refused(&set(foreign, "UPDATE orders SET v = 7 WHERE id = 4"), "PF004")?;
        let upsert = "INSERT INTO orders (id, v) OVERRIDING SYSTEM VALUE VALUES (3, 8) \
                      ON CONFLICT (id) DO UPDATE SET v = excluded.v";
        db.comes_to(upsert, rows, "PF002")?;
        db.run(&set(token, upsert))?;
        shows(&mut db, rows, &format!("1|0|- 2|0|- 3|8|{token} 4|0|- 5|0|-"))?;
        db.take_over("order:3")?;
        db.refused(&set(token, "DELETE FROM orders WHERE id = 3"), "PF004")?;
    }
    Ok(())
}

#[lab_test]
fn a_row_that_is_created_freely_and_moves_keeps_the_token_of_its_update(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE TABLE orders (id int, region text, v int DEFAULT 0, fence bigint) PARTITION BY LIST (region);
         CREATE TABLE eu PARTITION OF orders FOR VALUES IN ('eu');
         CREATE TABLE us PARTITION OF orders FOR VALUES IN ('us')",
    )?;
    db.protect("mode => 'managed', lease => 'order:{id}', events => 'update,delete'")?;
    db.run("INSERT INTO orders VALUES (1, 'eu', 0, 0), (2, 'eu', 0, NULL), (3, 'us', 0, 0)")?;
    let all = "SELECT id, tableoid::regclass, fence FROM orders ORDER BY id";
    shows(&mut db, all, "1|eu|- 2|eu|- 3|us|-")?;
    let (one, two) = (db.grant("order:1")?, db.grant("order:2")?);
    // Under two guards each row has its own token, also where it arrives.
    let guards = format!("SELECT lease_guard('order:1', {one}), lease_guard('order:2', {two})");
    db.comes_to(
        &format!("{guards}; UPDATE orders SET region = 'us', fence = NULL WHERE id < 3"),
        all,
        &format!("1|us|{one} 2|us|{two} 3|us|-"),
    )?;
    // What is inserted beside it has none.
    db.comes_to(
        &format!(
            "{guards}; WITH moved AS (UPDATE orders SET region = 'us' WHERE id = 1 RETURNING id) \
             INSERT INTO orders SELECT id + 8, 'us', 0, NULL FROM moved"
        ),
        all,
        &format!("1|us|{one} 2|eu|- 3|us|- 9|us|-"),
    )
}

#[lab_test]
fn a_closing_token_has_no_place_in_the_column(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "mode => 'managed', lease => 'order:{id}'")?;
    let token = db.grant("order:1")?;
    let last = format!("UPDATE orders SET v = 7, fence = lease_release('order:1', {token})");
    db.refused(&last, "PF002")?;
    // Write, then release, in one transaction.
    db.run(&set(
        token,
        &format!("UPDATE orders SET v = 7, fence = NULL; SELECT lease_release('order:1', {token})"),
    ))?;
    shows(&mut db, ROW, &format!("7|{token}"))?;
    db.refused(&set(token, "UPDATE orders SET v = 8"), "PF004").map(drop)
}

#[lab_test]
fn on_conflict_and_merge_are_judged_action_by_action(lab: &Lab) -> Result<()> {
    let (mut db, [a, b, c]) = with_three_tokens(lab, MANAGED)?;
    let rows = "SELECT id, v, fence FROM orders ORDER BY id";
    let upsert = format!(
        "INSERT INTO orders VALUES (1, 7, {HUGE}), (2, 8, NULL) \
         ON CONFLICT (id) DO UPDATE SET v = excluded.v, fence = excluded.fence"
    );
    let merge = "MERGE INTO orders USING (VALUES (1, 7), (2, 8)) AS s (id, v) ON s.id = orders.id \
                 WHEN MATCHED THEN UPDATE SET v = s.v, fence = 1 \
                 WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.v, 1)";
    for sql in [upsert.as_str(), merge] {
        db.comes_to(sql, rows, "PF002")?;
        db.comes_to(&set(a, sql), rows, "PF001")?;
        db.comes_to(&set(b, sql), rows, &format!("1|7|{b} 2|8|{b}"))?;
        db.comes_to(&set(c, sql), rows, &format!("1|7|{c} 2|8|{c}"))?;
    }
    db.comes_to(
        "INSERT INTO orders VALUES (1, 7, 0), (2, 8, 0) ON CONFLICT DO NOTHING",
        rows,
        &format!("1|0|{b} 2|8|-"),
    )?;
    let delete = "MERGE INTO orders USING (VALUES (1)) AS s (id) ON s.id = orders.id \
                  WHEN MATCHED AND v > 5 THEN UPDATE SET fence = 1 WHEN MATCHED THEN DELETE";
    db.comes_to(delete, rows, "PF002")?;
    db.comes_to(&set(b, delete), rows, "")
}

#[lab_test]
fn copy_is_an_insert_whose_column_is_replaced(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, MANAGED)?;
    let token = db.token()?;
    let mut copy = |token: &str, lines: &str| -> Result<Result<u64, Fault>> {
        db.run(&format!("SET pg_fence.token = '{token}'"))?;
        let mut writer = db.copy_in("COPY orders (id, v, fence) FROM STDIN")?;
        writer.write_all(lines.as_bytes())?;
        Ok(writer.finish().map_err(Fault::from))
    };
    ensure!(copy("", "2\t7\t0\n3\t7\t\\N\n")?? == 2);
    pg_test::fault::expect_err(copy("", "7\t7\t\\N\n8\t7\t1\n")?, "PF002")?;
    ensure!(copy(&token.to_string(), &format!("4\t7\t1\n5\t7\t\\N\n6\t7\t{HUGE}\n"))?? == 3);
    pg_test::fault::expect_err(copy(&HUGE.to_string(), "7\t7\t1\n")?, "PF003")?;
    shows(
        &mut db,
        "SELECT id, fence FROM orders WHERE id > 1 ORDER BY id",
        &format!("2|- 3|- 4|{token} 5|{token} 6|{token}"),
    )
}

#[lab_test]
fn a_cascade_presents_the_setting(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE TABLE parent (id int PRIMARY KEY); INSERT INTO parent VALUES (1);
         CREATE TABLE orders (parent_id int REFERENCES parent ON DELETE CASCADE ON UPDATE CASCADE, fence bigint);
         INSERT INTO orders VALUES (1, NULL)",
    )?;
    db.protect(MANAGED)?;
    let (a, b, c) = (db.token()?, db.token()?, db.token()?);
    db.run(&set(b, "UPDATE orders SET fence = NULL"))?;
    let rows = "SELECT parent_id, fence FROM orders";
    for (sql, at_b, at_c) in [
        ("UPDATE parent SET id = 2", format!("2|{b}"), format!("2|{c}")),
        ("DELETE FROM parent", String::new(), String::new()),
    ] {
        db.comes_to(sql, rows, "PF002")?;
        db.comes_to(&set(a, sql), rows, "PF001")?;
        db.comes_to(&set(b, sql), rows, &at_b)?;
        db.comes_to(&set(c, sql), rows, &at_c)?;
    }
    Ok(())
}

#[lab_test]
fn a_row_that_moves_keeps_the_token_of_its_update(lab: &Lab) -> Result<()> {
    for verify in ["", ", verify => true"] {
        for lease in ["", ", lease => 'order:{id}'"] {
            let mut db = TestDatabase::new(lab)?;
            db.run(
                "CREATE TABLE orders (id int, region text, v int DEFAULT 0, fence bigint) PARTITION BY LIST (region);
                 CREATE TABLE eu PARTITION OF orders FOR VALUES IN ('eu');
                 CREATE TABLE us (fence bigint, v int DEFAULT 0, region text, id int);
                 ALTER TABLE orders ATTACH PARTITION us FOR VALUES IN ('us');
                 INSERT INTO orders VALUES (1, 'eu')",
            )?;
            db.protect(&format!("mode => 'managed'{lease}{verify}"))?;
            let (a, b) = (db.token()?, db.grant("order:1")?);
            db.run(&set(b, "UPDATE orders SET fence = 1"))?;
            let rows = "SELECT tableoid::regclass, v, fence FROM orders";
            for (value, later) in [
                ("fence", ""),
                ("NULL", ""),
                ("1", ""),
                ("1", "NEW.fence := 1"),
                ("1", "NEW.fence := NULL"),
            ] {
                if !later.is_empty() {
                    // It runs behind the fence of the partition that the row leaves.
                    db.run(&format!(
                        "CREATE OR REPLACE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS $$ \
                         BEGIN {later}; RETURN NEW; END $$; \
                         CREATE OR REPLACE TRIGGER zz BEFORE UPDATE ON eu FOR EACH ROW EXECUTE FUNCTION meddle()"
                    ))?;
                }
                let sql = format!("UPDATE orders SET region = 'us', v = 7, fence = {value}");
                db.comes_to(&sql, rows, "PF002")?;
                let stale = if lease.is_empty() { "PF001" } else { "PF001 or PF004" };
                let refused = db.try_out(&set(a, &sql), rows)?;
                ensure!(refused.is_err_and(|fault| stale.contains(&fault.sqlstate)));
                db.comes_to(&set(b, &sql), rows, &format!("us|7|{b}"))?;
            }
        }
    }
    Ok(())
}

#[lab_test]
fn what_was_accepted_is_what_must_be_stored(lab: &Lab) -> Result<()> {
    let (mut db, [a, b, c]) = with_three_tokens(lab, MANAGED)?;
    let insert = "INSERT INTO orders VALUES (2, 7, 0)";
    let two = "SELECT v, fence FROM orders WHERE id = 2";
    for value in [a.to_string(), b.to_string(), HUGE.to_string(), "NULL".to_owned()] {
        db.run(&format!(
            "CREATE OR REPLACE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS $$ \
             BEGIN NEW.fence := {value}; RETURN NEW; END $$; \
             CREATE OR REPLACE TRIGGER zz BEFORE INSERT OR UPDATE ON orders \
             FOR EACH ROW EXECUTE FUNCTION meddle()"
        ))?;
        let shown = if value == "NULL" { "-" } else { &value };
        let refused = if value == "NULL" { "PF002" } else { "PF001" };
        db.protect("verify => false")?;
        db.comes_to(&set(c, "UPDATE orders SET v = 7"), ROW, &format!("7|{shown}"))?;
        db.protect("verify => true")?;
        db.comes_to(&set(c, "UPDATE orders SET v = 7"), ROW, refused)?;
        db.comes_to(&set(c, insert), two, refused)?;
        // Without a token the row is to have none.
        db.comes_to(insert, two, if value == "NULL" { "7|-" } else { refused })?;
    }
    // An earlier trigger's value is replaced as the statement's is.
    db.run("DROP TRIGGER zz ON orders")?;
    db.run("CREATE TRIGGER aa BEFORE INSERT OR UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION meddle()")?;
    db.comes_to(&set(c, "UPDATE orders SET v = 7"), ROW, &format!("7|{c}"))?;
    db.comes_to(&set(c, insert), two, &format!("7|{c}"))
}

#[lab_test]
fn under_replica_nothing_is_replaced(lab: &Lab) -> Result<()> {
    let (mut db, [a, b, c]) = with_three_tokens(lab, "mode => 'managed', always => true")?;
    db.run("SET session_replication_role = replica")?;
    let two = "SELECT v, fence FROM orders WHERE id = 2";
    for value in [b, c, HUGE] {
        let update = format!("UPDATE orders SET v = 7, fence = {value}");
        db.comes_to(&update, ROW, &format!("7|{value}"))?;
        db.comes_to(&set(a, &update), ROW, &format!("7|{value}"))?;
        let insert = format!("INSERT INTO orders VALUES (2, 7, {value})");
        db.comes_to(&insert, two, &format!("7|{value}"))?;
        db.comes_to(&set(a, &insert), two, &format!("7|{value}"))?;
    }
    db.comes_to(&set(c, &format!("UPDATE orders SET fence = {a}")), ROW, "PF001")?;
    db.comes_to(&set(c, "UPDATE orders SET fence = NULL"), ROW, "PF002")?;
    db.comes_to(&set(c, "INSERT INTO orders VALUES (2, 7, NULL)"), two, "7|-")?;
    db.comes_to("DELETE FROM orders", ROW, "")
}

/// What an ORM's object does: it has read every column, and writes every column back.
fn save(fence: Option<i64>, v: i32) -> String {
    let fence = fence.map_or("NULL".to_owned(), |token| token.to_string());
    format!("UPDATE orders SET id = 1, v = {v}, fence = {fence} WHERE id = 1")
}

#[lab_test]
fn a_rightful_holder_saves_as_often_as_it_likes(lab: &Lab) -> Result<()> {
    for lease in ["", ", lease => 'order:{id}'"] {
        let mut db = TestDatabase::orders(lab, &format!("mode => 'managed'{lease}"))?;
        let older = db.grant("order:1")?;
        // Its object was read before the first save, and knows nothing of what was stamped since.
        for v in 1..4 {
            db.run(&set(older, &save(None, v)))?;
            shows(&mut db, ROW, &format!("{v}|{older}"))?;
        }
        let newer = db.take_over("order:1")?;
        for v in 4..7 {
            for read in [None, Some(older), Some(newer)] {
                db.run(&set(newer, &save(read, v)))?;
                shows(&mut db, ROW, &format!("{v}|{newer}"))?;
            }
        }
        // The older one refreshes first, and has the newer one's token in its object then.
        let refused = db.try_out(&set(older, &save(Some(newer), 9)), ROW)?;
        ensure!(refused.is_err_and(|f| f.sqlstate == "PF004" || f.sqlstate == "PF001"));
        shows(&mut db, ROW, &format!("6|{newer}"))?;
    }
    Ok(())
}

#[lab_test]
fn a_reader_that_writes_back_what_it_read_presents_nothing(lab: &Lab) -> Result<()> {
    // In the other modes the token that it has just read may pass for its own.
    let (mut db, [_, b, _]) = with_three_tokens(lab, "mode => 'monotonic'")?;
    db.comes_to(&save(Some(b), 7), ROW, &format!("7|{b}"))?;
    db.protect(MANAGED)?;
    db.comes_to(&save(Some(b), 7), ROW, "PF002")?;
    db.comes_to("UPDATE orders SET v = 7, fence = fence", ROW, "PF002")
}

#[lab_test]
fn a_write_that_waited_is_judged_by_the_row_as_it_is_then(lab: &Lab) -> Result<()> {
    let (mut db, [_, b, c]) = with_three_tokens(lab, MANAGED)?;
    for sql in [
        "UPDATE orders SET v = 7, fence = NULL WHERE id = 1",
        "DELETE FROM orders WHERE id = 1",
        "INSERT INTO orders VALUES (1, 7) ON CONFLICT (id) DO UPDATE SET v = 7, fence = excluded.fence",
        "MERGE INTO orders USING (VALUES (1)) AS s (id) ON s.id = orders.id WHEN MATCHED THEN UPDATE SET v = 7",
    ] {
        db.run("BEGIN")?;
        db.run(&set(c, "UPDATE orders SET v = 1"))?;
        let mut older = Background::connect(&db.database().conninfo())?;
        older.run("BEGIN")?;
        older.send(&set(b, sql))?;
        older.wait_until_blocked()?;
        db.run("COMMIT")?;
        older.refused("PF001")?;
        shows(&mut db, ROW, &format!("1|{c}"))?;
    }
    Ok(())
}

#[lab_test]
fn the_hint_says_what_became_of_the_column(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run("CREATE TABLE orders (id int PRIMARY KEY, v int, seen bigint); INSERT INTO orders VALUES (1, 0)")?;
    db.protect("'seen', mode => 'managed'")?;
    let token = db.token()?;
    db.run(&set(token, "UPDATE orders SET v = 1"))?;
    let mut hints = |sql: &str, sqlstate: &str, wanted: &[&str]| -> Result<()> {
        let fault = db.refused(sql, sqlstate)?;
        let hint = fault.hint.clone().unwrap_or_default();
        for part in wanted {
            ensure!(hint.contains(part), "{sql}: {fault}");
        }
        ensure!(fault.column.as_deref() == Some("seen"), "{fault}");
        Ok(())
    };
    let lost = "lease_renew or lease_release found the lease lost";
    let managed = "managed";
    hints("UPDATE orders SET v = 7", "PF002", &["\"seen\"", managed, "lease_guard", lost])?;
    hints(
        "UPDATE orders SET seen = 7",
        "PF002",
        &["whatever a statement writes there is ignored", managed],
    )?;
    hints("UPDATE orders SET seen = NULL", "PF002", &["is ignored", managed, lost])?;
    hints("DELETE FROM orders", "PF002", &["DELETE", "SET LOCAL pg_fence.token"])?;
    Ok(())
}

#[lab_test]
fn a_rightful_holder_is_not_told_of_a_newer_one(lab: &Lab) -> Result<()> {
    let newer = "newer holder may have taken";
    let mut db = TestDatabase::new(lab)?;
    db.run(ORDERS)?;
    for mode in ["strict", "monotonic"] {
        db.protect(&format!("mode => '{mode}'"))?;
        let first = db.token()?;
        db.run(&set(first, &save(None, 1)).replace("fence = NULL", "fence = fence"))?;
        let own = db.token()?;
        db.run(&set(own, &save(Some(first), 1)))?;
        // Its second save writes the value back that it read before the first.
        for (sql, sqlstate) in
            [(set(own, &save(Some(first), 2)), "PF001"), (set(own, &save(None, 2)), "PF002")]
        {
            let fault = db.refused(&sql, sqlstate)?;
            let hint = fault.hint.as_deref().unwrap_or_default();
            ensure!(!hint.contains(newer) && hint.contains("managed mode"), "{fault}");
            ensure!(hint.contains("\"fence\""), "{fault}");
        }
        if mode == "strict" {
            for sql in [set(own, "UPDATE orders SET v = 3"), save(Some(own), 3)] {
                let fault = db.refused(&sql, "PF001")?;
                let hint = fault.hint.as_deref().unwrap_or_default();
                ensure!(!hint.contains(newer) && hint.contains("lease_renew"), "{fault}");
            }
        }
        // Who really is behind is told so.
        let fault = db.refused(&set(first, "UPDATE orders SET v = 3"), "PF001")?;
        ensure!(fault.hint.as_deref().is_some_and(|hint| hint.contains(newer)), "{fault}");
        let fault = db.refused(&save(Some(first), 3), "PF001")?;
        ensure!(fault.hint.as_deref().is_some_and(|hint| hint.contains(newer)), "{fault}");
    }
    Ok(())
}

#[lab_test]
fn a_trigger_made_by_hand_manages_too(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(ORDERS)?;
    db.run(
        "CREATE TRIGGER fenced BEFORE INSERT OR UPDATE OR DELETE ON orders \
         FOR EACH ROW EXECUTE FUNCTION fenced('fence', 'managed')",
    )?;
    let token = db.token()?;
    db.comes_to("UPDATE orders SET v = 7, fence = 1", ROW, "PF002")?;
    db.comes_to(&set(token, "UPDATE orders SET v = 7, fence = 1"), ROW, &format!("7|{token}"))?;
    let two = "SELECT fence FROM orders WHERE id = 2";
    db.comes_to("INSERT INTO orders VALUES (2, 0, 1)", two, "PF002")?;
    db.comes_to("INSERT INTO orders VALUES (2, 0, 0)", two, "-")
}
