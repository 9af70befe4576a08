//! A snapshot that was imported may be older than the transaction that has it. What it shows decides, as of any other.

use pg_test::client::literal;
use pg_test::{ensure, lab_test, Calls, Lab, Result};

#[lab_test]
fn an_imported_snapshot_is_no_newer_than_it_was(lab: &Lab) -> Result<()> {
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let db = lab.database()?;
        let (mut holder, mut exporter, mut importer) =
            (db.connect()?, db.connect()?, db.connect()?);
        holder.run("CREATE TABLE t (n int)")?;
        let old = holder.acquire("job", "1 h")?;
        let shown = holder.acquire("shown", "1 h")?;
        exporter.run(&format!("BEGIN ISOLATION LEVEL {level}"))?;
        let snapshot = exporter.text("SELECT pg_export_snapshot()")?.unwrap_or_default();
        // A predecessor writes, and the lease passes on.
        holder
            .run(&format!("BEGIN; SELECT lease_guard('job', {old}); INSERT INTO t VALUES (1)"))?;
        holder.run("COMMIT")?;
        holder.expire_now("job", old)?;
        let next = holder.acquire("job", "1 h")?;
        importer.run(&format!(
            "BEGIN ISOLATION LEVEL {level}; SET TRANSACTION SNAPSHOT {}",
            literal(&snapshot)
        ))?;
        ensure!(importer.granted("SELECT count(*) FROM t")? == 0, "the predecessor's world");
        let own = importer.acquire("own", "1 h")?;
        for exporter_has_gone in [false, true] {
            if exporter_has_gone {
                exporter.run("COMMIT")?;
                holder.run("VACUUM fence.lease")?;
            }
            importer.run("SAVEPOINT s")?;
            importer.refused(&format!("SELECT lease_guard('job', {next})"), "40001")?;
            importer.run("ROLLBACK TO s")?;
            importer.refused(&format!("SELECT lease_guard('own', {own})"), "55000")?;
            importer.run("ROLLBACK TO s")?;
            importer.granted(&format!("SELECT lease_guard('shown', {shown})"))?;
            importer.run("ROLLBACK TO s")?;
        }
    }
    Ok(())
}
