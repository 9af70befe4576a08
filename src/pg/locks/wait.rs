//! Sleeping, and waiting for a lock no longer than one likes.

use crate::errors::{self, Refusal};
use crate::pg::compat;
use crate::pg::locks::lock::LockTag;
use crate::pg::locks::time_limit;
use crate::pg::session::xact;
use pg_fence_rules::locks::LockMode;
use pg_fence_rules::Span;
use pgrx::pg_sys;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The wait event that `pg_stat_activity` shows of a session that sleeps.
struct WaitEvent {
    name: &'static CStr,
    /// 0 until this session has asked for it.
    number: AtomicU32,
}

/// The head of a queue waits until the lease can be had.
static FOR_A_LEASE: WaitEvent = WaitEvent::named(c"PgFenceLease");
/// A move of the token sequence waits until the server's clock has gone on.
static FOR_THE_CLOCK: WaitEvent = WaitEvent::named(c"PgFenceClock");

impl WaitEvent {
    const fn named(name: &'static CStr) -> Self {
        WaitEvent { name, number: AtomicU32::new(0) }
    }

    /// Where there are no names, or no more of them, it shows as any wait of an extension.
    fn number(&self) -> u32 {
        if self.number.load(Ordering::Relaxed) == 0 {
            let may_ask = compat::NAMES_WAIT_EVENTS && xact::may_begin_savepoint();
            let named = || xact::in_savepoint(|| compat::wait_event(self.name));
            let number = may_ask.then(named).flatten().unwrap_or(pg_sys::PG_WAIT_EXTENSION);
            self.number.store(number, Ordering::Relaxed);
        }
        self.number.load(Ordering::Relaxed)
    }
}

/// Somebody waits since then, for so long at most. Measured by a clock that nobody can set.
pub struct Waiting {
    since: Instant,
    at_most: Duration,
}

impl Waiting {
    /// A wait that begins now.
    pub fn since_now(at_most: Duration) -> Self {
        Waiting { since: Instant::now(), at_most }
    }

    /// The time that is left.
    pub fn left(&self) -> Duration {
        self.at_most.saturating_sub(self.since.elapsed())
    }

    /// 55P03 when `lock_timeout` has passed, which counts for the whole wait.
    fn check_lock_timeout(&self) -> Result<(), Refusal> {
        if lock_timeout().is_some_and(|timeout| self.since.elapsed() >= timeout) {
            return Err(errors::lock_timeout());
        }
        Ok(())
    }

    /// Sleeps for so long, or until the wait or `lock_timeout` is over, or until woken; false where the wait is over
    /// already. 55P03 when `lock_timeout` has passed; raises what cancel and timeouts raise.
    pub fn sleep(&self, span: Duration) -> Result<bool, Refusal> {
        if self.left().is_zero() {
            return Ok(false);
        }
        self.check_lock_timeout()?;
        let until_timeout = lock_timeout().map(|t| t.saturating_sub(self.since.elapsed()));
        let span = span.min(self.left()).min(until_timeout.unwrap_or(Duration::MAX));
        wait_for_latch(span, &FOR_A_LEASE);
        pgrx::check_for_interrupts!();
        Ok(true)
    }
}

/// Sleeps for so long; raises what cancel and timeouts raise.
pub fn pause(span: Span) {
    let span = Duration::from_micros(span.micros().max(0).unsigned_abs());
    let since = Instant::now();
    while let Some(left) = span.checked_sub(since.elapsed()).filter(|left| !left.is_zero()) {
        wait_for_latch(left, &FOR_THE_CLOCK);
        reset();
    }
}

/// Sleeps for so long, or until woken.
fn wait_for_latch(span: Duration, event: &WaitEvent) {
    let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
    let (ms, event) = (in_ms(span).into(), event.number());
    // SAFETY: this process's latch.
    unsafe { pg_sys::WaitLatch(pg_sys::MyLatch, events as i32, ms, event) };
}

/// Whole milliseconds that are not less.
fn in_ms(span: Duration) -> i32 {
    i32::try_from(span.as_micros().div_ceil(1_000)).unwrap_or(i32::MAX)
}

/// The setting; None when it is off.
fn lock_timeout() -> Option<Duration> {
    // SAFETY: reads a setting.
    let ms = unsafe { pg_sys::LockTimeout };
    (ms > 0).then(|| Duration::from_millis(ms.unsigned_abs().into()))
}

/// Takes a lock at once, or waits for it no longer than that: then it is false. Cancel, timeouts and the deadlock detector
/// end the wait with their own errors; 53200 as for `LockTag::take`.
///
/// Postgres's timeouts follow the server's clock. Set forward, it ends the wait too early: then the wait begins again,
/// at the end of the queue. Set back, it makes the wait longer.
pub fn take_within(tag: &LockTag, mode: LockMode, waiting: &Waiting) -> Result<bool, Refusal> {
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

/// Forgets wake-ups so far; raises what cancel and timeouts raise, for theirs are among them.
pub fn reset() {
    // SAFETY: this process's latch.
    unsafe { pg_sys::ResetLatch(pg_sys::MyLatch) };
    pgrx::check_for_interrupts!();
}

/// Begins a look at what is waited for: a wake-up after it is not lost. Ends the session when its client has gone, for
/// nobody would get the lease.
pub fn begin_look() {
    reset();
    check_client();
}

fn check_client() {
    // SAFETY: asks the socket; the flags are those that Postgres's own check sets.
    unsafe {
        if !pg_sys::MyProcPort.is_null() && !compat::guarded(|| compat::pq_check_connection()) {
            pg_sys::ClientConnectionLost = 1;
            pg_sys::InterruptPending = 1;
            pgrx::check_for_interrupts!();
        }
    }
}
