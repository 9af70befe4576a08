//! `fence_protect` and `fence_unprotect`: what they attach, to what they refuse to, what they leave.

use crate::support::set_if_known;
use crate::support::test_database::{shows, TestDatabase, ORDERS};
use pg_test::{edition, ensure, lab_test, Background, Context, Fault, Lab, Result};

/// Triggers of ours on `orders` as \d shows them, without what is the same for all.
const TRIGGERS: &str = "SELECT string_agg(tgenabled::text || ' ' || replace(replace(pg_get_triggerdef(oid), \
        'CREATE TRIGGER ', ''), ' ON public.orders FOR EACH ROW EXECUTE FUNCTION fenced', ' '), '; ' ORDER BY tgname) \
     FROM pg_trigger WHERE tgrelid = 'orders'::regclass AND tgfoid = 'fenced'::regproc \
                       AND tgname <> 'fenced_truncate'";
const TRUNCATE: &str = "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'orders'::regclass \
                        AND pg_get_triggerdef(oid) LIKE '%BEFORE TRUNCATE ON public.orders FOR EACH STATEMENT%'";

/// Arguments, row triggers, and whether there is one against TRUNCATE.
const KINDS: [(&str, &str, &str); 14] = [
    ("", "O fenced BEFORE DELETE OR UPDATE ('fence', 'strict')", "1"),
    ("mode => 'MONOTONIC'", "O fenced BEFORE DELETE OR UPDATE ('fence', 'monotonic')", "1"),
    ("always => true", "A fenced BEFORE DELETE OR UPDATE ('fence', 'strict')", "1"),
    (
        "'v2', events => ' Update , insert,UPDATE'",
        "O fenced BEFORE INSERT OR UPDATE ('v2', 'strict', '', '', 'insert,update')",
        "0",
    ),
    ("events => 'truncate'", "-", "1"),
    (
        "verify => true",
        "O fenced BEFORE DELETE OR UPDATE ('fence', 'strict'); \
         O fenced_verify AFTER UPDATE ('fence', 'strict', '', 'verify')",
        "1",
    ),
    (
        "lease => 'order:{id}'",
        "O fenced BEFORE INSERT OR DELETE OR UPDATE ('fence', 'monotonic', 'order:{id}')",
        "1",
    ),
    (
        "lease => 'o''{{{id}', mode => 'strict', events => 'delete'",
        "O fenced BEFORE DELETE ('fence', 'strict', 'o''{{{id}', '', 'delete')",
        "0",
    ),
    (
        "lease => 'order:{id}', verify => true, always => true",
        "A fenced BEFORE INSERT OR DELETE OR UPDATE ('fence', 'monotonic', 'order:{id}'); \
         A fenced_verify AFTER INSERT OR UPDATE ('fence', 'monotonic', 'order:{id}', 'verify')",
        "1",
    ),
    ("mode => 'Managed'", "O fenced BEFORE INSERT OR DELETE OR UPDATE ('fence', 'managed')", "1"),
    // Who creates a row must not fill a managed column, whatever the events.
    (
        "mode => 'managed', events => 'update'",
        "O fenced BEFORE INSERT OR UPDATE ('fence', 'managed', '', '', 'insert,update')",
        "0",
    ),
    (
        "mode => 'managed', events => 'truncate'",
        "O fenced BEFORE INSERT ('fence', 'managed', '', '', 'insert,truncate')",
        "1",
    ),
    (
        "mode => 'managed', lease => 'order:{id}', verify => true",
        "O fenced BEFORE INSERT OR DELETE OR UPDATE ('fence', 'managed', 'order:{id}'); \
         O fenced_verify AFTER INSERT OR UPDATE ('fence', 'managed', 'order:{id}', 'verify')",
        "1",
    ),
    (
        "mode => 'managed', lease => 'order:{id}', verify => true, events => 'update,delete'",
        "O fenced BEFORE INSERT OR DELETE OR UPDATE ('fence', 'managed', 'order:{id}', '', 'delete,update'); \
         O fenced_verify AFTER INSERT OR UPDATE ('fence', 'managed', 'order:{id}', 'verify', 'delete,update')",
        "0",
    ),
];

/// The same arguments with those named that a new fence takes by default, so that nothing stays as it was.
fn in_full(arguments: &str) -> String {
    let left_out = |name: &str| !arguments.contains(&format!("{name} =>"));
    let bound = !left_out("lease");
    let defaults = [
        ("mode", if bound { "monotonic" } else { "strict" }),
        ("lease", ""),
        ("events", if bound { "insert,update,delete,truncate" } else { "update,delete,truncate" }),
    ];
    let named = defaults.iter().filter(|(name, _)| left_out(name));
    let named = named.map(|(name, value)| format!("{name} => '{value}'"));
    let given = (!arguments.is_empty()).then(|| arguments.to_owned());
    given.into_iter().chain(named).collect::<Vec<_>>().join(", ")
}

