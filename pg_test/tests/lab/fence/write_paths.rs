//! Every path by which a row is written, and the outcome that it must have.

use crate::support::test_database::{shows, TestDatabase, ROW};
use crate::support::write_statements::{DELETES, INSERTS, TOUCHES, UPDATES, VIEWS_AND_FUNCTIONS};
use pg_test::{ensure, lab_test, Fault, Lab, Result};
use std::io::Write;

fn with(sql: &str, token: i64) -> String {
    sql.replace("{t}", &token.to_string())
}

fn set(token: i64, sql: &str) -> String {
    format!("SET LOCAL pg_fence.token = '{token}'; {sql}")
}

#[lab_test]
fn every_path_to_an_update_is_fenced(lab: &Lab) -> Result<()> {
    for mode in ["strict", "monotonic"] {
        let mut db = TestDatabase::orders(lab, &format!("mode => '{mode}'"))?;
        db.run(VIEWS_AND_FUNCTIONS)?;
        let (a, b, c) = (db.token()?, db.token()?, db.token()?);
        db.run(&format!("UPDATE orders SET fence = {b}"))?;
        let equal = if mode == "strict" { "PF001".to_owned() } else { format!("7|{b}") };
        for path in UPDATES {
            db.comes_to(&with(path, c), ROW, &format!("7|{c}"))?;
            db.comes_to(&with(path, a), ROW, "PF001")?;
            db.comes_to(&with(path, b), ROW, &equal)?;
            db.comes_to(&with(path, c + 1), ROW, "PF003")?;
            // The setting does not lift a stale value over the row's.
            db.comes_to(&set(c, &with(path, a)), ROW, "PF001")?;
        }
        for path in TOUCHES {
            db.comes_to(path, ROW, "PF002")?;
            db.comes_to(&set(a, path), ROW, "PF001")?;
            db.comes_to(&set(b, path), ROW, &equal)?;
            db.comes_to(&set(c, path), ROW, &format!("7|{c}"))?;
            db.comes_to(&set(c + 1, path), ROW, "PF003")?;
        }
        shows(&mut db, ROW, &format!("0|{b}"))?;
    }
    Ok(())
}

#[lab_test]
fn every_path_to_a_delete_is_fenced(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "")?;
    db.run(VIEWS_AND_FUNCTIONS)?;
    let (a, b, c) = (db.token()?, db.token()?, db.token()?);
    db.run(&format!("UPDATE orders SET fence = {b}"))?;
    for path in DELETES {
        db.comes_to(path, ROW, "PF002")?;
        db.comes_to(&set(a, path), ROW, "PF001")?;
        db.comes_to(&set(b, path), ROW, "PF001")?;
        db.comes_to(&set(c, path), ROW, "")?;
        db.comes_to(&set(c + 1, path), ROW, "PF003")?;
    }
    shows(&mut db, ROW, &format!("0|{b}"))
}

#[lab_test]
fn every_path_to_an_insert_is_fenced(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "events => 'insert,update,delete,truncate'")?;
    db.run(VIEWS_AND_FUNCTIONS)?;
    let a = db.token()?;
    let row = "SELECT v, fence FROM orders WHERE id = 2";
    for path in INSERTS {
        let none = path.replace("{t}", "NULL");
        db.comes_to(&with(path, a), row, &format!("7|{a}"))?;
        db.comes_to(&none, row, "PF002")?;
        db.comes_to(&set(a, &none), row, &format!("7|{a}"))?;
        db.comes_to(&with(path, a + 1), row, "PF003")?;
        db.comes_to(&set(a + 1, &none), row, "PF003")?;
    }
    Ok(())
}

