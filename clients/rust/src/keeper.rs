//! The task that tries, renews and releases all leases of a fence, on one connection.

use crate::calls::{LOCK, has_ended_unseen, release, renewal};
use crate::clock::{self, Moment};
use crate::error::{Error, Reason};
use crate::keeping::{Keeping, Try};
use crate::own::{Call, Limits, OwnConnection, only_value};
use crate::state::Shared;
use std::collections::VecDeque;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedMutexGuard;

/// As many are renewed by one statement. Each takes locks of the server's table.
const BATCH: usize = 500;
/// The shortest wait for a lock that there is. Where many leases are locked, the waits for each of them add up.
const NO_WAIT: Duration = Duration::from_millis(1);
/// Between two looks whether a heartbeat is starved still.
const STARVED: Duration = Duration::from_millis(20);
/// Without anything that is held there is nothing to hurry for.
const UNHURRIED: Duration = Duration::from_secs(10);

pub(crate) struct Keeper {
    keeping: Arc<Keeping>,
    own: OwnConnection,
    /// Nothing is left to do, as against a runtime that is gone.
    has_ended: bool,
}

/// What one statement renews.
struct Batch {
    leases: Vec<Arc<Shared>>,
    /// For somebody's transaction. What has waited in vain once does not.
    waits: bool,
}

/// What is to be done next.
enum Next {
    Renew(Vec<Arc<Shared>>),
    Release(Arc<Shared>),
    Try(Try),
    /// Until then there is nothing.
    Wait(Moment),
    End,
}

impl Keeper {
    pub fn new(keeping: Arc<Keeping>) -> Keeper {
        let own = OwnConnection::new(keeping.open.clone());
        Keeper { keeping, own, has_ended: false }
    }

    pub async fn keep(mut self) {
        loop {
            self.take_spare();
            let (over, next) = self.next();
            if !over.is_empty() && matches!(next, Next::End) {
                // A caller that waits for the end of the last one finds no connection left.
                self.close().await;
            }
            over.iter().for_each(|lease| lease.finish());
            match next {
                Next::Renew(due) => self.beat(due).await,
                Next::Release(lease) => self.release(&lease).await,
                Next::Try(one) => self.attempt(one).await,
                Next::Wait(until) => {
                    tokio::select! {
                        () = self.keeping.until_woken() => {}
                        () = clock::sleep_until(until) => {}
                    }
                }
                Next::End => {
                    self.close().await;
                    if self.ends() {
                        return;
                    }
                }
            }
        }
    }

    /// Those that are over, and what comes next: renewals that are due go first.
    fn next(&self) -> (Vec<Arc<Shared>>, Next) {
        let now = Moment::now();
        let mut state = self.keeping.state();
        let mut over = Vec::new();
        state.leases.retain(|_, lease| {
            let is_held = lease.is_held();
            if !is_held {
                over.push(lease.clone());
            }
            is_held
        });
        if !over.is_empty() {
            self.keeping.deadlines_have_changed();
        }
        let mut wait = now + Duration::from_secs(3600);
        let mut due = Vec::new();
        let mut ending = None;
        let starves = self.keeping.hooks.starves();
        for lease in state.leases.values() {
            let schedule = lease.schedule();
            let is_ending = lease.is_ending();
            let at = schedule.at(is_ending);
            match at <= now {
                _ if !is_ending && lease.is_left_to_its_deadline() => {}
                // By its own session.
                _ if is_ending && lease.terms.session => {}
                true if is_ending => ending = ending.or(Some(lease.clone())),
                true if starves => wait = wait.min(now + STARVED),
                true => due.push((at, lease.clone())),
                // Renewed along in the second half of its time: so leases come to beat together.
                false if !is_ending && !schedule.is_apart && at <= now + lease.third() / 2 => {
                    due.push((at, lease.clone()));
                    wait = wait.min(at);
                }
                false => wait = wait.min(at),
            }
        }
        let next = if due.iter().any(|(at, _)| *at <= now) {
            Next::Renew(due.into_iter().map(|(_, lease)| lease).collect())
        } else if let Some(lease) = ending {
            Next::Release(lease)
        } else if let Some(one) = state.tries.pop_front() {
            Next::Try(one)
        } else if state.leases.is_empty() {
            Next::End
        } else {
            Next::Wait(wait)
        };
        (over, next)
    }

