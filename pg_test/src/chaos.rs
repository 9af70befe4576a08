//! The chaos run: many workers with real clients, while the tables of the state are maintained, processes are
//! frozen and killed, servers crash and fail over, and the clock steps. What everybody asked and saw is written
//! down and judged afterwards.

mod deed;
mod evidence;
mod ground;
mod hand;
mod janitor;
mod judge;
mod kind;
mod maintenance;
mod nemesis;
mod orders;
mod plant;
mod record;
mod troupe;

pub use hand::{work, Identity};
pub use plant::{catch, planted, Plant};

use crate::extension::{self, Extension};
use crate::prefix::Prefix;
use crate::rundir::RunDir;
use crate::setup;
use anyhow::{bail, ensure, Result};
use evidence::Evidence;
use ground::Ground;
use hand::DATABASE;
use judge::Verdict;
use maintenance::Job;
use nemesis::{Fault, Nemesis};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use troupe::Troupe;

/// How to run.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
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
    #[arg(long, value_enum)]
    plant: Option<Plant>,
}

/// What a run shows.
#[derive(Debug)]
pub struct Summary {
    seed: u64,
    seconds: u64,
    faults: BTreeMap<Fault, usize>,
    /// How often each kind of maintenance was done, and how often it could not be.
    maintenance: BTreeMap<Job, (usize, usize)>,
    verdict: Verdict,
}

impl Summary {
    /// Why the run proves nothing, if it does not: too little has happened in it.
    pub fn void(&self) -> Option<String> {
        let faults: usize = self.faults.values().sum();
        let wanted = |name: &str, have: usize, per_minute: u64| {
            let least = (self.seconds * per_minute / 60).max(1) as usize;
            (have < least).then(|| format!("{have} {name}, not {least}"))
        };
        wanted("grants", self.verdict.grants, 30)
            .or_else(|| wanted("shared grants and slots", self.verdict.crowded, 10))
            .or_else(|| wanted("writes", self.verdict.writes, 30))
            .or_else(|| wanted("prepared writes", self.verdict.prepared, 2))
            .or_else(|| wanted("faults", faults, 12))
            .or_else(|| wanted("stale writes refused", self.verdict.refused, 2))
            .or_else(|| wanted("pieces of maintenance", self.maintained(None), 6))
            // In half a minute every one of them may be interrupted by a crash.
            .or_else(|| {
                let repacked = self.maintained(Some(Job::Repack));
                if self.seconds < 60 {
                    None
                } else {
                    wanted("tables repacked", repacked, 1)
                }
            })
    }

    /// How much maintenance was done, of one kind or of all.
    fn maintained(&self, only: Option<Job>) -> usize {
        let of_that_kind =
            self.maintenance.iter().filter(|(job, _)| only.is_none_or(|only| only == **job));
        of_that_kind.map(|(_, (done, _))| done).sum()
    }

    /// The promises that were broken.
    pub fn violations(&self) -> &[String] {
        &self.verdict.violations
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Verdict {
            grants,
            crowded,
            writes,
            prepared,
            refused,
            tokens,
            unknown,
            lost_in_failover,
            violations,
        } = &self.verdict;
        let faults: usize = self.faults.values().sum();
        writeln!(f, "seed {}, {} s", self.seed, self.seconds)?;
        writeln!(f, "{faults:>8}  faults injected")?;
        for (fault, count) in &self.faults {
            writeln!(f, "{count:>8}    {}", fault.name())?;
        }
        writeln!(f, "{:>8}  pieces of maintenance", self.maintained(None))?;
        for (job, (done, failed)) in &self.maintenance {
            writeln!(f, "{done:>8}    {} ({failed} given up or failed)", job.name())?;
        }
        writeln!(f, "{tokens:>8}  tokens seen")?;
        writeln!(f, "{grants:>8}  grants acknowledged")?;
        writeln!(f, "{crowded:>8}    of them shared, or of slots")?;
        writeln!(f, "{writes:>8}  writes acknowledged")?;
        writeln!(f, "{prepared:>8}  writes prepared")?;
        writeln!(f, "{refused:>8}  stale writes refused")?;
        writeln!(f, "{unknown:>8}  outcomes unknown")?;
        writeln!(f, "{lost_in_failover:>8}  transactions lost to asynchronous failovers")?;
        write!(f, "{:>8}  violations", violations.len())?;
        for violation in violations.iter().take(10) {
            write!(f, "\n          {violation}")?;
        }
        Ok(())
    }
}

