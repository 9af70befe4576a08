//! New features of newer PostgreSQL versions, with leases and fences. The rest is in newer_versions.script.

use pg_test::{Calls, Harness, Result, ensure, harness_test};

#[harness_test(from = 19)]
fn a_conflict_that_is_only_read_is_an_insert_s_to_refuse_and_writes_nothing(
    harness: &Harness,
) -> Result<()> {
    let db = harness.database()?;
    let mut session = db.connect()?;
    session.run(
        "CREATE TABLE orders (id int PRIMARY KEY, v int, fence bigint);
         INSERT INTO orders VALUES (1, 0);
         SELECT fence_protect('orders', lease => 'order:{id}')",
    )?;
    let token = session.acquire("order:1", "1 h")?;
    session.run(&format!("UPDATE orders SET v = 1, fence = {token}"))?;
    let insert = |fence: &str, lock: &str| {
        format!(
            "INSERT INTO orders VALUES (1, 9, {fence}) ON CONFLICT (id) DO SELECT {lock} RETURNING v, fence"
        )
    };
    let version = "SELECT ctid::text FROM orders";
    let before = session.text(version)?;
    for lock in ["", "FOR UPDATE"] {
        // The row to be inserted is checked first, as with any other ON CONFLICT.
        session.refused(&insert("NULL", lock), "PF002")?;
        let rows = session.rows(&insert(&token.to_string(), lock))?;
        ensure!(rows == [[Some("1".to_owned()), Some(token.to_string())]], "{lock}: {rows:?}");
    }
    ensure!(session.text(version)? == before, "it has written");
    Ok(())
}

#[harness_test(from = 19)]
fn a_fence_that_copy_cannot_read_is_none(harness: &Harness) -> Result<()> {
    let db = harness.database()?;
    let mut session = db.connect()?;
    session.run(
        "CREATE TABLE orders (id int PRIMARY KEY, v int, fence bigint);
         CREATE TABLE drafts (LIKE orders INCLUDING ALL);
         SELECT fence_protect('orders', lease => 'order:{id}'),
                fence_protect('drafts', lease => 'order:{id}', mode => 'managed')",
    )?;
    let copy = |table: &str, fence: &str| {
        format!("COPY {table} FROM PROGRAM 'printf \"1\\t2\\t{fence}\\n\"' (ON_ERROR SET_NULL)")
    };
    let token = session.acquire("order:1", "1 h")?;
    session.refused(&copy("orders", "abc"), "PF002")?;
    // Another column makes no difference; a managed fence column takes the presented token anyway.
    session.run(&format!("SET pg_fence.token = {token}"))?;
    for table in ["orders", "drafts"] {
        session.run(&copy(table, "abc"))?;
        ensure!(
            session.one::<i64>(&format!("SELECT fence FROM {table}"), &[])? == token,
            "{table}"
        );
    }
    Ok(())
}
