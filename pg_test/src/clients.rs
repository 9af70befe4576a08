//! The clients in the workers' own languages, and the scenarios that each must go through.
//!
//! | module | its noun |
//! | --- | --- |
//! | [`scenario`] | the scenarios of `clients/scenarios.md` |
//! | [`languages`] | the clients, and how their workers are brought |
//! | [`worker`] | a worker process in some language |
//! | [`tcp_proxy`] | its network link to the server, to be cut |
//! | [`scenario_servers`] | the servers of a scenario, and what happens to them |
//! | [`first_worker`] | the example of a client's README |
//! | [`fixture`] | a running scenario: its servers and workers |
//! | [`mod@run`] | a run of one scenario with one client |
//! | `duration` | durations in the lines of scenarios |
//! | [`command`] | the command `pg_fence`, whose scenarios are its own |

pub mod command;
mod duration;
pub mod first_worker;
pub mod fixture;
pub mod languages;
pub mod run;
pub mod scenario;
pub mod scenario_servers;
pub mod tcp_proxy;
pub mod worker;

use crate::edition;
use crate::harness::Harness;
use crate::process::output_of;
use crate::skipped::is_left_out;
use crate::surface::Surface;
use anyhow::{Context, Result, ensure};
use languages::{Client, Language};
use scenario::Scenario;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// The arguments of the command.
#[derive(Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    edition: edition::Choice,
    /// The clients to play with (all)
    clients: Vec<String>,
    /// Only scenarios whose name contains this (with `-` for spaces); also `the-first-worker`, `its-own-tests`, `its-checks`
    #[arg(long, value_name = "NAME")]
    scenario: Option<String>,
    /// Only with this known fault planted: the scenarios must catch it
    #[arg(long, value_name = "FAULT")]
    plant: Option<String>,
    /// Without the planted faults
    #[arg(long)]
    no_plants: bool,
}

impl Options {
    fn ask_for(&self, key: &str) -> bool {
        self.scenario.as_ref().is_none_or(|part| key.contains(part))
    }
}

/// The result of a client in one scenario, or with one fault.
struct Outcome {
    what: String,
    client: &'static str,
    fault: Option<String>,
    /// The reason why the scenario does not apply to this client.
    left_out: Option<String>,
}

/// Plays the scenarios and then each planted fault, with each client, and prints the table.
pub fn run(program: &Path, options: &Options) -> Result<()> {
    options.edition.make();
    let clients = chosen(&options.clients)?;
    let mut scenarios = scenario::all()?;
    scenarios.retain(|one| options.ask_for(&one.key()));
    let harness = Harness::start(program)?;
    let surface = Surface::of(&mut harness.database()?.connect()?)?;
    scenarios.retain(|one| match one.lacks(&surface) {
        Some(what) => {
            eprintln!("left out: {}: this edition has no {what}", one.name);
            false
        }
        None => true,
    });
    let mut outcomes = Vec::new();
    for client in &clients {
        let client = client.prepare().with_context(|| format!("{} cannot be had", client.name))?;
        outcomes.extend(played_by(&harness, &client, &scenarios, options));
    }
    let names: Vec<&str> = clients.iter().map(|client| client.name).collect();
    harness.close();
    print_table(&names, &outcomes);
    ensure!(!outcomes.is_empty(), "there is no such scenario");
    let bad = outcomes.iter().filter(|outcome| outcome.fault.is_some()).count();
    ensure!(bad == 0, "{bad} of {} went otherwise", outcomes.len());
    Ok(())
}

/// Plays everything with one client.
fn played_by(
    harness: &Harness,
    client: &Client,
    scenarios: &[Scenario],
    options: &Options,
) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    let name = client.language.name;
    if options.plant.is_none() {
        if options.ask_for("the-first-worker") {
            let runs = || {
                first_worker::is_shown(&client.language)?;
                first_worker::runs(harness, client, &harness.database()?)
            };
            outcomes.push(outcome(name, "The first worker", runs));
        }
        // The checks look at the client's source, and its tests need everything that the extension has.
        let Language { checks, tests, .. } = client.language;
        let is_full = !edition::is_lite();
        if is_full && !checks.is_empty() && options.ask_for("its-checks") {
            outcomes.push(outcome(name, "Its checks", || pass(client.checks()?)));
        }
        if is_full && !tests.is_empty() && options.ask_for("its-own-tests") {
            outcomes
                .push(outcome(name, "Its own tests", || first_worker::tests_pass(harness, client)));
        }
        outcomes.extend(scenarios.iter().map(|scenario| {
            outcome(name, &scenario.name, || run::play(harness, scenario, client, None))
        }));
    }
    if !options.no_plants {
        let plants = plants_of(scenarios, options.plant.as_deref());
        let planted = |plant: &&str| planted(harness, client, scenarios, plant);
        outcomes.extend(plants.iter().map(planted));
    }
    outcomes
}

