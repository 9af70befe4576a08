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
