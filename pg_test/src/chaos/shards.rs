//! One lease database, many shards: workers take leases on one server and write rows on four others, under the tokens of the
//! first. Workers freeze and die, every server is restarted and failed over; each shard is judged as a chaos run is.

mod lease_database;

use super::evidence::Evidence;
use super::instructions::Leases;
use super::judge::{self, stale, transaction, Findings};
use super::length::{run_again_while, Length, Shown};
use super::nemesis::{Disturbance, Nemesis, Weights};
use super::prefix_of;
use super::servers::{Servers, Stage};
use super::worker::{ChaosWorker, Identity};
use super::worker_pool::WorkerPool;
use crate::prefix::Prefix;
use anyhow::{bail, Result};
use lease_database::LeaseDatabase;
use rand::RngExt;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

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
    #[command(flatten)]
    length: Length,
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

impl Shown for Summary {
    fn seed(&self) -> u64 {
        self.seed
    }

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

    /// Something has not happened at all, or hardly.
    fn void(&self) -> Option<String> {
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

    fn violations(&self) -> &[String] {
        &self.findings.violations
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Findings { adoptions, writes, prepared, refused, let_pass, .. } = &self.findings;
        let Findings { unknown, lost_in_failover, .. } = &self.findings;
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
        self.findings.write_violations(f)
    }
}

/// Runs, prints the summary, and fails where a promise was broken, or where a planted fault was not noticed.
pub fn run(program: &Path, options: &Options) -> Result<()> {
    let (time, seed) = (options.length.time(), options.length.seed());
    let summary = run_until_enough_happened(&prefix_of(program)?, time, seed, options.fault)?;
    println!("{summary}");
    if let Some(fault) = options.fault {
        println!("{fault:?} was noticed.");
        return Ok(());
    }
    summary.judged()
}

/// Runs for that time, and again if too little has happened, or the fault was not noticed. A broken promise ends it at once.
/// That a planted fault is not noticed is an error.
pub fn run_until_enough_happened(
    prefix: &Arc<Prefix>,
    time: Duration,
    seed: u64,
    fault: Option<Fault>,
) -> Result<Summary> {
    let reason = |summary: &Summary| {
        let violations = summary.violations();
        let Some(fault) = fault else {
            return Ok(summary.void().filter(|_| violations.is_empty()));
        };
        if let Some(other) = violations.iter().find(|what| fault.is_not_blamed_for(what)) {
            bail!("{fault:?} is not to blame for this: {other}");
        }
        let noticed = violations.iter().any(|violation| fault.shows_as(violation));
        Ok((!noticed).then(|| format!("{fault:?} was not noticed")))
    };
    let run = |seed| run_for(prefix, time, seed, fault);
    match run_again_while(time, seed, run, reason)? {
        (summary, Some(why)) if fault.is_some() => bail!("{why}:\n{summary}"),
        (summary, _) => Ok(summary),
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
    let mut judged = |name: String, place: String, nemesis: &mut Nemesis, synchronous: bool| {
        nemesis.see_standby_through()?;
        let evidence = Evidence { synchronous, ..nemesis.evidence()? };
        let mut findings = judge::judge(&evidence);
        let found: Vec<String> =
            findings.violations.drain(..).map(|what| format!("{name}: {what}")).collect();
        if fault.is_none() {
            evidence.keep_where(&format!("shards-{seed}-{place}"), &found)?;
        }
        violations.extend(found);
        anyhow::Ok((evidence, findings))
    };
    let (_, of_leases) =
        judged("lease database".to_owned(), "leases".to_owned(), &mut leases, false)?;
    summary.tokens = of_leases.tokens;
    summary.leases = leases.count();
    let mut evidences = Vec::new();
    for (shard, nemesis) in shards.iter_mut().enumerate() {
        let synchronous = is_synchronous(shard);
        let (evidence, findings) =
            judged(shard_name(shard), format!("shard-{shard}"), nemesis, synchronous)?;
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
    let mut rng = who.rng();
    while leases.goes_on()? {
        let shard = rng.random_range(0..SHARDS);
        workers[shard].turn()?;
    }
    Ok(())
}
