//! How long a run goes on, and when it is over: alike for one server and for many.

use anyhow::{bail, ensure, Result};
use std::fmt::Display;
use std::time::{Duration, Instant};

/// How long a run is, and where its choices start from.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Length {
    /// How many minutes to run
    #[arg(long, default_value_t = 5.0)]
    minutes: f64,
    /// Where all choices start from
    #[arg(long)]
    seed: Option<u64>,
    /// Run for half a minute
    #[arg(long)]
    short: bool,
}

impl Length {
    pub fn time(&self) -> Duration {
        let minutes = if self.short { 0.5 } else { self.minutes };
        Duration::from_secs_f64(minutes * 60.0)
    }

    pub fn seed(&self) -> u64 {
        self.seed.unwrap_or_else(|| rand::random_range(1..1_000_000))
    }
}

/// What a run shows, or several added up.
pub trait Shown: Display {
    /// That of the latest run.
    fn seed(&self) -> u64;

    /// Adds what a further run shows.
    fn add(&mut self, further: Self);

    /// Why this proves nothing, if it does not.
    fn void(&self) -> Option<String>;

    /// The promises that were broken.
    fn violations(&self) -> &[String];

    /// Fails where a promise was broken, or the run is void.
    fn judged(&self) -> Result<()> {
        let count = self.violations().len();
        ensure!(count == 0, "{count} promises were broken");
        if let Some(why) = self.void() {
            bail!("the run is void: {why}");
        }
        Ok(())
    }
}

/// For how many times the time of one run a further run may begin.
const RUNS: u32 = 8;

/// Runs again, with the next seed, while there is a reason to: how much happens depends on the machine. Returns the reason
/// that is left when it is time to end.
pub fn run_again_while<S: Shown>(
    time: Duration,
    seed: u64,
    run: impl Fn(u64) -> Result<S>,
    reason: impl Fn(&S) -> Result<Option<String>>,
) -> Result<(S, Option<String>)> {
    let start = Instant::now();
    let mut shown = run(seed)?;
    while let Some(why) = reason(&shown)? {
        if start.elapsed() > RUNS * time {
            return Ok((shown, Some(why)));
        }
        let seed = shown.seed() + 1;
        eprintln!("{why}: another run, with seed {seed}");
        shown.add(run(seed)?);
    }
    Ok((shown, None))
}
