//! The rights to see counters, in a restored dump. The rest is in who_may_see.script.

use crate::failover::restores::{dump, restore};
use pg_test::{ensure, lab_test, Calls, Lab, Result};

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
    // The counts stay where they were.
    ensure!(session.truth("SELECT grants = 0 AND stats_reset IS NULL FROM fence.stats")?);
    session.refused("SELECT * FROM fence.refusals", "42501")?;
    let mut session = copy.connect_as(&admin)?;
    session.run("SELECT * FROM fence.refusals; SELECT fence_stats_reset()")?;
    ensure!(session.truth("SELECT stats_reset IS NOT NULL FROM fence.stats")?);
    Ok(())
}
