//! Writes by COPY and by a driver's parameters. (All other paths are in the script beside this.)

use crate::support::test_database::{shows, TestDatabase, ROW};
use pg_test::{ensure, lab_test, Fault, Lab, Result};
use std::io::Write;

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

#[lab_test]
fn copy_is_an_insert_whose_column_is_replaced(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "mode => 'managed'")?;
    let (token, huge) = (db.token()?, 1i64 << 60);
    let mut copy = |token: &str, lines: &str| -> Result<Result<u64, Fault>> {
        db.run(&format!("SET pg_fence.token = '{token}'"))?;
        let mut writer = db.copy_in("COPY orders (id, v, fence) FROM STDIN")?;
        writer.write_all(lines.as_bytes())?;
        Ok(writer.finish().map_err(Fault::from))
    };
    ensure!(copy("", "2\t7\t0\n3\t7\t\\N\n")?? == 2);
    pg_test::fault::expect_err(copy("", "7\t7\t\\N\n8\t7\t1\n")?, "PF002")?;
    ensure!(copy(&token.to_string(), &format!("4\t7\t1\n5\t7\t\\N\n6\t7\t{huge}\n"))?? == 3);
    pg_test::fault::expect_err(copy(&huge.to_string(), "7\t7\t1\n")?, "PF003")?;
    shows(
        &mut db,
        "SELECT id, fence FROM orders WHERE id > 1 ORDER BY id",
        &format!("2|- 3|- 4|{token} 5|{token} 6|{token}"),
    )
}
