//! A guard that was prepared before a crash. The rest is in locks.script.

use crate::support::test_database::shows;
use pg_test::{ensure, lab_test, Lab, Result};

#[lab_test]
fn a_prepared_guard_survives_a_crash(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().start()?;
    let mut session = cluster.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    let token: i64 = session.one("SELECT lease_acquire('a', ttl => '1 h')", &[])?;
    session.run(&format!("BEGIN; CREATE TABLE t (); SELECT lease_guard('a', {token})"))?;
    session.run("PREPARE TRANSACTION 'p'")?;
    cluster.kill9()?;
    cluster.start()?;
    let mut session = cluster.connect("postgres")?;
    session.run("SELECT lease_revoke('a')")?;
    shows(&mut session, "SELECT lease_acquire('a')", "-")?;
    shows(&mut session, "SELECT blocking_pids FROM lease_info('a')", "{0}")?;
    session.run("COMMIT PREPARED 'p'")?;
    let next: Option<i64> = session.one("SELECT lease_acquire('a')", &[])?;
    ensure!(next.is_some_and(|next| next > token));
    Ok(())
}
