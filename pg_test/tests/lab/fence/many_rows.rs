//! Statements that write many rows: each row is judged by itself, though most show what the row before them showed.

use crate::support::test_database::{shows, TestDatabase};
use pg_test::{ensure, lab_test, Lab, Result};

/// Where in its row the fence lies: at the same place in each, behind what is of any length, among NULLs, and in rows
/// that are older than the column.
const SHAPES: [&str; 4] = [
    "CREATE TABLE t (id int PRIMARY KEY, fence bigint, v int);
     INSERT INTO t SELECT n, 1 FROM generate_series(1, 5) n",
    "CREATE TABLE t (id int PRIMARY KEY, words text, fence bigint, v int);
     INSERT INTO t SELECT n, repeat('x', n), 1 FROM generate_series(1, 5) n",
    "CREATE TABLE t (id int PRIMARY KEY, nothing int, fence bigint, v int, last text);
     INSERT INTO t SELECT n, NULL, 1 FROM generate_series(1, 5) n",
    "CREATE TABLE t (gone int, id int PRIMARY KEY, v int);
     INSERT INTO t SELECT 0, n FROM generate_series(1, 5) n;
     ALTER TABLE t DROP COLUMN gone; ALTER TABLE t ADD COLUMN fence bigint DEFAULT 1;
     ALTER TABLE t ALTER COLUMN fence DROP DEFAULT",
];

const ROWS: &str = "SELECT string_agg(concat_ws(':', id, v), ' ' ORDER BY id) FROM t";
const NOTHING: &str = "1 2 3 4 5";

/// A table of five rows, fenced by that call of `fence_protect`.
fn five_rows(lab: &Lab, shape: &str, arguments: &str) -> Result<TestDatabase> {
    let mut db = TestDatabase::new(lab)?;
    db.run(shape)?;
    db.run(&format!("SELECT fence_protect('t', 'fence'{arguments})"))?;
    shows(&mut db, ROWS, NOTHING)?;
    Ok(db)
}

/// The statement shows a token in all rows, but another value in the fourth.
fn but_the_fourth(token: i64, value: &str) -> String {
    format!("UPDATE t SET v = 1, fence = CASE id WHEN 4 THEN {value} ELSE {token} END")
}

#[lab_test]
fn a_row_is_not_let_through_for_the_one_before_it(lab: &Lab) -> Result<()> {
    for shape in SHAPES {
        for mode in ["strict", "monotonic"] {
            for lease in ["", ", lease => 'batch'"] {
                let mut db = five_rows(lab, shape, &format!(", mode => '{mode}'{lease}"))?;
                let (foreign, token) = (db.token()?, db.grant("batch")?);
                let newer = db.token()?;
                let mut fails = |value: &str, sqlstate: &str| -> Result<()> {
                    let fault = db.refused(&but_the_fourth(token, value), sqlstate)?;
                    ensure!(fault.json()?["key"]["id"] == 4, "{fault}");
                    shows(&mut db, ROWS, NOTHING)
                };
                fails("9223372036854775807", "PF003")?;
                fails("NULL", "PF002")?;
                fails("0", "PF003")?;
                if !lease.is_empty() {
                    fails(&foreign.to_string(), "PF004")?;
                    fails(&newer.to_string(), "PF004")?;
                }
                db.run(&but_the_fourth(token, &token.to_string()))?;
                shows(&mut db, ROWS, "1:1 2:1 3:1 4:1 5:1")?;
            }
        }
    }
    Ok(())
}

#[lab_test]
fn a_row_that_has_seen_a_greater_token_stops_the_statement(lab: &Lab) -> Result<()> {
    for shape in SHAPES {
        for mode in ["strict", "monotonic"] {
            let mut db = five_rows(lab, shape, &format!(", mode => '{mode}'"))?;
            let (older, newer) = (db.token()?, db.token()?);
            db.run(&format!("UPDATE t SET fence = {newer} WHERE id = 4"))?;
            let fault = db.refused(&format!("UPDATE t SET v = 1, fence = {older}"), "PF001")?;
            ensure!(fault.json()?["key"]["id"] == 4, "{fault}");
            shows(&mut db, ROWS, NOTHING)?;
            // The same token again: `strict` takes it for stale, `monotonic` lets it through.
            let again = format!("UPDATE t SET v = 2, fence = {newer}");
            match mode {
                "strict" => {
                    let fault = db.refused(&again, "PF001")?;
                    ensure!(fault.json()?["key"]["id"] == 4, "{fault}");
                }
                _ => db.run(&again)?,
            }
        }
    }
    Ok(())
}

#[lab_test]
fn each_row_is_judged_for_its_own_lease(lab: &Lab) -> Result<()> {
    for shape in SHAPES {
        let mut db = five_rows(lab, shape, ", lease => 'row:{id}'")?;
        let mut case = String::new();
        for id in 1..=4 {
            case += &format!("WHEN {id} THEN {} ", db.grant(&format!("row:{id}"))?);
        }
        let first = db.one::<i64>("SELECT token FROM fence.leases WHERE name = 'row:1'", &[])?;
        for (upto, wrong) in [(2, 2), (5, 5)] {
            let shown = if upto == 2 { String::new() } else { case.clone() };
            let sql = format!(
                "UPDATE t SET v = 1, fence = CASE id {shown} WHEN 0 THEN 0 ELSE {first} END WHERE id <= {upto}"
            );
            let fault = db.refused(&sql, "PF004")?;
            ensure!(fault.json()?["key"]["id"] == wrong, "{fault}");
            shows(&mut db, ROWS, NOTHING)?;
        }
        db.run(&format!("UPDATE t SET v = 1, fence = CASE id {case} END WHERE id <= 4"))?;
    }
    Ok(())
}

/// What a statement has found out of a token is not kept for the next one, nor for one that it calls.
#[lab_test]
fn a_statement_within_another_is_judged_by_itself(lab: &Lab) -> Result<()> {
    let mut db = five_rows(lab, SHAPES[0], ", lease => 'batch'")?;
    db.run(
        "CREATE FUNCTION write_and_undo(token bigint) RETURNS int LANGUAGE plpgsql AS $$
         BEGIN
             BEGIN
                 UPDATE t SET v = 7, fence = token WHERE id >= 4;
                 RAISE 'undone';
             EXCEPTION WHEN raise_exception THEN
                 RETURN 1;
             END;
         END $$",
    )?;
    let token = db.grant("batch")?;
    db.run("BEGIN")?;
    db.run(&format!("SELECT write_and_undo({token})"))?;
    // The guard went with the block, and nothing of it is believed any more.
    let mut other = db.another()?;
    other.run("SELECT lease_revoke('batch')")?;
    let next: i64 = other.one("SELECT lease_acquire('batch', ttl => '1 h')", &[])?;
    db.refused(&format!("UPDATE t SET v = 8, fence = {token} WHERE id <= 3"), "PF004")?;
    db.run("ROLLBACK")?;
    db.run(&format!("UPDATE t SET v = write_and_undo({next}), fence = {next} WHERE id <= 3"))?;
    shows(&mut db, ROWS, "1:1 2:1 3:1 4 5")
}
