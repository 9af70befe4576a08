//! Waiting for a lease, in its queue.

use super::request::{Request, unless_refused};
use super::try_acquire::{takes_back_its_own, try_acquire};
use crate::errors::Report;
use crate::pg::locks::lock::LockTag;
use crate::pg::locks::wait::{self, Waiting};
use crate::pg::memory::Scratch;
use crate::pg::session::clock;
use crate::pg::state::opened::IfLocked;
use crate::statistics;
use pg_fence_rules::Token;
use pg_fence_rules::locks::HEAD_OF_QUEUE;
use std::time::Duration;

/// The longest sleep of the head of a queue: nobody wakes it when a prepared transaction is finished elsewhere, or the
/// server's clock is set.
const MAX_HEAD_SLEEP: Duration = Duration::from_secs(1);

/// Time between attempts of a caller that reclaims its own grant while it is guarded. The caller is in no queue, so
/// nobody wakes it.
const RECLAIM_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Tries to acquire; for a single lease, waits in the queue for up to `wait`. Returns `None` if the time is up.
///
/// The head's wait is measured by a monotonic clock, and that of the sessions behind it by Postgres's timeouts; whether
/// a grant is over is decided by the server's clock. The table is closed while the session sleeps and open during each
/// attempt only, so that maintenance does not wait for waiting sessions.
pub fn until_granted(requests: &[Request], wait: Duration) -> Result<Option<Token>, Report> {
    let if_locked = if wait.is_zero() { IfLocked::WaitForHolders } else { IfLocked::GiveUp };
    if let Ok(token) = unless_refused(try_acquire(requests, true, if_locked))? {
        return Ok(Some(token));
    }
    let [request] = requests else { return Ok(None) };
    if wait.is_zero() {
        return Ok(None);
    }
    let waiting = Waiting::since_now(wait);
    let _counted = statistics::enter_queue();
    // The current holder may re-acquire ahead of the queue, once no transaction guards the lease.
    let mut scratch = Scratch::new();
    while scratch.run(|| takes_back_its_own(request))? {
        wait::begin_attempt();
        let tried = scratch.run(|| try_acquire(requests, false, IfLocked::GiveUp));
        if let Ok(token) = unless_refused(tried)? {
            return Ok(Some(token));
        }
        if !waiting.sleep(RECLAIM_RETRY_INTERVAL)? {
            return Ok(None);
        }
    }
    let queue = LockTag::queue(&request.name);
    if !wait::take_within(&queue, HEAD_OF_QUEUE.mode, &waiting)? {
        return Ok(None);
    }
    let token = as_head(request, &waiting);
    queue.release(HEAD_OF_QUEUE.mode);
    token
}

fn as_head(request: &Request, waiting: &Waiting) -> Result<Option<Token>, Report> {
    let mut scratch = Scratch::new();
    loop {
        // Reset before the attempt, so that a wake-up that comes after the attempt is not lost.
        wait::begin_attempt();
        let requests = std::slice::from_ref(request);
        let tried = scratch.run(|| try_acquire(requests, false, IfLocked::GiveUp));
        let until = match unless_refused(tried)? {
            Ok(token) => return Ok(Some(token)),
            Err(until) => until,
        };
        if !waiting.sleep(clock::span_until(until).min(MAX_HEAD_SLEEP))? {
            return Ok(None);
        }
    }
}
