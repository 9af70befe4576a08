//! The server's clock.

use crate::pg::raw;
use crate::pg::session::xact;
use pg_fence_rules::Instant;
use std::time::Duration;

/// The server's clock, now.
pub fn now() -> Instant {
    if crate::known_bugs::NOW {
        return xact::started_at();
    }
    // SAFETY: reads the clock.
    Instant::from_micros(unsafe { raw::GetCurrentTimestamp() })
}

/// How long until the server's clock shows that time; zero when it has passed, for ever where there is none.
pub fn span_until(at: Option<Instant>) -> Duration {
    at.map_or(Duration::MAX, |at| {
        Duration::from_micros(at.since(now()).micros().max(0).unsigned_abs())
    })
}
