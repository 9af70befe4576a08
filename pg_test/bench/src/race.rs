//! Races of contenders that take turns: in each round every contender has a short slice of time.

use crate::peer::{Held, Peer};
use crate::spread::{Spread, percentile_ms};
use crate::workbench::{NAMES, Workbench};
use anyhow::{Context, Result, anyhow, ensure};
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Calls of a client before the clock starts: PostgreSQL plans each of the first five executions of a prepared
/// statement.
pub const WARM_UP: usize = 7;

/// One call of a client.
type Op = Box<dyn FnMut() -> Result<()>>;

/// A participant of a race.
pub struct Contender<'a> {
    /// The contender's name in the report.
    pub name: String,
    /// Makes a client in that client's thread: connects and prepares.
    join: Box<dyn Fn(usize) -> Result<Op> + Sync + 'a>,
    /// A lease that is held during the contender's turn.
    held: Option<(&'a dyn Peer, &'static str)>,
}

impl<'a> Contender<'a> {
    /// A contender whose clients are made by `join`, from their numbers.
    pub fn new<O>(
        name: impl Into<String>,
        join: impl Fn(usize) -> Result<O> + Sync + 'a,
    ) -> Contender<'a>
    where
        O: FnMut() -> Result<()> + 'static,
    {
        let join = Box::new(move |client| Ok(Box::new(join(client)?) as Op));
        Contender { name: name.into(), join, held: None }
    }

    /// Acquires and releases names that only this client uses.
    pub fn of_pairs(peer: &'a dyn Peer, clients: usize) -> Contender<'a> {
        Contender::new(peer.name(), move |client| {
            let mut locker = peer.join(client)?;
            Ok(move || {
                let number = rand::random_range(0..NAMES / clients) * clients + client;
                let name = format!("name{number}");
                let token = locker.acquire(&name)?.context("it should be free")?;
                locker.release(&name, token)
            })
        })
    }

    /// Tries to acquire a lease that another client holds.
    pub fn of_losing_tries(peer: &'a dyn Peer, lease: &'static str) -> Contender<'a> {
        let tries = Contender::new(peer.name(), move |client| {
            let mut locker = peer.join(client)?;
            Ok(move || {
                ensure!(locker.acquire(lease)?.is_none(), "the lease should be taken");
                Ok(())
            })
        });
        Contender { held: Some((peer, lease)), ..tries }
    }

    /// Reads the row of a hand-written lease, the lower bound for a try.
    pub fn of_selects(bench: &'a Workbench) -> Contender<'a> {
        Contender::new("limit: SELECT by key", |_| {
            let mut session = bench.connect()?;
            let select = session.prepare("SELECT token FROM update_first WHERE name = $1")?;
            Ok(move || Ok(session.query_one(&select, &[&"held"]).map(drop)?))
        })
    }
}

/// The results of a contender.
#[derive(Debug, Clone, Default)]
pub struct Track {
    pub name: String,
    /// Calls per second, or the median duration of a call, for each round.
    pub rounds: Vec<f64>,
    /// The calls of all rounds.
    pub latencies: Vec<Duration>,
}

impl Track {
    pub fn new(name: impl Into<String>) -> Track {
        Track { name: name.into(), ..Track::default() }
    }

    pub fn spread(&self) -> Spread {
        Spread::of(&self.rounds)
    }

    /// The ratios to another contender, round by round.
    pub fn ratio_to(&self, reference: &Track) -> Spread {
        Spread::of_ratios(&self.rounds, &reference.rounds)
    }

    /// The duration in milliseconds that this share of the calls did not exceed.
    pub fn percentile_ms(&self, share: f64) -> f64 {
        percentile_ms(&self.latencies, share)
    }

    /// Adds a round with the median duration of its calls.
    pub fn add(&mut self, round: Vec<Duration>) {
        self.rounds.push(percentile_ms(&round, 0.5));
        self.latencies.extend(round);
    }
}

/// The track with that name.
pub fn find<'a>(tracks: &'a [Track], name: &str) -> Result<&'a Track> {
    tracks.iter().find(|track| track.name == name).with_context(|| format!("{name} did not run"))
}

