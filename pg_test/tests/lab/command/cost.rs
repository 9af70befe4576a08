//! The cost of a run in addition to connecting.

use pg_test::clients::cable::Cable;
use pg_test::clients::command::stage::Stage;
use pg_test::{Lab, Result, ensure, lab_test};

/// A request and its answers are one round trip, however many messages they are.
#[lab_test]
fn a_run_takes_one_connection_and_two_round_trips_beside_connecting(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    let cable = Cable::lay(lab.cluster().port())?;
    let counted = |arguments: &[&str]| -> Result<(u64, u64)> {
        let before = (cable.connections(), cable.round_trips());
        let mut command = stage.command_to(&stage.conninfo().port(cable.port()));
        // A request for encryption would add a round trip.
        let output = command.env("PGSSLMODE", "disable").args(arguments).output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok((cable.connections() - before.0, cable.round_trips() - before.1))
    };
    // `leases` makes one request.
    let (connections, connecting) = match counted(&["leases"])? {
        (1, round_trips) => (1, round_trips - 1),
        other => pg_test::bail!("{other:?}"),
    };
    for arguments in [
        &["run", "job", "--", "true"][..],
        &["run", "job", "--wait", "1m", "--", "true"],
        &["run", "a", "b", "--", "true"],
        &["run", "job", "--session", "--", "true"],
    ] {
        let counted = counted(arguments)?;
        ensure!(
            counted == (connections, connecting + 2),
            "{arguments:?}: {counted:?}, connecting {connecting}"
        );
    }
    Ok(())
}