    /// Unless there is something to do again.
    fn ends(&mut self) -> bool {
        let mut state = self.keeping.state();
        self.has_ended = state.leases.is_empty() && state.tries.is_empty();
        state.is_keeping = !self.has_ended;
        self.has_ended
    }

    async fn close(&mut self) {
        self.own.close().await;
        let spare = self.keeping.state().spare.take();
        if let Some(spare) = spare {
            spare.close().await;
        }
    }

    // Calls

    /// None may hold up the renewals of what is held.
    fn limits(&self, own: Duration) -> Limits {
        if !self.keeping.hooks.watches() {
            return Limits { call: Duration::MAX, lock: Duration::MAX };
        }
        let smallest = self.keeping.state().smallest_ttl();
        let call = smallest.map_or(own, |ttl| own.min(ttl / 3));
        let lock = smallest.map_or(own.min(UNHURRIED), |ttl| (ttl / 240).max(LOCK));
        Limits { call, lock: lock.min(call) }
    }

    /// That of one that has waited; it is dropped where it is not needed.
    fn take_spare(&mut self) {
        // The plant takes what such a connection answers for a loss.
        if !self.keeping.hooks.takes_failure_for_loss() {
            self.own.leave_ended();
        }
        let spare = self.keeping.state().spare.take();
        self.own.take_over(spare.filter(|spare| !spare.has_ended()));
    }

    /// Whether a call that fails at once may only have found a connection that had ended unseen.
    fn reuses_connection(&mut self) -> bool {
        self.take_spare();
        self.own.is_open()
    }

    // Tries

    async fn attempt(&mut self, one: Try) {
        let Try { shared, call, again, answer } = one;
        let outcome =
            if shared.is_ending() { Ok(None) } else { self.grant(&shared, &call, again).await };
        let outcome = outcome.map(|granted| {
            let Some((token, before)) = granted else { return false };
            shared.granted(token, shared.hooks.counts_from(before));
            self.keeping.keep(shared.clone(), None);
            true
        });
        if !matches!(outcome, Ok(true)) {
            shared.finish();
        }
        // Nobody hears it who has given up; then the lease is ending.
        let _ = answer.send(outcome.map_err(|error| error.of_acquire(&shared.names)));
    }

    async fn grant(
        &mut self,
        shared: &Shared,
        call: &Call,
        again: Option<Call>,
    ) -> Result<Option<(i64, Moment)>, Error> {
        let limit = self.limits(shared.third()).call;
        let reuses_connection = self.reuses_connection();
        // The time that this takes is none of the lease's.
        self.own.connect(limit).await?;
        let mut before = Moment::now();
        let mut outcome = self.own.call(limit, call, pending()).await;
        if reuses_connection
            && outcome.as_ref().is_err_and(has_ended_unseen)
            && let Some(again) = again
        {
            before = Moment::now();
            outcome = self.own.call(limit, &again, pending()).await;
        }
        let token = only_value(&outcome?).map_err(Error::unclassified)?;
        Ok(token.map(|token| (token, before)))
    }

    // Renewals

    async fn beat(&mut self, due: Vec<Arc<Shared>>) {
        // A transaction that releases is not waited for.
        let mut renewing = Vec::new();
        let (mut plain, mut alone) = (Vec::new(), VecDeque::new());
        for lease in due {
            match lease.begin_renewal() {
                None => continue,
                Some(guard) => renewing.push(guard),
            }
            if lease.schedule().is_apart
                || lease.names.len() > 1
                || self.is_renewed_otherwise(&lease)
            {
                let waits = !lease.schedule().is_apart;
                alone.push_back(Batch { leases: vec![lease], waits });
            } else {
                plain.push(lease);
            }
        }
        plain.sort_by(|a, b| a.names.cmp(&b.names));
        let batch = |leases: &[_]| Batch { leases: leases.to_vec(), waits: true };
        let mut batches: VecDeque<Batch> = plain.chunks(BATCH).map(batch).collect();
        batches.append(&mut alone);
        self.renew_all(batches).await;
        drop::<Vec<OwnedMutexGuard<()>>>(renewing);
    }

