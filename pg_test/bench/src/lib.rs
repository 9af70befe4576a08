//! The bench: pg_fence beside everything else a team would pick, on one machine, in one run.
//!
//! Everything runs in the same harness: a thread a client, a connection a client, prepared
//! statements. Contenders take turns in short slices ([`race`]), so that whatever else the machine
//! does hits all of them, and what is compared are ratios within a round.
//!
//! | module | its noun |
//! | --- | --- |
//! | [`workbench`] | the server, and what stands beside it |
//! | [`peer`], [`peers`] | a way to take a lease; each in a file of its own |
//! | [`race`] | contenders taking turns |
//! | [`spread`] | medians, ratios, percentiles |
//! | [`triggers`] | minimal C triggers to measure against |
//! | [`sections`] | what is measured |
//! | [`report`], [`plot`] | what is shown of it |

pub mod peer;
pub mod peers;
pub mod plot;
pub mod race;
pub mod report;
pub mod sections;
pub mod spread;
pub mod triggers;
pub mod workbench;

use anyhow::{Result, ensure};
use clap::Args;
use pg_test::Harness;
use race::Rules;
use report::Report;
use std::path::PathBuf;
use std::time::Duration;
use workbench::Workbench;

/// The sections to measure, and how long.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// A minute's worth: shows that everything works, not how fast it is
    #[arg(long)]
    pub short: bool,
    /// Only this section (may be given several times)
    #[arg(long, value_name = "SECTION")]
    pub only: Vec<String>,
    /// How often the contenders of a race take turns
    #[arg(long, value_name = "N")]
    pub rounds: Option<usize>,
    /// Write the plots as SVG
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,
}

impl Options {
    /// The number of turns of each contender in a race.
    pub fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.short { 2 } else { 11 }).max(1)
    }

    /// The length of a turn.
    pub fn slice(&self) -> Duration {
        Duration::from_millis(if self.short { 50 } else { 500 })
    }

    /// The rules of a race with this number of concurrent clients. Statements are planned before the clock starts.
    pub fn rules(&self, clients: usize) -> Rules {
        Rules { clients, rounds: self.rounds(), slice: self.slice(), warm_up: race::WARM_UP }
    }

    /// The first value in a short run, the second one otherwise.
    pub fn pick<T>(&self, short: T, normal: T) -> T {
        if self.short { short } else { normal }
    }
}

/// Measures the chosen sections and returns the report.
pub fn run(harness: &Harness, options: &Options) -> Result<Report> {
    let names: Vec<&str> = sections::ALL.iter().map(|(name, _)| *name).collect();
    for name in &options.only {
        let there = names.join(", ");
        ensure!(names.contains(&name.as_str()), "there is no section {name}; there are {there}");
    }
    let bench = Workbench::make(harness, options.clone())?;
    let (description, sections, skipped) = (bench.description()?, Vec::new(), Vec::new());
    let mut report = Report { description, sections, skipped };
    for (name, measure) in sections::ALL {
        if options.only.is_empty() || options.only.iter().any(|only| only == name) {
            bench.progress(&format!("measuring: {name}"));
            report.sections.push(measure(&bench)?);
        }
    }
    bench.progress("done");
    report.skipped = bench.skipped();
    if let Some(dir) = &options.svg {
        std::fs::create_dir_all(dir)?;
        for plot in report.sections.iter().flat_map(|section| &section.plots) {
            plot.draw(dir)?;
        }
    }
    Ok(report)
}