#[lab_test]
fn every_path_to_a_bound_row_is_fenced(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "lease => 'order:{id}'")?;
    db.run(VIEWS_AND_FUNCTIONS)?;
    let old = db.grant("order:1")?;
    db.run(&format!("UPDATE orders SET fence = {old}"))?;
    let new = db.take_over("order:1")?;
    let second = db.grant("order:2")?;
    let foreign = db.token()?;
    let landed = format!("7|{new}");
    for path in UPDATES {
        db.comes_to(&with(path, new), ROW, &landed)?;
        // Neither the row's own token nor a greater one of another lease is any good.
        for stale in [old, second, foreign] {
            db.comes_to(&with(path, stale), ROW, "PF004")?;
        }
        for stale in [second, foreign] {
            db.comes_to(&set(new, &with(path, stale)), ROW, "PF004")?;
        }
        // A value that is the row's presents nothing, so that the setting counts; but not where the
        // row comes as one to be inserted.
        let written_back = if path.contains("ON CONFLICT") { "PF004" } else { &landed };
        db.comes_to(&set(new, &with(path, old)), ROW, written_back)?;
        db.comes_to(&with(path, foreign + 1), ROW, "PF003")?;
    }
    for path in TOUCHES {
        db.comes_to(path, ROW, "PF002")?;
        db.comes_to(&set(new, path), ROW, &landed)?;
        let guarded = format!("SELECT lease_guard('order:1', {new}); {path}");
        db.comes_to(&guarded, ROW, &landed)?;
        for stale in [old, second, foreign] {
            db.comes_to(&set(stale, path), ROW, "PF004")?;
        }
    }
    for path in DELETES {
        db.comes_to(path, ROW, "PF002")?;
        db.comes_to(&set(new, path), ROW, "")?;
        db.comes_to(&format!("SELECT lease_guard('order:1', {new}); {path}"), ROW, "")?;
        for stale in [old, second, foreign] {
            db.comes_to(&set(stale, path), ROW, "PF004")?;
        }
    }
    let row = "SELECT v, fence FROM orders WHERE id = 2";
    for path in INSERTS {
        let none = path.replace("{t}", "NULL");
        db.comes_to(&with(path, second), row, &format!("7|{second}"))?;
        db.comes_to(&set(second, &none), row, &format!("7|{second}"))?;
        db.comes_to(&none, row, "PF002")?;
        for stale in [old, new, foreign] {
            db.comes_to(&with(path, stale), row, "PF004")?;
            db.comes_to(&set(stale, &none), row, "PF004")?;
        }
    }
    shows(&mut db, "TABLE orders", &format!("1|0|{old}"))
}

#[lab_test]
fn a_merge_is_judged_action_by_action(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "events => 'insert,update,delete'")?;
    let (a, b, c) = (db.token()?, db.token()?, db.token()?);
    db.run(&format!(
        "UPDATE orders SET fence = {a}; INSERT INTO orders VALUES (2, 0, {b}), (3, 0, {a})"
    ))?;
    let merge = |update: i64, insert: i64| {
        format!(
            "MERGE INTO orders USING (VALUES (1), (2), (3), (4)) AS s (id) ON s.id = orders.id \
             WHEN MATCHED AND s.id = 1 THEN UPDATE SET v = 7, fence = {update} \
             WHEN MATCHED AND s.id = 2 THEN DELETE \
             WHEN MATCHED THEN DO NOTHING \
             WHEN NOT MATCHED THEN INSERT VALUES (s.id, 8, {insert})"
        )
    };
    let rows = "SELECT * FROM orders ORDER BY id";
    let landed = format!("1|7|{c} 3|0|{a} 4|8|{c}");
    db.comes_to(&set(c, &merge(c, c)), rows, &landed)?;
    // One action that must not be, and nothing is done.
    db.comes_to(&merge(c, c), rows, "PF002")?;
    db.comes_to(&set(a, &merge(c, c)), rows, "PF001")?;
    db.comes_to(&set(c, &merge(a, c)), rows, &landed)?; // equal presents nothing: the setting
    db.comes_to(&set(c, &merge(c, c + 1)), rows, "PF003")?;
    db.comes_to(&set(c, &merge(c + 1, c)), rows, "PF003")?;
    shows(&mut db, rows, &format!("1|0|{a} 2|0|{b} 3|0|{a}"))
}

