//! The command `pg_fence`: scenarios in which its processes are frozen and killed, links cut and servers restarted, as the
//! harness plays them (`command::scenarios`), and the faults that are planted in it to show that they would fail.
//!
//! | module | its noun |
//! | --- | --- |
//! | [`fixture`] | a database with a bound table, and runs of the command against it |
//! | [`terminal`] | a terminal for a run |
//! | [`plain`] | scenarios without trouble |
//! | [`lost`] | scenarios with it |

pub mod fixture;
pub mod lost;
pub mod plain;
pub mod terminal;

use super::fixture::is_caught;
use super::languages::rust;
use crate::harness::Harness;
use anyhow::Result;
use fixture::CommandFixture;

type Scenario = fn(&mut CommandFixture) -> Result<()>;

/// The planted faults (`clients/rust/cli/src/planted.rs`), each with the scenario that must fail with it.
const FAULTS: &[(&str, Scenario)] = &[
    ("no-deadline", lost::frozen_keeper),
    ("term-only", lost::frozen_keeper),
    ("no-token", plain::presented_by_psql),
    ("no-watchdog", lost::killed_supervisor),
    ("group-only", lost::killed_keeper),
    ("no-cgroup", lost::hidden_from_the_keeper),
    ("release-first", plain::left_behind),
    ("one-look", plain::daemons),
];

/// Plants each fault and checks that its scenario fails.
pub fn catch_all(harness: &Harness) -> Result<()> {
    for (fault, scenario) in FAULTS {
        let played = fixture::play(harness, &rust::command_with(fault)?, None, "", scenario);
        is_caught(fault, "its scenario", played)?;
    }
    Ok(())
}
