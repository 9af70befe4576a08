//! What was counted, shown and reset.

use crate::pg::call::args::{text_datum, Answer, Args};
use crate::pg::call::composite;
use crate::pg::call::errors::Refusal;
use crate::pg::session::server;
use crate::statistics::{self, Counter};
use pgrx::pg_sys::Datum;

/// `fence.read_stats()`: one row, of zeros where nothing was counted.
pub fn read_stats(args: Args) -> Result<Answer, Refusal> {
    use Counter::*;
    let seen = statistics::snapshot();
    let number = |counter: Counter| Some(Datum::from(seen.get(counter) as i64));
    let wait_ms = seen.get(WaitTime) as f64 / 1_000.0;
    Ok(composite::row(
        args,
        &[
            seen.reset_at.map(|at| at.micros().into()),
            number(Grants),
            number(TriesLost),
            number(Waits),
            // A double precision is passed as its bits.
            Some(Datum::from(wait_ms.to_bits())),
            number(Renewals),
            number(RenewalsLost),
            number(Releases),
            number(Revocations),
            number(TakeOvers),
            number(Guards),
            number(WritesChecked),
            number(Pf001),
            number(Pf002),
            number(Pf003),
            number(Pf004),
            number(Pf005),
            number(Jumps),
        ],
    ))
}

/// `fence.read_refusals()`: a row for each refused write that is kept, newest first.
pub fn read_refusals(args: Args) -> Result<Answer, Refusal> {
    let rows = statistics::refusals().into_iter().map(|refused| {
        let [sqlstate, relation, lease, holder, role, application, address, key] =
            refused.texts.map(|text| text.map(|text| text_datum(&text)));
        [
            Some(refused.at.micros().into()),
            sqlstate,
            relation,
            key,
            lease,
            refused.presented.map(|token| token.bigint().into()),
            refused.stored.map(|token| token.bigint().into()),
            holder,
            role,
            application,
            address,
            Some(refused.pid.into()),
        ]
    });
    Ok(composite::value_rows(args, rows))
}

/// `fence_stats_reset()`: begins to count anew. Errors: 25006.
pub fn reset(_: Args) -> Result<Answer, Refusal> {
    server::writable(c"fence_stats_reset()");
    statistics::reset();
    Ok(Answer::Null)
}
