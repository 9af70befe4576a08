//! Where there is no shared memory to be had, counting stops and writing does not.

use super::shown;
use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Calls, Cluster, Context, Lab, Result, Session};
use std::fs;
use std::os::unix::fs::PermissionsExt;

/// Connects, once the sessions that are leaving have made room.
fn connect(cluster: &Cluster, dbname: &str) -> Result<Session> {
    let mut session = None;
    wait_until("a session may connect", PATIENCE, || {
        session = cluster.connect(dbname).ok();
        session.is_some()
    })?;
    session.context("connected")
}

/// Leases and fenced writes, in a session of its own.
fn work(cluster: &Cluster, name: &str) -> Result<Session> {
    let mut session = connect(cluster, "postgres")?;
    session.run("SET statement_timeout = '60 s'")?;
    let token = session.acquire(name, "1 h")?;
    session.nothing(&format!("SELECT lease_acquire('{name}')"))?;
    session.run(&format!(
        "BEGIN; SELECT lease_guard('{name}', {token}); UPDATE t SET v = 1; COMMIT"
    ))?;
    session.refused("UPDATE t SET v = 2, fence = 1", "PF001")?;
    session.run(&format!(
        "BEGIN; DO $$ BEGIN UPDATE t SET fence = 1; EXCEPTION WHEN SQLSTATE 'PF001' THEN END $$;
         SELECT lease_renew('{name}', {token}); COMMIT"
    ))?;
    ensure!(session.speaks(name, token)?);
    Ok(session)
}

fn prepare(cluster: &Cluster) -> Result<()> {
    let mut session = cluster.connect("postgres")?;
    session.run(
        "CREATE EXTENSION pg_fence; CREATE TABLE t (id int PRIMARY KEY, v int, fence bigint);
         INSERT INTO t VALUES (1); SELECT fence_protect('t')",
    )
}

const COUNTED: &str =
    "grants 1, guards 1, refused_pf001 2, renewals 1, tries_lost 1, writes_checked 3";

#[lab_test]
fn a_segment_that_cannot_be_made(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().set("dynamic_shared_memory_type", "mmap").start()?;
    prepare(&cluster)?;
    let place = cluster.data().join("pg_dynshmem");
    let allow = |mode| fs::set_permissions(&place, fs::Permissions::from_mode(mode));
    allow(0o500)?;
    for n in 0..3 {
        let mut session = work(&cluster, &format!("job{n}"))?;
        ensure!(session.truth("SELECT stats_reset IS NULL AND grants = 0 FROM fence.stats")?);
        ensure!(session.rows("SELECT * FROM fence.refusals")?.is_empty());
        session.run("SELECT fence_stats_reset()")?;
        ensure!(session.notices().is_empty());
    }
    // Once, whichever session it was.
    let told = told(&cluster)?;
    ensure!(told.len() == 1 && told[0].contains("\"postgres\": could not open"), "{told:#?}");
    // As soon as there is some, it is counted again.
    allow(0o700)?;
    let mut session = work(&cluster, "later")?;
    ensure!(shown(&mut session)? == COUNTED, "{}", shown(&mut session)?);
    ensure!(session.granted("SELECT count(*) FROM fence.refusals")? == 2);
    let leaked = cluster.log()?.lines().filter(|line| line.contains("leak")).count();
    ensure!(leaked == 0, "{leaked} leaks");
    Ok(())
}

/// The log's line on it.
fn told(cluster: &Cluster) -> Result<Vec<String>> {
    let log = cluster.log()?;
    Ok(log.lines().filter(|line| line.contains("does not count")).map(str::to_owned).collect())
}

#[lab_test]
fn a_segment_that_cannot_be_mapped_is_not_replaced(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().set("dynamic_shared_memory_type", "mmap").start()?;
    prepare(&cluster)?;
    let mut first = work(&cluster, "first")?;
    let handle = first.granted("SELECT last_value FROM fence.stats_memory_seq")?;
    let file = cluster.data().join(format!("pg_dynshmem/mmap.{handle}"));
    let hide = |hidden: bool| {
        let mode = if hidden { 0o000 } else { 0o600 };
        fs::set_permissions(&file, fs::Permissions::from_mode(mode))
    };
    hide(true)?;
    let mut second = work(&cluster, "second")?;
    ensure!(second.truth("SELECT stats_reset IS NULL FROM fence.stats")?);
    second.run("SELECT fence_stats_reset()")?;
    work(&cluster, "another")?;
    let told = told(&cluster)?;
    ensure!(told.len() == 1 && told[0].contains("could not open"), "{told:#?}");
    hide(false)?;
    // The one that has it counts on, and so do those that come now.
    ensure!(shown(&mut first)? == COUNTED);
    let mut third = cluster.connect("postgres")?;
    third.acquire("third", "1 h")?;
    ensure!(shown(&mut first)? == COUNTED.replace("grants 1", "grants 2"));
    Ok(())
}

#[lab_test]
fn no_segment_is_left(lab: &Lab) -> Result<()> {
    // 64 segments and 5 for each backend that there can be.
    let small = [
        ("max_connections", "4"),
        ("max_worker_processes", "0"),
        ("max_wal_senders", "0"),
        ("autovacuum_max_workers", "1"),
        ("superuser_reserved_connections", "0"),
        ("max_prepared_transactions", "0"),
    ];
    let cluster = small.iter().fold(lab.builder(), |b, (name, value)| b.set(name, value));
    let cluster = cluster.without_fsync().start()?;
    prepare(&cluster)?;
    let mut admin = cluster.connect("template1")?;
    admin.run("CREATE DATABASE d")?;
    cluster.connect("d")?.run("CREATE EXTENSION pg_fence")?;
    // Each database has one that stays.
    let mut made = 0;
    for n in 0..200 {
        admin.run(&format!("CREATE DATABASE d{n} TEMPLATE d STRATEGY file_copy"))?;
        let mut session = connect(&cluster, &format!("d{n}"))?;
        session.run("SELECT lease_acquire('a')")?;
        if session.truth("SELECT stats_reset IS NULL FROM fence.stats")? {
            made = n;
            break;
        }
    }
    ensure!(made > 60, "only {made} segments");
    let mut session = work(&cluster, "job")?;
    ensure!(session.truth("SELECT stats_reset IS NULL AND grants = 0 FROM fence.stats")?);
    // Of each of the two databases.
    let told = told(&cluster)?;
    let too_many =
        told.iter().filter(|line| line.contains("too many dynamic shared memory segments"));
    ensure!(told.len() == 2 && too_many.count() == 2, "{told:#?}");
    Ok(())
}
