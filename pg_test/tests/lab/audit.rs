//! `fence_audit` itself: silence over a well-protected table and over copies. The right to ask: audit.script.
//!
//! The files of this folder tell what it finds.

automod::dir!(pub "tests/lab/audit");

use pg_test::script::holes::{unbound, AuditedDatabase, BOUND, LANDS, TABLE as ORDERS};
use pg_test::{ensure, lab_test, Context, Lab, Result};

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
    let db = lab.database()?;
    let mut audited = AuditedDatabase::new(&db)?;
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
    let db = lab.database()?;
    let mut audited = AuditedDatabase::new(&db)?;
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
fn it_finds_nothing_in_a_copy_by_dump(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut audited = AuditedDatabase::new(&db)?;
    audited.stage(PARTITIONS, ", lease => 'order:{id}', verify => true, always => true")?;
    let dump = lab.run("pg_dump", &["-d", &audited.conninfo.to_string()])?;
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