/// Runs all checks, and returns the output of those that find something.
fn pass(checks: Vec<(&str, Command)>) -> Result<()> {
    let run = |(name, mut check): (_, Command)| {
        Some(format!("{name}: {:#}", output_of(&mut check).err()?))
    };
    let found: Vec<String> = checks.into_iter().filter_map(run).collect();
    ensure!(found.is_empty(), "{}", found.join("\n"));
    Ok(())
}

fn chosen(names: &[String]) -> Result<Vec<&'static Language>> {
    let by_name = |name: &String| {
        let found = languages::ALL.iter().find(|language| language.name == name);
        found.with_context(|| format!("there is no client called {name}"))
    };
    match names {
        [] => Ok(languages::ALL.iter().collect()),
        names => names.iter().map(by_name).collect(),
    }
}

fn plants_of<'a>(scenarios: &'a [Scenario], only: Option<&str>) -> BTreeSet<&'a str> {
    let all = scenarios.iter().flat_map(|scenario| scenario.catches.iter().copied());
    all.filter(|plant| only.is_none_or(|only| only == *plant)).collect()
}

fn outcome(client: &'static str, what: &str, run: impl FnOnce() -> Result<()>) -> Outcome {
    let started = Instant::now();
    let error = run().err();
    if let Some(error) = error.as_ref().filter(|error| is_left_out(error)) {
        eprintln!("{client}: {what}: {error:#}");
        let why = Some(format!("{error:#}"));
        return Outcome { what: what.to_owned(), client, fault: None, left_out: why };
    }
    let fault = error.map(|error| format!("{error:#}"));
    match &fault {
        None => eprintln!("{client}: {what} ({} s)", started.elapsed().as_secs()),
        Some(fault) => eprintln!("{client}: {what}: FAILED: {fault}"),
    }
    Outcome { what: what.to_owned(), client, fault, left_out: None }
}

/// Each scenario that catches the fault must fail with it.
fn planted(harness: &Harness, client: &Client, scenarios: &[Scenario], plant: &str) -> Outcome {
    let catches = |scenario: &&Scenario| scenario.catches.contains(&plant);
    let mut fault = None;
    for scenario in scenarios.iter().filter(catches) {
        match run::play(harness, scenario, client, Some(plant)) {
            Err(error) if error.is::<fixture::NotReady>() => {
                eprintln!("{}: {plant}: {error:#}", client.language.name);
                fault = Some(format!("{error:#}"));
            }
            Err(caught) => {
                eprintln!(
                    "{}: {plant}: caught by \"{}\": {caught:#}",
                    client.language.name, scenario.name
                );
            }
            Ok(()) => {
                eprintln!("{}: {plant}: NOT caught by \"{}\"", client.language.name, scenario.name);
                fault = Some(format!("not caught by {}", scenario.name));
            }
        }
    }
    Outcome {
        what: format!("planted: {plant}"),
        client: client.language.name,
        fault,
        left_out: None,
    }
}

fn print_table(names: &[&str], outcomes: &[Outcome]) {
    println!("| | {} |\n| --- |{}", names.join(" | "), " --- |".repeat(names.len()));
    let mut rows: Vec<&str> = Vec::new();
    for outcome in outcomes {
        if !rows.contains(&outcome.what.as_str()) {
            rows.push(&outcome.what);
        }
    }
    for row in rows {
        let good = if row.starts_with("planted") { "caught" } else { "holds" };
        let of = |name: &&str| {
            let outcome = outcomes.iter().find(|one| one.what == row && one.client == *name);
            outcome.map_or("", |one| match one {
                Outcome { left_out: Some(_), .. } => "left out",
                Outcome { fault: None, .. } => good,
                _ => "FAILS",
            })
        };
        let cells: Vec<&str> = names.iter().map(of).collect();
        println!("| {row} | {} |", cells.join(" | "));
    }
    for outcome in outcomes {
        if let Some(why) = &outcome.left_out {
            println!("{}: \"{}\": {why}", outcome.client, outcome.what);
        }
    }
}
