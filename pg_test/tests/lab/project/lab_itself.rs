//! The lab itself: a server, the extension in it, and workers that can be frozen.

use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Background, Context, Lab, Result};
use std::path::PathBuf;
use std::time::Duration;

#[lab_test]
fn the_server_is_the_lab_s_own(lab: &Lab) -> Result<()> {
    let mut session = lab.cluster().connect("postgres")?;
    let data: String = session.one("SELECT current_setting('data_directory')", &[])?;
    ensure!(data.starts_with(&*lab.rundir().path().to_string_lossy()), "{data}");
    Ok(())
}

#[lab_test]
fn an_error_has_all_its_fields(lab: &Lab) -> Result<()> {
    let db = lab.bare_database()?;
    let fault = db.connect()?.refused(
        r#"DO $$BEGIN RAISE 'no' USING ERRCODE = 'PF001', DETAIL = '{"stored": 34}', HINT = 'h',
           SCHEMA = 's', TABLE = 't', COLUMN = 'c'; END$$"#,
        "PF001",
    )?;
    ensure!(fault.json()?["stored"] == 34, "{fault}");
    let place = [&fault.schema, &fault.table, &fault.column];
    ensure!(place.map(|field| field.as_deref()) == [Some("s"), Some("t"), Some("c")], "{place:?}");
    Ok(())
}

#[lab_test]
fn a_session_is_seen_waiting(lab: &Lab) -> Result<()> {
    let db = lab.bare_database()?;
    let mut holder = db.connect()?;
    holder.run("BEGIN; SELECT pg_advisory_xact_lock(1)")?;
    let mut waiter = Background::connect(&db.conninfo())?;
    waiter.send("SELECT pg_advisory_lock(1), 'mine'")?;
    waiter.wait_until_blocked()?;
    ensure!(waiter.blocked_by()? == [holder.pid()]);
    holder.run("COMMIT")?;
    ensure!(waiter.rows()?[0][1].as_deref() == Some("mine"));
    waiter.send("SELECT pg_sleep(60)")?;
    wait_until("it sleeps", PATIENCE, || {
        waiter.waits_for().is_some_and(|(_, event)| event == "PgSleep")
    })?;
    waiter.cancel()?;
    waiter.refused("57014")?;
    Ok(())
}

#[lab_test]
fn a_frozen_worker_goes_on_where_it_was(lab: &Lab) -> Result<()> {
    let db = lab.bare_database()?;
    db.connect()?.run("CREATE TABLE t (n int)")?;
    let mut worker = lab.worker("A", &db.conninfo())?;
    worker.freeze()?;
    worker.send("INSERT INTO t VALUES (1) RETURNING n")?;
    ensure!(worker.outcome(Duration::from_millis(300)).is_err(), "a frozen worker answered");
    worker.thaw()?;
    let rows = worker.outcome(PATIENCE)??;
    ensure!(rows == [[Some("1".to_owned())]], "{rows:?}");
    worker.refused("SELECT 1/0", "22012")?;
    worker.kill()?;
    ensure!(worker.send("SELECT 1").is_err() || worker.outcome(Duration::from_secs(1)).is_err());
    Ok(())
}

#[lab_test]
fn a_killed_server_leaves_no_shared_memory(lab: &Lab) -> Result<()> {
    for killed_before in [false, true] {
        let cluster = lab.builder().start()?;
        let postmaster = cluster.pid()?;
        let lock_file = std::fs::read_to_string(cluster.data().join("postmaster.pid"))?;
        let key_and_id = lock_file.lines().nth(6).context("no line on shared memory")?;
        let id = key_and_id.split_whitespace().last().context("no id")?.to_owned();
        let segments = || -> Result<String> { Ok(std::fs::read_to_string("/proc/sysvipc/shm")?) };
        let is_there = |text: &str| text.lines().any(|l| l.split_whitespace().nth(1) == Some(&id));
        let mapped: Vec<PathBuf> = std::fs::read_to_string(format!("/proc/{postmaster}/maps"))?
            .lines()
            .filter_map(|line| line.split_whitespace().nth(5))
            .filter(|path| path.starts_with("/dev/shm/PostgreSQL."))
            .map(PathBuf::from)
            .collect();
        ensure!(is_there(&segments()?) && !mapped.is_empty() && mapped.iter().all(|p| p.exists()));
        if killed_before {
            cluster.kill9()?;
        }
        drop(cluster);
        ensure!(!is_there(&segments()?), "segment {id} is left");
        ensure!(!mapped.iter().any(|path| path.exists()), "{mapped:?}");
    }
    Ok(())
}
