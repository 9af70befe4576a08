//! A run of one scenario with one client.

use super::fixture::{Fixture, NotReady};
use super::languages::Client;
use super::scenario::Scenario;
use super::scenario_servers::ScenarioServers;
use crate::harness::Harness;
use crate::stall_detector;
use anyhow::{Context, Result};

/// Plays the scenario. The error says what was different.
///
/// On a machine that stalls, renewals come late and leases expire that the scenario needs. Such a failure proves
/// nothing, so the scenario is played again, more slowly. A fault of the client fails at every pace.
pub fn play(
    harness: &Harness,
    scenario: &Scenario,
    client: &Client,
    plant: Option<&str>,
) -> Result<()> {
    stall_detector::at_some_pace(harness.rundir().path(), &scenario.name, |pace| {
        play_at(pace, harness, scenario, client, plant)
    })
}

fn play_at(
    pace: u32,
    harness: &Harness,
    scenario: &Scenario,
    client: &Client,
    plant: Option<&str>,
) -> Result<()> {
    let servers =
        ScenarioServers::start(harness, &scenario.needs, plant, pace).context(NotReady)?;
    let mut fixture = Fixture::new(servers, client, pace);
    for line in &scenario.lines {
        (line.play)(&mut fixture).with_context(|| format!("at \"{}\"", line.text))?;
    }
    fixture.close().context("at the end")
}
