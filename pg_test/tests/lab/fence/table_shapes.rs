//! Tables of every shape: wide, altered, toasted, oddly named.

use crate::support::test_database::{shown, shows, TestDatabase, ORDERS};
use pg_test::{ensure, lab_test, Context, Lab, Result};

fn set(token: i64, sql: &str) -> String {
    format!("BEGIN; SET LOCAL pg_fence.token = '{token}'; {sql}; COMMIT")
}

#[lab_test]
fn a_wide_row_is_stamped_and_nothing_else_is_touched(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    let columns: Vec<String> = (1..=1_400).map(|n| format!("c{n} int")).collect();
    db.run(&format!("CREATE TABLE wide ({}, fence bigint)", columns.join(", ")))?;
    let values: Vec<String> =
        (1..=1_400).map(|n| if n % 3 == 0 { "NULL".to_owned() } else { n.to_string() }).collect();
    db.run(&format!(
        "INSERT INTO wide VALUES ({}); SELECT fence_protect('wide')",
        values.join(",")
    ))?;
    let (a, b) = (db.token()?, db.token()?);
    db.run(&set(b, "UPDATE wide SET c700 = -700"))?;
    shows(
        &mut db,
        "SELECT c1, c3, c700, c1399, c1400, fence FROM wide",
        &format!("1|-|-700|1399|1400|{b}"),
    )?;
    let sum = "SELECT sum(value::int) FROM wide, jsonb_each_text(to_jsonb(wide) - 'fence') WHERE value IS NOT NULL";
    let wanted: i64 = (1..=1_400i64).filter(|n| n % 3 != 0).sum::<i64>() - 1_400;
    shows(&mut db, sum, &wanted.to_string())?;
    db.refused(&format!("UPDATE wide SET c1 = 0, fence = {a}"), "PF001").map(drop)
}

#[lab_test]
fn dropped_columns_do_not_shift_the_fence(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE TABLE t (gone bigint, id int PRIMARY KEY, also_gone text, v int, fence bigint, last bigint); \
         INSERT INTO t VALUES (5, 1, 'x', 0, NULL, 6); SELECT fence_protect('t'); \
         ALTER TABLE t DROP COLUMN gone, DROP COLUMN also_gone; \
         ALTER TABLE t ADD COLUMN new text DEFAULT 'n'",
    )?;
    let (a, b, c) = (db.token()?, db.token()?, db.token()?);
    db.run(&format!("UPDATE t SET v = 1, fence = {b}"))?;
    db.refused(&format!("UPDATE t SET v = 2, fence = {a}"), "PF001")?;
    db.refused("UPDATE t SET v = 2", "PF002")?;
    db.run(&set(c, "UPDATE t SET v = 3"))?;
    shows(&mut db, "TABLE t", &format!("1|3|{c}|6|n"))
}

#[lab_test]
fn rows_older_than_the_column_are_judged_by_its_missing_value(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t VALUES (1, 0), (2, 0)")?;
    let (a, b, c) = (db.token()?, db.token()?, db.token()?);
    // The column is added with a value that is stored nowhere but in the catalog.
    db.run(&format!(
        "ALTER TABLE t ADD COLUMN extra text DEFAULT 'kept', ADD COLUMN fence bigint DEFAULT {b}; \
         ALTER TABLE t ALTER COLUMN fence DROP DEFAULT; SELECT fence_protect('t')"
    ))?;
    db.refused(&format!("UPDATE t SET v = 1, fence = {a}"), "PF001")?;
    db.refused(&format!("UPDATE t SET v = 1, fence = {b}"), "PF001")?;
    db.run(&set(c, "UPDATE t SET v = 1 WHERE id = 1"))?;
    shows(&mut db, "SELECT * FROM t ORDER BY id", &format!("1|1|kept|{c} 2|0|kept|{b}"))?;
    // A column that fence_protect itself adds is NULL in rows that are there.
    db.run("CREATE TABLE u (id int); INSERT INTO u VALUES (1); SELECT fence_protect('u')")?;
    db.refused("UPDATE u SET id = 2", "PF002")?;
    db.run(&set(a, "UPDATE u SET id = 2"))?;
    shows(&mut db, "TABLE u", &format!("2|{a}"))
}

