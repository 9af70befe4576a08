//! Medians, quartiles, ratios, percentiles.

use std::time::Duration;

/// The spread of several rounds: the median and the quartiles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    pub median: f64,
    /// The first quartile.
    pub low: f64,
    /// The third quartile.
    pub high: f64,
}

impl Spread {
    /// The spread of the values of all rounds.
    pub fn of(values: &[f64]) -> Spread {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        if sorted.is_empty() {
            return Spread { median: f64::NAN, low: f64::NAN, high: f64::NAN };
        }
        let at = |share: f64| {
            let place = share * (sorted.len() - 1) as f64;
            let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
            below + (above - below) * place.fract()
        };
        Spread { median: at(0.5), low: at(0.25), high: at(0.75) }
    }

    /// The spread of the ratios within each round.
    pub fn of_ratios(values: &[f64], references: &[f64]) -> Spread {
        let ratios: Vec<f64> = values.iter().zip(references).map(|(a, b)| a / b).collect();
        Spread::of(&ratios)
    }

    /// The spread in another unit.
    pub fn times(self, factor: f64) -> Spread {
        Spread { median: self.median * factor, low: self.low * factor, high: self.high * factor }
    }
}

/// The duration in milliseconds that this share of the calls did not exceed.
pub fn percentile_ms(latencies: &[Duration], share: f64) -> f64 {
    let mut sorted = latencies.to_vec();
    sorted.sort_unstable();
    if sorted.is_empty() {
        return f64::NAN;
    }
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1].as_secs_f64() * 1e3
}

/// A number with commas between thousands.
pub fn grouped(number: f64, digits: usize) -> String {
    if !number.is_finite() {
        return "–".to_owned();
    }
    let text = format!("{number:.digits$}");
    let (sign, text) = text.strip_prefix('-').map_or(("", text.as_str()), |rest| ("-", rest));
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let mut out = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    let point = if fraction.is_empty() { "" } else { "." };
    format!("{sign}{out}{point}{fraction}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_ratios_is_taken_within_rounds() {
        let spread = Spread::of_ratios(&[10.0, 40.0, 9.0], &[10.0, 20.0, 10.0]);
        assert_eq!((spread.low, spread.median, spread.high), (0.95, 1.0, 1.5));
        let of_five = Spread::of(&[1.0, 4.0, 2.0, 3.0, 10.0]);
        assert_eq!((of_five.low, of_five.median, of_five.high), (2.0, 3.0, 4.0));
        assert_eq!(Spread::of(&[1.0, 4.0, 2.0, 3.0]).median, 2.5);
    }

    #[test]
    fn percentiles_are_of_calls_that_happened() {
        let latencies: Vec<Duration> = (1..=200).map(Duration::from_millis).collect();
        assert_eq!(percentile_ms(&latencies, 0.5), 100.0);
        assert_eq!(percentile_ms(&latencies, 0.99), 198.0);
    }
}
