//! The trigger where it cannot work: it says so, and nothing lands.

use crate::support::test_database::{shows, TestDatabase, ORDERS};
use pg_test::{ensure, lab_test, Lab, Result};

fn unprotected(lab: &Lab) -> Result<TestDatabase> {
    let mut db = TestDatabase::new(lab)?;
    db.run(ORDERS)?;
    Ok(db)
}

#[lab_test]
fn a_trigger_in_the_wrong_place_is_refused(lab: &Lab) -> Result<()> {
    let mut db = unprotected(lab)?;
    let token = db.token()?;
    db.run("CREATE VIEW seen AS SELECT * FROM orders")?;
    let writes = [
        format!("UPDATE {{}} SET fence = {token}"),
        format!("INSERT INTO {{}} VALUES (2, 0, {token})"),
        format!("SET LOCAL pg_fence.token = '{token}'; DELETE FROM {{}}"),
    ];
    for (place, table) in [
        ("AFTER INSERT OR UPDATE OR DELETE ON orders FOR EACH ROW", "orders"),
        ("BEFORE INSERT OR UPDATE OR DELETE ON orders FOR EACH STATEMENT", "orders"),
        ("AFTER INSERT OR UPDATE OR DELETE ON orders FOR EACH STATEMENT", "orders"),
        ("INSTEAD OF INSERT OR UPDATE OR DELETE ON seen FOR EACH ROW", "seen"),
    ] {
        db.run(&format!("CREATE TRIGGER misplaced {place} EXECUTE FUNCTION fenced()"))?;
        for write in &writes {
            db.comes_to(&write.replace("{}", table), "SELECT 1", "39P01")?;
        }
        let fault = db.refused(&writes[0].replace("{}", table), "39P01")?;
        ensure!(
            fault.hint.as_deref().is_some_and(|hint| hint.contains("fence_protect")),
            "{fault}"
        );
        db.run(&format!("DROP TRIGGER misplaced ON {table}"))?;
    }
    // A deferred one refuses too, at the latest with the commit.
    db.run(
        "CREATE CONSTRAINT TRIGGER misplaced AFTER UPDATE ON orders \
         DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fenced()",
    )?;
    db.refused(&writes[0].replace("{}", "orders"), "39P01")?;
    shows(&mut db, "TABLE orders", "1|0|-")
}

#[lab_test]
fn the_function_called_by_hand_is_refused(lab: &Lab) -> Result<()> {
    let mut db = unprotected(lab)?;
    let nobody = db.database().role("nobody")?;
    db.database().connect_as(&nobody)?.refused("SELECT fenced()", "39P01")?;
    db.refused("SELECT fenced()", "39P01")?;
    db.refused("SELECT * FROM fenced()", "42804")?;
    let fault = db.refused("DO $$ BEGIN PERFORM public.fenced(); END $$", "39P01")?;
    ensure!(fault.message.contains("trigger"), "{fault}");
    // As an event trigger Postgres does not take it.
    db.refused("CREATE EVENT TRIGGER e ON ddl_command_end EXECUTE FUNCTION fenced()", "42P17")
        .map(drop)
}

#[lab_test]
fn arguments_that_mean_nothing_are_refused(lab: &Lab) -> Result<()> {
    let mut db = unprotected(lab)?;
    let token = db.token()?;
    for (arguments, sqlstate) in [
        ("'fence', 'stric'", "22023"),
        ("'fence', 'STRICT'", "22023"),
        ("'fence', 'strict ', ''", "22023"),
        ("'fence', 'strict', 'order:{'", "22023"),
        ("'fence', 'strict', 'order:}'", "22023"),
        ("'fence', 'strict', 'order:{}'", "22023"),
        ("'fence', 'strict', 'order:{id'", "22023"),
        ("'fence', 'strict', 'order:{id}', 'verily'", "22023"),
        ("'fence', 'strict', 'order:{id}', '', 'more'", "22023"),
        ("'fence', 'strict', '', 'check'", "22023"),
        ("'fence', 'strict', '', '', 'updates'", "22023"),
        ("'fence', 'managed', 'order:{id}', '', 'update, delete'", "22023"),
        ("'fence', 'managed', 'order:{id}', '', 'unfenced insert'", "22023"),
        ("'fence', 'strict', '', '', '', 'more'", "22023"),
        ("'Fence'", "42703"),
        ("'none'", "42703"),
        ("'ctid'", "42703"),
        ("'v'", "42804"),
        ("'fence', 'strict', 'order:{ID}'", "42703"),
        ("'fence', 'strict', 'order:{ id }'", "42703"),
    ] {
        db.run(&format!(
            "CREATE OR REPLACE TRIGGER fenced BEFORE INSERT OR UPDATE OR DELETE ON orders \
             FOR EACH ROW EXECUTE FUNCTION fenced({arguments})"
        ))?;
        for write in [
            format!("UPDATE orders SET fence = {token}"),
            format!("INSERT INTO orders VALUES (2, 0, {token})"),
            format!("SET LOCAL pg_fence.token = '{token}'; DELETE FROM orders"),
        ] {
            db.comes_to(&write, "SELECT 1", sqlstate)?;
            let fault = db.refused(&write, sqlstate)?;
            ensure!(fault.hint.as_deref().is_some_and(|hint| !hint.is_empty()), "{fault}");
        }
    }
    shows(&mut db, "TABLE orders", "1|0|-")
}

