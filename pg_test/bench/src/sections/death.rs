//! From a holder's death to the next holder's answer.

use crate::peer::Locker;
use crate::peers::*;
use crate::plot::{Better, Plot};
use crate::report::{Cell, Section, Table};
use crate::spread::{Latencies, Spread};
use crate::workbench::Workbench;
use anyhow::{anyhow, ensure, Context, Result};
use pg_test::rundir::RunDir;
use pg_test::{Database, Session};
use std::any::Any;
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
    Ttl,
    Advisory,
    Etcd,
    Redis,
    ZooKeeper,
}

const ALL: [Way; 6] =
    [Way::Session, Way::Advisory, Way::Ttl, Way::Redis, Way::Etcd, Way::ZooKeeper];

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Session => ours::NAME_SESSION,
            Way::Ttl => "pg_fence, ttl of 1 s alone",
            Way::Advisory => advisory::NAME,
            Way::Etcd => "etcd, ttl of 2 s",
            Way::Redis => "Redis, ttl of 1 s",
            Way::ZooKeeper => "ZooKeeper, timeout of 4 s",
        }
    }

    /// After how long without a sign of life the holder counts as dead; None where its connection tells.
    fn ttl(self) -> Option<Duration> {
        let seconds = match self {
            Way::Session | Way::Advisory => return None,
            Way::Ttl | Way::Redis => 1,
            Way::Etcd => 2,
            Way::ZooKeeper => 4,
        };
        Some(Duration::from_secs(seconds))
    }

    /// A client, `dies` says whether it is the one to die.
    fn client(self, address: &str, dies: bool) -> Result<Box<dyn Locker>> {
        let holder = || if dies { "first" } else { "next" }.to_owned();
        // The one that survives renews nothing either.
        let ttl = self.ttl().filter(|_| dies).unwrap_or(Duration::from_secs(30));
        let session = || Session::connect(address);
        match self {
            Way::Session => ours::client(session()?, holder(), ", session => true"),
            Way::Ttl => {
                let ttl = format!(", ttl => '{} s'", ttl.as_secs());
                ours::client(session()?, holder(), &ttl)
            }
            Way::Advisory => advisory::client(session()?),
            Way::Etcd => etcd::client(address.parse()?, holder(), ttl),
            Way::Redis => redis::client(address.parse()?, holder(), ttl),
            Way::ZooKeeper => zookeeper::client(address.parse()?, ttl),
        }
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

/// What is there to hold it by.
struct Contender {
    way: Way,
    address: String,
    /// The server, for as long as it is needed.
    _server: Box<dyn Any>,
}

fn contender(bench: &Workbench, way: Way) -> Result<Contender> {
    let (address, server): (String, Box<dyn Any>) = match way {
        Way::Session | Way::Ttl | Way::Advisory => {
            let db: Database = bench.database()?;
            (db.conninfo().to_string(), Box::new(db))
        }
        Way::Etcd => {
            let etcd = etcd::watched(bench.lab.rundir())?;
            (etcd.port().to_string(), Box::new(etcd))
        }
        Way::Redis => {
            let redis = redis::start(bench, false)?;
            (redis.port().to_string(), Box::new(redis))
        }
        Way::ZooKeeper => {
            let zookeeper = zookeeper::start(bench)?;
            (zookeeper.port().to_string(), Box::new(zookeeper))
        }
    };
    Ok(Contender { way, address, _server: server })
}

/// What a contender reached.
struct Track {
    way: Way,
    latencies: Latencies,
    medians: Vec<f64>,
}

/// Processes that hold a lease are killed while another client waits for it.
pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new("Death of the holder");
    section.note(
        "The holder is a process of its own, and is killed (SIGKILL) while another client waits. The time is from \
         just before the kill to the next holder's answer. An advisory lock and a lease acquired with \
         `session => true` end when the server sees the connection end. The others end after a time without a \
         sign of life, the shortest that they sensibly have: ZooKeeper's least with its own settings, etcd's least, \
         a second for the rest. The holder is killed up to a third of that time after its last sign of \
         life, as one that gives a sign every third would be. Who waits asks Redis and ZooKeeper every 10 ms, and \
         watches etcd's key.",
    );
    let mut contenders = Vec::new();
    for way in ALL {
        match contender(bench, way) {
            Ok(contender) => contenders.push(contender),
            Err(error) => bench.skip(way.name(), &error),
        }
    }
    let track =
        |c: &Contender| Track { way: c.way, latencies: Latencies::default(), medians: vec![] };
    let mut tracks: Vec<Track> = contenders.iter().map(track).collect();
    bench.progress("death: holders killed");
    for _ in 0..bench.options.pick(1, bench.options.rounds()) {
        for (contender, track) in contenders.iter().zip(&mut tracks) {
            let times = match contender.way.ttl() {
                None => bench.options.pick(5, 20),
                Some(_) => 1,
            };
            let some = deaths(bench.lab.rundir(), contender, times)
                .with_context(|| format!("{} does not run", contender.way.name()))?;
            track.medians.push(some.percentile_ms(0.5));
            track.latencies.extend(some);
        }
    }
    report(&mut section, &tracks);
    Ok(section)
}

