//! A lease that was granted, until it is over: its times, and what becomes of them.

use crate::asked::{Pairs, seconds};
use crate::clock::{after, left};
use crate::error::{Error, Reason};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// An event for `on_event`, in the keeper's thread; it must not block.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Event {
    pub kind: EventKind,
    pub names: Vec<String>,
    pub token: i64,
    /// How long it is ours if no renewal comes through any more.
    pub remaining: Duration,
}

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum EventKind {
    Acquired,
    Renewed,
    Lost(Reason),
    Released,
}

/// The answer of `lease_keep` for one name: the outcome; what remains, and when to ask again, in seconds.
pub type Answer = (String, Option<f64>, Option<f64>);

/// A grant: once it is over it has a reason.
#[derive(Debug)]
pub(crate) struct Grant {
    pub names: Vec<String>,
    pub token: i64,
    pub ttl: Duration,
    /// The connection that a session lease lives on.
    pub session: Option<u64>,
    pub times: watch::Sender<Times>,
    /// The connections that are in a transaction under it.
    pub guards: Mutex<Vec<AbortHandle>>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub deadline: Duration,
    pub beat_at: Duration,
    /// Transactions that are about to release it: it is not renewed meanwhile.
    pub resting: i32,
    pub reason: Option<Reason>,
}

impl Grant {
    /// By a call that began at `before`: from there the ttl counts.
    pub fn new(
        names: Vec<String>,
        token: i64,
        before: Duration,
        ttl: Duration,
        session: Option<u64>,
    ) -> Arc<Grant> {
        let (deadline, beat_at) = (before + ttl, before + ttl / 3);
        let times = watch::Sender::new(Times { deadline, beat_at, resting: 0, reason: None });
        Arc::new(Grant { names, token, ttl, session, times, guards: Mutex::default() })
    }

    pub fn times(&self) -> Times {
        *self.times.borrow()
    }

    /// When it is to be renewed.
    pub fn beat_at(&self) -> Duration {
        let times = self.times();
        if times.resting == 0 { times.beat_at } else { Duration::MAX }
    }

    pub fn reason(&self) -> Option<Reason> {
        self.times().reason
    }

    pub fn remaining(&self) -> Duration {
        let times = self.times();
        if times.reason.is_none() { left(times.deadline) } else { Duration::ZERO }
    }

    /// The verdict of `check` on it.
    pub fn over(&self) -> Option<Error> {
        let (names, reason) = (self.names.clone(), self.reason()?);
        Some(Error::LeaseLost { names, reason, in_doubt: false })
    }

    /// The loss that it has come to.
    pub fn loss(&self) -> Option<Error> {
        if self.reason() == Some(Reason::Released) { None } else { self.over() }
    }

    pub fn rest(&self, is_resting: bool) {
        self.times.send_modify(|times| times.resting += if is_resting { 1 } else { -1 });
    }

    /// Whether it was not over before.
    pub fn end(&self, reason: Reason) -> bool {
        self.times.send_if_modified(|times| {
            let ends = times.reason.is_none();
            times.reason.get_or_insert(reason);
            if ends && reason != Reason::Released {
                // Before anybody hears of it, who would leave the guard.
                lock(&self.guards).iter().for_each(AbortHandle::abort);
            }
            ends
        })
    }

    /// Takes the answers, one for each name, to a call that began at `before`. Why it is lost, if it is; or else whether it
    /// was renewed.
    pub fn answered(
        &self,
        answers: &[Answer],
        before: Duration,
        got_on: bool,
    ) -> Result<bool, Reason> {
        let is = |outcome: &str| answers.iter().any(|(is, ..)| is == outcome);
        if is("lost") || is("refused") {
            let reason = if is("lost") { Reason::Gone } else { Reason::Refused };
            return if self.times().resting > 0 { Ok(false) } else { Err(reason) };
        }
        let again = answers.iter().map(|(.., again)| again.map_or(self.ttl / 12, seconds)).min();
        let again = again.unwrap_or(self.ttl / 3);
        let left = answers.iter().filter_map(|(_, left, _)| left.map(seconds)).min();
        let is_kept = answers.iter().all(|(outcome, ..)| outcome == "kept");
        self.times.send_modify(|times| match is_kept {
            true => {
                (times.deadline, times.beat_at) =
                    (before + left.unwrap_or_default(), before + again)
            }
            // Out of locks: at once, in another transaction, as long as that helps.
            false if again.is_zero() && !got_on => times.beat_at = after(self.ttl / 12),
            false => times.beat_at = after(again),
        });
        Ok(is_kept)
    }
}

pub(crate) fn pairs(grants: &[Arc<Grant>]) -> Pairs {
    let of_one = |grant: &Arc<Grant>| {
        let token = grant.token;
        grant.names.clone().into_iter().map(move |name| (name, token))
    };
    grants.iter().flat_map(of_one).collect()
}

/// For the log.
pub(crate) fn all_of(grants: &[Arc<Grant>]) -> String {
    match grants {
        [one] => format!("the lease {} is", one.names.join(", ")),
        all => format!("{} leases ({}, …) are", all.len(), all[0].names.join(", ")),
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
