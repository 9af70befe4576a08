//! The clock, and waits by it. A moment is the time since some other one.

use nix::time::{ClockId, clock_gettime};
use std::future::Future;
use std::time::Duration;

/// Nobody can set this clock, and it goes on while the machine sleeps if there is such a clock.
#[cfg(any(target_os = "linux", target_os = "android", target_os = "fuchsia"))]
const CLOCK: ClockId = ClockId::CLOCK_BOOTTIME;
#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "fuchsia")))]
const CLOCK: ClockId = ClockId::CLOCK_MONOTONIC;

/// Tokio's timers stand still while the machine sleeps, so each wait looks at the clock again.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

pub fn now() -> Duration {
    clock_gettime(CLOCK).expect("the system has this clock").into()
}

/// The moment after that span.
pub fn after(span: Duration) -> Duration {
    now().saturating_add(span)
}

/// How long it is until then; nothing if it has passed.
pub fn left(moment: Duration) -> Duration {
    moment.saturating_sub(now())
}

pub async fn sleep(span: Duration) {
    let until = after(span);
    while now() < until {
        tokio::time::sleep(left(until).min(LOOK_AGAIN)).await;
    }
}

/// The result of `work`, or nothing if it takes longer than that.
pub async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        done = work => Some(done),
        () = sleep(limit) => None,
    }
}
