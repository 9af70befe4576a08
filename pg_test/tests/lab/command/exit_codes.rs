//! A run that waits for its database. The rest is in exit_codes.script.

use pg_test::clients::command::stage::{pause, Stage};
use pg_test::{ensure, lab_test, Calls, Lab, Result};

#[lab_test]
fn it_waits_for_the_lease_and_for_the_database(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().start()?;
    let stage = Stage::on(lab, &cluster)?;
    cluster.stop(pg_test::Shutdown::Fast)?;
    let run = stage.run("job --wait 5m", "psql -qXc \"UPDATE work SET value = 'A1'\"")?;
    pause(2);
    cluster.start()?;
    let ended = run.ends_with(0)?;
    ensure!(ended.stderr.contains("tried again") && stage.written()? == ["A1"], "{ended:?}");
    // And through a restart while it stands in line.
    let token = stage.admin()?.acquire("job", "1 h")?;
    let mut run = stage.run("job --wait 5m", "psql -qXc \"UPDATE work SET value = 'A2'\"")?;
    pause(1);
    cluster.restart()?;
    ensure!(!run.has_ended(), "it has given up");
    stage.admin()?.run(&format!("SELECT lease_release('job', {token})"))?;
    run.ends_with(0)?;
    ensure!(stage.written()? == ["A1", "A2"]);
    Ok(())
}