#[lab_test]
fn toasted_values_survive_the_stamp(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE TABLE t (id int PRIMARY KEY, plain text, packed text, fence bigint); \
         ALTER TABLE t ALTER plain SET STORAGE EXTERNAL; \
         INSERT INTO t SELECT 1, string_agg(md5(n::text), ''), repeat('x', 300000), NULL \
             FROM generate_series(1, 20000) AS n; SELECT fence_protect('t')",
    )?;
    let digest = "SELECT md5(plain), md5(packed) FROM t";
    let before = shown(&mut db, digest)?;
    let (a, b, c) = (db.token()?, db.token()?, db.token()?);
    db.run(&set(b, "UPDATE t SET id = 2"))?;
    db.run(&format!("UPDATE t SET id = 3, fence = {c}"))?;
    db.refused(&format!("UPDATE t SET id = 4, fence = {a}"), "PF001")?;
    db.refused(&set(a, "DELETE FROM t"), "PF001")?;
    db.run("ROLLBACK")?;
    ensure!(shown(&mut db, digest)? == before);
    let d = db.token()?;
    db.run(&set(d, "UPDATE t SET packed = packed || 'y'"))?;
    shows(&mut db, "SELECT id, length(packed), fence FROM t", &format!("3|300001|{d}"))?;
    let e = db.token()?;
    db.run(&set(e, "DELETE FROM t"))
}

#[lab_test]
fn generated_columns_see_the_stamped_token(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v int, \
             twice int GENERATED ALWAYS AS (v * 2) STORED, fence bigint, \
             shown text GENERATED ALWAYS AS ('t' || fence) STORED); \
         SELECT fence_protect('t', events => 'insert,update,delete')",
    )?;
    let (a, b) = (db.token()?, db.token()?);
    db.run(&set(a, "INSERT INTO t (v) VALUES (1)"))?;
    shows(&mut db, "TABLE t", &format!("1|1|2|{a}|t{a}"))?;
    db.run(&set(b, "UPDATE t SET v = 5"))?;
    shows(&mut db, "TABLE t", &format!("1|5|10|{b}|t{b}"))?;
    db.refused(&format!("UPDATE t SET v = 6, fence = {a}"), "PF001").map(drop)
}

