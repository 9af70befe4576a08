//! A cancel after a span of time that no setting of the clock changes.
//!
//! Postgres's own timeouts are due at a time of the server's clock: set back by an hour, it lets them wait an hour more.
//! Where the system has timers of a monotonic clock, one of these sends this process what a cancel sends.

use pgrx::pg_sys;
use std::time::Duration;

/// Armed as long as it lives.
pub struct Alarm(Option<timer::Timer>);

impl Alarm {
    /// To go off after this span, once.
    pub fn after(span: Duration) -> Self {
        Alarm(timer::Timer::after(span))
    }

    /// From now on it does not go off.
    pub fn disarm(&self) {
        if let Some(timer) = &self.0 {
            timer.disarm();
        }
    }
}

/// Forgets a cancel that has not been served: one that an alarm has sent while another timeout ended the wait.
pub fn forget_cancel() {
    // SAFETY: a flag that the handler of this process's signals sets.
    unsafe { pg_sys::QueryCancelPending = 0 };
}

#[cfg(target_os = "linux")]
mod timer {
    use std::ffi::{c_int, c_long, c_void};
    use std::time::Duration;

    const CLOCK_MONOTONIC: c_int = 1;
    const SIGEV_SIGNAL: c_int = 0;
    const SIGINT: c_int = 2;

    /// struct sigevent of signal.h: 64 bytes.
    #[repr(C)]
    struct Event {
        value: usize,
        signal: c_int,
        notify: c_int,
        rest: [c_int; 12],
    }

    /// struct itimerspec of time.h.
    #[repr(C)]
    struct Setting {
        interval: [c_long; 2],
        value: [c_long; 2],
    }

    // time.h
    extern "C" {
        fn timer_create(clock: c_int, event: *mut Event, timer: *mut *mut c_void) -> c_int;
        fn timer_settime(
            timer: *mut c_void,
            flags: c_int,
            new: *const Setting,
            old: *mut Setting,
        ) -> c_int;
        fn timer_delete(timer: *mut c_void) -> c_int;
    }

    /// A timer of this process.
    pub struct Timer(*mut c_void);

    impl Timer {
        /// None where the system gives none: then Postgres's own timeout is all there is.
        pub fn after(span: Duration) -> Option<Self> {
            let mut event = Event { value: 0, signal: SIGINT, notify: SIGEV_SIGNAL, rest: [0; 12] };
            let mut timer = std::ptr::null_mut();
            // SAFETY: both point to values of the system's layout.
            let made = unsafe { timer_create(CLOCK_MONOTONIC, &mut event, &mut timer) } == 0;
            let timer = made.then_some(Timer(timer))?;
            // Zero would disarm it.
            timer.set(span.max(Duration::from_millis(1)));
            Some(timer)
        }

        pub fn disarm(&self) {
            self.set(Duration::ZERO);
        }

        fn set(&self, span: Duration) {
            let seconds = c_long::try_from(span.as_secs()).unwrap_or(c_long::MAX);
            let value = [seconds, c_long::from(span.subsec_nanos())];
            let setting = Setting { interval: [0, 0], value };
            // SAFETY: a timer that was made, and is deleted on drop.
            unsafe { timer_settime(self.0, 0, &setting, std::ptr::null_mut()) };
        }
    }

    impl Drop for Timer {
        fn drop(&mut self) {
            // SAFETY: as above.
            unsafe { timer_delete(self.0) };
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod timer {
    use std::time::Duration;

    pub struct Timer;

    impl Timer {
        pub fn after(_: Duration) -> Option<Self> {
            None
        }

        pub fn disarm(&self) {}
    }
}
