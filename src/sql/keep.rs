//! The heartbeat of a process: a row for each pair of a lease and a token.

use super::arguments;
use super::lease::may_lose_grants;
use crate::errors::Report;
use crate::leases::keep;
use crate::pg::call::args::{Answer, Args, interval_datum, text_datum};
use crate::pg::call::composite::RowAnswer;
use crate::pg::session::commit::WalSpan;
use crate::pg::session::xact;

/// `lease_keep(names, tokens) → rows`: renews the leases whose locks are free. Returns for each pair the outcome, and
/// when to send it again. Errors: 22004, 22023, 25006, 55000.
pub fn keep(args: Args) -> Result<Answer, Report> {
    let given = arguments::pairs(&args)?;
    xact::writable(c"lease_keep()");
    let rows = RowAnswer::begin(args);
    let pairs: Vec<keep::Pair> = given.iter().map(arguments::fit_pair).collect();
    let span = WalSpan::begin();
    let (answers, end_with_session) = keep::keep(&pairs)?;
    if may_lose_grants(end_with_session) {
        span.may_be_lost();
    }
    for ((name, token), answer) in given.into_iter().zip(answers) {
        let (outcome, renewed, remaining, code) = match answer {
            keep::Answer::Kept(token, ttl) => ("kept", Some(token), Some(ttl), None),
            keep::Answer::Lost => ("lost", None, None, None),
            keep::Answer::Later(code, left) => ("later", None, left, Some(code)),
            keep::Answer::Refused(code) => ("refused", None, None, Some(code)),
        };
        rows.put([
            Some(name.datum()),
            Some(token.bigint().into()),
            Some(text_datum(outcome.as_bytes())),
            renewed.map(|token| token.bigint().into()),
            remaining.map(interval_datum),
            answer.again_in().map(interval_datum),
            code.map(|code| text_datum(code.code().as_bytes())),
        ]);
    }
    Ok(Answer::Null)
}
