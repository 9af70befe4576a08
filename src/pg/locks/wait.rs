//! Sleeping, and waiting for a lock for a limited time.

use crate::errors::{self, Report};
use crate::pg::compat;
use crate::pg::locks::lock::LockTag;
use crate::pg::locks::time_limit;
use pg_fence_rules::Span;
use pg_fence_rules::locks::LockMode;
use pgrx::pg_sys;
use std::ffi::CStr;
use std::time::{Duration, Instant};

/// The wait event of the head of a queue, which waits for its lease.
const FOR_A_LEASE: &CStr = c"PgFenceLease";
/// The wait event before an advance of the token sequence, which waits for the server's clock.
const FOR_THE_CLOCK: &CStr = c"PgFenceClock";

/// A wait with its start and its longest time, measured by a monotonic clock.
pub struct Waiting {
    since: Instant,
    at_most: Duration,
}

impl Waiting {
    /// Begins a wait of at most `at_most`.
    pub fn since_now(at_most: Duration) -> Self {
        Waiting { since: Instant::now(), at_most }
    }

    /// Begins a wait of at most `at_most` that is over before `lock_timeout` could end it with an error.
    pub fn without_lock_timeout(at_most: Duration) -> Self {
        Waiting::since_now(lock_timeout().map_or(at_most, |timeout| at_most.min(timeout / 2)))
    }

    /// The remaining time.
    pub fn left(&self) -> Duration {
        self.at_most.saturating_sub(self.since.elapsed())
    }

    /// Errors with 55P03 if `lock_timeout` has passed, which counts for the whole wait.
    fn check_lock_timeout(&self) -> Result<(), Report> {
        if lock_timeout().is_some_and(|timeout| self.since.elapsed() >= timeout) {
            return Err(errors::lock_timeout());
        }
        Ok(())
    }

    /// Sleeps for `span`, or until the wait or `lock_timeout` is over, or until woken. Returns false if the wait was
    /// over already. Errors: 55P03 if `lock_timeout` has passed, and those of cancels and timeouts.
    pub fn sleep(&self, span: Duration) -> Result<bool, Report> {
        if self.left().is_zero() {
            return Ok(false);
        }
        self.check_lock_timeout()?;
        let until_timeout = lock_timeout().map(|t| t.saturating_sub(self.since.elapsed()));
        let span = span.min(self.left()).min(until_timeout.unwrap_or(Duration::MAX));
        wait_for_latch(span, FOR_A_LEASE);
        pgrx::check_for_interrupts!();
        Ok(true)
    }
}

/// Sleeps for `span`. Raises the errors of cancels and timeouts.
pub fn pause(span: Span) {
    let span = Duration::from_micros(span.micros().max(0).unsigned_abs());
    let since = Instant::now();
    while let Some(left) = span.checked_sub(since.elapsed()).filter(|left| !left.is_zero()) {
        wait_for_latch(left, FOR_THE_CLOCK);
        reset();
    }
}

/// Sleeps for `span`, or until woken. `pg_stat_activity` shows the event.
fn wait_for_latch(span: Duration, event: &CStr) {
    let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
    let (ms, event) = (in_ms(span).into(), compat::wait_event(event));
    // SAFETY: this process's latch.
    unsafe { pg_sys::WaitLatch(pg_sys::MyLatch, events as i32, ms, event) };
}

/// A span in milliseconds, rounded up.
fn in_ms(span: Duration) -> i32 {
    i32::try_from(span.as_micros().div_ceil(1_000)).unwrap_or(i32::MAX)
}

/// The setting `lock_timeout`; `None` if it is off.
fn lock_timeout() -> Option<Duration> {
    // SAFETY: reads a setting.
    let ms = unsafe { pg_sys::LockTimeout };
    (ms > 0).then(|| Duration::from_millis(ms.unsigned_abs().into()))
}

/// Takes a lock, waiting for it if it is held. Returns false if the time is up first. Cancels, timeouts and the
/// deadlock detector end the wait with their own errors; 53200 as for `LockTag::take`.
///
/// Postgres's timeouts follow the server's clock. If that is set forward, the wait ends too early and begins again at
/// the end of the queue. If it is set back, the wait takes longer.
pub fn take_within(tag: &LockTag, mode: LockMode, waiting: &Waiting) -> Result<bool, Report> {
    if tag.take(mode, false)? {
        return Ok(true);
    }
    if waiting.left().is_zero() {
        return Ok(false);
    }
    loop {
        let left_ms = in_ms(waiting.left()).max(1);
        if let Some(taken) = time_limit::at_most(left_ms, || tag.take(mode, true)) {
            return taken;
        }
        if waiting.left().is_zero() {
            return Ok(false);
        }
        waiting.check_lock_timeout()?;
    }
}

/// Clears earlier wake-ups, and raises the errors of cancels and timeouts, whose wake-ups may be among them.
pub fn reset() {
    // SAFETY: this process's latch.
    unsafe { pg_sys::ResetLatch(pg_sys::MyLatch) };
    pgrx::check_for_interrupts!();
}

/// Prepares for an attempt, so that a wake-up after it is not lost. Ends the session if its client has disconnected,
/// because nobody would use the lease.
pub fn begin_attempt() {
    reset();
    // SAFETY: asks the socket; Postgres's own check sets the same flags.
    unsafe {
        if !pg_sys::MyProcPort.is_null() && !compat::guarded(|| compat::pq_check_connection()) {
            pg_sys::ClientConnectionLost = 1;
            pg_sys::InterruptPending = 1;
            pgrx::check_for_interrupts!();
        }
    }
}
