//! `fence_audit` itself: silence over a well-protected table, who may ask, and what it cannot see.
//!
//! The files of this folder tell what it finds.

automod::dir!(pub "tests/lab/audit");

use crate::support::holes::{unbound, AuditedDatabase, BOUND, HOLE, LANDS, UNBOUND};
use pg_test::{ensure, lab_test, Background, Context, Lab, Result};

const ORDERS: &str = HOLE.table;
const PARTITIONS: &str =
    "CREATE TABLE orders (id int, v int, fence bigint, region text DEFAULT 'eu', PRIMARY KEY (id, region)) \
         PARTITION BY LIST (region);
     CREATE TABLE eu PARTITION OF orders FOR VALUES IN ('eu');
     CREATE TABLE far PARTITION OF orders FOR VALUES IN ('us') PARTITION BY LIST (region);
     CREATE TABLE us PARTITION OF far DEFAULT";
const CHILD: &str = "CREATE TABLE orders (id int PRIMARY KEY, v int, fence bigint); \
                     CREATE TABLE child (more text) INHERITS (orders)";

#[lab_test]
fn over_a_well_protected_table_it_says_nothing(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    for table in [ORDERS, PARTITIONS, CHILD] {
        for fence in [
            "",
            ", events => 'insert,update,delete,truncate'",
            ", verify => true",
            ", always => true",
            BOUND,
            ", lease => 'order:{id}', mode => 'strict'",
            ", lease => 'order:{id}', verify => true, always => true",
            ", 'Seen''s \"token\"', lease => '{{{id}}}%s\\$1'",
        ] {
            let outcome = (|| {
                // The writer does not write by another column.
                let words =
                    audited.stage(table, if fence.contains("Seen") { "" } else { fence })?;
                audited.owner.run(&format!("SELECT fence_protect('orders'{fence})"))?;
                if table == CHILD {
                    for (_, remedy) in audited.other_findings("'orders'")? {
                        audited.owner.run(&remedy)?;
                    }
                }
                let parts =
                    "SELECT inhrelid::regclass FROM pg_inherits JOIN pg_class ON oid = inhrelid \
                             WHERE relnamespace = 's'::regnamespace AND relkind IN ('r', 'p')";
                let parts = audited.owner.rows(parts)?.into_iter().flatten().flatten();
                let parts: Vec<String> = parts.map(|part| format!("'{part}'")).collect();
                let whole = ["'orders'", "", "relation => 's.orders'"].map(str::to_owned);
                for what in whole.into_iter().chain(parts.clone()) {
                    let rows = audited.audit(&what)?;
                    // Without a lease there is that to be said, and of the table alone.
                    let expected = (!fence.contains("lease") && !parts.contains(&what))
                        .then(|| unbound("orders"));
                    ensure!(rows.iter().map(|row| &row.0).eq(&expected), "{what}: {rows:#?}");
                }
                drop(words);
                audited.clear()
            })();
            outcome.with_context(|| format!("{table}; fence_protect('orders'{fence})"))?;
        }
    }
    Ok(())
}

