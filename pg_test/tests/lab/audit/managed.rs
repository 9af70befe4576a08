//! `fence_audit` on fences in `managed` mode: judged like monotonic ones, but a client that writes every column
//! back presents nothing there, and every INSERT is looked at.

use crate::support::holes::{AuditedDatabase, Hole, BOUND, HOLE, LANDS};
use pg_test::{ensure, lab_test, Lab, Result};

/// The triggers that fence a table in `managed` mode, made by hand.
fn by_hand(events: &str, arguments: &str) -> String {
    format!(
        "SELECT fence_unprotect('orders');
         CREATE TRIGGER fenced BEFORE {events} ON orders FOR EACH ROW EXECUTE FUNCTION fenced({arguments});
         CREATE TRIGGER fenced_truncate BEFORE TRUNCATE ON orders EXECUTE FUNCTION fenced({arguments})"
    )
}

const EVERY: &str = "INSERT OR UPDATE OR DELETE";

#[lab_test]
fn a_managed_fence_without_a_lease_is_no_finding(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    audited.stage(HOLE.table, "")?;
    for arguments in ["'fence', 'managed'", "'fence', 'managed', 'order:{id}'"] {
        audited.owner.run(&by_hand(EVERY, arguments))?;
        for what in ["'orders'", ""] {
            let rows = audited.other_findings(what)?;
            ensure!(rows.is_empty(), "{arguments}: {rows:?}");
        }
    }
    // The same fence in monotonic mode is one.
    audited.owner.run(&by_hand(EVERY, "'fence', 'monotonic'"))?;
    let rows = audited.other_findings("'orders'")?;
    ensure!(rows.len() == 1 && rows[0].0.starts_with("orders|hole|monotonic without"), "{rows:?}");
    Ok(())
}

#[lab_test]
fn a_managed_fence_without_insert_is_found(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    audited.stage(HOLE.table, "")?;
    audited.owner.run(&by_hand("UPDATE OR DELETE", "'fence', 'managed'"))?;
    let rows = audited.other_findings("'orders'")?;
    ensure!(rows.len() == 1 && rows[0].0 == "orders|hole|INSERT not fenced", "{rows:?}");
    let remedy = "SELECT public.fence_protect('s.orders', mode => 'managed', events => 'insert,update,delete,truncate');";
    ensure!(rows[0].1 == remedy, "{rows:?}");
    Ok(())
}