#[lab_test]
fn a_merge_that_names_the_column_in_another_action_presents_nothing_by_it(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "")?;
    let (a, b) = (db.token()?, db.token()?);
    db.run("INSERT INTO orders VALUES (2)")?;
    db.run(&format!("UPDATE orders SET fence = {a}"))?;
    let merge = format!(
        "MERGE INTO orders USING (VALUES (1), (2)) AS s (id) ON s.id = orders.id \
         WHEN MATCHED AND s.id = 1 THEN UPDATE SET v = 7, fence = {b} \
         WHEN MATCHED THEN UPDATE SET v = 7"
    );
    let rows = "SELECT * FROM orders ORDER BY id";
    db.comes_to(&merge, rows, "PF001")?;
    db.comes_to(&set(b, &merge), rows, &format!("1|7|{b} 2|7|{b}"))
}

#[lab_test]
fn a_statement_with_several_modifications_is_one(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "events => 'insert,update,delete'")?;
    let (a, b, c) = (db.token()?, db.token()?, db.token()?);
    db.run(&format!(
        "UPDATE orders SET fence = {a}; INSERT INTO orders VALUES (2, 0, {b}), (3, 0, {a})"
    ))?;
    let statement = |one: i64, two: i64| {
        format!(
            "WITH one AS (UPDATE orders SET v = 7, fence = {one} WHERE id = 1 RETURNING id), \
                  two AS (UPDATE orders SET v = 7, fence = {two} WHERE id = 2 RETURNING id), \
                  gone AS (DELETE FROM orders WHERE id = 3 RETURNING id) \
             INSERT INTO orders SELECT 4, 7, {one} FROM one, two, gone"
        )
    };
    let rows = "SELECT * FROM orders ORDER BY id";
    db.comes_to(&set(c, &statement(c, c)), rows, &format!("1|7|{c} 2|7|{c} 4|7|{c}"))?;
    // An accepted update is no licence for a deletion in the same statement.
    db.comes_to(&statement(c, c), rows, "PF002")?;
    db.comes_to(&set(c, &statement(c, a)), rows, "PF001")?;
    db.comes_to(&set(a, &statement(c, c)), rows, "PF001")?;
    let same_row = format!(
        "WITH up AS (UPDATE orders SET v = 7, fence = {c} WHERE id = 1 RETURNING id) \
         DELETE FROM orders WHERE id = 1"
    );
    match db.try_out(&same_row, "SELECT count(*) FROM orders WHERE id = 1")? {
        Ok(count) => ensure!(count == "1", "it deleted without a token"),
        Err(fault) => drop(fault.expect("PF002")?),
    }
    shows(&mut db, rows, &format!("1|0|{a} 2|0|{b} 3|0|{a}"))
}

#[lab_test]
fn on_conflict_is_judged_by_the_row_that_it_meets(lab: &Lab) -> Result<()> {
    for arguments in ["", "events => 'insert,update,delete,truncate'"] {
        let mut db = TestDatabase::orders(lab, arguments)?;
        let (a, b, c) = (db.token()?, db.token()?, db.token()?);
        db.run(&format!("UPDATE orders SET fence = {b}"))?;
        let rows = "SELECT * FROM orders ORDER BY id";
        let upsert = |token: i64| {
            format!(
                "INSERT INTO orders VALUES (5, 5, {token}), (1, 7, {token}) \
                 ON CONFLICT (id) DO UPDATE SET v = excluded.v, fence = excluded.fence"
            )
        };
        db.comes_to(&upsert(c), rows, &format!("1|7|{c} 5|5|{c}"))?;
        db.comes_to(&upsert(a), rows, "PF001")?;
        db.comes_to(&upsert(b), rows, "PF001")?;
        // Without the column, by the setting.
        let unaware = "INSERT INTO orders (id, v) VALUES (1, 7) \
                       ON CONFLICT (id) DO UPDATE SET v = excluded.v";
        db.comes_to(unaware, rows, "PF002")?;
        db.comes_to(&set(a, unaware), rows, "PF001")?;
        db.comes_to(&set(c, unaware), rows, &format!("1|7|{c}"))?;
        // A conflict that updates nothing writes nothing.
        let nothing = format!("INSERT INTO orders VALUES (1, 7, {a}) ON CONFLICT DO NOTHING");
        db.comes_to(&nothing, rows, &format!("1|0|{b}"))?;
    }
    Ok(())
}