/// The holder of another lease can write it before the remedy, and cannot after.
#[lab_test]
fn a_table_that_is_not_bound_is_found(lab: &Lab) -> Result<()> {
    const STALE: &str = "UPDATE orders SET v = 33, fence = lease_acquire('another')";
    const FIRES: &str = "SELECT string_agg(tgname::text || tgenabled::text, ',' ORDER BY tgname) FROM pg_trigger
                          WHERE tgrelid = 'orders'::regclass AND tgname IN ('fenced', 'fenced_verify')";
    const TWO: &str =
        "CREATE TABLE orders (id int, \"{k}\" text DEFAULT 'k', v int, fence bigint, PRIMARY KEY (id, \"{k}\"))";
    let mut audited = AuditedDatabase::new(lab)?;
    for (table, fence, lease) in [
        (ORDERS, "", "orders:{id}"),
        (ORDERS, ", verify => true, always => true", "orders:{id}"),
        (ORDERS, ", events => 'update'", "orders:{id}"),
        (PARTITIONS, ", verify => true", "orders:{id}:{region}"),
        (CHILD, "", "orders:{id}"),
        // Where the key cannot name a lease, all rows have one.
        ("CREATE TABLE orders (id int, v int, fence bigint)", "", "orders"),
        ("CREATE TABLE orders (id numeric PRIMARY KEY, v int, fence bigint)", "", "orders"),
        (TWO, "", "orders"),
    ] {
        let outcome = (|| {
            audited.stage(table, fence)?;
            let before = audited.owner.text(FIRES)?;
            let rows = audited.audit("'orders'")?;
            let (told, remedy) = rows
                .iter()
                .find(|(told, _)| *told == unbound("orders"))
                .context("no such finding")?;
            ensure!(
                remedy.contains(&format!("mode => 'monotonic', lease => '{lease}'")),
                "{told}: {remedy}"
            );
            audited.comes_to(STALE, LANDS)?;
            for (_, remedy) in &rows {
                audited.owner.run(remedy)?;
            }
            audited.bind(false)?;
            ensure!(audited.owner.text(FIRES)? == before, "other triggers than {before:?}");
            audited.comes_to(STALE, "PF004")?;
            audited.clear()
        })();
        outcome.with_context(|| format!("{table}; fence_protect('orders'{fence})"))?;
    }
    // A managed one stays managed, and one by hand keeps its column.
    audited.stage(ORDERS, "")?;
    audited.owner.run("SELECT fence_protect('orders', mode => 'managed', always => true)")?;
    audited.bind(false)?;
    audited.comes_to("UPDATE orders SET v = 33, fence = fence", "PF002")?;
    audited.owner.run(
        "SELECT fence_unprotect('orders'); ALTER TABLE orders RENAME fence TO \"Seen it\";
         CREATE TRIGGER a BEFORE UPDATE OR DELETE ON orders FOR EACH ROW EXECUTE FUNCTION fenced('Seen it');
         CREATE TRIGGER b BEFORE TRUNCATE ON orders EXECUTE FUNCTION fenced('Seen it')",
    )?;
    audited.bind(false)?;
    audited
        .comes_to("UPDATE orders SET v = 33, \"Seen it\" = lease_acquire('another')", "PF004")?;
    audited.clear()
}

#[lab_test]
fn over_a_table_by_hand_it_says_what_fence_protect_would_add(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    audited.stage(ORDERS, "")?;
    audited.owner.run(
        "SELECT fence_unprotect('orders');
         CREATE TRIGGER a_name BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION fenced()",
    )?;
    let rows = audited.other_findings("'orders'")?;
    let told: Vec<&str> = rows.iter().map(|row| &*row.0).collect();
    ensure!(
        told == ["orders|hole|DELETE not fenced", "orders|notice|TRUNCATE not fenced"],
        "{told:?}"
    );
    let remedy = "SELECT public.fence_protect('s.orders', mode => 'strict', events => 'update,delete,truncate');";
    ensure!(rows.iter().all(|row| row.1 == remedy), "{rows:?}");
    Ok(())
}

#[lab_test]
fn of_everything_it_shows_each_table_once(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    audited.stage(PARTITIONS, BOUND)?;
    audited.owner.run(
        "CREATE TABLE bills (id int PRIMARY KEY); SELECT fence_protect('bills', mode => 'monotonic');
         CREATE TABLE child () INHERITS (bills); CREATE TABLE plain (id int);
         ALTER TABLE eu DISABLE TRIGGER fenced",
    )?;
    let told: Vec<String> = audited.audit("")?.into_iter().map(|(told, _)| told).collect();
    ensure!(told.len() == 5, "{told:#?}");
    for (row, beginning) in told.iter().zip([
        "child|hole|UPDATE, DELETE not fenced",
        "child|notice|TRUNCATE not fenced",
        "bills|hole|monotonic without a lease",
        &unbound("bills"),
        "eu|hole|trigger \"fenced\" is disabled",
    ]) {
        ensure!(row.starts_with(beginning), "{told:#?}");
    }
    Ok(())
}

#[lab_test]
fn it_asks_for_ownership(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    let words = audited.stage(ORDERS, BOUND)?;
    let (owner, writer) = (&words[0].1, &words[1].1);
    audited.owner.run("ALTER TABLE orders DISABLE TRIGGER fenced")?;
    audited.admin.run(&format!("SET ROLE {writer}"))?;
    let fault = audited.admin.refused("SELECT fence_audit('orders')", "42501")?;
    ensure!(fault.json()?["relation"] == "s.orders", "{fault}");
    ensure!(fault.hint.as_ref().is_some_and(|hint| hint.contains(owner)), "{fault}");
    ensure!(audited.admin.rows("SELECT fence_audit()")?.is_empty());
    // A member of the owner is as good as the owner.
    audited.admin.run(&format!("RESET ROLE; GRANT {owner} TO {writer}; SET ROLE {writer}"))?;
    ensure!(audited.admin.rows("SELECT fence_audit('orders')")?.len() == 2);
    ensure!(audited.admin.rows("SELECT fence_audit()")?.len() == 2);
    audited.admin.run(&format!("RESET ROLE; REVOKE {owner} FROM {writer}"))
}

