//! One lease database, many shards: workers take leases on one server and write rows on four others, under the tokens of the
//! first. Workers freeze and die, every server is restarted and failed over; each shard is judged as a chaos run is.

mod lease_database;

use super::evidence::Evidence;
use super::instructions::Leases;
use super::judge::{self, stale, transaction, Findings};
use super::nemesis::{Disturbance, Nemesis, Weights};
use super::record;
use super::servers::{Servers, Stage};
use super::worker::{ChaosWorker, Identity, DATABASE};
use super::worker_pool::WorkerPool;
use crate::extension::{self, Extension};
use crate::majors;
use crate::prefix::Prefix;
use crate::rundir::RunDir;
use anyhow::{bail, ensure, Result};
use lease_database::LeaseDatabase;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SHARDS: usize = 4;
/// The jobs, each with a lease in the lease database and a row on every shard.
const JOBS: usize = 50;
const WORKERS: u32 = 8;

/// What happens to the lease database, and to the workers.
const TO_LEASES: Weights = &[
    (Disturbance::FreezeWorker, 40),
    (Disturbance::KillWorker, 16),
    (Disturbance::FreezeBackend, 6),
    (Disturbance::Terminate, 4),
    (Disturbance::KillServer, 6),
    (Disturbance::FailOver, 6),
];
/// What happens to a shard.
const TO_SHARD: Weights = &[
    (Disturbance::FreezeBackend, 8),
    (Disturbance::Terminate, 8),
    (Disturbance::KillBackend, 2),
    (Disturbance::KillServer, 8),
    (Disturbance::FailOver, 10),
];

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
    /// Plant a fault, which the run must catch
    #[arg(long = "plant", value_enum, value_name = "FAULT")]
    fault: Option<Fault>,
}

/// Something that is missing, which a run has to notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Fault {
    /// The last shard has no fence
    NoFence,
    /// The shards that are said to have synchronous standbys have asynchronous ones
    AsyncStandby,
}

impl Fault {
    /// Whether a violation shows it.
    fn shows_as(self, violation: &str) -> bool {
        match self {
            Fault::NoFence => violation.starts_with(&shard_name(SHARDS - 1)) && is_stale(violation),
            Fault::AsyncStandby => violation.contains("acknowledged, and lost"),
        }
    }

    /// Whether such a violation is of another's making, and so fails the run all the same.
    fn is_not_blamed_for(self, violation: &str) -> bool {
        self == Fault::NoFence && !violation.starts_with(&shard_name(SHARDS - 1))
    }
}

fn is_stale(violation: &str) -> bool {
    ["a stale write", "landed upon", "replaced grant"].iter().any(|said| violation.contains(said))
}

/// Every other shard has a synchronous standby.
fn is_synchronous(shard: usize) -> bool {
    shard.is_multiple_of(2)
}

fn shard_name(shard: usize) -> String {
    let kind = if is_synchronous(shard) { "synchronous" } else { "asynchronous" };
    format!("shard {shard} ({kind} standby)")
}

/// What a run shows, or several added up.
#[derive(Debug, Default)]
pub struct Summary {
    seed: u64,
    seconds: u64,
    /// Of the lease database.
    leases: BTreeMap<Disturbance, usize>,
    /// Of all shards.
    shards: BTreeMap<Disturbance, usize>,
    /// Tokens that workers have had from the lease database.
    tokens: usize,
    /// Of all shards; the violations are those of the lease database, too.
    findings: Findings,
    /// Writes by an older number to a shard that had not heard yet of a newer one, which another shard had adopted.
    unheard: usize,
}

impl Summary {
    fn add(&mut self, further: Summary) {
        for (all, more) in [(&mut self.leases, further.leases), (&mut self.shards, further.shards)]
        {
            for (disturbance, count) in more {
                *all.entry(disturbance).or_default() += count;
            }
        }
        self.seconds += further.seconds;
        self.seed = further.seed;
        self.tokens += further.tokens;
        self.unheard += further.unheard;
        self.findings.add(further.findings);
    }

