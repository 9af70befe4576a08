//! How long a run goes on.

use std::time::Duration;

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
