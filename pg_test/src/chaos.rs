//! The chaos run: many workers with real clients, while the tables of the state are maintained, processes are
//! frozen and killed, servers crash and fail over, and the clock steps. All that workers asked and saw is written
//! down and judged afterwards.

mod evidence;
mod instructions;
mod judge;
mod kind;
mod known_bugs;
mod length;
mod lock_service;
mod maintenance;
mod nemesis;
mod record;
mod resolver;
mod servers;
mod task;
mod worker;
mod worker_pool;

pub use known_bugs::{build_with, catch, plant_in_lite, KnownBug};
pub use worker::{work, Identity};

use crate::edition::{self, Surface};
use crate::extension::Extension;
use crate::majors;
use crate::prefix::Prefix;
use crate::rundir::RunDir;
use anyhow::{bail, ensure, Result};
use evidence::Evidence;
use instructions::Leases;
use judge::Findings;
use length::Length;
use maintenance::Job;
use nemesis::{Disturbance, Nemesis};
use servers::{Servers, Stage};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use worker::DATABASE;
use worker_pool::WorkerPool;

#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
    #[command(flatten)]
    edition: edition::Choice,
    #[command(flatten)]
    length: Length,
    /// Build the extension with a known bug, which the run must catch
    #[arg(long = "plant", value_enum, value_name = "BUG")]
    bug: Option<KnownBug>,
}

/// The result of a run, or of several added up.
#[derive(Debug)]
pub struct Summary {
    /// Of the latest run.
    seed: u64,
    /// How long each run was.
    seconds: u64,
    disturbances: BTreeMap<Disturbance, usize>,
    /// How often each kind of maintenance was done, and how often it could not be.
    maintenance: BTreeMap<Job, (usize, usize)>,
    /// The calls that workers could make.
    surface: Surface,
    findings: Findings,
}

impl Summary {
    /// Adds what a further run shows.
    fn add(&mut self, further: Summary) {
        for (disturbance, count) in further.disturbances {
            *self.disturbances.entry(disturbance).or_default() += count;
        }
        for (job, (done, failed)) in further.maintenance {
            let (all_done, all_failed) = self.maintenance.entry(job).or_default();
            *all_done += done;
            *all_failed += failed;
        }
        self.seed = further.seed;
        self.findings.add(further.findings);
    }

    /// Why this proves nothing, if it does not: less has happened than should in one run.
    fn void(&self) -> Option<String> {
        let disturbances: usize = self.disturbances.values().sum();
        let wanted = |name: &str, have: usize, per_minute: u64| {
            let least = (self.seconds * per_minute / 60).max(1) as usize;
            (have < least).then(|| format!("{have} {name}, not {least}"))
        };
        let where_there = |is_there: bool, name: &str, have: usize, per_minute: u64| {
            is_there.then(|| wanted(name, have, per_minute)).flatten()
        };
        let Surface { multi_holder, sessions, adoption, .. } = self.surface;
        wanted("grants", self.findings.grants, 30)
            .or_else(|| {
                let have = self.findings.multi_holder;
                where_there(multi_holder, "shared grants and slots", have, 10)
            })
            .or_else(|| where_there(adoption, "adoptions", self.findings.adoptions, 10))
            .or_else(|| wanted("writes", self.findings.writes, 30))
            .or_else(|| wanted("prepared writes", self.findings.prepared, 2))
            .or_else(|| wanted("disturbances", disturbances, 12))
            .or_else(|| wanted("stale writes refused", self.findings.refused, 2))
            .or_else(|| {
                let have = self.findings.passed_on;
                where_there(sessions, "leases that passed on as a session ended", have, 2)
            })
            .or_else(|| {
                let second = self.maintained(Some(Job::Second));
                wanted("pieces of maintenance", self.maintained(None) - second, 6).or_else(|| {
                    where_there(!edition::is_lite(), "DDL in the second database", second, 6)
                })
            })
            // In half a minute every one of them may be interrupted by a crash.
            .or_else(|| {
                if self.seconds < 60 {
                    return None;
                }
                wanted("tables repacked", self.maintained(Some(Job::Repack)), 1)
                    .or_else(|| wanted("tables moved", self.maintained(Some(Job::Move)), 1))
            })
    }

    /// The promises that were broken.
    fn violations(&self) -> &[String] {
        &self.findings.violations
    }

    /// Fails where a promise was broken, or the run is void.
    pub fn judged(&self) -> Result<()> {
        let count = self.violations().len();
        ensure!(count == 0, "{count} promises were broken");
        if let Some(why) = self.void() {
            bail!("the run is void: {why}");
        }
        Ok(())
    }

