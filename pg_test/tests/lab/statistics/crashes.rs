//! A backend that is terminated in the middle. Servers that stop or crash: crashes.script.

use super::shown;
use pg_test::process::PATIENCE;
use pg_test::{ensure, lab_test, process, Background, Calls, Lab, Result};

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
