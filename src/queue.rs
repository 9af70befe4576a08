//! Waiting in line for a lease.
//!
//! The line is the lock manager's own: waiters ask for one lock per lease and are served in the order they
//! came. Whoever has that lock is the head, the only one who looks; it sleeps until something can have
//! changed. A transaction that changed the lease finds the head by the lock and wakes it once its change is
//! visible and its own locks are gone.

use crate::acquire::{Request, Tried};
use crate::errors::Refusal;
use crate::lease;
use crate::pg::lock::{Mode as Lock, Tag};
use crate::pg::memory::Scratch;
use crate::pg::relation_lock::Wait;
use crate::pg::server;
use crate::pg::wait::{self, Waiting};
use crate::pg::xact::{self, SubTransaction};
use pg_fence_rules::Token;
use std::cell::RefCell;
use std::time::Duration;

/// The head looks at least this often: a prepared transaction may be finished by a session that knows
/// nothing of leases, and the server's clock may be set.
const LOOK_AT_LEAST: Duration = Duration::from_secs(1);

thread_local! {
    /// Leases that this transaction has changed or guarded.
    static CHANGED: RefCell<Vec<Changed>> = const { RefCell::new(Vec::new()) };
}

/// A lease that was changed or guarded.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Changed {
    line: Tag,
    /// In which savepoint.
    savepoint: SubTransaction,
    /// That one was rolled back: its locks go next.
    undone: bool,
}

/// Waits in line for up to `wait`, then gives up: None.
///
/// How long it has waited is measured by a clock that nobody can set; only when a grant is over is told by the
/// server's clock. The table is closed while the session sleeps, and open for each look only: maintenance waits for
/// nobody who waits.
pub fn acquire(request: &Request, wait: Duration) -> Result<Option<Token>, Refusal> {
    if let Tried::Won(token) = lease::attempt(request, true, Wait::Never)? {
        return Ok(Some(token));
    }
    let waiting = Waiting::since_now(wait);
    let line = Tag::queue(request.name);
    if !line.take(Lock::Own, false) && !wait::take_within(&line, Lock::Own, &waiting) {
        return Ok(None);
    }
    let token = as_head(request, &waiting);
    line.give(Lock::Own);
    token
}

fn as_head(request: &Request, waiting: &Waiting) -> Result<Option<Token>, Refusal> {
    let scratch = Scratch::new();
    loop {
        // Before the look, so that a wake-up after it is not lost.
        wait::reset();
        wait::check_client();
        let until = match scratch.turn(|| lease::attempt(request, false, Wait::Never))? {
            Tried::Won(token) => return Ok(Some(token)),
            Tried::Lost { until } => until,
        };
        if waiting.left().is_zero() {
            return Ok(None);
        }
        waiting.check_lock_timeout();
        waiting.sleep(server::span_until(until).min(LOOK_AT_LEAST));
    }
}

/// Does somebody wait for this lease?
pub fn somebody_waits(name: &[u8]) -> bool {
    let line = Tag::queue(name);
    let empty = line.take(Lock::Probe, false);
    if empty {
        line.give(Lock::Probe);
    }
    !empty
}

/// Wakes the head of the line now.
pub fn wake(name: &[u8]) {
    Tag::queue(name).wake(Lock::Own);
}

/// This transaction has changed the lease, or guards it: its end wakes the head of the line.
pub fn changed(name: &[u8]) {
    let (line, savepoint) = (Tag::queue(name), xact::savepoint());
    let new = Changed { line, savepoint, undone: false };
    CHANGED.with_borrow_mut(|changed| {
        // The same lease is mostly changed many times in a row.
        if changed.last() != Some(&new) {
            changed.push(new);
        }
    });
}

/// A savepoint's locks pass to its parent.
pub fn savepoint_released(savepoint: SubTransaction, parent: SubTransaction) {
    CHANGED.with_borrow_mut(|changed| {
        changed.iter_mut().filter(|c| c.savepoint == savepoint).for_each(|c| c.savepoint = parent);
    });
}

/// A savepoint's changes are undone; its locks are given back next.
pub fn savepoint_rolled_back(savepoint: SubTransaction) {
    CHANGED.with_borrow_mut(|changed| {
        changed.iter_mut().filter(|c| c.savepoint == savepoint).for_each(|c| c.undone = true);
    });
}

/// A savepoint that was rolled back has given back its locks.
pub fn locks_released() {
    CHANGED.with_borrow_mut(|changed| {
        changed.retain(|c| {
            if c.undone {
                c.line.wake(Lock::Own);
            }
            !c.undone
        });
    });
}

/// The transaction has given back its locks.
pub fn transaction_ended() {
    for changed in CHANGED.take() {
        changed.line.wake(Lock::Own);
    }
}