fn report(section: &mut Section, tracks: &[Track]) {
    let mut table = Table::new(
        "death to the next answer",
        &["", "p50 ms", "p99 ms", "p50 of each round, ms", "deaths"],
    );
    for track in tracks {
        table.rows.push(vec![
            track.way.name().into(),
            Cell::Number(track.latencies.percentile_ms(0.5), 2),
            Cell::Number(track.latencies.percentile_ms(0.99), 2),
            Cell::Spread(Spread::of(&track.medians), 2),
            Cell::Number(track.latencies.len() as f64, 0),
        ]);
    }
    section.tables.push(table);
    let of = |way| tracks.iter().find(|track| track.way == way).map(|track| &track.medians);
    if let Some(ours) = of(Way::Session) {
        for (other, bound) in
            [(Way::Advisory, 1.5), (Way::Redis, 1.0), (Way::Etcd, 1.0), (Way::ZooKeeper, 1.0)]
        {
            if let Some(medians) = of(other) {
                let aim = format!("death, p50 over {}: at most {bound}", other.name());
                section.at_most(&aim, Spread::of_ratios(ours, medians), bound);
            }
        }
    }
    section.plots.push(Plot {
        better: Better::Lower,
        file: "death".to_owned(),
        title: "from a holder's death to the next answer, p50 in ms".to_owned(),
        bars: tracks.iter().map(|t| (t.way.name().to_owned(), Spread::of(&t.medians))).collect(),
    });
}

/// How many deaths may come too late for their ttl. On a machine that stands still for a second some do.
const TOO_LATE: usize = 20;

/// So many holders in turn, each killed; the same client gets the lease after each.
fn deaths(rundir: &RunDir, contender: &Contender, times: usize) -> Result<Latencies> {
    let (go, told) = mpsc::channel::<()>();
    let (answer, answers) = mpsc::channel::<Instant>();
    let (way, address) = (contender.way, contender.address.as_str());
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
        let killed = kill_each(rundir, contender, times, &go, &answers);
        drop(go);
        next.join().map_err(|_| anyhow!("a client panicked"))??;
        killed
    })
}

/// The time from each death to the answer.
fn kill_each(
    rundir: &RunDir,
    contender: &Contender,
    times: usize,
    go: &mpsc::Sender<()>,
    answers: &mpsc::Receiver<Instant>,
) -> Result<Latencies> {
    let answered = || answers.recv_timeout(Duration::from_secs(60)).context("nobody got the lease");
    let (mut latencies, mut too_late) = (Latencies::default(), 0);
    answered()?;
    while latencies.len() < times {
        let started = Instant::now();
        let mut holder = start_holder(rundir, contender)?;
        go.send(()).context("a client is gone")?;
        // Long enough for the other one to ask and to wait.
        let since = contender.way.ttl().map_or(0.0, |ttl| ttl.as_secs_f64() / 3.0);
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
        let is_over = contender.way.ttl().is_some_and(|ttl| answered - started >= ttl);
        ensure!(is_over && too_late <= TOO_LATE, "it was granted before the holder died");
    }
    Ok(latencies)
}

fn start_holder(rundir: &RunDir, contender: &Contender) -> Result<Child> {
    let way = clap::ValueEnum::to_possible_value(&contender.way).context("a way without a name")?;
    let mut holder = rundir
        .command(rundir.program())
        .args(["bench-holder", way.get_name(), &contender.address])
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
