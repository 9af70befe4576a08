//! The clock, and waits by it.

use std::future::Future;
use std::ops::Add;
use std::time::Duration;

/// A moment on a clock that nobody can set, and that goes on while the machine sleeps where there is such a one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(Duration);

/// Tokio's timers stand still while the machine sleeps; so each wait looks at the clock again after this.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

impl Moment {
    /// The present one.
    pub fn now() -> Moment {
        #[cfg(any(target_os = "linux", target_os = "android", target_os = "fuchsia"))]
        let clock = rustix::time::ClockId::Boottime;
        #[cfg(not(any(target_os = "linux", target_os = "android", target_os = "fuchsia")))]
        let clock = rustix::time::ClockId::Monotonic;
        let now = rustix::time::clock_gettime(clock);
        // Neither part is ever negative on these clocks.
        Moment(Duration::new(now.tv_sec as u64, now.tv_nsec as u32))
    }

    /// How long it is until then; nothing where it has passed.
    pub fn remaining(self) -> Duration {
        self.0.saturating_sub(Moment::now().0)
    }

    /// Whether it is past.
    pub fn has_passed(self) -> bool {
        Moment::now() >= self
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;

    fn add(self, span: Duration) -> Moment {
        Moment(self.0.saturating_add(span))
    }
}

pub(crate) async fn sleep_until(moment: Moment) {
    while !moment.has_passed() {
        tokio::time::sleep(moment.remaining().min(LOOK_AGAIN)).await;
    }
}

pub(crate) async fn sleep(span: Duration) {
    sleep_until(Moment::now() + span).await;
}

/// What `work` comes to, or nothing where it takes longer than that.
pub(crate) async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        done = work => Some(done),
        () = sleep(limit) => None,
    }
}
