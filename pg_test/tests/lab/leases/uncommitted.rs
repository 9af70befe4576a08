//! Acquires that are not committed yet, on a standby. The rest is in uncommitted.script.

use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Lab, Result, Session};

/// A lease as it is shown, by the view as by the call: holder, state and whom it keeps out.
fn shown(session: &mut Session, name: &str) -> Result<Vec<String>> {
    let mut by = |leases: String| -> Result<Vec<String>> {
        let rows = session.rows(&format!(
            "SELECT concat_ws(' ', holder, state, blocking_pids) FROM {leases} ORDER BY 1"
        ))?;
        Ok(rows.into_iter().flatten().flatten().collect())
    };
    let rows = by(format!("fence.leases WHERE name = '{name}'"))?;
    let by_call = by(format!("lease_info('{name}')"))?;
    ensure!(rows == by_call, "{rows:?} {by_call:?}");
    Ok(rows)
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
    wait_until("the standby has what came after", PATIENCE, || {
        shown(&mut reader, "after").is_ok_and(|rows| rows == ["they held {}"])
    })?;
    ensure!(shown(&mut reader, "job")? == ["old expired {}"]);
    open.run("COMMIT")
}
