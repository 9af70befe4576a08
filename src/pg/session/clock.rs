//! The server's clock.

use crate::encoding::to_utf8;
use crate::pg::call::args::{bytes_of, text_datum};
use crate::pg::raw;
use pg_fence_rules::Instant;
use pgrx::{direct_function_call_as_datum, pg_sys};
use std::time::Duration;

/// The present time of the server's clock.
pub fn now() -> Instant {
    // SAFETY: reads the clock.
    Instant::from_micros(unsafe { raw::GetCurrentTimestamp() })
}

/// Time until the server's clock reaches `at`: zero if it has passed, the longest duration if there is none.
pub fn span_until(at: Option<Instant>) -> Duration {
    at.map_or(Duration::MAX, |at| {
        Duration::from_micros(at.since(now()).micros().max(0).unsigned_abs())
    })
}

/// A time in ISO 8601, UTC; `infinity` for a grant that never expires.
pub fn iso(at: Instant) -> String {
    if at == Instant::LATEST {
        return "infinity".into();
    }
    let format = text_datum(br#"YYYY-MM-DD"T"HH24:MI:SS.US"Z""#);
    let arguments = [Some(at.micros().into()), Some(format)];
    // SAFETY: a function of the server, with arguments of its declared types (a timestamp without time zone, and a
    // text); it returns a text.
    unsafe {
        let text = direct_function_call_as_datum(pg_sys::timestamp_to_char, &arguments);
        text.map(|text| to_utf8(bytes_of(text))).unwrap_or_default()
    }
}
