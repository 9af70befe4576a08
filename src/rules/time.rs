//! Points and spans of time that cannot be taken for each other, nor for a token. "Never" is the None of an Option.

use std::ops::{Add, Sub};

/// A point in time: microseconds since 2000-01-01 00:00 UTC, as the server counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Instant(i64);

/// A span of time, in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Span(i64);

impl Instant {
    /// Before any deadline: nothing has expired yet.
    pub const EARLIEST: Instant = Instant(i64::MIN);
    /// After any deadline: what the clock alone never ends.
    pub const LATEST: Instant = Instant(i64::MAX);

    /// The point so many microseconds after 2000-01-01 00:00 UTC, a `timestamptz` as Postgres keeps it.
    pub const fn from_micros(us: i64) -> Self {
        Instant(us)
    }

    /// How many microseconds after 2000-01-01 00:00 UTC it is.
    pub const fn micros(self) -> i64 {
        self.0
    }

    /// How long after `earlier` it is; negative where it is before.
    pub const fn since(self, earlier: Instant) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }

    /// In ISO 8601, UTC.
    pub fn iso(self) -> String {
        const DAY: i64 = 86_400_000_000;
        let (days, within) = (self.0.div_euclid(DAY), self.0.rem_euclid(DAY));
        // Days to civil date, from 0000-03-01 (H. Hinnant, "chrono-compatible low-level date algorithms").
        let z = days + 730_425;
        let era = z.div_euclid(146_097);
        let doe = z.rem_euclid(146_097);
        let yoe = (doe - doe / 1_460 + doe / 36_524 - doe / 146_096) / 365;
        let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
        let mp = (5 * doy + 2) / 153;
        let day = doy - (153 * mp + 2) / 5 + 1;
        let month = if mp < 10 { mp + 3 } else { mp - 9 };
        let year = yoe + era * 400 + i64::from(month <= 2);
        let (seconds, us) = (within / 1_000_000, within % 1_000_000);
        let (hour, minute, second) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
        format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{us:06}Z")
    }
}

impl Span {
    /// No time at all: what waits for so long does not wait.
    pub const ZERO: Span = Span(0);

    /// A span of so many microseconds, negative ones too.
    pub const fn from_micros(us: i64) -> Self {
        Span(us)
    }

    /// A span of so many seconds; as long as can be said where that overflows.
    pub const fn from_secs(seconds: i64) -> Self {
        Span(seconds.saturating_mul(1_000_000))
    }

    /// How many microseconds it is.
    pub const fn micros(self) -> i64 {
        self.0
    }
}

impl Add<Span> for Instant {
    type Output = Instant;

    fn add(self, span: Span) -> Instant {
        Instant(self.0.saturating_add(span.0))
    }
}

impl Sub<Span> for Instant {
    type Output = Instant;

    fn sub(self, span: Span) -> Instant {
        Instant(self.0.saturating_sub(span.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_date_is_that_of_the_calendar() {
        let iso = |us| Instant::from_micros(us).iso();
        assert_eq!(iso(0), "2000-01-01T00:00:00.000000Z");
        assert_eq!(iso(-1), "1999-12-31T23:59:59.999999Z");
        let days = |n: i64| iso(n * 86_400_000_000);
        assert_eq!(days(59), "2000-02-29T00:00:00.000000Z");
        assert_eq!(days(60), "2000-03-01T00:00:00.000000Z");
        assert_eq!(days(36_525 + 58), "2100-02-28T00:00:00.000000Z");
        assert_eq!(days(36_525 + 59), "2100-03-01T00:00:00.000000Z");
        assert_eq!(iso(820_540_800_000_000), "2026-01-01T00:00:00.000000Z");
    }
}
