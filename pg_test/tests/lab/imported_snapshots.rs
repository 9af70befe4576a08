//! A snapshot that was imported may be older than the transaction that has it.
//!
//! On servers of their own: whatever is exported on a server matters to all its sessions.

use pg_test::client::literal;
use pg_test::{ensure, lab_test, Calls, Cluster, Lab, Result, Session};

const KEEPING: [&str; 2] = ["REPEATABLE READ", "SERIALIZABLE"];

struct ExportedSnapshot {
    cluster: Cluster,
    holder: Session,
    exporter: Session,
    snapshot: String,
}

impl ExportedSnapshot {
    /// A holder of `job` writes and commits, long before the lease is over, after another session has exported its
    /// snapshot.
    fn new(lab: &Lab, ttl: &str, level: &str) -> Result<ExportedSnapshot> {
        ExportedSnapshot::of_a_guard(lab, ttl, level, |_, _| Ok(()))
    }

    /// The same, and `before_commit` is called while the holder's transaction is open, with another session.
    fn of_a_guard(
        lab: &Lab,
        ttl: &str,
        level: &str,
        before_commit: impl FnOnce(&mut Session, i64) -> Result<()>,
    ) -> Result<ExportedSnapshot> {
        let cluster = lab.builder().start()?;
        let mut holder = cluster.connect("postgres")?;
        holder.run("CREATE EXTENSION pg_fence; CREATE TABLE t (n int)")?;
        let token = holder.acquire("job", ttl)?;
        let mut exporter = cluster.connect("postgres")?;
        exporter.run(&format!("BEGIN ISOLATION LEVEL {level}"))?;
        let snapshot = exporter.text("SELECT pg_export_snapshot()")?.unwrap_or_default();
        holder
            .run(&format!("BEGIN; SELECT lease_guard('job', {token}); INSERT INTO t VALUES (1)"))?;
        before_commit(&mut cluster.connect("postgres")?, token)?;
        holder.run("COMMIT")?;
        Ok(ExportedSnapshot { cluster, holder, exporter, snapshot })
    }

    /// A session in a transaction that has the exported snapshot.
    fn importer(&self, level: &str) -> Result<Session> {
        let mut importer = self.cluster.connect("postgres")?;
        importer.run(&format!("BEGIN ISOLATION LEVEL {level}"))?;
        importer.run(&format!("SET TRANSACTION SNAPSHOT {}", literal(&self.snapshot)))?;
        Ok(importer)
    }
}

#[lab_test]
fn an_imported_snapshot_is_no_newer_than_it_was(lab: &Lab) -> Result<()> {
    for level in KEEPING {
        let mut exported = ExportedSnapshot::new(lab, "7 s", level)?;
        exported.holder.wait_expired("job")?;
        // Long enough ago for a trace of the guarded transaction not to be needed.
        let mut importer = exported.importer(level)?;
        ensure!(importer.granted("SELECT count(*) FROM t")? == 0, "the predecessor's world");
        importer.refused("SELECT lease_acquire('job')", "40001")?;
        // An error is told before the locks are given back.
        importer.run("ROLLBACK")?;
        exported.exporter.refused("SELECT lease_acquire('job')", "40001")?;
    }
    Ok(())
}

#[lab_test]
fn an_imported_snapshot_whose_exporter_has_gone_is_no_newer_either(lab: &Lab) -> Result<()> {
    let level = "REPEATABLE READ";
    let mut exported = ExportedSnapshot::new(lab, "7 s", level)?;
    exported.holder.wait_expired("job")?;
    let mut importer = exported.importer(level)?;
    exported.exporter.run("COMMIT")?;
    // Another one comes and goes, or stays.
    for end in ["COMMIT", "SELECT 1"] {
        exported
            .exporter
            .run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_export_snapshot()")?;
        exported.exporter.run(end)?;
        importer.run("SAVEPOINT s")?;
        importer.refused("SELECT lease_acquire('job')", "40001")?;
        importer.run("ROLLBACK TO s")?;
    }
    Ok(())
}

#[lab_test]
fn what_an_imported_snapshot_shows_as_free_is_granted(lab: &Lab) -> Result<()> {
    for level in KEEPING {
        let cluster = lab.builder().start()?;
        let mut outside = cluster.connect("postgres")?;
        outside.run("CREATE EXTENSION pg_fence; CREATE TABLE t (n int)")?;
        let token = outside.acquire("released", "1 h")?;
        outside.release("released", token)?.expect("held");
        let mut exporter = cluster.connect("postgres")?;
        exporter.run(&format!("BEGIN ISOLATION LEVEL {level}"))?;
        let snapshot = exporter.text("SELECT pg_export_snapshot()")?.unwrap_or_default();
        outside.run("INSERT INTO t VALUES (1)")?;
        let exported = ExportedSnapshot { cluster, holder: outside, exporter, snapshot };
        let mut importer = exported.importer(level)?;
        importer.acquire("released", "1 h")?;
        importer.acquire("new", "1 h")?;
        importer.run("COMMIT")?;
    }
    Ok(())
}

#[lab_test]
fn a_snapshot_of_one_s_own_is_granted_what_had_expired(lab: &Lab) -> Result<()> {
    for level in KEEPING {
        // Somebody has had a snapshot exported all the while, as pg_dump with several jobs does for hours.
        let mut exported = ExportedSnapshot::of_a_guard(lab, "1 h", level, |other, token| {
            other.expire_now("job", token)
        })?;
        // Files are dated by a clock that ticks: what was exported a moment ago may have been exported just now.
        exported.holder.run("SELECT pg_sleep(0.1)")?;
        let mut inside = exported.cluster.connect("postgres")?;
        inside.run(&format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM t"))?;
        // So that it matters how old the snapshot is.
        exported.holder.run("INSERT INTO t VALUES (2)")?;
        inside.acquire("job", "1 h")?;
        inside.run("COMMIT")?;
        // Who exports one meanwhile makes all others try once more.
        let mut other = exported.cluster.connect("postgres")?;
        other.acquire_expired("other")?;
        let begin = format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM t");
        inside.run(&begin)?;
        exported.exporter.run("SELECT pg_export_snapshot()")?;
        exported.holder.run("INSERT INTO t VALUES (3)")?;
        inside.refused("SELECT lease_acquire('other')", "40001")?;
        inside.run("ROLLBACK")?;
        std::thread::sleep(std::time::Duration::from_millis(100));
        inside.run(&begin)?;
        exported.holder.run("INSERT INTO t VALUES (4)")?;
        inside.acquire("other", "1 h")?;
        inside.run("COMMIT")?;
    }
    Ok(())
}

#[lab_test]
fn a_guard_under_an_imported_snapshot_needs_a_grant_that_it_sees(lab: &Lab) -> Result<()> {
    for level in KEEPING {
        let mut exported = ExportedSnapshot::new(lab, "1 h", level)?;
        let seen = exported.holder.granted("SELECT token FROM fence.leases")?;
        let later = exported.holder.acquire("later", "1 h")?;
        let mut importer = exported.importer(level)?;
        importer.granted(&format!("SELECT lease_guard('job', {seen})"))?;
        importer.refused(&format!("SELECT lease_guard('later', {later})"), "40001")?;
    }
    Ok(())
}