fn warnings(db: &mut TestDatabase) -> Vec<Fault> {
    db.notices().into_iter().filter(|notice| notice.severity == "WARNING").collect()
}

#[lab_test]
fn it_attaches_what_the_arguments_say(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    for (arguments, triggers, truncate) in KINDS {
        db.run(&format!("DROP TABLE IF EXISTS orders; {ORDERS}"))?;
        db.protect(arguments)?;
        shows(&mut db, TRIGGERS, triggers)?;
        shows(&mut db, TRUNCATE, truncate)?;
    }
    Ok(())
}

#[lab_test]
fn called_again_it_attaches_anew(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(ORDERS)?;
    db.run("UPDATE orders SET fence = 7")?;
    for (first, ..) in KINDS {
        for (arguments, triggers, truncate) in KINDS {
            db.run("SELECT fence_unprotect('orders')")?;
            db.protect(first)?;
            db.protect(&in_full(arguments))?;
            shows(&mut db, TRIGGERS, triggers).with_context(|| first)?;
            shows(&mut db, TRUNCATE, truncate).with_context(|| first)?;
        }
    }
    // Made by hand, under whatever name, it goes as well; and what is not ours stays.
    db.run(
        "CREATE TRIGGER by_hand BEFORE DELETE ON orders FOR EACH ROW EXECUTE FUNCTION fenced('fence', 'monotonic');
         CREATE TRIGGER theirs BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    )?;
    db.protect(&in_full(""))?;
    shows(&mut db, TRIGGERS, KINDS[0].1)?;
    shows(&mut db, "SELECT count(*) FROM pg_trigger WHERE tgname = 'theirs'", "1")?;
    shows(&mut db, "SELECT id, v, fence FROM orders", "1|0|7")
}

#[lab_test]
fn with_the_column_there_it_does_not_wait_for_readers(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(ORDERS)?;
    let mut reader = db.database().connect()?;
    reader.run("BEGIN; SELECT count(*) FROM orders")?;
    db.run("SET lock_timeout = '1 s'")?;
    for arguments in [
        "",
        "",
        "mode => 'monotonic'",
        "lease => 'order:{id}', events => 'update,truncate'",
        "verify => true, always => true, events => 'insert,update,delete,truncate'",
        "verify => true",
    ] {
        db.protect(arguments).with_context(|| arguments)?;
    }
    let row = "O fenced BEFORE INSERT OR DELETE OR UPDATE ('fence', 'monotonic', 'order:{id}')";
    let verify =
        "O fenced_verify AFTER INSERT OR UPDATE ('fence', 'monotonic', 'order:{id}', 'verify')";
    shows(&mut db, TRIGGERS, &format!("{row}; {verify}"))?;
    db.run("ALTER TABLE orders DISABLE TRIGGER fenced")?;
    db.protect("verify => true")?;
    shows(&mut db, TRIGGERS, &format!("{row}; {verify}"))?;
    // To drop a trigger takes more.
    db.refused("SELECT fence_protect('orders')", "55P03")?;
    reader.run("COMMIT")?;
    db.protect("")?;
    shows(&mut db, TRIGGERS, row)
}

#[lab_test]
fn called_again_it_keeps_what_the_call_leaves_out(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(ORDERS)?;
    db.protect("lease => 'order:{id}', mode => 'strict', events => 'update,delete'")?;
    let fenced = |fires: &str, mode: &str, lease: &str, events: &str| {
        format!("O fenced BEFORE {fires} ('fence', '{mode}', '{lease}', '', '{events}')")
    };
    let changed = "delete,update";
    let unchanged = fenced("DELETE OR UPDATE", "strict", "order:{id}", changed);
    for arguments in ["", "mode => NULL, lease => NULL, events => NULL", "verify => false"] {
        db.protect(arguments)?;
        shows(&mut db, TRIGGERS, &unchanged)?;
        shows(&mut db, TRUNCATE, "0")?;
    }
    db.protect("mode => 'monotonic'")?;
    shows(&mut db, TRIGGERS, &fenced("DELETE OR UPDATE", "monotonic", "order:{id}", changed))?;
    db.protect("lease => 'o:{id}'")?;
    shows(&mut db, TRIGGERS, &fenced("DELETE OR UPDATE", "monotonic", "o:{id}", changed))?;
    db.protect("events => 'insert,truncate'")?;
    shows(&mut db, TRIGGERS, &fenced("INSERT", "monotonic", "o:{id}", "insert,truncate"))?;
    shows(&mut db, TRUNCATE, "1")?;
    db.protect("mode => 'managed'")?;
    db.protect("events => 'delete'")?;
    shows(&mut db, TRIGGERS, &fenced("INSERT OR DELETE", "managed", "o:{id}", "delete"))?;
    // A single trigger against TRUNCATE tells it too.
    db.protect("mode => 'strict', events => 'truncate'")?;
    db.protect("")?;
    shows(&mut db, TRIGGERS, "-")?;
    shows(&mut db, TRUNCATE, "1")?;
    db.protect("events => 'update'")?;
    let update = fenced("UPDATE", "strict", "o:{id}", "update");
    shows(&mut db, TRIGGERS, &update)?;
    // What is taken off without being named is said.
    db.protect("verify => true, always => true")?;
    db.notices();
    db.protect("")?;
    let notices = db.notices();
    ensure!(notices.len() == 1 && notices[0].message.contains("verify or always"), "{notices:?}");
    shows(&mut db, TRIGGERS, &update)
}

