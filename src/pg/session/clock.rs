//! The server's clock.

use crate::encoding::to_utf8;
use crate::pg::call::args::{bytes_of, text_datum};
use crate::pg::raw;
use pg_fence_rules::Instant;
use pgrx::{direct_function_call_as_datum, pg_sys};
use std::time::Duration;

/// The server's clock, now.
pub fn now() -> Instant {
    // SAFETY: reads the clock.
    Instant::from_micros(unsafe { raw::GetCurrentTimestamp() })
}

/// How long until the server's clock shows that time; zero when it has passed, for ever where there is none.
pub fn span_until(at: Option<Instant>) -> Duration {
    at.map_or(Duration::MAX, |at| {
        Duration::from_micros(at.since(now()).micros().max(0).unsigned_abs())
    })
}

/// A time in ISO 8601, UTC; `infinity` where it has no end.
pub fn iso(at: Instant) -> String {
    if at == Instant::LATEST {
        return "infinity".into();
    }
    let format = text_datum(br#"YYYY-MM-DD"T"HH24:MI:SS.US"Z""#);
    let arguments = [Some(at.micros().into()), Some(format)];
    // SAFETY: a function of the server, with the arguments that it declares: a timestamp without a zone, and a text, which
    // it answers.
    unsafe {
        let text = direct_function_call_as_datum(pg_sys::timestamp_to_char, &arguments);
        text.map(|text| to_utf8(bytes_of(text))).unwrap_or_default()
    }
}