#[lab_test]
fn a_managed_fence_is_mended_as_one(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    audited.stage(HOLE.table, "")?;
    audited.owner.run("CREATE TABLE child () INHERITS (orders)")?;
    for (arguments, mended) in [
        ("'fence', 'managed'", "fenced('fence', 'managed')"),
        ("'fence', 'managed', 'order:{id}'", "fenced('fence', 'managed', 'order:{id}')"),
    ] {
        audited.owner.run(&by_hand(EVERY, arguments))?;
        let rows = audited.other_findings("'orders'")?;
        let told: Vec<&str> = rows.iter().map(|row| &*row.0).collect();
        ensure!(
            told == [
                "child|hole|INSERT, UPDATE, DELETE not fenced",
                "child|notice|TRUNCATE not fenced"
            ],
            "{told:?}"
        );
        ensure!(rows.iter().all(|row| row.1.contains(mended)), "{rows:?}");
        for (_, remedy) in &rows {
            audited.owner.run(remedy)?;
        }
        ensure!(audited.other_findings("'orders'")?.is_empty());
        // One that judges otherwise than its root does.
        let other = "CREATE OR REPLACE TRIGGER fenced BEFORE INSERT OR UPDATE OR DELETE ON child \
                     FOR EACH ROW EXECUTE FUNCTION fenced('fence', 'monotonic')";
        audited.owner.run(other)?;
        let rows = audited.other_findings("")?;
        ensure!(
            rows.len() == 1
                && rows[0]
                    .0
                    .starts_with(r#"child|hole|trigger "fenced" judges by other arguments"#),
            "{rows:?}"
        );
        audited.owner.run(&rows[0].1)?;
        ensure!(audited.other_findings("")?.is_empty());
        audited.owner.run("DROP TRIGGER fenced ON child; DROP TRIGGER fenced_truncate ON child")?;
    }
    Ok(())
}

const FREE: &str = "mode => 'managed', events => 'update,delete,truncate'";

#[lab_test]
fn an_insert_that_fills_a_managed_column_is_found(lab: &Lab) -> Result<()> {
    let high = "INSERT INTO orders (id, v, fence) VALUES (2, 33, 9000000000000000000)";
    let mut audited = AuditedDatabase::new(lab)?;
    audited.close_all(&[Hole {
        built: &by_hand("UPDATE OR DELETE", "'fence', 'managed', 'order:{id}'"),
        found: &["orders|hole|INSERT not fenced"],
        write: high,
        after: "PF002",
        ..HOLE
    }])?;
    // Where rows are created without a lease, none brings a fence all the same, and their column stays empty.
    audited.stage(HOLE.table, "")?;
    audited.owner.run(
        "SELECT fence_unprotect('orders'); DELETE FROM orders;
         ALTER TABLE orders ALTER id ADD GENERATED ALWAYS AS IDENTITY",
    )?;
    audited.owner.run(&by_hand(
        "UPDATE OR DELETE",
        "'fence', 'managed', 'order:{id}', '', 'unfenced insert'",
    ))?;
    let created =
        "INSERT INTO orders (v, fence) VALUES (33, 9000000000000000000) RETURNING fence IS NULL";
    ensure!(!audited.owner.one::<bool>(created, &[])?, "an INSERT without a trigger was judged");
    let rows = audited.audit("'orders'")?;
    let told: Vec<&str> = rows.iter().map(|row| &*row.0).collect();
    ensure!(told[0] == "orders|hole|INSERT not fenced", "{told:?}");
    ensure!(told[1].starts_with("orders|hole|rows hold fences up to"), "{told:?}");
    for (_, remedy) in &rows {
        audited.owner.run(remedy)?;
    }
    ensure!(audited.audit("'orders'")?.is_empty() && audited.audit("")?.is_empty());
    audited.owner.refused(created, "PF002")?;
    let created = "INSERT INTO orders (v) VALUES (33) RETURNING fence IS NULL";
    ensure!(audited.owner.one::<bool>(created, &[])?);
    Ok(())
}

/// A row of the table was deleted under its lease; then rows are created without one.
fn freed(key: &str) -> String {
    format!(
        "SET pg_fence.token = ':new'; DELETE FROM orders; RESET pg_fence.token; {key};
         SELECT fence_protect('orders', {FREE})"
    )
}

const BROUGHT_BACK: Hole<'static> = Hole {
    by_admin: true,
    found: &["orders|hole|rows are created without their lease, by keys that clients choose: \
              a late INSERT can bring a deleted row back"],
    write: "INSERT INTO orders (id, v) VALUES (1, 33)",
    after: "PF002",
    ..HOLE
};

#[lab_test]
fn a_row_whose_key_the_client_chooses_is_found_where_it_needs_no_lease(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    for key in [
        "",
        "ALTER TABLE orders ALTER id ADD GENERATED BY DEFAULT AS IDENTITY",
        // Of a column that the lease does not name.
        "ALTER TABLE orders ADD n int GENERATED ALWAYS AS IDENTITY",
    ] {
        audited.close_all(&[Hole { built: &freed(key), ..BROUGHT_BACK }])?;
    }
    audited.close_all(&[Hole {
        fence: ", lease => 'order:1'",
        built: &freed(
            "ALTER TABLE orders ALTER v SET NOT NULL, ALTER v ADD GENERATED ALWAYS AS IDENTITY",
        ),
        write: "INSERT INTO orders (id) VALUES (1)",
        ..BROUGHT_BACK
    }])
}

