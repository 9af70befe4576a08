//! A standby's counters. The rest is in segments.script.

use super::shown;
use pg_test::{ensure, lab_test, Calls, Lab, Result};

#[lab_test]
fn a_standby_shows_nothing_and_counts_once_it_is_promoted(lab: &Lab) -> Result<()> {
    let primary = lab.builder().without_fsync().start()?;
    let standby = lab.builder().without_fsync().standby_of(&primary)?;
    standby.start()?;
    let mut session = primary.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    session.acquire("a", "1 h")?;
    session.refused("SELECT lease_guard('x', 1)", "PF004")?;
    standby.wait_replayed(&primary)?;
    let mut reader = standby.connect("postgres")?;
    let nothing = "SELECT stats_reset IS NULL AND grants = 0 AND jumps = 0 FROM fence.stats";
    ensure!(reader.truth(nothing)? && reader.rows("TABLE fence.refusals")?.is_empty());
    reader.refused("SELECT fence_stats_reset()", "25006")?;
    primary.kill9()?;
    standby.promote()?;
    // Also the session that was there before.
    let mut fresh = standby.connect("postgres")?;
    fresh.acquire("b", "1 h")?;
    reader.acquire("c", "1 h")?;
    ensure!(shown(&mut reader)? == "grants 2, jumps 1", "{}", shown(&mut reader)?);
    Ok(())
}
