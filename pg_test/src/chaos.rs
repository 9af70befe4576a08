//! The chaos run: many workers with real clients, while tables are maintained, processes are frozen and killed, servers
//! crash and fail over, and the clock is stepped. All requests and answers of workers are recorded and checked
//! afterwards.

mod checker;
mod history;
mod instructions;
mod known_bugs;
mod lease_kind;
mod lock_service;
mod maintenance;
mod nemesis;
mod record;
mod resolver;
mod rows;
mod servers;
mod task;
mod worker;
mod worker_pool;

pub use known_bugs::{KnownBug, build_with, catch, patches, plant_in_lite};
pub use worker::{Identity, work};

use crate::edition;
use crate::extension::Extension;
use crate::install_dir::InstallDir;
use crate::majors;
use crate::rundir::RunDir;
use crate::surface::Surface;
use anyhow::{Result, bail, ensure};
use checker::{
    ADOPTIONS, CLAIMS, Findings, GRANTS, LATE_WRITES, PASSED_ON, PREPARED, REFUSED, ROW_REFUSED,
    SHARED, TAKE_OVERS, WRITES,
};
use history::History;
use instructions::Leases;
use maintenance::Job;
use nemesis::{Disturbance, Nemesis};
use servers::{Servers, Workload};
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
    /// How many minutes to run
    #[arg(long, default_value_t = 5.0)]
    minutes: f64,
    /// Where all choices start from
    #[arg(long)]
    seed: Option<u64>,
    /// Run for half a minute
    #[arg(long)]
    short: bool,
    /// Build the extension with a known bug, which the run must catch
    #[arg(long = "plant", value_enum, value_name = "BUG")]
    bug: Option<KnownBug>,
}

/// The result of one run, or of several together.
#[derive(Debug)]
pub struct Summary {
    /// The seed of the latest run.
    seed: u64,
    /// The length of each run.
    seconds: u64,
    disturbances: BTreeMap<Disturbance, usize>,
    /// For each kind of maintenance, how often it was done and how often it failed.
    maintenance: BTreeMap<Job, (usize, usize)>,
    /// The calls that workers could make.
    surface: Surface,
    findings: Findings,
}

impl Summary {
    /// Adds the results of another run.
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

    /// The reason why the run proves nothing, if too little has happened in it.
    fn void(&self) -> Option<String> {
        let Surface { multi_holder, sessions, adoption, .. } = self.surface;
        let (number, second) =
            (|what| self.findings.number(what), self.maintained(Some(Job::Second)));
        // In half a minute, a crash may interrupt every one of these.
        let is_long = self.seconds >= 60;
        // The minimum number of each event per minute, if it applies.
        let wanted = [
            (true, GRANTS, number(GRANTS), 30),
            (multi_holder, SHARED, number(SHARED), 10),
            (adoption, ADOPTIONS, number(ADOPTIONS), 10),
            (true, WRITES, number(WRITES), 30),
            (true, PREPARED, number(PREPARED), 2),
            (true, "disturbances", self.disturbances.values().sum(), 12),
            (true, REFUSED, number(REFUSED), 2),
            (sessions, PASSED_ON, number(PASSED_ON), 2),
            (true, CLAIMS, number(CLAIMS), 30),
            (true, TAKE_OVERS, number(TAKE_OVERS), 4),
            (true, LATE_WRITES, number(LATE_WRITES), 2),
            (true, ROW_REFUSED, number(ROW_REFUSED), 10),
            (true, "pieces of maintenance", self.maintained(None) - second, 6),
            (!edition::is_lite(), "DDL in the second database", second, 6),
            (is_long, "tables repacked", self.maintained(Some(Job::Repack)), 1),
            (is_long, "tables moved", self.maintained(Some(Job::Move)), 1),
        ];
        wanted.into_iter().find_map(|(is_there, name, have, per_minute)| {
            let least = (self.seconds * per_minute / 60).max(1) as usize;
            (is_there && have < least).then(|| format!("{have} {name}, not {least}"))
        })
    }

    /// The requirements that were violated.
    fn violations(&self) -> &[String] {
        &self.findings.violations
    }

    /// Fails if a requirement was violated, or if the run proves nothing.
    pub fn checked(&self) -> Result<()> {
        let count = self.violations().len();
        ensure!(count == 0, "{count} promises were broken");
        if let Some(why) = self.void() {
            bail!("the run is void: {why}");
        }
        Ok(())
    }