/// Whatever somebody has dropped, disabled or made weaker comes back, and nothing that was not asked for.
#[lab_test]
fn called_again_it_re_attaches_what_was_dropped(lab: &Lab) -> Result<()> {
    const ALL: &str = "SELECT string_agg(tgname || tgenabled::text || pg_get_triggerdef(oid), ' ' ORDER BY tgname) \
                         FROM pg_trigger WHERE tgrelid = 'orders'::regclass";
    let mut db = TestDatabase::new(lab)?;
    let drop = |names: &[&str]| -> String {
        names.iter().map(|name| format!("DROP TRIGGER {name} ON orders;")).collect()
    };
    for (arguments, ..) in KINDS {
        db.run(&format!("DROP TABLE IF EXISTS orders; {ORDERS}"))?;
        db.protect(arguments)?;
        let whole = db.text(ALL)?;
        let names = db.rows("SELECT tgname FROM pg_trigger WHERE tgrelid = 'orders'::regclass")?;
        let names: Vec<String> = names.into_iter().flatten().flatten().collect();
        for left in &names {
            let lost: Vec<&str> =
                names.iter().filter(|name| *name != left).map(|name| &**name).collect();
            db.run(&drop(&lost))?;
            // A call that says nothing, but for what it would take off.
            let column = if arguments.contains("'v2'") { "'v2', " } else { "" };
            let kept = ["verify", "always"].map(|option| {
                format!("{option} => {}", arguments.contains(&format!("{option} => true")))
            });
            db.protect(&format!("{column}{}", kept.join(", ")))?;
            ensure!(
                db.text(ALL)? == whole,
                "{arguments}: without {lost:?}: {:?}, not {whole:?}",
                db.text(ALL)?
            );
        }
    }
    // Nothing tells what it was: what the call says, and its defaults, hold.
    db.run(&format!("DROP TABLE orders; {ORDERS}"))?;
    db.protect("")?;
    let whole = db.text(ALL)?;
    db.run(&drop(&["fenced", "fenced_truncate"]))?;
    db.protect("")?;
    ensure!(db.text(ALL)? == whole);
    for weaker in [
        "ALTER TABLE orders DISABLE TRIGGER fenced",
        "ALTER TABLE orders ENABLE REPLICA TRIGGER fenced",
        "CREATE OR REPLACE TRIGGER fenced BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION fenced('fence', 'strict')",
        "CREATE OR REPLACE TRIGGER fenced BEFORE UPDATE OF v OR DELETE ON orders FOR EACH ROW EXECUTE FUNCTION fenced('fence', 'strict')",
        "CREATE OR REPLACE TRIGGER fenced BEFORE UPDATE OR DELETE ON orders FOR EACH ROW WHEN (OLD.v > 7) EXECUTE FUNCTION fenced('fence', 'strict')",
    ] {
        db.run(weaker)?;
        db.notices();
        db.protect("")?;
        ensure!(db.text(ALL)? == whole, "{weaker}");
        let said = db.notices();
        ensure!(said.iter().any(|notice| notice.message.starts_with("added to the fence of public.orders: ")), "{weaker}: {said:?}");
    }
    // More than a fence of its kind judges by itself stays, too, where it was made by hand.
    db.run("CREATE OR REPLACE TRIGGER fenced BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION fenced('fence', 'strict')")?;
    db.protect("")?;
    shows(
        &mut db,
        TRIGGERS,
        "O fenced BEFORE INSERT OR DELETE OR UPDATE ('fence', 'strict', '', '', 'delete,insert,truncate,update')",
    )
}

/// The messages of the notices since the last look; each has a hint.
fn said(db: &mut TestDatabase) -> Result<Vec<String>> {
    let notices = db.notices();
    ensure!(
        notices
            .iter()
            .all(|n| n.severity == "NOTICE" && n.hint.is_some() && !n.message.contains('\n')),
        "{notices:?}"
    );
    Ok(notices.into_iter().map(|notice| notice.message.clone()).collect())
}

