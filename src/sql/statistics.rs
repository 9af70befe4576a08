//! The functions that show and reset the counters.

use crate::encoding::in_server_encoding;
use crate::errors::Report;
use crate::pg::call::args::{Answer, Args, text_datum};
use crate::pg::call::composite::{self, RowAnswer};
use crate::pg::session::xact;
use crate::statistics::{self, Counter};
use pgrx::pg_sys::Datum;

/// `fence.read_stats()`: one row, with zeros if nothing was counted.
pub fn read_stats(args: Args) -> Result<Answer, Report> {
    let seen = statistics::snapshot();
    let mut row = vec![seen.reset_at.map(|at| at.micros().into())];
    row.extend(seen.numbers.map(|number| Some(Datum::from(number as i64))));
    // The value in milliseconds. A double precision is passed as its bits.
    let wait_time = Counter::WaitTime as usize;
    row[1 + wait_time] = Some(Datum::from((seen.numbers[wait_time] as f64 / 1_000.0).to_bits()));
    Ok(composite::row(args, &row))
}

/// `fence.read_refusals()`: a row for each stored refused write, newest first.
pub fn read_refusals(args: Args) -> Result<Answer, Report> {
    let rows = RowAnswer::begin(args);
    for (at, pid, presented, stored, texts) in statistics::refusals() {
        let [sqlstate, relation, lease, holder, role, application, address, key] =
            texts.map(|text| text.map(|text| text_datum(&in_server_encoding(text))));
        rows.put([
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
        ]);
    }
    Ok(Answer::Null)
}

/// `fence_stats_reset()`: sets all counts to zero. Errors: 25006.
pub fn reset(_: Args) -> Result<Answer, Report> {
    xact::writable(c"fence_stats_reset()");
    statistics::reset();
    Ok(Answer::Null)
}
