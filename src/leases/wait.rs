//! Waiting for a lease, in its line.

use super::acquire::attempt;
use super::request::{Request, Tried};
use crate::pg::call::errors::Refusal;
use crate::pg::locks::lock::LockTag;
use crate::pg::locks::relation_lock::Wait;
use crate::pg::locks::wait::{self, Waiting};
use crate::pg::memory::Scratch;
use crate::pg::session::server;
use crate::statistics;
use pg_fence_rules::locks::HEAD_OF_LINE;
use pg_fence_rules::Token;
use std::time::Duration;

/// The head looks at least this often: a prepared transaction may be finished by a session that knows
/// nothing of leases, and the server's clock may be set.
const LOOK_AT_LEAST: Duration = Duration::from_secs(1);

/// Waits in line for up to `wait`, then gives up: None.
///
/// How long the head has waited is measured by a clock that nobody can set; those behind it, by Postgres's timeouts.
/// When a grant is over is told by the server's clock. The table is closed while the session sleeps, and open for each
/// look only: maintenance waits for nobody who waits.
pub fn acquire(request: &Request, wait: Duration) -> Result<Option<Token>, Refusal> {
    if let Tried::Won(token) = attempt(request, true, Wait::Never)? {
        return Ok(Some(token));
    }
    let waiting = Waiting::since_now(wait);
    let _counted = statistics::stands_in_line();
    let line = LockTag::line(&request.name);
    if !line.take(HEAD_OF_LINE.mode, false)?
        && !wait::take_within(&line, HEAD_OF_LINE.mode, &waiting)?
    {
        return Ok(None);
    }
    let token = as_head(request, &waiting);
    line.give(HEAD_OF_LINE.mode);
    token
}

fn as_head(request: &Request, waiting: &Waiting) -> Result<Option<Token>, Refusal> {
    let scratch = Scratch::new();
    loop {
        // Before the look, so that a wake-up after it is not lost.
        wait::reset();
        wait::check_client();
        let until = match scratch.turn(|| attempt(request, false, Wait::Never))? {
            Tried::Won(token) => return Ok(Some(token)),
            Tried::Lost { until } => until,
        };
        if waiting.left().is_zero() {
            return Ok(None);
        }
        waiting.check_lock_timeout()?;
        waiting.sleep(server::span_until(until).min(LOOK_AT_LEAST));
    }
}
