//! Many at once: in line for one lease, and as the cron jobs of several machines.

use nix::sys::signal::Signal;
use pg_test::clients::command::stage::{Run, Stage};
use pg_test::process::{self, wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Context, Lab, Result};
use rand::RngExt;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How many machines run the same job.
const MACHINES: u64 = 4;

/// Reads, takes its time, and writes what it has read and one more: two that overlap would lose one.
const JOB: &str = "n=$(psql -qAtXc 'SELECT value FROM work') || exit 1; sleep 0.$((RANDOM_PART)); \
                   psql -qXc \"UPDATE work SET value = $((n + 1))\" 2>> $DIR/refused";

/// Jobs of several machines for as long as `PG_FENCE_CRON_SECONDS` says (30), any of whose processes is frozen or
/// killed at any time: no write is lost, none is stale, and no two happen under one token.
#[lab_test(slow)]
fn cron_jobs_of_several_machines_under_random_freezes(lab: &Lab) -> Result<()> {
    let seconds = std::env::var("PG_FENCE_CRON_SECONDS").ok().and_then(|text| text.parse().ok());
    let until = Instant::now() + Duration::from_secs(seconds.unwrap_or(30));
    let stage = Stage::new(lab)?;
    let mut admin = stage.admin()?;
    admin.run("UPDATE work SET value = 0, fence = lease_acquire('job')")?;
    stage.revoke()?;
    let (stop, freezes, runs) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| -> Result<()> {
        let (stage, stop, freezes, runs) = (&stage, &stop, &freezes, &runs);
        let machines: Vec<_> = (0..MACHINES)
            .map(|_| scope.spawn(move || machine(stage, stop, freezes, runs)))
            .collect();
        while Instant::now() < until && !machines.iter().any(|machine| machine.is_finished()) {
            std::thread::sleep(Duration::from_millis(100));
        }
        stop.store(true, Ordering::Relaxed);
        machines.into_iter().try_for_each(|machine| machine.join().expect("it does not panic"))
    })?;
    let written: i64 = admin.one("SELECT count(*) FROM written", &[])?;
    let tokens: i64 = admin.one("SELECT count(DISTINCT token) FROM written", &[])?;
    let counted: i64 = admin.one("SELECT value::bigint + 1 FROM work", &[])?;
    let (freezes, runs) = (freezes.into_inner(), runs.into_inner());
    let refused: i64 = admin.one(
        "SELECT refused_pf001 + refused_pf002 + refused_pf003 + refused_pf004 FROM fence.stats",
        &[],
    )?;
    eprintln!("{runs} runs, {freezes} freezes and kills, {written} writes, {refused} refused");
    ensure!(written == counted, "{written} writes landed, and {counted} were counted");
    ensure!(written == tokens, "{written} writes with {tokens} tokens");
    ensure!(written > 3 && freezes > 0, "nothing was shown");
    let ordered = "SELECT count(*) FROM (SELECT token < lag(token) OVER (ORDER BY n) AS back FROM written) AS w WHERE back";
    ensure!(admin.one::<i64>(ordered, &[])? == 0, "a token went back");
    Ok(())
}

/// Starts the job again and again, and is unkind to its processes.
fn machine(stage: &Stage, stop: &AtomicBool, freezes: &AtomicU64, runs: &AtomicU64) -> Result<()> {
    let mut random = rand::rng();
    while !stop.load(Ordering::Relaxed) {
        let mut command = stage.command();
        let part: u32 = random.random_range(2..9);
        let job = JOB.replace("RANDOM_PART", &part.to_string());
        let options = "run job --ttl 1500ms --wait 3s --if-taken 0 --quiet";
        command.args(options.split(' '));
        command.args(["--", "sh", "-c", &job]).stdout(Stdio::null()).stderr(Stdio::null());
        let mut run = Run::start(command)?;
        runs.fetch_add(1, Ordering::Relaxed);
        let is_keeper = |pid: &i32| process::title(*pid).contains("keep-lease");
        let is_command = |pid: i32| process::title(pid).starts_with("sh ");
        let mut keeper = None;
        let mut frozen = Vec::new();
        // Mostly while it holds the lease.
        let patience = Duration::from_millis(random.random_range(0..8000));
        let _ = wait_until("its command runs", patience, || {
            let children = process::children_of(run.supervisor());
            keeper = children.iter().copied().find(is_keeper);
            children.iter().any(|pid| is_command(*pid)) || run.has_ended()
        });
        std::thread::sleep(Duration::from_millis(random.random_range(0..700)));
        if random.random_range(0..3) > 0 {
            frozen = victims(&run, &mut random);
            freezes.fetch_add(frozen.len() as u64, Ordering::Relaxed);
            let signal =
                if random.random_range(0..4) == 0 { Signal::SIGKILL } else { Signal::SIGSTOP };
            // A process that has ended meanwhile is none.
            frozen.iter().for_each(|pid| drop(process::signal(*pid, signal)));
            std::thread::sleep(Duration::from_millis(random.random_range(0..4000)));
        }
        // The writer first, which is to be as late as can be; those that would end it come later.
        frozen.reverse();
        let (others, own): (Vec<i32>, Vec<i32>) =
            frozen.into_iter().partition(|pid| *pid != run.supervisor() && Some(*pid) != keeper);
        others.iter().for_each(|pid| drop(process::resume(*pid)));
        std::thread::sleep(Duration::from_millis(random.random_range(0..1000)));
        own.iter().for_each(|pid| drop(process::resume(*pid)));
        wait_until("the run ends", PATIENCE, || run.has_ended()).context("a run hangs")?;
    }
    Ok(())
}

/// Some of the processes of a run, what it was started with first.
fn victims(run: &Run, random: &mut impl RngExt) -> Vec<i32> {
    let all = process::family_of(run.supervisor());
    match random.random_range(0..3) {
        0 => all,
        1 => vec![all[random.random_range(0..all.len())]],
        _ => all.into_iter().filter(|_| random.random_range(0..2) == 0).collect(),
    }
}