#[lab_test]
fn it_says_what_it_added_and_what_that_leaves_open(lab: &Lab) -> Result<()> {
    const ORDER_ALONE: &str = "public.orders is bound to no lease: its fence checks the order of tokens alone, and the holder of \
                               any lease can write it";
    const NULLABLE: &str =
        "column \"place\" of public.orders may be NULL: nobody can write such a row (22004)";
    let mut db = TestDatabase::new(lab)?;
    db.run("CREATE TABLE orders (id int PRIMARY KEY, place text)")?;
    for (arguments, dropped, wanted) in [
        (
            "",
            "",
            &[
                "added to the fence of public.orders: column \"fence\", UPDATE, DELETE, TRUNCATE",
                ORDER_ALONE,
            ][..],
        ),
        ("", "", &[ORDER_ALONE]),
        (
            "",
            "DROP TRIGGER fenced ON orders",
            &["added to the fence of public.orders: UPDATE, DELETE", ORDER_ALONE],
        ),
        (
            "",
            "DROP TRIGGER fenced_truncate ON orders",
            &["added to the fence of public.orders: TRUNCATE", ORDER_ALONE],
        ),
        ("verify => true", "", &["added to the fence of public.orders: verify", ORDER_ALONE]),
        (
            "verify => NULL, lease => 'order:{id}'",
            "",
            &["added to the fence of public.orders: INSERT"],
        ),
        ("verify => NULL", "", &[]),
        ("verify => NULL, lease => 'order:{id}{place}'", "", &[NULLABLE]),
        ("verify => NULL", "", &[NULLABLE]),
    ] {
        db.run(&format!("{dropped};"))?;
        db.notices();
        db.protect(arguments)?;
        let said = said(&mut db)?;
        ensure!(said == wanted, "{arguments}; {dropped}: {said:?}");
    }
    // The hint of the last one is the statement that helps.
    db.protect("verify => NULL")?;
    let hint = db.notices().pop().and_then(|notice| notice.hint.clone()).context("no hint")?;
    db.run(&hint)?;
    db.protect("verify => NULL")?;
    ensure!(said(&mut db)?.is_empty());
    // Of partitions, what one of them lacks.
    db.run(&format!("DROP TABLE orders; {TREE}"))?;
    db.protect("")?;
    db.run("DROP TRIGGER fenced_truncate ON two")?;
    db.notices();
    db.protect("")?;
    ensure!(said(&mut db)? == ["added to the fence of public.orders: TRUNCATE", ORDER_ALONE]);
    Ok(())
}

/// What the hint of 22004 says can be done, and mends them.
#[lab_test]
fn rows_that_name_no_lease_are_mended_by_the_owner(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE TABLE orders (id int PRIMARY KEY, place text, v int, fence bigint);
         INSERT INTO orders VALUES (1, NULL, 0), (2, 'Ulm', 0)",
    )?;
    let arguments = "lease => 'at:{place}', verify => true";
    db.protect(arguments)?;
    let token = db.grant("at:Kiel")?;
    for write in [
        "UPDATE orders SET v = 1, place = 'Kiel'",
        "DELETE FROM orders",
        "INSERT INTO orders VALUES (3)",
    ] {
        let fault = db.refused(&format!("SET pg_fence.token = {token}; {write}"), "22004")?;
        let hint = fault.hint.clone().context("no hint")?;
        for step in ["fence_unprotect", "UPDATE", "SET NOT NULL", "fence_protect"] {
            ensure!(hint.contains(step), "{hint}");
        }
    }
    db.run(&format!(
        "BEGIN; SELECT fence_unprotect('orders'); UPDATE orders SET place = 'Kiel' WHERE place IS NULL;
         ALTER TABLE orders ALTER COLUMN place SET NOT NULL; SELECT fence_protect('orders', {arguments}); COMMIT"
    ))?;
    db.run(&format!(
        "RESET pg_fence.token; UPDATE orders SET v = 1, fence = {token} WHERE id = 1"
    ))?;
    shows(&mut db, "SELECT finding FROM fence_audit('orders')", "")
}

#[lab_test]
fn a_wrapper_that_passes_null_changes_nothing(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    let all_null = "NULL, NULL, NULL, NULL, NULL, NULL";
    for (arguments, triggers, truncate) in KINDS {
        db.run(&format!("DROP TABLE IF EXISTS orders; {ORDERS}"))?;
        // On a new table NULL is the default.
        db.protect(all_null)?;
        shows(&mut db, TRIGGERS, KINDS[0].1)?;
        db.run("SELECT fence_unprotect('orders')")?;
        db.protect(arguments)?;
        db.notices();
        db.protect(all_null)?;
        shows(&mut db, TRIGGERS, triggers).with_context(|| arguments)?;
        shows(&mut db, TRUNCATE, truncate).with_context(|| arguments)?;
        // Nothing was added, nothing taken off.
        let said: Vec<String> =
            db.notices().into_iter().map(|notice| notice.message.clone()).collect();
        let unbound = !arguments.contains("lease =>");
        ensure!(said.len() == usize::from(unbound), "{arguments}: {said:?}");
        ensure!(said.iter().all(|message| message.contains("bound to no lease")), "{said:?}");
    }
    Ok(())
}

