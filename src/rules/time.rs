//! Points and spans of time as types of their own, so that neither is mistaken for the other or for a token. "Never" is
//! an Option's None.

use std::ops::{Add, Sub};

/// A point in time: microseconds since 2000-01-01 00:00 UTC, as Postgres counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Instant(i64);

/// A span of time, in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Span(i64);

impl Instant {
    /// Before any deadline.
    pub const EARLIEST: Instant = Instant(i64::MIN);
    /// After any deadline, for grants that never expire.
    pub const LATEST: Instant = Instant(i64::MAX);

    /// The time `us` microseconds after 2000-01-01 00:00 UTC, as in Postgres's `timestamptz`.
    pub const fn from_micros(us: i64) -> Self {
        Instant(us)
    }

    /// The number of microseconds since 2000-01-01 00:00 UTC.
    pub const fn micros(self) -> i64 {
        self.0
    }

    /// The span from `earlier` to this time; negative if this time is before.
    pub const fn since(self, earlier: Instant) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }
}

impl Span {
    /// The empty span; a wait of this length does not wait.
    pub const ZERO: Span = Span(0);

    /// A span of `us` microseconds, which may be negative.
    pub const fn from_micros(us: i64) -> Self {
        Span(us)
    }

    /// A span of this number of seconds, or the longest one if that overflows.
    pub const fn from_secs(seconds: i64) -> Self {
        Span(seconds.saturating_mul(1_000_000))
    }

    /// The number of microseconds in the span.
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
