//! Adopted leases when servers fail over, are dumped and restored. Crashes: adopted.script.

use super::promotions::cut;
use super::restores::{dump, restore};
use pg_test::{ensure, lab_test, Calls, Lab, Result, Session};

fn adopt(session: &mut Session, token: i64) -> Result<Option<i64>> {
    session.one("SELECT lease_adopt('job', $1)", &[&token])
}

#[lab_test]
fn a_standby_shows_what_is_adopted_and_adopts_nothing(lab: &Lab) -> Result<()> {
    let primary = lab.builder().start()?;
    let mut session = primary.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence; SELECT lease_adopt('job', 33, 'worker A')")?;
    let standby = lab.builder().standby_of(&primary)?;
    standby.start()?;
    standby.wait_replayed(&primary)?;
    let mut reader = standby.connect("postgres")?;
    for call in ["lease_adopt('job', 33)", "lease_adopt('job', 34)", "lease_forget('job')"] {
        reader.refused(&format!("SELECT {call}"), "25006")?;
    }
    reader.refused("SELECT lease_forget_older('0')", "25006")?;
    ensure!(reader.speaks("job", 33)? && !reader.speaks("job", 34)?);
    for relation in ["fence.leases WHERE name = 'job'", "lease_info('job')"] {
        let row = reader.rows(&format!(
            "SELECT state, holder, token::text, adopted::text, remaining::text FROM {relation}"
        ))?;
        let wanted = ["held", "worker A", "33", "true"].map(|text| Some(text.to_owned()));
        ensure!(row.len() == 1 && row[0][..4] == wanted && row[0][4].is_none(), "{row:?}");
    }
    ensure!(adopt(&mut session, 34)? == Some(34));
    standby.wait_replayed(&primary)?;
    ensure!(!reader.speaks("job", 33)? && reader.speaks("job", 34)?);
    // A promoted one does not know what it has missed.
    primary.kill9()?;
    standby.promote()?;
    let mut session = standby.connect("postgres")?;
    ensure!(!session.speaks("job", 34)?);
    session.refused("SELECT lease_adopt('job', 33)", "PF001")?;
    ensure!(adopt(&mut session, 34)? == Some(34) && session.speaks("job", 34)?);
    Ok(())
}

#[lab_test]
fn an_adoption_that_a_standby_has_missed_comes_with_the_holder_s_next_transaction(
    lab: &Lab,
) -> Result<()> {
    let primary = lab.builder().start()?;
    let mut session = primary.connect("postgres")?;
    session.run(
        "CREATE EXTENSION pg_fence;
         CREATE TABLE t (id int PRIMARY KEY, v int);
         INSERT INTO t VALUES (1, 0);
         SELECT fence_protect('t', lease => 'job'), lease_adopt('job', 33)",
    )?;
    let standby = lab.builder().standby_of(&primary)?;
    standby.start()?;
    standby.wait_replayed(&primary)?;
    cut(&standby)?;
    ensure!(adopt(&mut session, 34)? == Some(34));
    primary.kill9()?;
    standby.promote()?;
    let (mut old, mut new) = (standby.connect("postgres")?, standby.connect("postgres")?);
    // By itself it speaks no more; only who adopts it again first is believed, until the newer holder comes.
    old.refused("UPDATE t SET v = 1, fence = 33", "PF004")?;
    old.run("BEGIN; SELECT lease_guard('job', lease_adopt('job', 33)); UPDATE t SET v = 1")?;
    ensure!(adopt(&mut new, 34)?.is_none());
    old.run("COMMIT")?;
    new.run(
        "BEGIN; SELECT lease_guard('job', lease_adopt('job', 34)); UPDATE t SET v = 2; COMMIT",
    )?;
    old.refused("SELECT lease_adopt('job', 33)", "PF001")?;
    old.refused("UPDATE t SET v = 3, fence = 33", "PF001")?;
    Ok(())
}

#[lab_test]
fn a_dump_remembers_what_is_stale(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = db.role("adopter")?;
    let mut session = db.connect()?;
    session.run(&format!(
        "SELECT fence_grant('{role}', 'adopter', 'job'), lease_adopt('job', 33), lease_adopt('free', 44);
         SELECT lease_revoke('free')"
    ))?;
    let file = dump(lab, lab.cluster(), db.name())?;
    let other = lab.bare_database()?;
    restore(lab, lab.cluster(), other.name(), &file, &[])?;
    let mut session = other.connect()?;
    ensure!(!session.speaks("job", 33)?, "it may have been replaced since the dump");
    session.refused("SELECT lease_adopt('job', 32)", "PF001")?;
    session.refused("SELECT lease_adopt('free', 44)", "PF001")?;
    ensure!(adopt(&mut session, 33)? == Some(33) && session.speaks("job", 33)?);
    let mut worker = other.connect_as(&role)?;
    ensure!(adopt(&mut worker, 34)? == Some(34));
    worker.refused("SELECT lease_adopt('free', 45)", "42501")?;
    Ok(())
}