/// The ratios of one contender to another, round by round.
pub fn ratio(tracks: &[Track], name: &str, other: &str) -> Result<Spread> {
    Ok(find(tracks, name)?.ratio_to(find(tracks, other)?))
}

/// The number of clients in words.
pub fn at_once(clients: usize) -> String {
    format!("{clients} client{}", if clients == 1 { "" } else { "s" })
}

/// The rules of a race.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// The number of concurrent clients.
    pub clients: usize,
    /// The number of turns of each contender.
    pub rounds: usize,
    /// The length of a turn.
    pub slice: Duration,
    /// The calls of each client before the clock starts.
    pub warm_up: usize,
}

impl Rules {
    /// More, shorter turns, to find small differences.
    pub fn in_short_turns(self) -> Rules {
        Rules { rounds: self.rounds * 4, slice: self.slice / 4, ..self }
    }
}

/// Runs clients in threads of their own, each given its number, and returns their results.
pub fn side_by_side<T: Send>(
    clients: usize,
    client: impl Fn(usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let client = &client;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..clients).map(|number| scope.spawn(move || client(number))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a client panicked"))?)
            .collect()
    })
}

/// The results of several contenders in turn, by round. The order changes in each round, and the first rounds do not
/// count.
pub fn in_turns<const N: usize>(
    number: usize,
    (uncounted, rounds): (usize, usize),
    mut turn: impl FnMut(usize) -> Result<[f64; N]>,
) -> Result<Vec<[Vec<f64>; N]>> {
    let mut all = vec![[const { Vec::new() }; N]; number];
    for round in 0..uncounted + rounds {
        let order = (0..number).map(|n| (n + round) % number);
        let order: Vec<usize> =
            if round % 2 == 0 { order.collect() } else { order.rev().collect() };
        for index in order {
            let figures = turn(index)?;
            if round >= uncounted {
                all[index].iter_mut().zip(figures).for_each(|(all, figure)| all.push(figure));
            }
        }
    }
    Ok(all)
}

/// Runs a race.
pub fn run(contenders: &[Contender], rules: Rules) -> Result<Vec<Track>> {
    let mut tracks: Vec<Track> = contenders.iter().map(|one| Track::new(&*one.name)).collect();
    let rates = in_turns(contenders.len(), (0, rules.rounds), |index| {
        let one = &contenders[index];
        let (rate, latencies) =
            turn(one, rules).with_context(|| format!("{} does not run", one.name))?;
        tracks[index].latencies.extend(latencies);
        Ok([rate])
    })?;
    tracks.iter_mut().zip(rates).for_each(|(track, [rates])| track.rounds = rates);
    Ok(tracks)
}

/// A turn of one contender: calls per second, and the duration of each call.
fn turn(contender: &Contender, rules: Rules) -> Result<(f64, Vec<Duration>)> {
    let held = contender.held.map(|(peer, lease)| -> Result<Held> {
        let (mut locker, name) = (peer.join(rules.clients)?, lease.to_owned());
        let token = locker.acquire(lease)?.context("it should be free")?;
        Ok(Held { locker, name, token })
    });
    let _held = held.transpose()?;
    let start = Barrier::new(rules.clients);
    let outcomes = side_by_side(rules.clients, |client| {
        let ready = warmed_up(contender, client, rules.warm_up);
        start.wait();
        calls(ready?, rules.slice)
    })?;
    let mut rate = 0.0;
    let mut latencies = Vec::new();
    for (of_client, some) in outcomes {
        rate += of_client;
        latencies.extend(some);
    }
    Ok((rate, latencies))
}

fn warmed_up(contender: &Contender, client: usize, calls: usize) -> Result<Op> {
    let mut op = (contender.join)(client)?;
    (0..calls).try_for_each(|_| op())?;
    Ok(op)
}

fn calls(mut op: Op, slice: Duration) -> Result<(f64, Vec<Duration>)> {
    let mut latencies = Vec::new();
    let start = Instant::now();
    let mut before = start;
    while before - start < slice {
        op()?;
        let after = Instant::now();
        latencies.push(after - before);
        before = after;
    }
    Ok((latencies.len() as f64 / (before - start).as_secs_f64(), latencies))
}
