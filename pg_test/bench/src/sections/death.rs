//! From a holder's death to the next holder's answer.

use crate::peer::Locker;
use crate::peers::sql::Client;
use crate::peers::{advisory, ours};
use crate::plot::{Better, Plot};
use crate::report::{Section, Table};
use crate::spread::{Latencies, Spread};
use crate::workbench::Workbench;
use anyhow::{anyhow, ensure, Context, Result};
use pg_test::rundir::RunDir;
use pg_test::{Database, Session};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The lease that is died with.
const NAME: &str = "death";

/// A way to hold it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Way {
    Session,
    Advisory,
    Ttl,
}

const ALL: [Way; 3] = [Way::Session, Way::Advisory, Way::Ttl];

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Session => ours::NAME_SESSION,
            Way::Advisory => advisory::NAME,
            Way::Ttl => "pg_fence, ttl of 1 s alone",
        }
    }

    /// After how long without a sign of life the holder counts as dead; None where its connection tells.
    fn ttl(self) -> Option<Duration> {
        (self == Way::Ttl).then_some(Duration::from_secs(1))
    }

    /// A client; `dies` says whether it is the one to die.
    fn client(self, address: &str, dies: bool) -> Result<Box<dyn Locker>> {
        let session = Session::connect(address)?;
        let holder = if dies { "first" } else { "next" }.to_owned();
        let statements = match self {
            Way::Session => ours::statements(ours::SESSION),
            Way::Advisory => advisory::statements(),
            // The one that survives renews nothing either.
            Way::Ttl if dies => ours::statements(", ttl => '1 s'"),
            Way::Ttl => ours::statements(""),
        };
        Ok(Box::new(Client::new(session, holder, &statements)?))
    }
}

/// The process of a holder.
#[derive(Debug, clap::Args)]
pub struct Holder {
    #[arg(value_enum)]
    way: Way,
    address: String,
}

impl Holder {
    /// Its whole life: it acquires, says so, and waits for its death.
    pub fn hold(&self) -> Result<()> {
        let mut locker = self.way.client(&self.address, true)?;
        locker.acquire(NAME)?.context("the lease is taken")?;
        println!("held");
        // The process that has started it keeps the other end open for as long as it lives.
        std::io::stdin().lines().for_each(drop);
        Ok(())
    }
}

/// Processes that hold a lease are killed while another client waits for it.
pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new("Death of the holder");
    section.note(
        "The holder is a process of its own, and is killed (SIGKILL) while another client waits. The time is from \
         just before the kill to the next holder's answer. An advisory lock and a lease acquired with \
         `session => true` end when the server sees the connection end. The other one ends by its ttl; its holder is \
         killed up to a third of that time after its last sign of life, as one that gives a sign every third would be.",
    );
    let databases = ALL.map(|_| bench.database());
    let databases = databases.into_iter().collect::<Result<Vec<Database>>>()?;
    let mut tracks = ALL.map(|_| (Latencies::default(), Vec::new()));
    bench.progress("death: holders killed");
    for _ in 0..bench.options.pick(1, bench.options.rounds()) {
        for ((way, database), (latencies, medians)) in ALL.iter().zip(&databases).zip(&mut tracks) {
            let times = if way.ttl().is_some() { 1 } else { bench.options.pick(5, 20) };
            let address = database.conninfo().to_string();
            let some = deaths(bench.lab.rundir(), *way, &address, times)
                .with_context(|| format!("{} does not run", way.name()))?;
            medians.push(some.percentile_ms(0.5));
            latencies.extend(some);
        }
    }
    let all = ALL.iter().zip(&tracks);
    let all = all.map(|(way, (latencies, medians))| (way.name(), latencies, &**medians));
    section.tables.push(Table::of_answers("death to the next answer", "deaths", all));
    let [(_, session), (_, advisory), _] = &tracks;
    let aim = format!("death, p50 over {}: at most 1.5", Way::Advisory.name());
    section.at_most(&aim, Spread::of_ratios(session, advisory), 1.5);
    let bars = ALL.iter().zip(&tracks);
    section.plots.push(Plot {
        better: Better::Lower,
        file: "death".to_owned(),
        title: "from a holder's death to the next answer, p50 in ms".to_owned(),
        bars: bars.map(|(way, (_, p50))| (way.name().to_owned(), Spread::of(p50))).collect(),
    });
    Ok(section)
}

/// How many deaths may come too late for their ttl. On a machine that stands still for a second some do.
const TOO_LATE: usize = 20;

/// So many holders in turn, each killed; the same client gets the lease after each.
fn deaths(rundir: &RunDir, way: Way, address: &str, times: usize) -> Result<Latencies> {
    let (go, told) = mpsc::channel::<()>();
    let (answer, answers) = mpsc::channel::<Instant>();
    std::thread::scope(|scope| {
        let next = scope.spawn(move || -> Result<()> {
            let mut next = way.client(address, false)?;
            // Ready, and after each answer again.
            let _ = answer.send(Instant::now());
            while told.recv().is_ok() {
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

/// The time from each death to the answer.
fn kill_each(
    times: usize,
    way: Way,
    go: &mpsc::Sender<()>,
    answers: &mpsc::Receiver<Instant>,
    start_holder: impl Fn() -> Result<Child>,
) -> Result<Latencies> {
    let answered = || answers.recv_timeout(Duration::from_secs(60)).context("nobody got the lease");
    let (mut latencies, mut too_late) = (Latencies::default(), 0);
    answered()?;
    while latencies.len() < times {
        let started = Instant::now();
        let mut holder = start_holder()?;
        go.send(()).context("a client is gone")?;
        // Long enough for the other one to ask and to wait.
        let since = way.ttl().map_or(0.0, |ttl| ttl.as_secs_f64() / 3.0);
        std::thread::sleep(Duration::from_secs_f64(rand::random_range(0.02..0.03 + since)));
        let killed = Instant::now();
        holder.kill()?;
        holder.wait()?;
        let answered = answered()?;
        if answered > killed {
            latencies.push(answered - killed);
            continue;
        }
        // Its time was over, which is no death of the holder.
        too_late += 1;
        let is_over = way.ttl().is_some_and(|ttl| answered - started >= ttl);
        ensure!(is_over && too_late <= TOO_LATE, "it was granted before the holder died");
    }
    Ok(latencies)
}

fn start_holder(rundir: &RunDir, way: Way, address: &str) -> Result<Child> {
    let way = clap::ValueEnum::to_possible_value(&way).context("a way without a name")?;
    let mut holder = rundir
        .command(rundir.program())
        .args(["bench-holder", way.get_name(), address])
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