#[lab_test]
fn what_is_no_table_is_refused(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    audited.stage(ORDERS, BOUND)?;
    audited.owner.run(
        "CREATE VIEW v AS SELECT 1 AS a; CREATE SEQUENCE q; CREATE MATERIALIZED VIEW m AS SELECT 1 AS a",
    )?;
    for (what, sqlstate) in [("'v'", "42809"), ("'q'", "42809"), ("'m'", "42809"), ("99", "42P01")]
    {
        let fault = audited.owner.refused(&format!("SELECT fence_audit({what})"), sqlstate)?;
        ensure!(fault.hint.is_some() && fault.json()?["relation"].is_string(), "{fault}");
    }
    // It takes part in any transaction, and in one that only reads.
    audited
        .owner
        .run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SELECT fence_audit(); COMMIT")
}

#[lab_test]
fn to_whom_may_not_use_leases_it_says_what_it_left_out(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    let owner = audited.stage(ORDERS, BOUND)?[0].1.clone();
    audited.owner.run(
        "SELECT fence_unprotect('orders'); UPDATE orders SET fence = 777000001000000; SELECT fence_protect('orders')",
    )?;
    audited.admin.run(&format!("SELECT fence_revoke('{owner}')"))?;
    audited.owner.notices();
    ensure!(audited.other_findings("'orders'")?.is_empty());
    let notices = audited.owner.notices();
    ensure!(notices.len() == 1 && notices[0].severity == "NOTICE", "{notices:?}");
    ensure!(notices[0].message.contains("last token"), "{notices:?}");
    let hint = notices[0].hint.as_deref().context("no hint")?;
    let statement = &hint[hint.find("SELECT").context("no statement")?..];
    audited.admin.run(statement)?;
    let rows = audited.other_findings("'orders'")?;
    ensure!(
        rows.len() == 1 && rows[0].0.contains("rows hold fences up to 777000001000000"),
        "{rows:?}"
    );
    ensure!(audited.owner.notices().is_empty());
    Ok(())
}

#[lab_test]
fn writes_that_go_on_meanwhile_are_no_finding(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    audited.stage(ORDERS, "")?;
    // Held up between its look at the last token and its look at the rows.
    let mut reader = Background::connect(&audited.owner_conninfo())?;
    audited.admin.run("BEGIN; LOCK TABLE orders IN ACCESS EXCLUSIVE MODE")?;
    reader.send("SELECT finding FROM fence_audit('orders')")?;
    reader.wait_until_blocked()?;
    audited.admin.run(
        "SELECT lease_revoke('order:1'); \
         UPDATE orders SET v = 36, fence = lease_acquire('order:1'); COMMIT",
    )?;
    let rows = reader.rows()?;
    ensure!(rows.concat() == [Some(UNBOUND.replace("|notice|", ""))], "{rows:?}");
    Ok(())
}

#[lab_test]
fn it_finds_nothing_in_a_copy_by_dump(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    audited.stage(PARTITIONS, ", lease => 'order:{id}', verify => true, always => true")?;
    let dump = lab.run("pg_dump", &["-d", &audited.conninfo().to_string()])?;
    let copy = lab.bare_database()?;
    let file = lab.rundir().path().join(format!("{}.sql", copy.name()));
    std::fs::write(&file, dump)?;
    let file = file.to_string_lossy();
    let target = copy.conninfo().to_string();
    lab.run("psql", &["-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", &target, "-f", &file])?;
    let rows = copy.connect()?.rows("SELECT * FROM public.fence_audit()")?;
    ensure!(rows.is_empty(), "{rows:?}");
    Ok(())
}

#[lab_test]
fn a_table_whose_triggers_were_not_restored_is_found(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    audited.stage(ORDERS, BOUND)?;
    let triggers =
        "SELECT string_agg(format('DROP TRIGGER %I ON orders', tgname), ';') FROM pg_trigger \
                     WHERE tgrelid = 'orders'::regclass AND NOT tgisinternal";
    let triggers = audited.owner.text(triggers)?.context("no triggers")?;
    audited.owner.run(&triggers)?;
    let rows = audited.audit("")?;
    ensure!(
        rows.len() == 1
            && rows[0].0.starts_with(
                "orders|notice|no trigger of pg_fence is on this table, which was fenced"
            ),
        "{rows:?}"
    );
    audited.owner.run(&rows[0].1)?;
    audited.bind(false)?;
    audited.clear()
}
