//! A lease that somebody else grants, under a token of theirs.

use pg_test::clients::command::stage::{has_ended, Stage};
use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Lab, Result};

#[lab_test]
fn a_greater_token_ends_the_command_of_the_smaller_one(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    let mut admin = stage.admin()?;
    admin.run(&format!("SELECT fence_grant('{}', 'adopter')", stage.role()))?;
    let script = "psql -qXc \"UPDATE work SET value = '$ME'\"; echo $$ > $DIR/$ME; [ $ME = B1 ] || exec sleep 600";
    let old = stage.run("job --adopt 100 --ttl 2s", &format!("ME=A1; {script}"))?;
    let pid = stage.pid("A1")?;
    stage.run("job --adopt 200", &format!("ME=B1; {script}"))?.ends_with(0)?;
    let ended = old.ends_with(70)?;
    has_ended(pid)?;
    ensure!(
        ended.stderr.contains("stale fencing token 100: lease \"job\" has had 200"),
        "{ended:?}"
    );
    // Nothing was given back: the same token goes on to serve, and an older one does not.
    stage.run("job --adopt 200", &format!("ME=B1; {script}"))?.ends_with(0)?;
    let ended = stage.run("job --adopt 150", "echo ran")?.ends_with(70)?;
    ensure!(ended.stdout.is_empty(), "{ended:?}");
    ensure!(stage.written()? == ["A1", "B1", "B1"], "{:?}", stage.written()?);
    Ok(())
}

#[lab_test]
fn the_supervisor_of_an_adopted_lease_is_killed(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    stage.admin()?.run(&format!("SELECT fence_grant('{}', 'adopter')", stage.role()))?;
    let script =
        "trap '' TERM; setsid sleep 600 & echo $! > $DIR/escaped; while :; do sleep 0.1; done";
    let run = stage.run("job --adopt 100 --grace 500ms", script)?;
    let escaped = stage.pid("escaped")?;
    pg_test::clients::command::stage::kill(run.supervisor())?;
    wait_until("all of it has ended", PATIENCE, || !pg_test::process::is_alive(escaped))?;
    run.ends_killed()
}