    /// Why this proves nothing, if it does not: something has not happened at all, or hardly.
    pub fn void(&self) -> Option<String> {
        let of = |map: &BTreeMap<Disturbance, usize>, kind| map.get(&kind).copied().unwrap_or(0);
        let wanted = |name: &str, have: usize, least: usize| {
            (have < least).then(|| format!("{have} {name}, not {least}"))
        };
        wanted("adoptions", self.findings.adoptions, 20)
            .or_else(|| wanted("writes", self.findings.writes, 20))
            .or_else(|| wanted("stale writes refused", self.findings.refused, 5))
            .or_else(|| wanted("workers frozen", of(&self.leases, Disturbance::FreezeWorker), 3))
            .or_else(|| wanted("workers killed", of(&self.leases, Disturbance::KillWorker), 1))
            .or_else(|| wanted("shards restarted", of(&self.shards, Disturbance::KillServer), 2))
            .or_else(|| wanted("shards failed over", of(&self.shards, Disturbance::FailOver), 2))
    }

    /// The promises that were broken.
    pub fn violations(&self) -> &[String] {
        &self.findings.violations
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Findings { adoptions, writes, prepared, refused, let_pass, .. } = &self.findings;
        let Findings { unknown, lost_in_failover, violations, .. } = &self.findings;
        writeln!(f, "seed {}, {} s, {JOBS} jobs on {SHARDS} shards", self.seed, self.seconds)?;
        for (of, disturbances) in [("lease database", &self.leases), ("shards", &self.shards)] {
            writeln!(f, "{:>8}  disturbances, {of}", disturbances.values().sum::<usize>())?;
            for (disturbance, count) in disturbances {
                writeln!(f, "{count:>8}    {}", disturbance.name())?;
            }
        }
        writeln!(f, "{:>8}  tokens had from the lease database", self.tokens)?;
        writeln!(f, "{adoptions:>8}  adoptions acknowledged")?;
        writeln!(f, "{writes:>8}  writes acknowledged")?;
        writeln!(f, "{prepared:>8}  writes prepared")?;
        writeln!(f, "{refused:>8}  stale writes and adoptions refused")?;
        writeln!(
            f,
            "{:>8}  older writes to a shard that had not heard of the newer token",
            self.unheard
        )?;
        writeln!(
            f,
            "{let_pass:>8}  stale writes after an adoption that an asynchronous failover had lost"
        )?;
        writeln!(f, "{unknown:>8}  outcomes unknown")?;
        writeln!(f, "{lost_in_failover:>8}  transactions lost to asynchronous failovers")?;
        write!(f, "{:>8}  violations", violations.len())?;
        for violation in violations.iter().take(10) {
            write!(f, "\n          {violation}")?;
        }
        Ok(())
    }
}

/// Runs, prints the summary, and fails where a promise was broken, or where a planted fault was not noticed.
pub fn run(program: &Path, options: &Options) -> Result<()> {
    let minutes = if options.short { 0.5 } else { options.minutes };
    let time = Duration::from_secs_f64(minutes * 60.0);
    let seed = options.seed.unwrap_or_else(|| rand::random_range(1..1_000_000));
    let installation = majors::chosen()?;
    let extension = Extension::build(&installation)?;
    let rundir = Arc::new(RunDir::create(program)?);
    let prefix = Arc::new(Prefix::copy(rundir, &installation)?);
    prefix.install(&extension)?;
    let summary = run_until_enough_happened(&prefix, time, seed, options.fault)?;
    println!("{summary}");
    if let Some(fault) = options.fault {
        println!("{fault:?} was noticed.");
        return Ok(());
    }
    let count = summary.violations().len();
    ensure!(count == 0, "{count} promises were broken");
    if let Some(why) = summary.void() {
        bail!("the run is void: {why}");
    }
    Ok(())
}

/// For how many times the time of one run a further run may begin.
const RUNS: u32 = 8;

