//! Who may see and reset what was counted.

use crate::failover::restores::{dump, restore};
use pg_test::{ensure, lab_test, Calls, Lab, Result};

const LOOKS: [&str; 5] = [
    "SELECT * FROM fence.stats",
    "SELECT fence.read_stats()",
    "SELECT * FROM fence.refusals",
    "SELECT fence.read_refusals()",
    "SELECT fence_stats_reset()",
];

#[lab_test]
fn a_stranger_nothing_a_worker_the_counters_an_administrator_all(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut owner = db.connect()?;
    let (stranger, worker, admin) = (db.role("stranger")?, db.role("worker")?, db.role("admin")?);
    let all = |from: usize, to: &str| -> Result<()> {
        let mut session = db.connect_as(to)?;
        for (n, look) in LOOKS.iter().enumerate() {
            if n < from {
                session.run(look)?;
            } else {
                session.refused(look, "42501")?;
            }
        }
        session.refused("SELECT setval('fence.stats_memory_seq', 7)", "42501")?;
        session.refused("SELECT last_value FROM fence.stats_memory_seq", "42501")?;
        Ok(())
    };
    all(0, &stranger)?;
    owner.run(&format!("GRANT USAGE ON SCHEMA fence TO {stranger}"))?;
    all(0, &stranger)?;
    owner.run(&format!("SELECT fence_grant('{worker}'), fence_grant('{admin}', 'admin')"))?;
    all(2, &worker)?;
    all(5, &admin)?;
    owner.run(&format!("SELECT fence_revoke('{worker}'), fence_revoke('{admin}')"))?;
    all(0, &worker)?;
    all(0, &admin)
}

#[lab_test]
fn what_a_role_without_rights_writes_is_counted(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut owner = db.connect()?;
    let writer = db.role("writer")?;
    owner.run(&format!(
        "CREATE TABLE t (id int PRIMARY KEY, fence bigint); INSERT INTO t VALUES (1); SELECT fence_protect('t');
         GRANT ALL ON t TO {writer}"
    ))?;
    // It is the first that counts at all.
    db.connect_as(&writer)?.refused("UPDATE t SET id = 2", "PF002")?;
    let seen = "SELECT refused_pf002 = 1 AND writes_checked = 1 FROM fence.stats";
    ensure!(owner.truth(seen)?);
    ensure!(owner.text("SELECT role FROM fence.refusals")? == Some(writer));
    Ok(())
}

#[lab_test]
fn nobody_else_says_how_many_refusals_are_kept(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let writer = db.role("writer")?;
    let mut session = db.connect_as(&writer)?;
    // Before the library is loaded, anything can be set; it does not count.
    session.run("SET pg_fence.refusals_kept = 9999")?;
    db.connect()?.run(&format!("SELECT fence_grant('{writer}')"))?;
    session.acquire("a", "1 h")?;
    ensure!(session.text("SHOW pg_fence.refusals_kept")?.as_deref() == Some("256"));
    session.refused("SET pg_fence.refusals_kept = 1", "42501")?;
    Ok(())
}

#[lab_test]
fn a_dump_carries_who_may_see(lab: &Lab) -> Result<()> {
    let (db, copy) = (lab.database()?, lab.bare_database()?);
    let (worker, admin) = (db.role("worker")?, db.role("admin")?);
    db.connect()?.run(&format!(
        "SELECT fence_grant('{worker}'), fence_grant('{admin}', 'admin'), lease_acquire('a')"
    ))?;
    let file = dump(lab, lab.cluster(), db.name())?;
    restore(lab, lab.cluster(), copy.name(), &file, &[])?;
    let mut session = copy.connect_as(&worker)?;
    // What was counted stays where it was.
    ensure!(session.truth("SELECT grants = 0 AND stats_reset IS NULL FROM fence.stats")?);
    session.refused("SELECT * FROM fence.refusals", "42501")?;
    let mut session = copy.connect_as(&admin)?;
    session.run("SELECT * FROM fence.refusals; SELECT fence_stats_reset()")?;
    ensure!(session.truth("SELECT stats_reset IS NOT NULL FROM fence.stats")?);
    Ok(())
}
