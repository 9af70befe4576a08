//! The time from a holder's death to the next holder's answer.

use crate::peer::Locker;
use crate::peers::sql::{ADVISORY, Client, OURS, SESSION, SHORT, Sql};
use crate::plot::Better::Lower;
use crate::race::{Track, ratio};
use crate::report::Section;
use crate::workbench::Workbench;
use anyhow::{Context, Result, anyhow, ensure};
use pg_test::rundir::RunDir;
use pg_test::{Database, Session};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The lease of the holders.
const NAME: &str = "death";

/// A way to hold the lease: the statements of the dying and of the surviving client, neither of which renews.
#[derive(Clone, Copy)]
struct Way {
    dies: Sql,
    survives: Sql,
    /// The time after which a silent holder counts as dead; `None` if the end of its connection is noticed.
    ttl: Option<Duration>,
}

const ALL: [Way; 3] = [
    Way { dies: SESSION, survives: SESSION, ttl: None },
    Way { dies: ADVISORY, survives: ADVISORY, ttl: None },
    Way { dies: SHORT, survives: OURS, ttl: Some(Duration::from_secs(1)) },
];

/// The process of a holder.
#[derive(Debug, clap::Args)]
pub struct Holder {
    /// The name of its way to hold the lease.
    way: String,
    address: String,
}

impl Holder {
    /// Runs the process: acquires the lease, reports that, and waits to be killed.
    pub fn hold(&self) -> Result<()> {
        let way = ALL.iter().find(|way| way.dies.name == self.way).context("no such way")?;
        let session = Session::connect(&self.address)?;
        let mut locker = Client::new(session, "first".to_owned(), &way.dies)?;
        locker.acquire(NAME)?.context("the lease is taken")?;
        println!("held");
        // The parent process keeps the other end open as long as it lives.
        std::io::stdin().lines().for_each(drop);
        Ok(())
    }
}

/// Kills processes that hold a lease while another client waits for it.
pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new(
        "Death of the holder",
        "The holder is a process of its own, and is killed (SIGKILL) while another client waits. The time is from \
         just before the kill to the next holder's answer. An advisory lock and a lease acquired with \
         `session => true` end when the server sees the connection end. The other one ends by its ttl; its holder is \
         killed up to a third of that time after its last sign of life, as one that gives a sign every third would be.",
    );
    let databases = ALL.map(|_| bench.database());
    let databases = databases.into_iter().collect::<Result<Vec<Database>>>()?;
    let mut tracks = ALL.map(|way| Track::new(way.dies.name));
    bench.progress("death: holders killed");
    for _ in 0..bench.options.pick(1, bench.options.rounds()) {
        for ((way, database), track) in ALL.iter().zip(&databases).zip(&mut tracks) {
            let times = if way.ttl.is_some() { 1 } else { bench.options.pick(5, 20) };
            let address = database.conninfo().to_string();
            let some = deaths(bench.harness.rundir(), *way, &address, times)
                .with_context(|| format!("{} does not run", way.dies.name))?;
            track.add(some);
        }
    }
    section.answers("death to the next answer", "deaths", &tracks);
    let ratio = ratio(&tracks, SESSION.name, ADVISORY.name)?;
    section.at_most(format!("death, p50 over {}", ADVISORY.name), ratio, 1.5);
    let title = "from a holder's death to the next answer, p50 in ms";
    section.bars_of(Lower, "death", title, &tracks);
    Ok(section)
}

/// The number of deaths that may come after the ttl. On a machine that stalls for a second some do.
const TOO_LATE: usize = 20;

/// Kills this number of holders in turn; the same client gets the lease after each.
fn deaths(rundir: &RunDir, way: Way, address: &str, times: usize) -> Result<Vec<Duration>> {
    let (go, signal) = mpsc::channel::<()>();
    let (answer, answers) = mpsc::channel::<Instant>();
    std::thread::scope(|scope| {
        let next = scope.spawn(move || -> Result<()> {
            let session = Session::connect(address)?;
            let mut next = Client::new(session, "next".to_owned(), &way.survives)?;
            // Ready, and again after each answer.
            let _ = answer.send(Instant::now());
            while signal.recv().is_ok() {
                let token = next.wait(NAME)?;
                let answered = Instant::now();
                next.release(NAME, token)?;
                let _ = answer.send(answered);
            }
            Ok(())
        });
        let killed = kill_each(times, way, &go, &answers, || start_holder(rundir, way, address));
        drop(go);
        next.join().map_err(|_| anyhow!("a client panicked"))??;
        killed
    })
}

/// Kills each holder and returns the time from each death to the answer.
fn kill_each(
    times: usize,
    way: Way,
    go: &mpsc::Sender<()>,
    answers: &mpsc::Receiver<Instant>,
    start_holder: impl Fn() -> Result<Child>,
) -> Result<Vec<Duration>> {
    let answered = || answers.recv_timeout(Duration::from_secs(60)).context("nobody got the lease");
    let (mut latencies, mut too_late) = (Vec::new(), 0);
    answered()?;
    while latencies.len() < times {
        let started = Instant::now();
        let mut holder = start_holder()?;
        go.send(()).context("a client is gone")?;
        // Long enough for the other client to call and to wait.
        let since = way.ttl.map_or(0.0, |ttl| ttl.as_secs_f64() / 3.0);
        std::thread::sleep(Duration::from_secs_f64(rand::random_range(0.02..0.03 + since)));
        let killed = Instant::now();
        holder.kill()?;
        holder.wait()?;
        let answered = answered()?;
        if answered > killed {
            latencies.push(answered - killed);
            continue;
        }
        // The grant had expired, so the holder's death was not measured.
        too_late += 1;
        let is_over = way.ttl.is_some_and(|ttl| answered - started >= ttl);
        ensure!(is_over && too_late <= TOO_LATE, "it was granted before the holder died");
    }
    Ok(latencies)
}

fn start_holder(rundir: &RunDir, way: Way, address: &str) -> Result<Child> {
    let mut holder = rundir
        .command(rundir.program())
        .args(["bench-holder", way.dies.name, address])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .context("cannot start a holder")?;
    let mut said = String::new();
    BufReader::new(holder.stdout.take().context("no pipe")?).read_line(&mut said)?;
    if said.trim() != "held" {
        let _ = holder.kill();
        let status = holder.wait()?;
        return Err(anyhow!("the holder has not got the lease: {status}"));
    }
    Ok(holder)
}
