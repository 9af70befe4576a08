//! The clock, and waits by it. A moment is the time since an unknown start.

use nix::time::{ClockId, clock_gettime};
use std::future::Future;
use std::time::Duration;

/// A monotonic clock. It goes on while the machine sleeps, if the system has such a clock.
#[cfg(any(target_os = "linux", target_os = "android", target_os = "fuchsia"))]
const CLOCK: ClockId = ClockId::CLOCK_BOOTTIME;
#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "fuchsia")))]
const CLOCK: ClockId = ClockId::CLOCK_MONOTONIC;

/// Tokio's timers stand still while the machine sleeps, so each wait reads the clock again after
/// this time.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

pub fn now() -> Duration {
    clock_gettime(CLOCK).expect("the system has this clock").into()
}

/// Returns the moment that is `span` from now.
pub fn after(span: Duration) -> Duration {
    now().saturating_add(span)
}

/// Returns the time until the moment, or zero if the moment has passed.
pub fn left(moment: Duration) -> Duration {
    moment.saturating_sub(now())
}

pub async fn sleep(span: Duration) {
    let until = after(span);
    while now() < until {
        tokio::time::sleep(left(until).min(CHECK_INTERVAL)).await;
    }
}

/// Returns the result of `work`, or None if it takes longer than `limit`.
pub async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        done = work => Some(done),
        () = sleep(limit) => None,
    }
}