#[lab_test]
fn binding_and_unbinding_change_what_depends_on_the_lease(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "events => 'update'")?;
    db.protect("lease => 'order:{id}'")?;
    shows(&mut db, TRIGGERS, KINDS[6].1)?;
    shows(&mut db, TRUNCATE, "1")?;
    let token = db.grant("order:1")?;
    let foreign = db.token()?;
    db.protect("")?;
    db.refused(&format!("UPDATE orders SET fence = {foreign}"), "PF004")?;
    db.run(&format!("UPDATE orders SET fence = {token}"))?;
    // Without a lease, monotonic would let a client pass that writes back what it has read.
    db.protect("lease => ''")?;
    let strict = "O fenced BEFORE INSERT OR DELETE OR UPDATE \
                  ('fence', 'strict', '', '', 'delete,insert,truncate,update')";
    shows(&mut db, TRIGGERS, strict)?;
    db.run(&format!("UPDATE orders SET fence = {foreign}"))?;
    // Twice is as good as once.
    db.protect("lease => ''")?;
    shows(&mut db, TRIGGERS, strict)?;
    db.protect("mode => 'managed'")?;
    db.protect("lease => 'order:{id}'")?;
    db.protect("lease => ''")?;
    shows(&mut db, TRIGGERS, "O fenced BEFORE INSERT OR DELETE OR UPDATE ('fence', 'managed')")
}

#[lab_test]
fn it_adds_a_column_only_where_there_is_none(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    let columns = "SELECT attname, format_type(atttypid, atttypmod), attnotnull FROM pg_attribute \
                   WHERE attrelid = 'orders'::regclass AND attnum > 1 AND NOT attisdropped ORDER BY attnum";
    db.run("CREATE TABLE orders (id int PRIMARY KEY)")?;
    db.protect("")?;
    shows(&mut db, columns, "fence|bigint|f")?;
    db.protect("")?;
    db.run("COMMENT ON COLUMN orders.fence IS 'mine'")?;
    db.protect("lease => 'order:{id}'")?;
    shows(&mut db, columns, "fence|bigint|f")?;
    shows(&mut db, "SELECT col_description('orders'::regclass, 2)", "mine")?;
    ensure!(warnings(&mut db).is_empty());
    // A second column starts without the tokens of the first, and that is said.
    db.run("COMMENT ON COLUMN orders.fence IS NULL")?;
    db.protect("")?;
    db.run("ALTER TABLE orders RENAME fence TO seen")?;
    db.protect("")?;
    let notices = warnings(&mut db);
    ensure!(notices.len() == 1 && notices[0].message.contains("\"seen\""), "{notices:?}");
    db.protect("'seen'")?;
    ensure!(warnings(&mut db).is_empty());
    shows(&mut db, columns, "seen|bigint|f fence|bigint|f")
}

#[lab_test]
fn names_are_quoted(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    let table = r#""We ird"."T ""q; DROP TABLE orders; --""#;
    let column = r#""Fen'ce\ %s""#;
    db.run(&format!(
        r#"CREATE SCHEMA "We ird"; CREATE TABLE {table} (id int, "It's {{}}" int, "Na me" text DEFAULT 'n');
           INSERT INTO {table} (id) VALUES (7)"#
    ))?;
    let as_text = table.replace('\'', "''");
    for arguments in ["", ", verify => true, always => true"] {
        db.run(&format!(
            r#"SELECT fence_protect('{as_text}', E'Fen''ce\\ %s', lease => E'a''{{{{{{id}}}}}}\\$$%s{{Na me}}'{arguments})"#
        ))?;
        let right: i64 =
            db.one(r"SELECT lease_acquire(E'a''{7}\\$$%sn', reclaim => true, holder => 'h')", &[])?;
        let wrong = db.token()?;
        db.run(&format!("UPDATE {table} SET {column} = {right}"))?;
        db.refused(&format!("UPDATE {table} SET {column} = {wrong}"), "PF004")?;
        db.refused(&format!("DELETE FROM {table}"), "PF002")?;
        db.refused(&format!("TRUNCATE {table}"), "PF005")?;
    }
    db.run(&format!("SELECT fence_unprotect('{as_text}'); TRUNCATE {table}"))
}

