//! `managed` mode: whatever a statement writes into the fence column is replaced, and only the guard of the
//! row's lease or the setting presents a token.

use crate::support::test_database::{shows, TestDatabase, ROW};
use crate::support::write_statements::{DELETES, INSERTS, TOUCHES, UPDATES, VIEWS_AND_FUNCTIONS};
use pg_test::{ensure, lab_test, Fault, Lab, Result};
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
