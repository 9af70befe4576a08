//! Acquires that are not committed yet, on a standby and in another database. The rest is in uncommitted.script.

use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Calls, Lab, Result};

#[lab_test]
fn another_database_has_leases_of_its_own(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut open = db.connect()?;
    open.run("BEGIN; SELECT lease_acquire('a', 'me')")?;
    let elsewhere = lab.database()?;
    ensure!(elsewhere.connect()?.granted("SELECT count(*) FROM fence.leases")? == 0);
    Ok(())
}

#[lab_test]
fn a_standby_does_not_show_it(lab: &Lab) -> Result<()> {
    let primary = lab.builder().start()?;
    let mut open = primary.connect("postgres")?;
    open.run("CREATE EXTENSION pg_fence; SELECT lease_acquire('job', 'old', '1 us')")?;
    let standby = lab.builder().standby_of(&primary)?;
    standby.start()?;
    open.run("BEGIN; SELECT lease_acquire('job', 'me', '1 h')")?;
    primary.connect("postgres")?.run("SELECT lease_acquire('after', 'they', '1 h')")?;
    let mut reader = standby.connect("postgres")?;
    let shown = "SELECT string_agg(concat_ws(' ', name, holder, state), ' ' ORDER BY name) FROM fence.leases";
    wait_until("the standby has what came after", PATIENCE, || {
        let shown = reader.text(shown);
        shown.is_ok_and(|shown| shown.as_deref() == Some("after they held job old expired"))
    })?;
    open.run("COMMIT")
}