#[lab_test]
fn what_cannot_be_protected_is_refused(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE TYPE kind AS (id int); CREATE TABLE typed OF kind;
         CREATE TABLE orders (id int PRIMARY KEY, g int GENERATED ALWAYS AS (1) STORED, n numeric, c char(3),
             filled bigint DEFAULT 3, made bigint GENERATED ALWAYS AS (id) STORED,
             counted bigint GENERATED BY DEFAULT AS IDENTITY, number int);
         CREATE VIEW v AS SELECT * FROM orders; CREATE MATERIALIZED VIEW m AS SELECT 1 AS id; CREATE SEQUENCE q;
         CREATE TEMP TABLE short (id int); CREATE UNLOGGED TABLE quick (id int);
         CREATE TABLE p (id int, fence bigint) PARTITION BY LIST (id);
         CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1) PARTITION BY LIST (id);
         CREATE TABLE p11 PARTITION OF p1 FOR VALUES IN (1);
         CREATE TABLE half (id int) PARTITION BY LIST (id); CREATE UNLOGGED TABLE half1 PARTITION OF half DEFAULT;
         CREATE FOREIGN DATA WRAPPER nothing; CREATE SERVER nowhere FOREIGN DATA WRAPPER nothing;
         CREATE FOREIGN TABLE abroad (id int, fence bigint) SERVER nowhere;
         CREATE TABLE far (id int) PARTITION BY LIST (id); CREATE FOREIGN TABLE far1 PARTITION OF far DEFAULT SERVER nowhere;
         CREATE TABLE parent (id int); CREATE TABLE child () INHERITS (parent);
         CREATE TABLE named (id int);
         CREATE TRIGGER fenced_verify BEFORE UPDATE ON named FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    )?;
    let state = "SELECT count(*), (SELECT count(*) FROM pg_trigger) FROM pg_attribute";
    let before = db.rows(state)?;
    for (arguments, sqlstate, says) in [
        ("'orders', 'filled'", "42611", "has a default"),
        ("'orders', 'made'", "42611", "is generated"),
        ("'orders', 'counted'", "42611", "has a default"),
        ("'orders', 'number'", "42804", "of type integer, not bigint"),
        ("'orders', 'n'", "42804", "of type numeric"),
        ("'orders', 'xmin'", "42701", "of Postgres itself"),
        ("'orders', lease => 'o:{none}'", "42703", "no column of it"),
        ("'orders', lease => 'o:{ID}'", "42703", "no column of it"),
        ("'orders', lease => 'o:{ctid}'", "42703", "no column of it"),
        ("'orders', lease => 'o:{id}{n}'", "42804", "not fit"),
        ("'orders', lease => 'o:{c}'", "42804", "not fit"),
        ("'orders', lease => 'o:{g}'", "42611", "generated"),
        ("'orders', lease => 'o:{fence}'", "22023", "fence column"),
        ("'v'", "42809", "not a table"),
        ("'m'", "42809", "not a table"),
        ("'q'", "42809", "not a table"),
        ("'abroad'", "42809", "not a table of this server"),
        ("'short'", "42809", "temporary"),
        ("'quick'", "42809", "unlogged"),
        ("'p1'", "42809", "partition"),
        ("'p11'", "42809", "partition"),
        ("'half'", "42809", "a partition of it"),
        ("'far'", "42809", "a partition of it"),
        ("'child'", "42809", "inheritance child"),
        ("'named'", "42710", "another trigger bears the name"),
        ("'typed'", "42809", "no attribute"),
        ("'pg_class'", "42809", "belongs to Postgres"),
        ("'fence.lease'", "42809", "pg_fence itself"),
        ("99", "42P01", "no such table"),
        ("'p', verify => true, events => 'update'", "22023", "partitioned"),
        ("'p', mode => 'managed', lease => 'o:{id}', events => 'update'", "22023", "partitioned"),
    ] {
        if !edition::has(arguments) {
            continue;
        }
        let call = format!("SELECT fence_protect({arguments})");
        let fault = db.refused(&call, sqlstate)?;
        ensure!(fault.message.contains(says), "{call}: {fault}");
        ensure!(fault.hint.as_deref().is_some_and(|hint| !hint.is_empty()), "{call}: {fault}");
        ensure!(fault.json()?["relation"].is_string(), "{call}: {fault}");
        ensure!(db.rows(state)? == before, "{call} left something");
    }
    Ok(())
}

#[lab_test]
fn what_means_nothing_is_refused(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(ORDERS)?;
    for (arguments, sqlstate) in [
        ("NULL", "22004"),
        ("'orders', ''", "22023"),
        ("'orders', mode => 'lax'", "22023"),
        ("'orders', mode => ''", "22023"),
        ("'orders', events => ''", "22023"),
        ("'orders', events => 'update,,delete'", "22023"),
        ("'orders', events => 'select'", "22023"),
        ("'orders', events => 'update or delete'", "22023"),
        ("'orders', events => 'delete,truncate', verify => true", "22023"),
        ("'orders', lease => ''", "22023"),
        ("'orders', lease => 'o:{'", "22023"),
        ("'orders', lease => 'o:}'", "22023"),
        ("'orders', lease => 'o:{}'", "22023"),
        ("'orders', lease => 'o:{id}}'", "22023"),
        ("'orders', lease => repeat('x', 513)", "22023"),
        ("'orders', lease => repeat('ä', 257)", "22023"),
    ] {
        if !edition::has(arguments) {
            continue;
        }
        let call = format!("SELECT fence_protect({arguments})");
        let fault = db.refused(&call, sqlstate)?;
        ensure!(fault.hint.as_deref().is_some_and(|hint| !hint.is_empty()), "{call}: {fault}");
        shows(&mut db, TRIGGERS, "-")?;
    }
    db.refused("SELECT fence_unprotect(NULL)", "22004")?;
    db.refused("SELECT fence_unprotect(99)", "42P01").map(drop)
}