#[lab_test]
fn a_column_renamed_or_dropped_fails_closed(lab: &Lab) -> Result<()> {
    for lease in ["", "lease => 'order:{id}', verify => true"] {
        let mut db = TestDatabase::orders(lab, lease)?;
        let token = db.grant("order:1")?;
        let writes = |column: &str| {
            [
                format!("UPDATE orders SET {column} = {token}"),
                format!("SET LOCAL pg_fence.token = '{token}'; UPDATE orders SET v = 7"),
                format!("SET LOCAL pg_fence.token = '{token}'; DELETE FROM orders"),
            ]
        };
        db.run("ALTER TABLE orders RENAME COLUMN fence TO fence_token")?;
        for write in writes("fence_token") {
            db.comes_to(&write, "SELECT 1", "42703")?;
        }
        db.run("ALTER TABLE orders DROP COLUMN fence_token")?;
        db.run("ALTER TABLE orders ALTER COLUMN v TYPE bigint")?;
        for write in writes("v") {
            db.comes_to(&write, "SELECT 1", "42703")?;
        }
        // As the hint says: attached again, it works again.
        db.protect(lease)?;
        db.run(&writes("fence")[0])?;
    }
    let mut db = TestDatabase::orders(lab, "lease => 'order:{id}'")?;
    let token = db.grant("order:1")?;
    db.run("ALTER TABLE orders RENAME COLUMN id TO number")?;
    let fault = db.refused(&format!("UPDATE orders SET fence = {token}"), "42703")?;
    ensure!(fault.message.contains("id"), "{fault}");
    Ok(())
}

#[lab_test]
fn a_column_of_the_wrong_kind_fails_closed(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "")?;
    let token = db.token()?;
    db.run("CREATE DOMAIN tick AS bigint")?;
    for kind in ["int", "numeric", "text", "tick", "double precision"] {
        db.run(&format!("ALTER TABLE orders ALTER COLUMN fence TYPE {kind} USING NULL"))?;
        // An int has no room for a token.
        let write = format!("UPDATE orders SET fence = {token} % 1000");
        db.comes_to(&write, "SELECT 1", "42804")?;
        db.comes_to(
            &format!("SET LOCAL pg_fence.token = '{token}'; DELETE FROM orders"),
            "SELECT 1",
            "42804",
        )?;
    }
    db.run("ALTER TABLE orders DROP COLUMN fence, ADD COLUMN fence bigint GENERATED ALWAYS AS (id) STORED")?;
    let set = format!("SET LOCAL pg_fence.token = '{token}'; UPDATE orders SET v = 7");
    db.comes_to(&set, "SELECT 1", "42804")
}

#[lab_test]
fn a_lease_that_cannot_be_worked_out_fails_closed(lab: &Lab) -> Result<()> {
    let mut db = unprotected(lab)?;
    let token = db.token()?;
    db.run(
        "ALTER TABLE orders ADD COLUMN n numeric DEFAULT 1, ADD COLUMN f float8 DEFAULT 1, \
         ADD COLUMN d date DEFAULT '2026-01-01', ADD COLUMN ts timestamptz DEFAULT now(), ADD COLUMN c char(3) DEFAULT 'x', \
         ADD COLUMN b bytea DEFAULT 'x', ADD COLUMN a int[] DEFAULT '{1}', ADD COLUMN j jsonb DEFAULT '1', \
         ADD COLUMN g int GENERATED ALWAYS AS (v + 1) STORED",
    )?;
    for column in ["n", "f", "d", "ts", "c", "b", "a", "j", "g"] {
        db.run(&format!(
            "CREATE OR REPLACE TRIGGER fenced BEFORE UPDATE ON orders \
             FOR EACH ROW EXECUTE FUNCTION fenced('fence', 'strict', 'order:{{{column}}}')"
        ))?;
        db.comes_to(&format!("UPDATE orders SET fence = {token}"), "SELECT 1", "42804")?;
    }
    shows(&mut db, "SELECT id, v, fence FROM orders", "1|0|-")
}

#[lab_test]
fn the_trigger_made_by_hand_is_the_one_of_the_readme(lab: &Lab) -> Result<()> {
    let mut db = unprotected(lab)?;
    db.run("CREATE TRIGGER fenced BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION fenced()")?;
    let (a, b) = (db.token()?, db.token()?);
    db.run(&format!("UPDATE orders SET fence = {b}"))?;
    db.refused(&format!("UPDATE orders SET fence = {a}"), "PF001")?;
    db.refused(&format!("UPDATE orders SET fence = {b}"), "PF001")?;
    db.run(
        "CREATE TRIGGER t BEFORE TRUNCATE ON orders FOR EACH STATEMENT EXECUTE FUNCTION fenced()",
    )?;
    db.refused("TRUNCATE orders", "PF005")?;
    // Any name will do, and a role that may make triggers may use it.
    let owner = db.database().role("owner")?;
    db.run(&format!("ALTER TABLE orders OWNER TO {owner}"))?;
    let mut session = db.database().connect_as(&owner)?;
    session.run(
        "DROP TRIGGER fenced ON orders; CREATE TRIGGER guard BEFORE UPDATE OR DELETE ON orders \
         FOR EACH ROW EXECUTE FUNCTION fenced('fence', 'monotonic')",
    )?;
    session.run(&format!("UPDATE orders SET fence = {b}"))?;
    session.refused("DELETE FROM orders", "PF002").map(drop)
}

#[lab_test]
fn empty_arguments_stand_for_defaults(lab: &Lab) -> Result<()> {
    let mut db = unprotected(lab)?;
    db.run("CREATE TRIGGER fenced BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION fenced('', '', '')")?;
    let (a, b) = (db.token()?, db.token()?);
    db.run(&format!("UPDATE orders SET fence = {b}"))?;
    db.refused(&format!("UPDATE orders SET fence = {b}"), "PF001")?;
    db.refused(&format!("UPDATE orders SET fence = {a}"), "PF001").map(drop)
}