    fn is_renewed_otherwise(&self, lease: &Shared) -> bool {
        self.keeping.hooks.renews(&lease.names[0], lease.token()).is_some()
    }

    async fn renew_all(&mut self, mut batches: VecDeque<Batch>) {
        let mut may_reconnect = self.reuses_connection();
        while let Some(Batch { leases: mut batch, waits }) = batches.pop_front() {
            batch.retain(|lease| lease.is_held());
            if batch.is_empty() {
                continue;
            }
            let error = match self.renew(&batch, waits).await {
                Ok(()) => continue,
                Err(error) => error,
            };
            if self.keeping.hooks.takes_failure_for_loss() {
                batch.iter().for_each(|lease| lease.lose(Reason::Denied, Some(error.clone())));
            } else if has_ended_unseen(&error) && std::mem::take(&mut may_reconnect) {
                // A new one may do at once.
                batches.push_front(Batch { leases: batch, waits });
            } else if !error.is_of_statement() || !self.keeping.hooks.divides() {
                // No other would do better.
                batch
                    .into_iter()
                    .chain(batches.drain(..).flat_map(|one| one.leases))
                    .for_each(|lease| has_failed(&lease, &error));
            } else if batch.len() > 1 {
                // Until the culprit stands alone.
                let rest = batch.split_off(batch.len() / 2);
                batches.push_front(Batch { leases: rest, waits: false });
                batches.push_front(Batch { leases: batch, waits: false });
            } else {
                batch[0].schedule().is_apart = true;
                has_failed(&batch[0], &error);
            }
        }
    }

    /// By one statement, each with an answer of its own.
    async fn renew(&mut self, batch: &[Arc<Shared>], waits: bool) -> Result<(), Error> {
        let before = Moment::now();
        let tokens = self.call_renew(batch, waits).await?;
        let all_are_lost = tokens.contains(&None) && self.keeping.hooks.takes_one_for_all();
        for (lease, token) in batch.iter().zip(tokens) {
            let Some(token) = token.filter(|_| !all_are_lost) else {
                lease.lose(Reason::Gone, None);
                continue;
            };
            let begun = {
                let mut schedule = lease.schedule();
                schedule.next = before + lease.third();
                schedule.is_apart = false;
                std::mem::take(&mut schedule.begun)
            };
            lease.renewed(token, lease.hooks.counts_from(before));
            for one in begun {
                // Who has given up waiting hears nothing.
                let _ = one.send(token);
            }
        }
        Ok(())
    }

    async fn call_renew(
        &mut self,
        batch: &[Arc<Shared>],
        waits: bool,
    ) -> Result<Vec<Option<i64>>, Error> {
        let lease = &batch[0];
        if let Some(otherwise) = self.keeping.hooks.renews(&lease.names[0], lease.token()) {
            return otherwise.await.map(|token| vec![token]);
        }
        let mut limits = self.limits(lease.third());
        if !waits {
            limits.lock = limits.lock.min(NO_WAIT);
        }
        let rows = self.own.call_within(limits, &renewal(batch)).await?;
        rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>().map_err(Error::unclassified)
    }

    // Releases

    async fn release(&mut self, lease: &Shared) {
        let limits = self.limits(lease.third());
        self.take_spare();
        if let Some(pause) = release(&mut self.own, lease, limits, true).await {
            lease.schedule().release = Moment::now() + pause;
        }
    }
}

impl Drop for Keeper {
    /// Where its runtime is gone nobody renews any more, and nobody watches the deadline.
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let (leases, tries) = {
            let mut state = self.keeping.state();
            state.is_keeping = false;
            state.spare = None;
            (std::mem::take(&mut state.leases), std::mem::take(&mut state.tries))
        };
        for lease in leases.values().chain(tries.iter().map(|one| &one.shared)) {
            lease.lose(Reason::Deadline, None);
            lease.finish();
        }
    }
}

/// No loss yet where trying again can help: the deadline tells.
fn has_failed(lease: &Shared, error: &Error) {
    log::warn!("the lease {} was not renewed: {error}", lease.names[0]);
    {
        let mut schedule = lease.schedule();
        schedule.begun.clear();
        schedule.next = Moment::now() + lease.twelfth();
    }
    if error.is_permanent() {
        lease.lose(Reason::Denied, Some(error.clone()));
    }
}
