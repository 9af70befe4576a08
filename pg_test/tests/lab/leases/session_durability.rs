//! A lease of a session, where a standby is waited for. What else it waits for: session_durability.script.

use pg_test::process::{wait_until, PATIENCE};
use pg_test::{lab_test, Background, Calls, Lab, Result};

#[lab_test]
fn with_synchronous_standbys_it_waits_as_its_session_asked(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().start()?;
    let mut local = cluster.connect("postgres")?;
    local.run("CREATE EXTENSION pg_fence; SET synchronous_commit = local")?;
    // One that never answers.
    cluster.configure(&[("synchronous_standby_names", "nobody")])?;
    cluster.reload()?;
    let mut asks = Background::connect(&cluster.conninfo("postgres"))?;
    wait_until("who asks for a standby waits for it", PATIENCE, || {
        // The checkpointer may not know of the standby yet.
        if asks.is_finished() {
            let _ = asks.rows();
        }
        let _ = asks.send("SELECT lease_acquire('job', 'h', session => true, reclaim => true)");
        asks.waits_for().is_some_and(|(_, event)| event == "SyncRep")
    })?;
    local.granted("SELECT lease_acquire('local', session => true)").map(drop)
}
