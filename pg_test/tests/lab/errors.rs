//! What a client learns from a refusal, and what it does not.

automod::dir!(pub "tests/lab/errors");

use crate::support::test_database::TestDatabase;
use pg_test::{ensure, lab_test, Calls, Fault, Lab, Result};
use serde_json::{json, Value};

/// A refusal of pg_fence: one line, a hint, JSON with just these keys, and where it happened.
fn check(fault: &Fault, keys: &[&str], place: [Option<&str>; 3]) -> Result<Value> {
    ensure!(fault.severity == "ERROR", "{fault}");
    ensure!(!fault.message.is_empty() && !fault.message.contains('\n'), "{fault}");
    ensure!(fault.hint.as_deref().is_some_and(|hint| !hint.is_empty()), "{fault}");
    let detail = fault.json()?;
    let mut found: Vec<&str> =
        detail.as_object().into_iter().flatten().map(|(name, _)| name.as_str()).collect();
    found.sort_unstable();
    let mut wanted = keys.to_vec();
    wanted.sort_unstable();
    ensure!(found == wanted, "the keys are {found:?}, not {wanted:?}: {fault}");
    let fields = [&fault.schema, &fault.table, &fault.column].map(|field| field.as_deref());
    ensure!(fields == place, "it happened at {fields:?}, not {place:?}");
    Ok(detail)
}

const ORDERS_FENCE: [Option<&str>; 3] = [Some("public"), Some("orders"), Some("fence")];

#[lab_test]
fn a_stale_token_is_pf001(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "")?;
    let (a, b) = (db.token()?, db.token()?);
    db.run(&format!("UPDATE orders SET fence = {b}"))?;
    for (sql, presented) in [
        (format!("UPDATE orders SET v = 7, fence = {a}"), a),
        (format!("UPDATE orders SET v = 7, fence = {b}"), b),
        (format!("SET pg_fence.token = '{a}'; UPDATE orders SET v = 7"), a),
        (format!("SET pg_fence.token = '{a}'; DELETE FROM orders"), a),
    ] {
        let fault = db.refused(&sql, "PF001")?;
        let detail = check(&fault, &["presented", "stored", "relation", "key"], ORDERS_FENCE)?;
        let wanted = json!({"presented": presented, "stored": b, "relation": "public.orders", "key": {"id": 1}});
        ensure!(detail == wanted, "{detail}");
        ensure!(fault.message.contains(&b.to_string()), "{fault}");
    }
    Ok(())
}

#[lab_test]
fn a_missing_token_is_pf002(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "")?;
    let place = ORDERS_FENCE;
    let fault = db.refused("UPDATE orders SET v = 7", "PF002")?;
    check(&fault, &["relation", "key"], place)?;
    let token = db.token()?;
    db.run(&format!("UPDATE orders SET fence = {token}"))?;
    for sql in ["UPDATE orders SET v = 7", "UPDATE orders SET fence = NULL", "DELETE FROM orders"] {
        let fault = db.refused(sql, "PF002")?;
        let detail = check(&fault, &["stored", "relation", "key"], place)?;
        ensure!(detail["stored"] == token, "{fault}");
        ensure!(fault.hint.as_deref().is_some_and(|h| h.contains("pg_fence.token")), "{fault}");
    }
    Ok(())
}

#[lab_test]
fn a_token_never_issued_is_pf003(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "")?;
    let token = db.token()?;
    for value in [token + 1, 0, -5, i64::MAX, i64::MIN] {
        let fault = db.refused(&format!("UPDATE orders SET fence = {value}"), "PF003")?;
        let detail = check(&fault, &["presented", "relation", "key"], ORDERS_FENCE)?;
        ensure!(detail["presented"] == value, "{fault}");
        ensure!(fault.message.contains(&value.to_string()), "{fault}");
    }
    Ok(())
}

#[lab_test]
fn a_token_that_does_not_speak_is_pf004(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "lease => 'order:{id}'")?;
    let old: i64 = db.one("SELECT lease_acquire('order:1', 'worker A', '1 h')", &[])?;
    db.run("SELECT lease_revoke('order:1')")?;
    let expiry =
        "SELECT to_char(expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') \
                  FROM fence.leases WHERE name = 'order:1'";
    let of_b: i64 = db.one("SELECT lease_acquire('order:1', 'worker B', '1 h')", &[])?;
    let expires_at = db.text(expiry)?;
    db.run("SET TimeZone = 'Asia/Kathmandu'; SET DateStyle = 'German'")?;
    let keys = ["presented", "lease", "holder", "expires_at"];
    let wanted = json!({"presented": old, "lease": "order:1", "holder": "worker B", "expires_at": expires_at});

    let guard = db.refused(&format!("SELECT lease_guard('order:1', {old})"), "PF004")?;
    ensure!(check(&guard, &keys, [None; 3])? == wanted, "{guard}");
    let write = db.refused(&format!("UPDATE orders SET fence = {old}"), "PF004")?;
    let mut detail = check(&write, &[&keys[..], &["relation", "key"]].concat(), ORDERS_FENCE)?;
    let rest = detail.as_object_mut().into_iter();
    let rest: Vec<Option<Value>> =
        rest.flat_map(|d| [d.remove("relation"), d.remove("key")]).collect();
    ensure!(rest == [Some(json!("public.orders")), Some(json!({"id": 1}))], "{write}");
    ensure!(detail == wanted, "{write}");
    ensure!(write.message.contains("order:1"), "{write}");

    // Of a lease that was never heard of there is nothing more to tell.
    let unknown = db.refused(&format!("SELECT lease_guard('never', {of_b})"), "PF004")?;
    check(&unknown, &["presented", "lease"], [None; 3])?;
    Ok(())
}