#[lab_test]
fn copy_is_an_insert(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "events => 'insert,update'")?;
    let token = db.token()?;
    let copy = |token: &str, columns: &str, lines: &str| -> Result<Result<u64, Fault>> {
        let mut session = db.another()?;
        if !token.is_empty() {
            session.run(&format!("SET pg_fence.token = '{token}'"))?;
        }
        let mut writer = session.copy_in(&format!("COPY orders {columns} FROM STDIN"))?;
        writer.write_all(lines.as_bytes())?;
        Ok(writer.finish().map_err(Fault::from))
    };
    let refused = pg_test::fault::expect_err;
    refused(copy("", "(id, v)", "2\t7\n")?, "PF002")?;
    refused(copy("", "(id, v, fence)", &format!("2\t7\t{token}\n3\t7\t\\N\n"))?, "PF002")?;
    refused(
        copy("", "(id, v, fence)", &format!("2\t7\t{token}\n3\t7\t{}\n", token + 1))?,
        "PF003",
    )?;
    ensure!(copy("", "(id, v, fence)", &format!("2\t7\t{token}\n3\t7\t{token}\n"))?? == 2);
    ensure!(copy(&token.to_string(), "(id, v)", "4\t7\n5\t7\n")?? == 2);
    shows(
        &mut db,
        "SELECT count(*), min(fence), max(fence) FROM orders WHERE id > 1",
        &format!("4|{token}|{token}"),
    )?;

    db.protect("lease => 'order:{id}'")?;
    let (six, seven) = (db.grant("order:6")?, db.grant("order:7")?);
    let mut copy = |lines: String| -> Result<Result<u64, Fault>> {
        let mut writer = db.copy_in("COPY orders (id, v, fence) FROM STDIN")?;
        writer.write_all(lines.as_bytes())?;
        Ok(writer.finish().map_err(Fault::from))
    };
    refused(copy(format!("6\t7\t{six}\n7\t7\t{six}\n"))?, "PF004")?;
    ensure!(copy(format!("6\t7\t{six}\n7\t7\t{seven}\n"))?? == 2);
    shows(
        &mut db,
        "SELECT id, fence FROM orders WHERE id > 5 ORDER BY id",
        &format!("6|{six} 7|{seven}"),
    )
}

#[lab_test]
fn a_client_with_parameters_gets_the_same_answer(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "")?;
    let (a, b, c) = (db.token()?, db.token()?, db.token()?);
    db.run(&format!("UPDATE orders SET fence = {b}"))?;
    let statement = db.prepare("UPDATE orders SET v = v + 1, fence = $1 WHERE id = $2")?;
    // Often enough that the server may change to a generic plan.
    for _ in 0..8 {
        let stale = db.execute(&statement, &[&a, &1]).map_err(Fault::from);
        let fault = pg_test::fault::expect_err(stale, "PF001")?;
        ensure!(fault.json()?["stored"] == b, "{fault}");
    }
    let null = db.execute(&statement, &[&None::<i64>, &1]).map_err(Fault::from);
    pg_test::fault::expect_err(null, "PF002")?;
    ensure!(db.execute(&statement, &[&c, &1])? == 1);
    shows(&mut db, ROW, &format!("1|{c}"))
}