    /// How much maintenance was done, of one kind or of all.
    fn maintained(&self, only: Option<Job>) -> usize {
        let of_that_kind =
            self.maintenance.iter().filter(|(job, _)| only.is_none_or(|only| only == **job));
        of_that_kind.map(|(_, (done, _))| done).sum()
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Findings {
            grants,
            multi_holder,
            adoptions,
            writes,
            prepared,
            refused,
            let_pass,
            passed_on,
            tokens,
            unknown,
            lost_in_failover,
            violations: _,
        } = &self.findings;
        let disturbances: usize = self.disturbances.values().sum();
        writeln!(f, "seed {}, {} s", self.seed, self.seconds)?;
        if edition::is_lite() {
            let left_out = self.surface.left_out().join(", ");
            writeln!(f, "the lite edition; left out, for it has none: {left_out}")?;
        }
        writeln!(f, "{disturbances:>8}  disturbances injected")?;
        for (disturbance, count) in &self.disturbances {
            writeln!(f, "{count:>8}    {}", disturbance.name())?;
        }
        writeln!(f, "{:>8}  pieces of maintenance", self.maintained(None))?;
        for (job, (done, failed)) in &self.maintenance {
            writeln!(f, "{done:>8}    {} ({failed} given up or failed)", job.name())?;
        }
        writeln!(f, "{tokens:>8}  tokens seen")?;
        writeln!(f, "{grants:>8}  grants acknowledged")?;
        writeln!(f, "{multi_holder:>8}    of them shared, or of slots")?;
        writeln!(f, "{adoptions:>8}  adoptions of what a lock service has granted")?;
        writeln!(f, "{writes:>8}  writes acknowledged")?;
        writeln!(f, "{prepared:>8}  writes prepared")?;
        writeln!(f, "{refused:>8}  stale writes refused")?;
        writeln!(f, "{let_pass:>8}  stale writes after an adoption that a failover had lost")?;
        writeln!(f, "{passed_on:>8}  leases passed on before their time, as a session had ended")?;
        writeln!(f, "{unknown:>8}  outcomes unknown")?;
        writeln!(f, "{lost_in_failover:>8}  transactions lost to asynchronous failovers")?;
        self.findings.write_violations(f)
    }
}

/// Runs, prints the summary, and fails where a promise was broken, or where a planted bug was not caught.
pub fn run(program: &Path, options: &Options) -> Result<()> {
    options.edition.make();
    let (time, seed) = (options.length.time(), options.length.seed());
    if let Some(bug) = options.bug {
        let prefix = if edition::is_lite() {
            known_bugs::plant_in_lite(bug)?;
            prefix_of(program)?
        } else {
            known_bugs::build_with(program, bug)?
        };
        let summary = known_bugs::catch(&prefix, bug, time, seed)?;
        println!("{summary}");
        println!("The planted bug was caught.");
        return Ok(());
    }
    let summary = run_until_enough_happened(&prefix_of(program)?, time, seed)?;
    println!("{summary}");
    summary.judged()
}

/// A PostgreSQL of its own; with the extension, where that is what is judged.
fn prefix_of(program: &Path) -> Result<Arc<Prefix>> {
    let installation = majors::chosen()?;
    let extension = if edition::is_lite() { None } else { Some(Extension::build(&installation)?) };
    let rundir = Arc::new(RunDir::create(program)?);
    let prefix = Arc::new(Prefix::copy(rundir, &installation)?);
    extension.iter().try_for_each(|extension| prefix.install(extension))?;
    Ok(prefix)
}

/// Runs for that time, and again if too little has happened. A broken promise ends it at once.
pub fn run_until_enough_happened(
    prefix: &Arc<Prefix>,
    time: Duration,
    seed: u64,
) -> Result<Summary> {
    let start = Instant::now();
    let mut summary = run_for(prefix, time, seed, None)?;
    while let Some(why) = summary.void().filter(|_| summary.violations().is_empty()) {
        if start.elapsed() > RUNS * time {
            break;
        }
        let seed = summary.seed + 1;
        eprintln!("{why}: another run, with seed {seed}");
        summary.add(run_for(prefix, time, seed, None)?);
    }
    Ok(summary)
}

/// For how many times the time of one run a further run may begin: how much happens depends on the machine.
const RUNS: u32 = 8;

/// Disturbs and judges for that time, with the extension that is installed in `prefix`.
pub fn run_for(
    prefix: &Arc<Prefix>,
    time: Duration,
    seed: u64,
    bug: Option<KnownBug>,
) -> Result<Summary> {
    let leases = bug.map_or(6, KnownBug::leases);
    let maintains = bug.is_none_or(KnownBug::is_about_maintenance);
    let workers = 8;
    let dir = prefix.rundir().path().join(format!("chaos-{seed}"));
    std::fs::create_dir_all(dir.join("log"))?;
    let adopted = 2;
    let stage = Stage { leases, adopted, workers, maintains };
    let servers = Servers::prepare(prefix.clone(), stage)?;
    let rundir = prefix.rundir().clone();
    let workers = WorkerPool::new(rundir, dir.clone(), seed, workers);
    let weights = bug.map_or(nemesis::ALL, KnownBug::weights);
    let surface = Surface::of(&mut servers.primary().connect(DATABASE)?)?;
    let adopts = surface.adoption && bug.is_none_or(KnownBug::is_about_adoption);
    let leases = Leases {
        exclusive: leases,
        multi_holder: surface.multi_holder && bug.is_none(),
        several: surface.several,
        sessions: surface.sessions,
        adopted: if adopts { adopted } else { 0 },
        // A run that is about adoption has few others.
        mostly_adopted: bug.is_some(),
    };
    let mut nemesis = Nemesis::new(servers, workers, dir.clone(), seed, weights, leases)?;
    let upkeep = nemesis.disturb(time, maintains.then(|| prefix.clone()))?;
    let evidence = Evidence { upkeep, ..Evidence::of(&nemesis)? };
    let (disturbances, findings) = (nemesis.count(), judge::judge(&evidence));
    if bug.is_none() {
        evidence.keep_where(&format!("chaos-{seed}"), &findings.violations)?;
    }
    let mut maintenance = BTreeMap::<Job, (usize, usize)>::new();
    for done in &evidence.upkeep.done {
        let (worked, failed) = maintenance.entry(done.job).or_default();
        *if done.failure.is_none() { worked } else { failed } += 1;
    }
    Ok(Summary { seed, seconds: time.as_secs(), disturbances, maintenance, surface, findings })
}
