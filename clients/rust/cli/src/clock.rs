//! The clock that goes on while the machine sleeps, shared by all processes of this machine.

use crate::failure::{Failure, Result};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::ops::{Add, Sub};
use std::time::Duration;

/// A moment of `CLOCK_BOOTTIME`. Nobody can set that clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Moment(Duration);

impl Moment {
    pub fn now() -> Result<Moment> {
        let now = clock_gettime(ClockId::CLOCK_BOOTTIME);
        let now = now.map_err(|error| Failure::system("there is no clock", error))?;
        Ok(Moment(Duration::from(now)))
    }

    /// How long it is until then; nothing where it has passed.
    pub fn remaining(self) -> Result<Duration> {
        Ok(self.0.saturating_sub(Moment::now()?.0))
    }

    pub fn has_passed(self) -> Result<bool> {
        Ok(Moment::now()? >= self)
    }

    pub fn as_timespec(self) -> TimeSpec {
        TimeSpec::from_duration(self.0)
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
