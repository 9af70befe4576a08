//! Backends and servers that die in the middle.

use super::shown;
use nix::sys::signal::Signal;
use pg_test::process::PATIENCE;
use pg_test::{ensure, lab_test, process, Background, Calls, Lab, Result};

#[lab_test]
fn after_a_restart_or_a_crash_counting_begins_anew(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().start()?;
    cluster.connect("postgres")?.run("CREATE EXTENSION pg_fence")?;
    let ends =
        ["restart", "backend killed", "server killed", "backend killed again", "restart again"];
    for end in ends {
        let mut session = cluster.connect("postgres")?;
        session.acquire(end, "1 h")?;
        session.refused("SELECT lease_guard('x', 1)", "PF004")?;
        let mut open = cluster.connect("postgres")?;
        open.run("BEGIN; SELECT lease_acquire('open')")?;
        let before = shown(&mut session)?;
        ensure!(before == "grants 1, refused_pf004 1", "before {end}: {before}");
        if end.starts_with("restart") {
            cluster.restart()?;
        } else if end.starts_with("server") {
            cluster.kill9()?;
            cluster.start()?;
        } else {
            process::signal(open.pid(), Signal::SIGKILL)?;
            process::wait_until("the server has started again", PATIENCE, || {
                let again = cluster.connect("postgres");
                again.is_ok_and(|mut again| {
                    again.truth("SELECT stats_reset IS NULL FROM fence.stats").unwrap_or(false)
                })
            })?;
        }
        let mut session = cluster.connect("postgres")?;
        ensure!(session.truth("SELECT stats_reset IS NULL FROM fence.stats")?, "{end}");
        ensure!(shown(&mut session)?.is_empty(), "{end}");
        ensure!(session.rows("SELECT * FROM fence.refusals")?.is_empty(), "{end}");
    }
    Ok(())
}

#[lab_test]
fn a_session_that_is_terminated_has_counted(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run(
        "CREATE TABLE t (id int PRIMARY KEY, v int, fence bigint);
         INSERT INTO t SELECT generate_series(1, 100); SELECT fence_protect('t')",
    )?;
    let token = session.acquire("a", "1 h")?;
    super::counted(&mut session)?;
    let mut victim = Background::connect(&db.conninfo())?;
    let pid = victim.pid();
    victim.run("BEGIN")?;
    victim.run("SELECT lease_acquire('b')")?;
    victim.send(&format!(
        "UPDATE t SET v = 1, fence = {token} + CASE WHEN id = 100 THEN (pg_sleep(3600)::text || '0')::int ELSE 0 END"
    ))?;
    process::wait_until("it sleeps", PATIENCE, || {
        victim.waits_for().is_some_and(|(_, event)| event == "PgSleep")
    })?;
    victim.terminate()?;
    ensure!(victim.outcome(PATIENCE)?.is_err());
    process::wait_until("it is gone", PATIENCE, || {
        let gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)";
        session.one(gone, &[&pid]).unwrap_or(false)
    })?;
    ensure!(shown(&mut session)? == "grants 1, writes_checked 99", "{}", shown(&mut session)?);
    Ok(())
}
