//! Durations in the lines of scenarios: `300 ms`, `2 s`.

use anyhow::{Result, bail};
use std::time::Duration;

pub fn duration(words: &[&str]) -> Result<Duration> {
    let [number, unit] = words else { bail!("a time is a number and a unit") };
    let number: u64 = number.parse()?;
    Ok(match *unit {
        "ms" => Duration::from_millis(number),
        "s" => Duration::from_secs(number),
        "min" => Duration::from_secs(60 * number),
        "h" => Duration::from_secs(3600 * number),
        _ => bail!("{unit} is no unit of time"),
    })
}
