//! The clock that goes on while the machine is suspended. All processes of the machine share it.

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::ops::{Add, Sub};
use std::time::Duration;

/// A moment of `CLOCK_BOOTTIME`. Nobody can set that clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Moment(Duration);

impl Moment {
    pub fn now() -> Moment {
        Moment(clock_gettime(ClockId::CLOCK_BOOTTIME).expect("Linux has this clock").into())
    }

    /// Returns the time until the moment, or zero if it has passed.
    pub fn remaining(self) -> Duration {
        self.0.saturating_sub(Moment::now().0)
    }

    pub fn has_passed(self) -> bool {
        Moment::now() >= self
    }

    /// Returns the time from the start of the machine to the moment.
    pub fn as_duration(self) -> Duration {
        self.0
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;

    fn add(self, span: Duration) -> Moment {
        Moment(self.0.saturating_add(span))
    }
}

impl Sub<Duration> for Moment {
    type Output = Moment;

    fn sub(self, span: Duration) -> Moment {
        Moment(self.0.saturating_sub(span))
    }
}
