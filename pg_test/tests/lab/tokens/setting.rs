//! The setting `pg_fence.token`: what it takes, how far it reaches.

use crate::support::test_database::{shows, TestDatabase};
use pg_test::{ensure, lab_test, Lab, Result};

const NO_TOKENS: &[&str] = &[
    "abc",
    "0",
    "-1",
    "1.5",
    "1e3",
    "0x22",
    "34 ",
    " 34",
    "34;",
    "1 2",
    "+34",
    "NULL",
    "9223372036854775808",
    "99999999999999999999999999",
    "-9223372036854775808",
    "٣٤",
    "1_000",
];

#[lab_test]
fn a_value_that_is_no_token_is_refused(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "")?;
    let token = db.token()?;
    for value in NO_TOKENS {
        for set in ["SET", "SET SESSION", "SET LOCAL"] {
            let fault = db.refused(&format!("{set} pg_fence.token = '{value}'"), "22023")?;
            ensure!(fault.message.contains("pg_fence.token"), "{fault}");
        }
        db.refused(&format!("SELECT set_config('pg_fence.token', '{value}', true)"), "22023")?;
        db.refused(&format!("CREATE FUNCTION f() RETURNS int LANGUAGE sql SET pg_fence.token = '{value}' AS 'SELECT 1'"), "22023")?;
        let database = db.database().name().to_owned();
        db.refused(&format!("ALTER DATABASE {database} SET pg_fence.token = '{value}'"), "22023")?;
        db.refused("UPDATE orders SET v = 7", "PF002")?;
    }
    for value in [
        format!("'{token}'"),
        token.to_string(),
        "''".into(),
        "DEFAULT".into(),
        format!("'{}'", i64::MAX),
    ] {
        db.run(&format!("SET pg_fence.token = {value}"))?;
    }
    db.refused("UPDATE orders SET v = 7", "PF003")?;
    db.run("SET pg_fence.token = ''")?;
    db.refused("UPDATE orders SET v = 7", "PF002")?;
    db.run(&format!("SET pg_fence.token = {token}; UPDATE orders SET v = 7"))?;
    db.run("RESET pg_fence.token")?;
    shows(&mut db, "SELECT v, fence FROM orders", &format!("7|{token}"))
}

#[lab_test]
fn a_value_set_before_the_library_is_loaded_is_looked_at_then(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "")?;
    let token = db.token()?;
    for value in NO_TOKENS {
        // A new session knows nothing of the setting until it calls the first function.
        let mut fresh = db.another()?;
        fresh.run(&format!("SET pg_fence.token = '{value}'"))?;
        fresh.refused("UPDATE orders SET v = 7", "PF002")?;
        shows(&mut fresh, "SHOW pg_fence.token", "")?;
        let mut fresh = db.another()?;
        let local = format!("BEGIN; SET LOCAL pg_fence.token = '{value}'; DELETE FROM orders");
        fresh.refused(&local, "PF002")?;
    }
    let mut fresh = db.database().conninfo().set("pg_fence.token", "x0").connect()?;
    fresh.refused("UPDATE orders SET v = 7", "PF002")?;
    for set in ["SET", "SET LOCAL"] {
        let mut fresh = db.another()?;
        let sql = format!("BEGIN; {set} pg_fence.token = '{token}'; UPDATE orders SET v = 7");
        fresh.run(&sql)?;
        shows(&mut fresh, "SELECT v, fence FROM orders", &format!("7|{token}"))?;
        fresh.run("ROLLBACK")?;
        fresh.refused("UPDATE orders SET v = 7", "PF002")?;
    }
    Ok(())
}

#[lab_test]
fn set_local_ends_with_its_transaction_or_savepoint(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "mode => 'monotonic'")?;
    let (a, b) = (db.token()?, db.token()?);
    let row = "SELECT fence FROM orders";
    db.run(&format!("SET LOCAL pg_fence.token = '{a}'"))?;
    db.refused("UPDATE orders SET v = 1", "PF002")?;
    let set = format!("BEGIN; SET LOCAL pg_fence.token = '{a}'");
    for end in ["ROLLBACK", "COMMIT"] {
        db.run(&format!("{set}; UPDATE orders SET v = 1; {end}"))?;
        db.refused("UPDATE orders SET v = 2", "PF002")?;
    }
    db.refused(&format!("{set}; SELECT 1/0"), "22012")?;
    db.run("ROLLBACK")?;
    db.refused("UPDATE orders SET v = 2", "PF002")?;
    db.run(&format!(
        "BEGIN; SET LOCAL pg_fence.token = '{a}'; SAVEPOINT s; SET LOCAL pg_fence.token = '{b}'; \
         ROLLBACK TO s; UPDATE orders SET v = 3; COMMIT"
    ))?;
    shows(&mut db, row, &a.to_string())?;
    db.run(&format!(
        "BEGIN; SAVEPOINT s; SET LOCAL pg_fence.token = '{b}'; RELEASE s; UPDATE orders SET v = 4; COMMIT"
    ))?;
    shows(&mut db, row, &b.to_string())?;
    db.refused("UPDATE orders SET v = 5", "PF002").map(drop)
}

#[lab_test]
fn it_comes_from_wherever_settings_come(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "mode => 'monotonic'")?;
    let token = db.token()?;
    db.database()
        .conninfo()
        .set("pg_fence.token", &token.to_string())
        .connect()?
        .run("UPDATE orders SET v = 1")?;
    let writer = db.database().role("writer")?;
    db.run(&format!(
        "GRANT ALL ON orders TO {writer}; ALTER ROLE {writer} SET pg_fence.token = '{token}'"
    ))?;
    db.database().connect_as(&writer)?.run("UPDATE orders SET v = 2")?;
    db.run(&format!("ALTER ROLE {writer} RESET pg_fence.token"))?;
    let mut session = db.database().connect_as(&writer)?;
    session.refused("UPDATE orders SET v = 3", "PF002")?;
    // Anyone may set it.
    session.run(&format!("SET pg_fence.token = '{token}'; UPDATE orders SET v = 3"))?;
    shows(&mut db, "SELECT v, fence FROM orders", &format!("3|{token}"))
}

#[lab_test]
fn a_function_may_have_a_token_of_its_own(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "mode => 'monotonic'")?;
    let (a, b) = (db.token()?, db.token()?);
    db.run(&format!(
        "CREATE FUNCTION touch() RETURNS void LANGUAGE sql SET pg_fence.token = '{a}' AS 'UPDATE orders SET v = v + 1'"
    ))?;
    db.run("SELECT touch()")?;
    db.refused("UPDATE orders SET v = 7", "PF002")?;
    db.run(&format!(
        "BEGIN; SET LOCAL pg_fence.token = '{b}'; SELECT touch(); UPDATE orders SET v = 7; COMMIT"
    ))?;
    shows(&mut db, "SELECT v, fence FROM orders", &format!("7|{b}"))?;
    db.refused("SELECT touch()", "PF001").map(drop)
}

#[lab_test]
fn other_names_with_its_prefix_are_refused(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "")?;
    let token = db.token()?;
    db.refused(&format!("SET pg_fence.tokn = '{token}'"), "42602")?;
    db.refused(&format!("SET LOCAL pg_fence.fence = '{token}'"), "42602").map(drop)
}
