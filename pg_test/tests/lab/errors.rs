//! How long a DETAIL is, and what a driver makes of a refusal. The rest is in errors.script.

automod::dir!(pub "tests/lab/errors");

use crate::support::test_database::TestDatabase;
use pg_test::{ensure, lab_test, Calls, Fault, Lab, Result};
use serde_json::Value;

/// Eighty columns, twenty-five lines.
const SCREEN: usize = 80 * 25;

#[lab_test]
fn a_detail_is_never_longer_than_a_screen(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE TABLE one (word text PRIMARY KEY, v int, fence bigint); SELECT fence_protect('one'); \
         CREATE TABLE many (a text, b text, c text, d text, e text, f text, g text, h text, i text, j text, \
             v int, fence bigint, PRIMARY KEY (a, b, c, d, e, f, g, h, i, j)); SELECT fence_protect('many')",
    )?;
    // One byte, two, four, and some that JSON writes as six or two.
    for text in ["x", "ü", "🦀", "\u{1}", "\"", "\\", "x\u{1}🦀ü"] {
        let long = |bytes: usize| {
            format!("repeat({}, {})", pg_test::client::literal(text), bytes / text.len())
        };
        let starts = |shown: &Value, most: usize| {
            let shown = shown.as_str().unwrap_or_default();
            let begin = shown.strip_suffix("...").unwrap_or("no ellipsis");
            text.repeat(most).starts_with(begin) && begin.len() >= 8
        };
        db.run(&format!("INSERT INTO one VALUES ({}, 0)", long(50_000)))?;
        let fault = db.refused("UPDATE one SET v = 1", "PF002")?;
        let detail = fault.json()?;
        ensure!(fault.detail.as_deref().is_some_and(|d| d.len() < SCREEN), "{fault}");
        ensure!(starts(&detail["key"]["word"], 50_000), "{fault}");
        db.run("SELECT fence_unprotect('one'); TRUNCATE one; SELECT fence_protect('one')")?;

        let columns = vec![long(240); 10].join(", ");
        db.run(&format!("INSERT INTO many VALUES ({columns}, 0)"))?;
        let fault = db.refused("UPDATE many SET v = 1", "PF002")?;
        let key = &fault.json()?["key"];
        ensure!(fault.detail.as_deref().is_some_and(|d| d.len() < SCREEN), "{fault}");
        ensure!(starts(&key["a"], 240) && starts(&key["h"], 240), "{fault}");
        ensure!(key["..."] == "2 more columns", "what is left out is said: {fault}");
        db.run("SELECT fence_unprotect('many'); TRUNCATE many; SELECT fence_protect('many')")?;

        let name = long(512);
        let token = db.granted(&format!("SELECT lease_acquire({name}, {name}, '1 h')"))?;
        let fault =
            db.refused(&format!("SELECT lease_guard({name}, {})", token + 1_000), "PF004")?;
        let detail = fault.json()?;
        ensure!(fault.detail.as_deref().is_some_and(|d| d.len() < SCREEN), "{fault}");
        ensure!(starts(&detail["lease"], 512) && starts(&detail["holder"], 512), "{fault}");
    }
    // A short value is shown as it is.
    db.run("INSERT INTO one VALUES (repeat('x', 200) || '...', 0)")?;
    let fault = db.refused("UPDATE one SET v = 1", "PF002")?;
    ensure!(fault.json()?["key"]["word"] == "x".repeat(200) + "...", "{fault}");
    Ok(())
}

#[lab_test]
fn a_driver_does_not_take_a_refusal_for_one_to_retry(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "lease => 'order:{id}'")?;
    let token = db.token()?;
    for (sql, sqlstate) in [
        ("UPDATE orders SET v = 7".to_owned(), "PF002"),
        (format!("UPDATE orders SET fence = {token}"), "PF004"),
        ("TRUNCATE orders".to_owned(), "PF005"),
    ] {
        let mut session = db.another()?;
        let mut transaction = session.transaction()?;
        let error = transaction.execute(&sql, &[]).map_err(Fault::from);
        let fault = pg_test::fault::expect_err(error, sqlstate)?;
        ensure!(!fault.sqlstate.starts_with("40"), "{fault}");
        // As after any error, the transaction is over and the session is not.
        let after = transaction.execute("SELECT 1", &[]).map_err(Fault::from);
        pg_test::fault::expect_err(after, "25P02")?;
        transaction.rollback()?;
        session.run("SELECT 1")?;
    }
    Ok(())
}
