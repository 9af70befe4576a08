//! The times at which a command is ended if its lease is not renewed.
//!
//! ```text
//! renewed ── beat ── next renewal ── attempt ── once more ── attempt ── TERM ── grace ── KILL ── reserve ── deadline
//! ```

use crate::clock::Moment;
use crate::failure::{Failure, Result};
use pg_fence_client::BEATS_PER_TTL;
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    pub ttl: Duration,
    /// The time from TERM to KILL.
    pub grace: Duration,
    /// The time from KILL to the deadline, in which the processes end.
    reserve: Duration,
}

impl Times {
    /// Fails if the grace does not fit between a failed renewal and the deadline.
    pub fn new(ttl: Duration, grace: Option<Duration>) -> Result<Times> {
        if ttl < Duration::from_millis(300) {
            return Err(Failure::usage("--ttl is at least 300ms"));
        }
        let reserve = (ttl / 15).clamp(Duration::from_millis(50), Duration::from_secs(1));
        let longest = ttl / 3 - reserve;
        let grace = grace.unwrap_or((ttl / 6).min(Duration::from_secs(5)).min(longest));
        if grace > longest {
            return Err(Failure::usage(format!(
                "--grace {} does not fit between a renewal that has failed and the end of the lease: with --ttl {} \
                 it is at most {}",
                humantime::format_duration(grace),
                humantime::format_duration(ttl),
                humantime::format_duration(longest)
            )));
        }
        Ok(Times { ttl, grace, reserve })
    }

    /// How long a renewal may take before another connection is tried: the second attempt has the same time before
    /// TERM. The client's deadline is a fiftieth of the ttl earlier.
    pub fn attempt_timeout(&self) -> Duration {
        let beat = self.ttl / BEATS_PER_TTL;
        (self.ttl / 50 * 49 - self.reserve - self.grace - beat) / 2
    }

    /// When to send TERM if the lease is not renewed.
    pub fn term_at(&self, deadline: Moment) -> Moment {
        self.kill_at(deadline) - self.grace
    }

    /// When to send KILL at the latest.
    pub fn kill_at(&self, deadline: Moment) -> Moment {
        deadline - self.reserve
    }

    /// When the renewer kills the command, if the supervisor has not done so by then.
    pub fn enforce_at(&self, deadline: Moment) -> Moment {
        deadline - self.reserve / 2
    }

    /// How long the supervisor has to end the command after a loss, before the renewer kills it.
    pub fn takeover_delay(&self) -> Duration {
        self.grace + self.reserve / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn the_command_has_ended_by_the_deadline_and_not_before_a_renewal_may_fail() {
        for ttl in [ms(300), ms(3_000), ms(30_000), ms(3_600_000), Duration::MAX / 2] {
            let times = Times::new(ttl, None).unwrap();
            let deadline = Moment::now() + ttl;
            assert!(times.kill_at(deadline) < deadline);
            assert!(times.term_at(deadline) <= times.kill_at(deadline));
            assert!(times.term_at(deadline) >= deadline - ttl / 3, "{ttl:?}");
            let second = ttl / BEATS_PER_TTL + times.attempt_timeout() * 2;
            assert!(second <= ttl - times.grace - times.reserve, "{ttl:?}");
            assert!(times.attempt_timeout() >= ttl / 8, "{ttl:?}");
        }
    }

    #[test]
    fn a_grace_must_fit() {
        assert_eq!(Times::new(ms(30_000), Some(ms(9_000))).unwrap().grace, ms(9_000));
        assert!(Times::new(ms(30_000), Some(ms(9_001))).is_err());
        assert!(Times::new(ms(299), None).is_err());
        assert_eq!(Times::new(ms(30_000), Some(Duration::ZERO)).unwrap().grace, Duration::ZERO);
    }
}
