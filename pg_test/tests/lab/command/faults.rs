//! Faults are planted in the command, and the scenarios of the other files must fail: tests that catch nothing prove
//! nothing.

use super::stage::{program, Stage};
use super::{exit_codes, lost};
use pg_test::clients::languages::rust::command_with;
use pg_test::{bail, lab_test, Lab, Result};

type Scenario = fn(&Stage) -> Result<()>;

/// Each with the scenario that catches it.
const FAULTS: &[(&str, Scenario)] = &[
    ("no-deadline", lost::frozen_keeper),
    ("no-watchdog", lost::killed_supervisor),
    ("group-only", lost::killed_keeper),
    ("term-only", lost::frozen_keeper),
    ("release-first", exit_codes::left_behind),
    ("no-token", exit_codes::presented_by_psql),
];

#[lab_test(slow)]
fn planted_faults_are_caught(lab: &Lab) -> Result<()> {
    program()?;
    for (fault, scenario) in FAULTS {
        let stage = Stage::with(lab, lab.cluster(), command_with(fault)?)?;
        match scenario(&stage) {
            Ok(()) => bail!("{fault} is not caught"),
            Err(caught) => eprintln!("{fault}: caught: {caught:#}"),
        }
    }
    Ok(())
}
