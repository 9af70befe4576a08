//! `fence_audit` on a database restored from a dump. What it reports on a well-protected table (nothing), and who may
//! call it: audit.script.
//!
//! The files of this folder test its findings.

automod::dir!(pub "tests/suite/audit");

use pg_test::script::bypass::AuditedDatabase;
use pg_test::{Harness, Result, ensure, harness_test};

const PARTITIONS: &str =
    "CREATE TABLE orders (id int, v int, fence bigint, region text DEFAULT 'eu', PRIMARY KEY (id, region)) \
         PARTITION BY LIST (region);
     CREATE TABLE eu PARTITION OF orders FOR VALUES IN ('eu');
     CREATE TABLE far PARTITION OF orders FOR VALUES IN ('us') PARTITION BY LIST (region);
     CREATE TABLE us PARTITION OF far DEFAULT";

#[harness_test]
fn it_finds_nothing_in_a_copy_by_dump(harness: &Harness) -> Result<()> {
    let db = harness.database()?;
    let mut audited = AuditedDatabase::new(&db)?;
    audited.build(PARTITIONS, ", lease => 'order:{id}', verify => true, always => true")?;
    let dump = harness.run("pg_dump", &["-d", &audited.conninfo.to_string()])?;
    let copy = harness.bare_database()?;
    let file = harness.rundir().path().join(format!("{}.sql", copy.name()));
    std::fs::write(&file, dump)?;
    let file = file.to_string_lossy();
    let target = copy.conninfo().to_string();
    harness.run("psql", &["-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", &target, "-f", &file])?;
    let rows = copy
        .connect()?
        .rows("SELECT * FROM public.fence_audit() WHERE finding NOT LIKE 'monotonic: a%'")?;
    ensure!(rows.is_empty(), "{rows:?}");
    Ok(())
}