#[lab_test]
fn a_table_that_changed_while_it_waited_is_looked_at_again(lab: &Lab) -> Result<()> {
    for (change, sqlstate) in [
        ("ALTER TABLE orders SET UNLOGGED", "42809"),
        ("ALTER TABLE orders ALTER fence SET DEFAULT 7", "42611"),
        ("ALTER TABLE orders RENAME id TO number", "42703"),
        ("ALTER TABLE orders RENAME TO bills; CREATE TABLE orders (id int, fence bigint)", "40001"),
    ] {
        // Lite fences the one that was named.
        if edition::is_lite() && sqlstate == "40001" {
            continue;
        }
        let mut db = TestDatabase::new(lab)?;
        db.run(ORDERS)?;
        let mut caller = Background::connect(&db.database().conninfo())?;
        db.run(&format!("BEGIN; {change}"))?;
        // By oid, so that the name is not what it waits for.
        let oid: u32 = db.one(
            "SELECT oid FROM pg_class WHERE relname IN ('orders', 'bills') ORDER BY oid LIMIT 1",
            &[],
        )?;
        caller.send(&format!("SELECT fence_protect({oid}, lease => 'order:{{id}}')"))?;
        caller.wait_until_blocked()?;
        db.run("COMMIT")?;
        caller.refused(sqlstate).with_context(|| change)?;
        shows(&mut db, "SELECT count(*) FROM pg_trigger WHERE tgfoid = 'fenced'::regproc", "0")?;
    }
    Ok(())
}

const TREE: &str = "CREATE TABLE orders (id int, v int, fence bigint) PARTITION BY LIST (id); \
                    CREATE TABLE one PARTITION OF orders FOR VALUES IN (1); \
                    CREATE TABLE more PARTITION OF orders FOR VALUES IN (2, 3) PARTITION BY LIST (id); \
                    CREATE TABLE two PARTITION OF more FOR VALUES IN (2);";

#[lab_test]
fn a_partition_made_later_is_fenced_alike(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(TREE)?;
    db.protect("lease => 'order:{id}', verify => true, always => true")?;
    db.run(
        "CREATE TABLE three PARTITION OF more FOR VALUES IN (3);
         CREATE TABLE four (v int, fence bigint, id int); ALTER TABLE orders ATTACH PARTITION four FOR VALUES IN (4)",
    )?;
    let token = db.grant("order:1")?;
    for id in 1..=4 {
        let insert = format!("INSERT INTO orders VALUES ({id}, 0, {token})");
        db.comes_to(&insert, "SELECT count(*) FROM orders", if id == 1 { "1" } else { "PF004" })?;
    }
    shows(
        &mut db,
        "SELECT tgname, tgenabled, count(*) FROM pg_trigger WHERE tgfoid = 'fenced'::regproc GROUP BY 1, 2 ORDER BY 1",
        "fenced|A|6 fenced_truncate|A|4 fenced_verify|A|6",
    )?;
    db.run("SELECT fence_protect('orders', lease => 'order:{id}')")?;
    shows(
        &mut db,
        "SELECT tgname, tgenabled, count(*) FROM pg_trigger WHERE tgfoid = 'fenced'::regproc GROUP BY 1, 2 ORDER BY 1",
        "fenced|O|6 fenced_truncate|O|6",
    )
}

#[lab_test]
fn the_children_of_a_table_are_left_with_a_warning(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(&format!("{ORDERS} CREATE TABLE child () INHERITS (orders)"))?;
    db.notices();
    db.protect("")?;
    let notices = warnings(&mut db);
    ensure!(notices.len() == 1, "{notices:?}");
    ensure!(
        notices[0].hint.as_deref().is_some_and(|hint| hint.contains("fence_audit(")),
        "{notices:?}"
    );
    db.run("INSERT INTO child VALUES (2); UPDATE child SET v = 1")
}

#[lab_test]
fn a_member_of_the_owner_may(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    let (owner, member) = (db.database().role("owner")?, db.database().role("member")?);
    db.run(&format!("{ORDERS} ALTER TABLE orders OWNER TO {owner}; GRANT {owner} TO {member}"))?;
    let mut session = db.database().connect_as(&member)?;
    session.run("SELECT fence_protect('orders'); SELECT fence_unprotect('orders')")?;
    // From PostgreSQL 16 on it is the grant that says whether its rights are inherited, made when it is.
    db.run(&format!(
        "ALTER ROLE {member} NOINHERIT; REVOKE {owner} FROM {member}; GRANT {owner} TO {member}"
    ))?;
    let fault = session.refused("SELECT fence_protect('orders')", "42501")?;
    ensure!(fault.hint.as_deref().is_some_and(|hint| hint.contains(&owner)), "{fault}");
    session.run(&format!("SET ROLE {owner}; SELECT fence_protect('orders')"))
}