#[lab_test]
fn a_truncate_is_pf005(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "")?;
    let fault = db.refused("TRUNCATE orders", "PF005")?;
    ensure!(fault.message.contains("TRUNCATE") && !fault.message.contains('\n'), "{fault}");
    ensure!(fault.hint.as_deref().is_some_and(|hint| hint.contains("fence_unprotect")), "{fault}");
    ensure!(fault.schema.as_deref() == Some("public"), "{fault}");
    ensure!(fault.table.as_deref() == Some("orders"), "{fault}");
    ensure!(fault.json()?["relation"] == "public.orders", "{fault}");
    Ok(())
}

#[lab_test]
fn a_key_of_several_columns_is_shown_with_its_types(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE TABLE t (v int, small smallint, big bigint, word text, yes boolean, uid uuid, day date, \
             amount numeric(10,2), fence bigint, PRIMARY KEY (word, small, big, yes, uid, day, amount)); \
         INSERT INTO t VALUES (0, -3, 9007199254740993, E'a\"b\\\\c\\nü', true, \
             '00000000-0000-0000-0000-00000000002a', '2026-11-21', 1.50); SELECT fence_protect('t')",
    )?;
    let fault = db.refused("UPDATE t SET v = 1", "PF002")?;
    let key = &fault.json()?["key"];
    ensure!(key["small"] == -3 && key["big"] == 9007199254740993i64, "{fault}");
    ensure!(key["word"] == "a\"b\\c\nü", "{fault}");
    ensure!(key["uid"] == "00000000-0000-0000-0000-00000000002a", "{fault}");
    ensure!(key["day"] == "2026-11-21" && key["amount"] == "1.50", "{fault}");
    ensure!(key["yes"] == "t", "{fault}");
    ensure!(key.as_object().is_some_and(|key| key.len() == 7), "{fault}");
    Ok(())
}

#[lab_test]
fn an_insert_shows_the_row_that_was_not_to_be(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "lease => 'order:{id}'")?;
    let token = db.token()?;
    let fault = db.refused(&format!("INSERT INTO orders VALUES (5, 0, {token})"), "PF004")?;
    let detail = check(&fault, &["presented", "lease", "relation", "key"], ORDERS_FENCE)?;
    ensure!(detail["key"] == json!({"id": 5}) && detail["lease"] == "order:5", "{detail}");
    Ok(())
}

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
    // What is short is shown as it is.
    db.run("INSERT INTO one VALUES (repeat('x', 200) || '...', 0)")?;
    let fault = db.refused("UPDATE one SET v = 1", "PF002")?;
    ensure!(fault.json()?["key"]["word"] == "x".repeat(200) + "...", "{fault}");
    Ok(())
}

#[lab_test]
fn a_caller_in_plpgsql_gets_every_field(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "")?;
    let (a, b) = (db.token()?, db.token()?);
    db.run(&format!("UPDATE orders SET fence = {b}"))?;
    db.run(&format!(
        "DO $$ DECLARE s text; d jsonb; h text; t text; c text; n text; BEGIN \
         BEGIN UPDATE orders SET v = 7, fence = {a}; RAISE 'it landed'; \
         EXCEPTION WHEN SQLSTATE 'PF001' THEN \
             GET STACKED DIAGNOSTICS s = RETURNED_SQLSTATE, d = PG_EXCEPTION_DETAIL, h = PG_EXCEPTION_HINT, \
                 t = TABLE_NAME, c = COLUMN_NAME, n = SCHEMA_NAME; END; \
         ASSERT s = 'PF001' AND (d->>'stored')::bigint = {b} AND h <> '' AND t = 'orders' AND c = 'fence' \
             AND n = 'public'; END $$"
    ))
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

#[lab_test]
fn an_error_inside_a_partition_names_the_partition(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE TABLE orders (id int PRIMARY KEY, v int, fence bigint) PARTITION BY RANGE (id); \
         CREATE SCHEMA parts; CREATE TABLE parts.low PARTITION OF orders FOR VALUES FROM (0) TO (9); \
         INSERT INTO orders VALUES (1, 0); SELECT fence_protect('orders')",
    )?;
    // As Postgres names it for its own constraints.
    let fault = db.refused("UPDATE orders SET v = 7", "PF002")?;
    check(&fault, &["relation", "key"], [Some("parts"), Some("low"), Some("fence")])?;
    ensure!(fault.json()?["relation"] == "parts.low", "{fault}");
    Ok(())
}

#[lab_test]
fn a_program_can_tell_a_grant_that_must_be_renewed_from_a_lost_one(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.acquire("job", "1 h")?;
    let guard = format!("BEGIN; SELECT lease_guard('job', {token})");
    session.run("SELECT fence_new_epoch()")?;
    let fault = session.refused(&guard, "PF004")?;
    ensure!(fault.json()?["renew_first"] == true, "{fault}");
    session.run("ROLLBACK; SELECT lease_revoke('job')")?;
    let fault = session.refused(&guard, "PF004")?;
    ensure!(fault.json()?.get("renew_first").is_none(), "{fault}");
    Ok(())
}
