//! A predecessor whose commit waits while a snapshot is taken. The rest is in snapshots.script.

use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Background, Calls, Lab, Result};

const PREDECESSOR: &str = "SELECT v FROM t";

#[lab_test]
fn a_predecessor_whose_commit_waits_for_a_standby_is_not_overlooked(lab: &Lab) -> Result<()> {
    let cluster = lab
        .builder()
        .set("synchronous_commit", "local")
        .set("synchronous_standby_names", "nobody")
        .start()?;
    let mut admin = cluster.connect("postgres")?;
    admin.run("CREATE EXTENSION pg_fence; CREATE TABLE t (v int); INSERT INTO t VALUES (0)")?;
    admin.run("SELECT fence_protect('t', lease => 'job')")?;
    let token = admin.acquire("job", "1 h")?;
    let mut guarded = Background::connect(&cluster.conninfo("postgres"))?;
    guarded.send("SET synchronous_commit = on")?;
    guarded.rows()?;
    guarded
        .send(&format!("BEGIN; SELECT lease_guard('job', {token}); UPDATE t SET v = 50; COMMIT"))?;
    let waits = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE pid = {} AND wait_event = 'SyncRep'",
        guarded.pid()
    );
    wait_until("the commit waits", PATIENCE, || admin.granted(&waits).is_ok_and(|n| n == 1))?;
    admin.release("job", token)?.expect("held");
    let mut inside = cluster.connect("postgres")?;
    inside.run("BEGIN ISOLATION LEVEL REPEATABLE READ")?;
    ensure!(inside.granted(PREDECESSOR)? == 0, "the predecessor's world");
    ensure!(admin.is_taken("job")?, "its locks stay until its work is visible");
    admin.run(&format!("SELECT pg_cancel_backend({})", guarded.pid()))?;
    guarded.rows()?;
    let next = admin.acquire("job", "1 h")?;
    // Tried again, it may rely on the grant, and sees what the predecessor wrote.
    for sql in
        [format!("SELECT lease_guard('job', {next})"), format!("UPDATE t SET fence = {next}")]
    {
        inside.run("SAVEPOINT s")?;
        inside.refused(&sql, "40001")?;
        inside.run("ROLLBACK TO s")?;
    }
    inside.run("ROLLBACK; BEGIN ISOLATION LEVEL REPEATABLE READ")?;
    ensure!(inside.granted(PREDECESSOR)? == 50, "a new snapshot");
    inside.run(&format!("UPDATE t SET fence = {next}; COMMIT"))
}
