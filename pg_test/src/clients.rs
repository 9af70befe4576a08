//! The clients in the workers' own languages, and the scenarios that each must go through.
//!
//! | module | its noun |
//! | --- | --- |
//! | [`scenario`] | the scenarios of `clients/scenarios.md` |
//! | [`languages`] | the clients, and how their programs are built and started |
//! | [`worker`] | a worker process in some language |
//! | [`tcp_proxy`] | its network link to the server, to be cut |
//! | [`scenario_servers`] | the servers of a scenario, and what happens to them |
//! | [`first_worker`] | the example of a client's README |
//! | [`fixture`] | a running scenario: its servers and workers |
//! | [`command`] | the command `pg_fence`, whose scenarios are its own |

pub mod command;
pub mod first_worker;
pub mod fixture;
pub mod languages;
pub mod scenario;
pub mod scenario_servers;
pub mod tcp_proxy;
pub mod worker;

use crate::edition;
use crate::harness::Harness;
use crate::skipped::is_left_out;
use crate::surface::Surface;
use anyhow::{Context, Result, ensure};
use languages::{Client, Language};
use scenario::Scenario;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Instant;

/// The arguments of the command.
#[derive(Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    edition: edition::Choice,
    /// The clients to play with (all)
    #[arg(value_parser = language)]
    clients: Vec<&'static Language>,
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

/// What became of each scenario and fault with each client: `holds`, `caught`, `left out` or `FAILS`.
#[derive(Default)]
struct Table {
    rows: Vec<(String, BTreeMap<&'static str, &'static str>)>,
}

impl Table {
    /// Runs it, and says how it went.
    fn run(&mut self, client: &Client, what: &str, run: &dyn Fn() -> Result<()>) {
        let (client, started) = (client.language.name, Instant::now());
        let word = match run() {
            Ok(()) if what.starts_with("planted") => "caught",
            Ok(()) => "holds",
            Err(error) => {
                eprintln!("{client}: {what}: {error:#}");
                if is_left_out(&error) { "left out" } else { "FAILS" }
            }
        };
        eprintln!("{client}: {what}: {word} ({} s)", started.elapsed().as_secs());
        if self.rows.iter().all(|(known, _)| known != what) {
            self.rows.push((what.to_owned(), BTreeMap::new()));
        }
        if let Some((_, words)) = self.rows.iter_mut().find(|(known, _)| known == what) {
            words.insert(client, word);
        }
    }

    fn print(&self, clients: &[&Language]) {
        let names: Vec<&str> = clients.iter().map(|client| client.name).collect();
        println!("| | {} |\n| --- |{}", names.join(" | "), " --- |".repeat(names.len()));
        for (what, words) in &self.rows {
            let words = names.iter().map(|name| *words.get(name).unwrap_or(&""));
            println!("| {what} | {} |", words.collect::<Vec<_>>().join(" | "));
        }
    }
}

/// Plays the scenarios and then each planted fault, with each client, and prints the table.
pub fn run(program: &Path, options: &Options) -> Result<()> {
    options.edition.make();
    let mut clients = options.clients.clone();
    if clients.is_empty() {
        clients.extend(languages::ALL);
    }
    let mut scenarios = scenario::all()?;
    scenarios.retain(|one| options.ask_for(&one.key()));
    let harness = Harness::start(program)?;
    let surface = Surface::of(&mut harness.database()?.connect()?)?;
    let (there, others): (Vec<_>, _) = scenarios.into_iter().partition(|one| one.is_in(&surface));
    for scenario in others {
        let missing = surface.left_out().join(", ");
        eprintln!("left out: {}: this edition has no {missing}", scenario.name);
    }
    let mut table = Table::default();
    for client in &clients {
        let client = client
            .prepare()
            .with_context(|| format!("cannot prepare the client {}", client.name))?;
        play(&harness, &client, &there, options, &mut table);
    }
    harness.close();
    table.print(&clients);
    ensure!(!table.rows.is_empty(), "there is no such scenario");
    let words = table.rows.iter().flat_map(|(_, words)| words.values());
    let bad = words.filter(|word| **word == "FAILS").count();
    ensure!(bad == 0, "{bad} went otherwise");
    Ok(())
}

/// Plays everything with one client.
fn play(
    harness: &Harness,
    client: &Client,
    scenarios: &[Scenario],
    options: &Options,
    table: &mut Table,
) {
    let mut play = |what: &str, run: &dyn Fn() -> Result<()>| table.run(client, what, run);
    if options.plant.is_none() {
        if options.ask_for("the-first-worker") {
            play("The first worker", &|| {
                first_worker::is_shown(&client.language)?;
                first_worker::runs(harness, client, &harness.database()?)
            });
        }
        // The checks look at the client's source, and its tests need everything that the extension has.
        let Language { checks, tests, .. } = client.language;
        let is_full = !edition::is_lite();
        if is_full && !checks.is_empty() && options.ask_for("its-checks") {
            play("Its checks", &|| client.check());
        }
        if is_full && !tests.is_empty() && options.ask_for("its-own-tests") {
            play("Its own tests", &|| first_worker::tests_pass(harness, client));
        }
        for scenario in scenarios {
            play(scenario.name, &|| fixture::play(harness, scenario, client, None));
        }
    }
    let mut plants: BTreeSet<&str> =
        scenarios.iter().flat_map(|one| &one.catches).copied().collect();
    plants.retain(|plant| options.plant.as_ref().is_none_or(|only| only == plant));
    for plant in plants.into_iter().filter(|_| !options.no_plants) {
        play(&format!("planted: {plant}"), &|| catch(harness, client, scenarios, plant));
    }
}

fn language(name: &str) -> Result<&'static Language> {
    let found = languages::ALL.iter().find(|language| language.name == name);
    found.with_context(|| format!("there is no client called {name}"))
}

/// Each scenario that catches the fault must fail with it.
fn catch(harness: &Harness, client: &Client, scenarios: &[Scenario], plant: &str) -> Result<()> {
    for scenario in scenarios.iter().filter(|scenario| scenario.catches.contains(&plant)) {
        let played = fixture::play(harness, scenario, client, Some(plant));
        fixture::is_caught(plant, scenario.name, played)?;
    }
    Ok(())
}