/// Runs for that time, and again if too little has happened, or the fault was not noticed: how much happens depends on the
/// machine. A broken promise ends it at once. That a planted fault is not noticed is an error.
pub fn run_until_enough_happened(
    prefix: &Arc<Prefix>,
    time: Duration,
    seed: u64,
    fault: Option<Fault>,
) -> Result<Summary> {
    let start = Instant::now();
    let mut summary = run_for(prefix, time, seed, fault)?;
    loop {
        let violations = summary.violations();
        let why = match fault {
            None if !violations.is_empty() => None,
            None => summary.void(),
            Some(fault) => {
                if let Some(other) = violations.iter().find(|what| fault.is_not_blamed_for(what)) {
                    bail!("{fault:?} is not to blame for this: {other}");
                }
                let noticed = violations.iter().any(|violation| fault.shows_as(violation));
                (!noticed).then(|| format!("{fault:?} was not noticed"))
            }
        };
        let Some(why) = why else { return Ok(summary) };
        if start.elapsed() > RUNS * time {
            ensure!(fault.is_none(), "{why}:\n{summary}");
            return Ok(summary);
        }
        let seed = summary.seed + 1;
        eprintln!("{why}: another run, with seed {seed}");
        summary.add(run_for(prefix, time, seed, fault)?);
    }
}

/// Disturbs and judges for that time.
pub fn run_for(
    prefix: &Arc<Prefix>,
    time: Duration,
    seed: u64,
    fault: Option<Fault>,
) -> Result<Summary> {
    // Not that of an earlier run with this seed: its records are others.
    let dir = prefix.new_dir("shards")?;
    let rundir = prefix.rundir().clone();
    let workers = WorkerPool::new(rundir.clone(), "shards-worker", dir.clone(), seed, WORKERS);
    let stage = Stage {
        leases: 0,
        adopted: 0,
        workers: 0,
        maintains: false,
        synchronous: false,
        fenced: true,
    };
    let nemesis = |dir: PathBuf, stage: Stage, workers, weights, seed| -> Result<Nemesis> {
        std::fs::create_dir_all(dir.join("log"))?;
        let servers = Servers::prepare(prefix.clone(), stage)?;
        let leases = Leases {
            exclusive: 0,
            multi_holder: false,
            several: false,
            sessions: false,
            adopted: stage.adopted,
            mostly_adopted: true,
        };
        Nemesis::new(servers, workers, dir, seed, weights, leases)
    };
    let mut leases = nemesis(leases_dir(&dir), stage, workers, TO_LEASES, seed)?.at_ease(2);
    let mut shards = Vec::new();
    for shard in 0..SHARDS {
        let synchronous = is_synchronous(shard) && fault != Some(Fault::AsyncStandby);
        let fenced = shard != SHARDS - 1 || fault != Some(Fault::NoFence);
        let stage = Stage { adopted: JOBS, synchronous, fenced, ..stage };
        let dir = shard_dir(&dir, shard);
        let nobody = WorkerPool::new(rundir.clone(), "shards-worker", dir.clone(), seed, 0);
        let seed = seed ^ (shard as u64 + 1) << 32;
        shards.push(nemesis(dir, stage, nobody, TO_SHARD, seed)?.at_ease(6));
    }

    shards.iter_mut().try_for_each(Nemesis::begin)?;
    leases.begin()?;
    std::thread::scope(|scope| {
        let all = shards.iter_mut().chain([&mut leases]);
        let threads: Vec<_> =
            all.map(|nemesis| scope.spawn(move || nemesis.strike_for(time))).collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(struck) => struck,
            Err(_) => bail!("a nemesis panicked"),
        })
    })?;
    // The workers go first: what they leave prepared is finished then.
    leases.end()?;
    shards.iter_mut().try_for_each(Nemesis::end)?;

    let mut summary = Summary { seed, seconds: time.as_secs(), ..Summary::default() };
    let mut violations = Vec::new();
    let mut judged = |name: String, dir: &Path, nemesis: &mut Nemesis, synchronous: bool| {
        nemesis.see_standby_through()?;
        let mut evidence = Evidence {
            records: record::read_all(&dir.join("log"))?,
            disturbances: nemesis.done().to_vec(),
            era: nemesis.era(),
            crashes: nemesis.servers().crashes(),
            synchronous,
            ..Evidence::default()
        };
        evidence.read(&mut nemesis.servers().primary().connect(DATABASE)?)?;
        let mut findings = judge::judge(&evidence);
        let found: Vec<String> =
            findings.violations.drain(..).map(|what| format!("{name}: {what}")).collect();
        if fault.is_none() && !found.is_empty() {
            let place = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let path = extension::target_dir().join(format!("shards-{seed}-{place}.txt"));
            evidence.write(&path, &found)?;
            eprintln!("The evidence is in {}.", path.display());
        }
        violations.extend(found);
        anyhow::Ok((evidence, findings))
    };
    let (_, of_leases) =
        judged("lease database".to_owned(), &leases_dir(&dir), &mut leases, false)?;
    summary.tokens = of_leases.tokens;
    summary.leases = leases.count();
    let mut evidences = Vec::new();
    for (shard, nemesis) in shards.iter_mut().enumerate() {
        let synchronous = is_synchronous(shard);
        let (evidence, findings) =
            judged(shard_name(shard), &shard_dir(&dir, shard), nemesis, synchronous)?;
        evidences.push(evidence);
        summary.findings.add(findings);
        for (disturbance, count) in nemesis.count() {
            *summary.shards.entry(disturbance).or_default() += count;
        }
    }
    summary.findings.violations = violations;
    summary.unheard = unheard(&evidences);
    Ok(summary)
}