#[lab_test]
fn it_takes_off_the_fence_and_nothing_else(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "lease => 'order:{id}', verify => true")?;
    let token = db.grant("order:1")?;
    db.run(&format!(
        "UPDATE orders SET v = 1, fence = {token};
         CREATE TRIGGER theirs BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger();
         CREATE TRIGGER by_hand BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION fenced();
         SELECT fence_unprotect('orders')"
    ))?;
    shows(&mut db, "SELECT tgname FROM pg_trigger WHERE tgrelid = 'orders'::regclass", "theirs")?;
    shows(&mut db, "SELECT * FROM orders", &format!("1|1|{token}"))?;
    db.notices();
    db.run("UPDATE orders SET v = 2; DELETE FROM orders; TRUNCATE orders")?;
    ensure!(db.notices().is_empty());
    db.run("SELECT fence_unprotect('orders')")?;
    let notices = db.notices();
    ensure!(notices.len() == 1 && notices[0].message.contains("is not fenced"), "{notices:?}");
    Ok(())
}

#[lab_test]
fn it_takes_the_fence_off_a_whole_tree(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(TREE)?;
    db.protect("verify => true")?;
    for part in ["one", "more", "two"] {
        let fault = db.refused(&format!("SELECT fence_unprotect('{part}')"), "42809")?;
        ensure!(fault.hint.as_deref().is_some_and(|hint| hint.contains("orders")), "{fault}");
    }
    db.run("SELECT fence_unprotect('orders')")?;
    shows(&mut db, "SELECT count(*) FROM pg_trigger WHERE tgfoid = 'fenced'::regproc", "0")
}

/// A backslash in a body would mean one thing where it is `on`, another where it is `off`, and be warned of there.
#[lab_test]
fn no_function_depends_on_standard_conforming_strings(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "")?;
    let ambiguous = "SELECT p.oid::regprocedure || ': ' || line
          FROM pg_depend d JOIN pg_proc p ON p.oid = d.objid CROSS JOIN string_to_table(p.prosrc, E'\\n') AS line
         WHERE d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'pg_fence') AND d.deptype = 'e'
           AND d.classid = 'pg_proc'::regclass AND ltrim(line) NOT LIKE '--%' AND line LIKE E'%\\\\\\\\%' AND line NOT LIKE '%E''%'";
    shows(&mut db, ambiguous, "")?;
    db.run(&set_if_known("standard_conforming_strings = off"))?;
    db.run("SET client_min_messages = warning")?;
    db.notices();
    db.run(
        "SELECT fence_protect('orders', events => ' update , delete,truncate '), fence_audit(), fence_unprotect('orders');
         SELECT fence_grant('pg_monitor', 'monitor'), fence_revoke('pg_monitor')",
    )?;
    let notices = db.notices();
    ensure!(notices.is_empty(), "{notices:?}");
    Ok(())
}

/// A schema a tenant, made from one template: who holds a lease of the one holds that of all, until one has its own.
#[lab_test]
fn tables_of_one_name_in_two_schemas_that_share_leases_are_told_of(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE SCHEMA a; CREATE SCHEMA \"b{\\\"; CREATE TABLE a.orders (id int PRIMARY KEY);
         CREATE TABLE \"b{\\\".orders (LIKE a.orders INCLUDING ALL); CREATE TABLE a.bills (id int PRIMARY KEY)",
    )?;
    let findings =
        "SELECT relation || '|' || finding FROM fence_audit() WHERE finding LIKE 'its leases%' ORDER BY 1";
    for table in ["a.orders", "a.bills"] {
        db.run(&format!("SELECT fence_protect('{table}', lease => 'order:{{id}}')"))?;
    }
    shows(&mut db, findings, "")?;
    db.notices();
    db.run("SELECT fence_protect(E'\"b{\\\\\".orders', lease => 'order:{id}')")?;
    let told = db.notices();
    let shared = told.iter().find(|notice| notice.message.contains("the same names"));
    let shared = shared.context("no NOTICE of it")?;
    ensure!(shared.message == "\"b{\\\".orders has leases of the same names as a.orders: the holder of one holds all", "{shared}");
    ensure!(db.rows(findings)?.len() == 2);
    let hint = shared.hint.as_deref().context("no hint")?;
    let start = hint.find("SELECT").context("no statement")?;
    db.run(&hint[start..=hint.find(';').context("no statement")?])?;
    shows(&mut db, findings, "")?;
    db.run("INSERT INTO \"b{\\\".orders SELECT 7, lease_acquire(E'b{\\\\:order:7')")?;
    // The audit's remedies do the same.
    db.run("SELECT fence_protect(E'\"b{\\\\\".orders', lease => 'order:{id}')")?;
    let rows = db.rows("SELECT remedy FROM fence_audit() WHERE finding LIKE 'its leases%'")?;
    for remedy in rows.concat().into_iter().flatten() {
        db.run(&remedy)?;
    }
    shows(&mut db, findings, "")
}
