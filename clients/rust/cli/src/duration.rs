//! A time on the command line.

use std::str::FromStr;
use std::time;

/// A time as `30s`, `10m`, `1h 30m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Duration(pub time::Duration);

impl FromStr for Duration {
    type Err = humantime::DurationError;

    fn from_str(text: &str) -> Result<Duration, Self::Err> {
        humantime::parse_duration(text).map(Duration)
    }
}