fn leases_dir(dir: &Path) -> PathBuf {
    dir.join("leases")
}

fn shard_dir(dir: &Path, shard: usize) -> PathBuf {
    dir.join(format!("shard-{shard}"))
}

/// How many writes have landed on a shard by an older number than one that only another shard knew of.
fn unheard(evidences: &[Evidence]) -> usize {
    let transactions: Vec<HashMap<i64, _>> = evidences.iter().map(transaction::all).collect();
    let adoptions: Vec<_> = transactions.iter().map(stale::adoptions).collect();
    let knew = |shard: usize, lease: i32, number: i64, sent: i64| {
        let of_lease = adoptions[shard].get(&lease).map_or(&[][..], Vec::as_slice);
        of_lease.iter().any(|adoption| adoption.number > number && adoption.at < sent)
    };
    let mut count = 0;
    for (shard, evidence) in evidences.iter().enumerate() {
        for (number, sent, write) in stale::writes(evidence, &transactions[shard]) {
            let elsewhere =
                (0..evidences.len()).any(|other| knew(other, write.lease, number, sent));
            count += usize::from(elsewhere && !knew(shard, write.lease, number, sent));
        }
    }
    count
}

/// Works until the instructions say to stop, on one shard and then on another: what a worker process does.
pub fn work(who: Identity) -> Result<()> {
    let at = |dir: PathBuf| Identity { dir, ..who.clone() };
    let leases = Rc::new(LeaseDatabase::new(at(leases_dir(&who.dir)))?);
    let mut workers = Vec::new();
    for shard in 0..SHARDS {
        let identity = Identity {
            seed: who.seed ^ (shard as u64 + 1) << 32,
            ..at(shard_dir(&who.dir, shard))
        };
        workers.push(ChaosWorker::new(identity, leases.clone())?);
    }
    let seed = who.seed ^ (u64::from(who.worker) << 40) ^ (u64::from(who.incarnation) << 20);
    let mut rng = StdRng::seed_from_u64(seed);
    while leases.goes_on()? {
        let shard = rng.random_range(0..SHARDS);
        workers[shard].turn()?;
    }
    Ok(())
}