/// Runs, prints the summary, and fails where a promise was broken, or where a planted bug was not caught.
pub fn run(program: &Path, options: &Options) -> Result<()> {
    setup::ensure(&[setup::server(), setup::build()].concat())?;
    let minutes = if options.short { 0.5 } else { options.minutes };
    let time = Duration::from_secs_f64(minutes * 60.0);
    let seed = options.seed.unwrap_or_else(|| rand::random_range(1..1_000_000));
    if let Some(plant) = options.plant {
        let prefix = plant::planted(program, plant)?;
        let summary = plant::catch(&prefix, plant, time, seed)?;
        println!("{summary}");
        println!("The planted bug was caught.");
        return Ok(());
    }
    let pg_config = extension::default_pg_config();
    let extension = Extension::build(&pg_config)?;
    let rundir = Arc::new(RunDir::create(program)?);
    let prefix = Arc::new(Prefix::copy(rundir, &pg_config)?);
    prefix.install(&extension)?;
    let summary = rage(&prefix, time, seed, None)?;
    println!("{summary}");
    let count = summary.violations().len();
    ensure!(count == 0, "{count} promises were broken");
    if let Some(why) = summary.void() {
        bail!("the run is void: {why}");
    }
    Ok(())
}

/// Runs with the extension that is installed in `prefix`.
pub fn rage(
    prefix: &Arc<Prefix>,
    time: Duration,
    seed: u64,
    plant: Option<Plant>,
) -> Result<Summary> {
    let leases = plant.map_or(6, Plant::leases);
    let maintains = plant.is_none_or(Plant::is_about_maintenance);
    let workers = 8;
    let dir = prefix.rundir().path().join(format!("chaos-{seed}"));
    std::fs::create_dir_all(dir.join("log"))?;
    let ground = Ground::prepare(prefix.clone(), leases, workers, maintains)?;
    let troupe = Troupe::new(prefix.rundir().clone(), dir.clone(), seed, workers);
    let weights = plant.map_or(nemesis::ALL, Plant::weights);
    let leases = (leases, plant.is_none());
    let mut nemesis = Nemesis::new(ground, troupe, dir.clone(), seed, weights, leases)?;
    let upkeep = nemesis.rage(time, maintains.then(|| prefix.clone()))?;
    let mut evidence = Evidence {
        records: record::read_all(&dir.join("log"))?,
        faults: nemesis.done().to_vec(),
        era: nemesis.era(),
        upkeep,
        crashes: nemesis.ground().crashes(),
        ..Evidence::default()
    };
    evidence.read(&mut nemesis.ground().primary().connect(DATABASE)?)?;
    let (faults, verdict) = (nemesis.count(), judge::judge(&evidence));
    if plant.is_none() && !verdict.violations.is_empty() {
        let path = extension::target_dir().join(format!("chaos-{seed}.txt"));
        evidence.write(&path, &verdict.violations)?;
        eprintln!("The evidence is in {}.", path.display());
    }
    let mut maintenance = BTreeMap::<Job, (usize, usize)>::new();
    for done in &evidence.upkeep.done {
        let (worked, failed) = maintenance.entry(done.job).or_default();
        *if done.failure.is_none() { worked } else { failed } += 1;
    }
    Ok(Summary { seed, seconds: time.as_secs(), faults, maintenance, verdict })
}
