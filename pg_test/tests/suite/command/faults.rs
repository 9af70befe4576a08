//! Faults are planted in the command, and its scenarios must fail: a test that catches no fault proves nothing.

use pg_test::clients::command::fixture::{CommandFixture, play, program};
use pg_test::clients::command::scenarios;
use pg_test::clients::fixture::is_caught;
use pg_test::clients::languages::rust;
use pg_test::{Harness, Result, harness_test};

type Scenario = fn(&mut CommandFixture) -> Result<()>;

/// The planted faults (`clients/rust/cli/src/planted.rs`), each with the scenario that must fail with it.
const FAULTS: &[(&str, Scenario)] = &[
    ("no-deadline", scenarios::frozen_renewer),
    ("term-only", scenarios::frozen_renewer),
    ("no-token", scenarios::presented_by_psql),
    ("no-watchdog", scenarios::killed_supervisor),
    ("group-only", scenarios::killed_renewer),
    ("no-cgroup", scenarios::hidden_from_the_renewer),
    ("release-first", scenarios::left_behind),
    ("one-scan", scenarios::daemons),
];

#[harness_test(slow)]
fn planted_faults_are_caught(harness: &Harness) -> Result<()> {
    program()?;
    for (fault, scenario) in FAULTS {
        let played = play(harness, &rust::command_with(fault)?, None, "", scenario);
        is_caught(fault, "its scenario", played)?;
    }
    Ok(())
}
