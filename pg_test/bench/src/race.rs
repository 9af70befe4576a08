//! Contenders taking turns: a round gives each of them a short slice of time.

use crate::peer::{Held, Peer};
use crate::spread::{percentile_ms, Spread};
use crate::workbench::{Workbench, NAMES};
use anyhow::{anyhow, ensure, Context, Result};
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Calls of a client before the clock starts: PostgreSQL plans a prepared statement again for each of the first five.
pub const WARM_UP: usize = 7;

/// One call of a client.
type Op = Box<dyn FnMut() -> Result<()>>;

/// A participant of a race.
pub struct Contender<'a> {
    /// Its name in the report.
    pub name: String,
    /// Makes a client, in that client's thread: connects, prepares.
    join: Box<dyn Fn(usize) -> Result<Op> + Sync + 'a>,
    /// A lease that somebody has while it has its turn.
    held: Option<(&'a dyn Peer, &'static str)>,
}

impl<'a> Contender<'a> {
    /// A contender whose clients `join` makes, from their number.
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

    /// Takes and gives back names that are the client's alone, of so many clients.
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

    /// Tries for a lease that somebody else has.
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

    /// Reads the row of a lease that is written by hand: the limit of a try.
    pub fn of_selects(bench: &'a Workbench) -> Contender<'a> {
        Contender::new("limit: SELECT by key", |_| {
            let mut session = bench.connect()?;
            let select = session.prepare("SELECT token FROM update_first WHERE name = $1")?;
            Ok(move || Ok(session.query_one(&select, &[&"held"]).map(drop)?))
        })
    }
}

/// The result of a contender.
#[derive(Debug, Clone, Default)]
pub struct Track {
    pub name: String,
    /// Calls a second, or how long a call took in the median, round by round.
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

    /// How many times that of another, round by round.
    pub fn ratio_to(&self, reference: &Track) -> Spread {
        Spread::of_ratios(&self.rounds, &reference.rounds)
    }

    /// The time that so great a share of the calls did not exceed, in milliseconds.
    pub fn percentile_ms(&self, share: f64) -> f64 {
        percentile_ms(&self.latencies, share)
    }

    /// One more round, by how long a call took in the median.
    pub fn add(&mut self, round: Vec<Duration>) {
        self.rounds.push(percentile_ms(&round, 0.5));
        self.latencies.extend(round);
    }
}

/// The track of that name.
pub fn find<'a>(tracks: &'a [Track], name: &str) -> Result<&'a Track> {
    tracks.iter().find(|track| track.name == name).with_context(|| format!("{name} did not run"))
}

/// How many times another's one contender's is, round by round.
pub fn ratio(tracks: &[Track], name: &str, other: &str) -> Result<Spread> {
    Ok(find(tracks, name)?.ratio_to(find(tracks, other)?))
}

/// So many clients, in words.
pub fn at_once(clients: usize) -> String {
    format!("{clients} client{}", if clients == 1 { "" } else { "s" })
}

/// How a race is run.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// Clients at a time.
    pub clients: usize,
    /// How often each contender has its turn.
    pub rounds: usize,
    /// How long a turn takes.
    pub slice: Duration,
    /// Calls of each client before the clock starts.
    pub warm_up: usize,
}

impl Rules {
    /// Short turns, and many, where what is looked for is small.
    pub fn in_short_turns(self) -> Rules {
        Rules { rounds: self.rounds * 4, slice: self.slice / 4, ..self }
    }
}

/// The results of clients in threads of their own, each given its number.
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

/// What so many give, each in its turn, by round. Nobody always follows the same one, and the first rounds do not count.
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

/// One turn of one contender: calls a second, and how long each took.
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