#[lab_test]
fn odd_names_are_taken_as_they_are(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        r#"CREATE SCHEMA "Odd.Schema"; CREATE SCHEMA "select";
           CREATE TABLE "Odd.Schema"."Order ""Lines"" é" ("Order Id" text PRIMARY KEY, "it's" int, "Fence Tök{}en" bigint);
           INSERT INTO "Odd.Schema"."Order ""Lines"" é" VALUES ('ü/{1}', 0);
           SELECT fence_protect('"Odd.Schema"."Order ""Lines"" é"', 'Fence Tök{}en', lease => 'zeile {{é}} {Order Id}', verify => true);
           CREATE TABLE "select"."table" ("user" int, fence int, "end" bigint);
           INSERT INTO "select"."table" VALUES (1, 0);
           SELECT fence_protect('"select"."table"', 'end')"#,
    )?;
    let token = db.grant("zeile {é} ü/{1}")?;
    let other = db.token()?;
    let table = r#""Odd.Schema"."Order ""Lines"" é""#;
    let fault = db.refused(
        &format!(r#"UPDATE {table} SET "it's" = 1, "Fence Tök{{}}en" = {other}"#),
        "PF004",
    )?;
    ensure!(fault.schema.as_deref() == Some("Odd.Schema"), "{fault}");
    ensure!(fault.table.as_deref() == Some(r#"Order "Lines" é"#), "{fault}");
    ensure!(fault.column.as_deref() == Some("Fence Tök{}en"), "{fault}");
    ensure!(fault.json()?["lease"] == "zeile {é} ü/{1}", "{fault}");
    ensure!(fault.json()?["key"]["Order Id"] == "ü/{1}", "{fault}");
    db.run(&set(token, &format!(r#"UPDATE {table} SET "it's" = 1"#)))?;
    shows(&mut db, &format!("TABLE {table}"), &format!("ü/{{1}}|1|{token}"))?;
    db.refused(r#"UPDATE "select"."table" SET fence = 3"#, "PF002")?;
    db.run(&format!(r#"UPDATE "select"."table" SET fence = 3, "end" = {other}"#))
}

#[lab_test]
fn nothing_needs_to_be_on_the_search_path(lab: &Lab) -> Result<()> {
    let database = lab.bare_database()?;
    let mut session = database.connect()?;
    session.run(
        "CREATE SCHEMA api; CREATE EXTENSION pg_fence SCHEMA api; CREATE SCHEMA data; \
         CREATE TABLE data.orders (id int PRIMARY KEY, v int); INSERT INTO data.orders VALUES (1, 0); \
         SET search_path = ''; SELECT api.fence_protect('data.orders', lease => 'order:{id}', verify => true)",
    )?;
    let token: i64 = session.one("SELECT api.lease_acquire('order:1', ttl => '1 h')", &[])?;
    session.refused("UPDATE data.orders SET v = 1", "PF002")?;
    session.run(&format!("UPDATE data.orders SET v = 1, fence = {token}"))?;
    session.run(&format!(
        "BEGIN; SELECT api.lease_guard('order:1', {token}); UPDATE data.orders SET v = 2; COMMIT"
    ))?;
    let mut fresh = database.connect()?;
    fresh.refused("UPDATE data.orders SET v = 3", "PF002")?;
    fresh.run("SET search_path = data; SELECT api.fence_unprotect('orders')")?;
    fresh.run("UPDATE orders SET v = 3")
}

#[lab_test]
fn objects_of_the_caller_change_nothing(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "lease => 'order:{id}'")?;
    let writer = db.database().role("writer")?;
    db.run(&format!(
        "SELECT fence_grant('{writer}'); GRANT ALL ON orders TO {writer}; GRANT CREATE ON SCHEMA public TO {writer}"
    ))?;
    let mut session = db.database().connect_as(&writer)?;
    let old: i64 = session.one("SELECT lease_acquire('order:1', ttl => '1 h')", &[])?;
    db.take_over("order:1")?;
    // What it makes in its own name shadows nothing that the trigger looks at.
    for sql in [
        "CREATE TEMPORARY TABLE lease AS SELECT * FROM fence.leases",
        "CREATE TEMPORARY SEQUENCE token_seq START 1000000",
        "CREATE FUNCTION pg_temp.fenced() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
        "CREATE FUNCTION public.gt(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true'",
        "CREATE OPERATOR public.> (leftarg = bigint, rightarg = bigint, function = public.gt)",
        "SET search_path = pg_temp, public, pg_catalog",
        "SET row_security = off",
    ] {
        // Some are refused already; whatever is not must not help.
        let _ = session.try_rows(sql);
        session.refused(&format!("UPDATE public.orders SET v = 7, fence = {old}"), "PF004")?;
        session.refused("UPDATE public.orders SET v = 7", "PF002")?;
    }
    // What would take the trigger out of the way is not its to do.
    for sql in [
        "SET session_replication_role = replica",
        "ALTER TABLE public.orders DISABLE TRIGGER fenced",
        "DROP TRIGGER fenced ON public.orders",
        "SELECT public.fence_unprotect('public.orders')",
        "ALTER TABLE public.orders RENAME COLUMN fence TO f",
    ] {
        session.refused(sql, "42501")?;
    }
    session.refused("TRUNCATE public.orders", "PF005")?;
    Ok(())
}

#[lab_test]
fn a_table_without_a_key_is_fenced(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run("CREATE TABLE t (v int); INSERT INTO t VALUES (1), (1); SELECT fence_protect('t')")?;
    let (a, b) = (db.token()?, db.token()?);
    db.run(&format!("UPDATE t SET v = 2, fence = {b}"))?;
    let fault = db.refused(&format!("UPDATE t SET v = 3, fence = {a}"), "PF001")?;
    ensure!(fault.json()?.get("key").is_none(), "{fault}");
    shows(&mut db, "TABLE t", &format!("2|{b} 2|{b}"))
}

#[lab_test]
fn a_row_type_altered_in_the_same_session_is_seen(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "")?;
    let mut writer = db.another()?;
    let tokens: Vec<i64> = (0..6).map(|_| db.token()).collect::<Result<_>>()?;
    writer.run("PREPARE p (bigint) AS UPDATE orders SET v = v + 1, fence = $1")?;
    writer.run(&format!("EXECUTE p ({})", tokens[1]))?;
    for (ddl, token) in [
        ("ALTER TABLE orders ADD COLUMN a int DEFAULT 1", tokens[2]),
        ("ALTER TABLE orders DROP COLUMN a", tokens[3]),
        ("ALTER TABLE orders DROP COLUMN fence, ADD COLUMN b text DEFAULT 'b', ADD COLUMN fence bigint", tokens[4]),
    ] {
        db.run(ddl)?;
        writer.run(&format!("EXECUTE p ({token})"))?;
        writer.refused(&format!("EXECUTE p ({})", tokens[0]), "PF001")?;
    }
    // A new mode counts from the next statement.
    db.protect("mode => 'monotonic'")?;
    writer.run(&format!("EXECUTE p ({})", tokens[4]))?;
    db.protect("mode => 'strict'")?;
    writer.refused(&format!("EXECUTE p ({})", tokens[4]), "PF001").map(drop)
}

#[lab_test]
fn a_table_rewritten_keeps_its_fence(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(ORDERS)?;
    db.protect("")?;
    let (a, b) = (db.token()?, db.token()?);
    db.run(&format!("UPDATE orders SET fence = {b}"))?;
    for ddl in [
        "VACUUM FULL orders",
        "CLUSTER orders USING orders_pkey",
        "ALTER TABLE orders ALTER COLUMN v TYPE bigint",
        "ALTER TABLE orders RENAME TO o; ALTER TABLE o RENAME TO orders",
        "CREATE SCHEMA s; ALTER TABLE orders SET SCHEMA s; SET search_path = s, public",
    ] {
        db.run(ddl)?;
        db.refused(&format!("UPDATE orders SET v = 7, fence = {a}"), "PF001")?;
        shows(&mut db, "SELECT v, fence FROM orders", &format!("0|{b}"))?;
    }
    Ok(())
}

/// Since November 2026 minor releases note with each value that is a row which version of its type it is of. A trigger that
/// makes the row around it anew must hand that on.
#[lab_test]
fn a_row_within_a_row_whose_type_is_altered_comes_out_as_without_a_fence(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE TYPE place AS (street text, number int); \
         CREATE TABLE plain (id int PRIMARY KEY, at place, many place[], v int, fence bigint); \
         CREATE TABLE fenced (LIKE plain INCLUDING ALL); \
         SELECT fence_protect('fenced', mode => 'managed')",
    )?;
    for (n, step) in [
        "INSERT INTO $ VALUES (1, ROW('a', 1), ARRAY[ROW('b', 2)::place], 0)",
        "ALTER TYPE place ADD ATTRIBUTE town text",
        "UPDATE $ SET v = v + 1",
        "UPDATE $ SET at.town = 'c' WHERE id = 1",
        "ALTER TYPE place DROP ATTRIBUTE number",
        "UPDATE $ SET v = v + 1",
        "ALTER TYPE place ADD ATTRIBUTE number text",
        "INSERT INTO $ SELECT id + 10, at, many || at, v FROM $",
        "UPDATE $ SET many[1].number = 'd', v = v + 1",
        "VACUUM FULL $",
        "UPDATE $ SET at = many[1]",
    ]
    .into_iter()
    .enumerate()
    {
        let tables: &[&str] = if step.contains('$') { &["plain", "fenced"] } else { &[""] };
        let token = db.token()?;
        for table in tables {
            let step = step.replace('$', table);
            db.run(&if step.starts_with("VACUUM") { step } else { set(token, &step) })?;
        }
        let differ = "SELECT count(*) FROM plain AS p FULL JOIN fenced AS f USING (id)
                       WHERE (p.at::text, p.many::text, to_jsonb(p) - 'fence')
                         IS DISTINCT FROM (f.at::text, f.many::text, to_jsonb(f) - 'fence')";
        shows(&mut db, differ, "0").with_context(|| format!("step {n}: {step}"))?;
    }
    shows(&mut db, "SELECT count(*), count(fence) FROM fenced", "2|2")?;
    // Rows that functions answer are values of their type, too, and may be kept.
    db.run(
        "SELECT lease_acquire('job', 'me'); CREATE TABLE kept AS \
           SELECT i, l FROM lease_info('job') AS i JOIN fence.leases AS l USING (name); \
         ALTER TABLE fence.lease ADD COLUMN extra text DEFAULT 'x'",
    )?;
    shows(&mut db, "SELECT (i).holder, (l).holder FROM kept", "me|me")?;
    shows(&mut db, "SELECT i.holder FROM lease_info('job') AS i", "me")
}
