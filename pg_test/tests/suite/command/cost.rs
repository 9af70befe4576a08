//! The cost of a run in addition to connecting.

use pg_test::clients::command::fixture::CommandFixture;
use pg_test::{Harness, Result, ensure, harness_test};

/// A request and its answers are one round trip, however many messages they are.
#[harness_test]
fn a_run_takes_one_connection_and_two_round_trips_beside_connecting(
    harness: &Harness,
) -> Result<()> {
    let fixture = CommandFixture::new(harness)?;
    let link = &fixture.link;
    let counted = |arguments: &[&str]| -> Result<(u64, u64)> {
        let before = (link.connections(), link.round_trips());
        let mut command = fixture.command();
        // A request for encryption would add a round trip.
        let output = command.env("PGSSLMODE", "disable").args(arguments).output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok((link.connections() - before.0, link.round_trips() - before.1))
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
