//! `fence_audit` on leases from a clock that stood ahead. What else it says of the state: state.script.

use pg_test::clock::Clocked;
use pg_test::{ensure, lab_test, Context, Lab, Result, Session};

/// The answer of `fence_audit()` to a session: `relation|severity|finding`, and the remedy.
fn audit(session: &mut Session) -> Result<Vec<(String, String)>> {
    let rows = session.rows(
        "SELECT concat_ws('|', coalesce(relation::text, '-'), severity, finding), coalesce(remedy, '') FROM fence_audit()",
    )?;
    let text = |cell: Option<String>| cell.context("a finding with a NULL");
    rows.into_iter().map(|mut row| Ok((text(row.remove(0))?, text(row.remove(0))?))).collect()
}

#[lab_test]
fn a_lease_from_a_clock_that_stood_ahead_is_found(lab: &Lab) -> Result<()> {
    let clocked = Clocked::start(lab.builder(), &lab.prefix().new_dir("clock")?)?;
    let mut admin = clocked.cluster().connect("postgres")?;
    admin.run("CREATE EXTENSION pg_fence; SELECT lease_acquire('before', ttl => '1 day')")?;
    clocked.step(2 * 3600)?;
    admin.run("SELECT lease_release('over', lease_acquire('over', ttl => '1 min'))")?;
    admin.run("SELECT lease_acquire('job', ttl => '1 min')")?;
    let kept: i64 = admin.one("SELECT lease_acquire('kept', ttl => '1 min')", &[])?;
    ensure!(audit(&mut admin)?.is_empty());
    clocked.step(0)?;
    let said = |lease: &str| {
        format!(
            "fence.lease|notice|lease \"{lease}\" has more time left than its ttl: \
             the clock stood ahead when it was granted or renewed"
        )
    };
    let rows = audit(&mut admin)?;
    let wanted = ["job", "kept"].map(said);
    ensure!(rows.iter().map(|row| &row.0).eq(&wanted), "{rows:#?}");
    // A renewal counts from the clock as it is; or the remedies.
    admin.run(&format!("SELECT lease_renew('kept', {kept})"))?;
    admin.run(&rows[0].1)?;
    ensure!(audit(&mut admin)?.is_empty());
    ensure!(admin.one::<bool>("SELECT count(*) = 2 FROM fence.leases WHERE state = 'held'", &[])?);
    Ok(())
}
