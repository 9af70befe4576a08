//! Contenders taking turns: a round gives each of them a short slice of time.

use crate::spread::{Latencies, Spread};
use anyhow::{anyhow, Context, Result};
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Calls of a client before the clock starts: PostgreSQL plans a prepared statement again for each of the first five.
pub const WARM_UP: usize = 7;

/// One call of a client.
pub type Op = Box<dyn FnMut() -> Result<()>>;

/// A participant of a race.
pub struct Contender<'a> {
    /// Its name in the report.
    pub name: String,
    /// Makes a client, in that client's thread: connects, prepares.
    pub join: Box<dyn Fn(usize) -> Result<Op> + Sync + 'a>,
}

impl<'a> Contender<'a> {
    /// A contender whose clients `join` makes, from their number.
    pub fn new(
        name: impl Into<String>,
        join: impl Fn(usize) -> Result<Op> + Sync + 'a,
    ) -> Contender<'a> {
        Contender { name: name.into(), join: Box::new(join) }
    }
}

/// The result of a contender.
#[derive(Debug, Clone, Default)]
pub struct Track {
    pub name: String,
    /// Calls a second, round by round.
    pub rates: Vec<f64>,
    /// The calls of all rounds.
    pub latencies: Latencies,
}

impl Track {
    /// Calls a second.
    pub fn rate(&self) -> Spread {
        Spread::of(&self.rates)
    }

    /// How many times the calls a second of another, round by round.
    pub fn ratio_to(&self, reference: &Track) -> Spread {
        Spread::of_ratios(&self.rates, &reference.rates)
    }
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

/// Runs a race. The order turns around with each round, so that nobody always follows the same one.
pub fn run(contenders: &[Contender], rules: Rules) -> Result<Vec<Track>> {
    let mut tracks: Vec<Track> = contenders
        .iter()
        .map(|contender| Track { name: contender.name.clone(), ..Track::default() })
        .collect();
    for round in 0..rules.rounds {
        let mut order: Vec<usize> = (0..contenders.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let (rate, latencies) = turn(&contenders[index], rules)
                .with_context(|| format!("{} does not run", contenders[index].name))?;
            tracks[index].rates.push(rate);
            tracks[index].latencies.extend(latencies);
        }
    }
    Ok(tracks)
}

/// One turn of one contender: calls a second, and how long each took.
pub fn turn(contender: &Contender, rules: Rules) -> Result<(f64, Latencies)> {
    let start = Barrier::new(rules.clients);
    let outcomes = side_by_side(rules.clients, |client| {
        let ready = warmed_up(contender, client, rules.warm_up);
        start.wait();
        calls(ready?, rules.slice)
    })?;
    let mut rate = 0.0;
    let mut latencies = Latencies::default();
    for (of_client, some) in outcomes {
        rate += of_client;
        latencies.extend(some);
    }
    Ok((rate, latencies))
}

fn warmed_up(contender: &Contender, client: usize, calls: usize) -> Result<Op> {
    let mut op = (contender.join)(client)?;
    for _ in 0..calls {
        op()?;
    }
    Ok(op)
}

fn calls(mut op: Op, slice: Duration) -> Result<(f64, Latencies)> {
    let mut latencies = Latencies::default();
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