    /// The number of maintenance jobs, of one kind or of all.
    fn maintained(&self, only: Option<Job>) -> usize {
        let of_that_kind =
            self.maintenance.iter().filter(|(job, _)| only.is_none_or(|only| only == **job));
        of_that_kind.map(|(_, (done, _))| done).sum()
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let disturbances: usize = self.disturbances.values().sum();
        writeln!(f, "seed {}, {} s", self.seed, self.seconds)?;
        if edition::is_lite() {
            let left_out = self.surface.left_out().join(", ");
            writeln!(f, "the lite edition; left out, for it has none: {left_out}")?;
        }
        writeln!(f, "{disturbances:>8}  disturbances injected")?;
        for (disturbance, count) in &self.disturbances {
            writeln!(f, "{count:>8}    {disturbance:?}")?;
        }
        writeln!(f, "{:>8}  pieces of maintenance", self.maintained(None))?;
        for (job, (done, failed)) in &self.maintenance {
            writeln!(f, "{done:>8}    {job:?} ({failed} given up or failed)")?;
        }
        write!(f, "{}", self.findings)
    }
}

/// Runs and prints the summary. Fails if a requirement was violated, or if a planted bug was not caught.
pub fn run(program: &Path, options: &Options) -> Result<()> {
    options.edition.make();
    let minutes = if options.short { 0.5 } else { options.minutes };
    let time = Duration::from_secs_f64(minutes * 60.0);
    let seed = options.seed.unwrap_or_else(|| rand::random_range(1..1_000_000));
    if let Some(bug) = options.bug {
        let install_dir = if edition::is_lite() {
            known_bugs::plant_in_lite(bug)?;
            install_dir_of(program)?
        } else {
            known_bugs::build_with(program, bug)?
        };
        let summary = known_bugs::catch(&install_dir, bug, time, seed)?;
        println!("{summary}");
        println!("The planted bug was caught.");
        return Ok(());
    }
    let summary = run_until_enough_happened(&install_dir_of(program)?, time, seed)?;
    println!("{summary}");
    summary.checked()
}

/// A private PostgreSQL, with the extension if that is under test.
fn install_dir_of(program: &Path) -> Result<Arc<InstallDir>> {
    let installation = majors::chosen()?;
    let extension = if edition::is_lite() { None } else { Some(Extension::build(&installation)?) };
    let rundir = Arc::new(RunDir::create(program)?);
    let install_dir = Arc::new(InstallDir::copy(rundir, &installation)?);
    extension.iter().try_for_each(|extension| install_dir.install(extension))?;
    Ok(install_dir)
}

/// Runs for that time, and again if too little has happened. Stops at once at a violation.
pub fn run_until_enough_happened(
    install_dir: &Arc<InstallDir>,
    time: Duration,
    seed: u64,
) -> Result<Summary> {
    let start = Instant::now();
    let mut summary = run_for(install_dir, time, seed, None)?;
    while let Some(why) = summary.void().filter(|_| summary.violations().is_empty()) {
        if start.elapsed() > RUNS * time {
            break;
        }
        let seed = summary.seed + 1;
        eprintln!("{why}: another run, with seed {seed}");
        summary.add(run_for(install_dir, time, seed, None)?);
    }
    Ok(summary)
}

/// The limit for starting further runs, as a multiple of the time of one: how much happens depends on the machine.
const RUNS: u32 = 8;

/// Disturbs the workers for that time and checks the history, with the extension in `install_dir`.
pub fn run_for(
    install_dir: &Arc<InstallDir>,
    time: Duration,
    seed: u64,
    bug: Option<KnownBug>,
) -> Result<Summary> {
    let leases = bug.map_or(6, KnownBug::leases);
    let maintains = bug.is_none_or(KnownBug::is_about_maintenance);
    let workers = 8;
    let dir = install_dir.rundir().path().join(format!("chaos-{seed}"));
    std::fs::create_dir_all(dir.join("log"))?;
    let adopted = 2;
    let workload = Workload { leases, adopted, workers, maintains };
    let servers = Servers::prepare(install_dir.clone(), workload)?;
    let rundir = install_dir.rundir().clone();
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
        // A run about adoption has few other leases.
        mostly_adopted: bug.is_some(),
        row_share: bug.map_or(25, KnownBug::row_share),
    };
    let mut nemesis = Nemesis::new(servers, workers, dir.clone(), seed, weights, leases)?;
    let upkeep = nemesis.disturb(time, maintains.then(|| install_dir.clone()))?;
    let history = History { upkeep, ..History::of(&nemesis)? };
    let (disturbances, findings) = (nemesis.count(), checker::check(&history));
    if bug.is_none() {
        history.keep_where(&format!("chaos-{seed}"), &findings.violations)?;
    }
    let mut maintenance = BTreeMap::<Job, (usize, usize)>::new();
    for done in &history.upkeep.done {
        let (worked, failed) = maintenance.entry(done.job).or_default();
        *if done.failure.is_none() { worked } else { failed } += 1;
    }
    Ok(Summary { seed, seconds: time.as_secs(), disturbances, maintenance, surface, findings })
}
