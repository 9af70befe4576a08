//! The counters, shown and reset.

use crate::encoding::in_server_encoding;
use crate::errors::Refusal;
use crate::pg::call::args::{text_datum, Answer, Args};
use crate::pg::call::composite;
use crate::pg::session::xact;
use crate::statistics::{self, Counter};
use pgrx::pg_sys::Datum;

/// `fence.read_stats()`: one row, of zeros where nothing was counted.
pub fn read_stats(args: Args) -> Result<Answer, Refusal> {
    let seen = statistics::snapshot();
    let value = |column: &str| {
        if column == "stats_reset" {
            return seen.reset_at.map(|at| at.micros().into());
        }
        match Counter::of_column(column)? {
            // In milliseconds. A double precision is passed as its bits.
            Counter::WaitTime => {
                let wait_ms = seen.get(Counter::WaitTime) as f64 / 1_000.0;
                Some(Datum::from(wait_ms.to_bits()))
            }
            counter => Some(Datum::from(seen.get(counter) as i64)),
        }
    };
    Ok(composite::row_by_names(args, value))
}

/// `fence.read_refusals()`: a row for each refused write that is kept, newest first.
pub fn read_refusals(args: Args) -> Result<Answer, Refusal> {
    let rows = statistics::refusals().into_iter().map(|(at, pid, presented, stored, texts)| {
        let [sqlstate, relation, lease, holder, role, application, address, key] =
            texts.map(|text| text.map(|text| text_datum(&in_server_encoding(text))));
        [
            Some(at.into()),
            sqlstate,
            relation,
            key,
            lease,
            presented.map(Datum::from),
            stored.map(Datum::from),
            holder,
            role,
            application,
            address,
            Some(pid.into()),
        ]
    });
    Ok(composite::value_rows(args, rows))
}

/// `fence_stats_reset()`: counts from zero. Errors: 25006.
pub fn reset(_: Args) -> Result<Answer, Refusal> {
    xact::writable(c"fence_stats_reset()");
    statistics::reset();
    Ok(Answer::Null)
}