#[lab_test]
fn a_row_whose_key_the_client_chooses_in_a_partition_or_child_is_found(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    let found = |rel: &str| BROUGHT_BACK.found[0].replacen("orders", rel, 1);
    let partition = Hole {
        table: "CREATE TABLE orders (id int, v int, fence bigint, PRIMARY KEY (id)) PARTITION BY RANGE (id);
                CREATE TABLE one PARTITION OF orders DEFAULT",
        write: "INSERT INTO one (id, v) VALUES (1, 33)",
        ..BROUGHT_BACK
    };
    // The key that the database makes for the root is the client's where the partition is written itself, until
    // PostgreSQL 17; there a partition has its root's identity.
    let key = "ALTER TABLE orders ALTER id ADD GENERATED ALWAYS AS IDENTITY";
    let version: i32 =
        audited.admin.one("SELECT current_setting('server_version_num')::int", &[])?;
    let (built, found_there) = (freed(key), found("one"));
    let (found_there, comes_to) = if version < 170_000 {
        (&[&*found_there][..], (LANDS, "PF002"))
    } else {
        (&[][..], ("428C9", "428C9"))
    };
    // Without the right to insert, that is what is said first until 17; there it is that the key is no client's.
    let shut_out = if version < 170_000 { "42501" } else { "428C9" };
    let (before, after) = comes_to;
    audited.close_all(&[Hole { built: &built, found: found_there, before, after, ..partition }])?;
    let shut = format!("{key}; REVOKE INSERT ON one FROM :writer");
    audited.close_all(&[Hole {
        built: &freed(&shut),
        found: &[],
        before: shut_out,
        after: shut_out,
        ..partition
    }])?;
    // A child has triggers of its own.
    audited.stage("CREATE TABLE orders (id int PRIMARY KEY, v int, fence bigint); CREATE TABLE child () INHERITS (orders)", BOUND)?;
    audited.admin.run("ALTER TABLE orders ALTER id ADD GENERATED ALWAYS AS IDENTITY")?;
    audited.owner.run(&format!("SELECT fence_protect('orders', {FREE})"))?;
    for (_, remedy) in audited.audit("'orders'")? {
        ensure!(!remedy.contains("'update,delete"), "{remedy}");
        audited.owner.run(&remedy)?;
    }
    ensure!(audited.audit("")?.is_empty());
    audited.comes_to("INSERT INTO child (id, v) VALUES (2, 33)", "PF002")?;
    audited.owner.run(
        "CREATE OR REPLACE TRIGGER fenced BEFORE INSERT OR UPDATE OR DELETE ON child FOR EACH ROW \
             EXECUTE FUNCTION fenced('fence', 'managed', 'order:{id}', '', 'update,delete')",
    )?;
    audited.comes_to("INSERT INTO child (id, v) VALUES (2, 33)", LANDS)?;
    let rows = audited.audit("'orders'")?;
    ensure!(rows.len() == 1 && rows[0].0 == found("child"), "{rows:?}");
    audited.owner.run(&rows[0].1)?;
    ensure!(audited.audit("'orders'")?.is_empty() && audited.audit("")?.is_empty());
    audited.comes_to("INSERT INTO child (id, v) VALUES (2, 33)", "PF002")
}

#[lab_test]
fn a_row_whose_key_the_database_makes_is_no_finding(lab: &Lab) -> Result<()> {
    AuditedDatabase::new(lab)?.close_all(&[Hole {
        built: &freed("ALTER TABLE orders ALTER id ADD GENERATED ALWAYS AS IDENTITY (START 2)"),
        found: &[],
        before: "428C9",
        after: "428C9",
        ..BROUGHT_BACK
    }])
}

#[lab_test]
fn what_mends_such_a_fence_leaves_its_rows_free(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    for (built, found) in [
        (
            "CREATE FUNCTION low() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
             CREATE TRIGGER zz BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION low()",
            "orders|hole|trigger \"zz\" runs after the fence and may change what it has judged",
        ),
        ("DROP TRIGGER fenced_truncate ON orders", "orders|notice|TRUNCATE not fenced"),
    ] {
        audited.stage(HOLE.table, BOUND)?;
        audited.owner.run(&format!(
            "ALTER TABLE orders ALTER id ADD GENERATED ALWAYS AS IDENTITY (START 2);
             SELECT fence_protect('orders', {FREE}); {built}"
        ))?;
        let rows = audited.audit("'orders'")?;
        ensure!(rows.len() == 1 && rows[0].0 == found, "{rows:?}");
        audited.owner.run(&rows[0].1)?;
        ensure!(audited.audit("'orders'")?.is_empty() && audited.audit("")?.is_empty());
        let free: bool = audited.owner.one(
            "SELECT bool_and(pg_get_triggerdef(oid) LIKE '%''delete,truncate,update'')') FROM pg_trigger \
              WHERE tgrelid = 'orders'::regclass AND tgname LIKE 'fenced%'",
            &[],
        )?;
        ensure!(free, "{}", rows[0].1);
        audited.comes_to("INSERT INTO orders (v) VALUES (33)", LANDS)?;
        audited.clear()?;
    }
    Ok(())
}

/// `fence_protect` keeps the lease that a call leaves out: a remedy that means none has to say so.
#[lab_test]
fn what_unbinds_a_fence_says_so(lab: &Lab) -> Result<()> {
    AuditedDatabase::new(lab)?.close_all(&[Hole {
        built: "DROP TRIGGER fenced ON orders;
                CREATE TRIGGER a_name BEFORE INSERT OR UPDATE OR DELETE ON orders FOR EACH ROW
                    EXECUTE FUNCTION fenced();
                ALTER TABLE orders DISABLE TRIGGER a_name",
        found: &[
            r#"orders|hole|trigger "a_name" is disabled"#,
            r#"orders|hole|trigger "fenced_truncate" judges by other arguments than the fence of s.orders"#,
        ],
        ..HOLE
    }])
}
