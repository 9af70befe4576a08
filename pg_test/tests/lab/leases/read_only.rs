//! Read-only transactions and standbys.

use pg_test::{ensure, lab_test, Calls, Cluster, Lab, Result, Session};

/// All that writes, refused with 25006; all that looks, answered.
fn only_looks(session: &mut Session, token: i64) -> Result<()> {
    for call in [
        "lease_acquire('new')",
        "lease_acquire('job')",
        "lease_acquire('job', wait => '1 s')",
        &format!("lease_renew('job', {token})"),
        "lease_renew('nobody', 1)",
        &format!("lease_release('job', {token})"),
        "lease_revoke('job')",
        "lease_revoke('nobody')",
        &format!("lease_guard('job', {token})"),
        "lease_prune()",
        "fence_new_epoch()",
        "lease_acquire_all('{a,b}')",
        &format!("lease_renew_all('{{job}}', {token})"),
        &format!("lease_release_all('{{job}}', {token})"),
    ] {
        session.run("SAVEPOINT s")?;
        session.refused(&format!("SELECT {call}"), "25006")?;
        session.run("ROLLBACK TO s")?;
    }
    ensure!(session.speaks("job", token)? && !session.speaks("job", token + 1)?);
    let shown = "SELECT name || ' ' || state || ' ' || holder || ' ' || (remaining > '0')";
    for source in ["lease_info('job')", "fence.leases WHERE name = 'job'"] {
        let text = session.text(&format!("{shown} FROM {source}"))?;
        ensure!(text.as_deref() == Some("job held me true"), "{text:?}");
    }
    session.refused("SELECT lease_check('', 1)", "22023")?;
    Ok(())
}

#[lab_test]
fn a_read_only_transaction_only_looks(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.granted("SELECT lease_acquire('job', 'me', '1 h')")?;
    for begin in [
        "BEGIN READ ONLY",
        "BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY",
        "BEGIN; SET transaction_read_only = on",
    ] {
        session.run(begin)?;
        only_looks(&mut session, token).map_err(|e| e.context(begin))?;
        session.run("ROLLBACK")?;
    }
    ensure!(session.renew("job", token)?.is_some());
    Ok(())
}

#[lab_test]
fn a_standby_only_looks(lab: &Lab) -> Result<()> {
    let primary = lab.builder().without_fsync().start()?;
    let standby = lab.builder().without_fsync().standby_of(&primary)?;
    standby.start()?;
    let mut session = primary.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    let token = session.granted("SELECT lease_acquire('job', 'me', '1 h')")?;
    let look = |standby: &Cluster| -> Result<Session> {
        standby.wait_replayed(&primary)?;
        standby.connect("postgres")
    };
    let mut reader = look(&standby)?;
    reader.run("BEGIN")?;
    ensure!(reader.truth("SELECT in_recovery AND timeline = 1 FROM fence_status()")?);
    only_looks(&mut reader, token)?;
    reader.run("COMMIT; BEGIN ISOLATION LEVEL REPEATABLE READ")?;
    only_looks(&mut reader, token)?;
    reader.run("COMMIT")?;
    // It goes with the primary, and by its own clock.
    session.granted(&format!("SELECT lease_renew('job', {token}, '1 s')"))?;
    let mut reader = look(&standby)?;
    reader.wait_expired("job")?;
    ensure!(!reader.speaks("job", token)?);
    session.acquire("job", "1 h")?;
    let mut reader = look(&standby)?;
    ensure!(!reader.speaks("job", token)? && reader.speaks("job", token + 2)?);
    Ok(())
}
