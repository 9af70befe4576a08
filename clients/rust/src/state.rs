//! What a lease's holder, its keeper and its watch share.

use crate::clock::{self, Moment};
use crate::error::{Error, LeaseLost, Reason};
use crate::hooks::Hooks;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Mutex as AsyncMutex, Notify, watch};
use tokio::task::AbortHandle;

pub(crate) struct Shared {
    pub names: Arc<[String]>,
    pub ttl: Duration,
    /// How to call a function of the extension.
    schema: String,
    state: watch::Sender<State>,
    token: AtomicI64,
    /// The connections of the transactions under it that can be broken off.
    breakers: Mutex<Breakers>,
    /// Held by the heartbeat during a renewal, and by a transaction that releases: a renewal would wait for it.
    pub renewing: AsyncMutex<()>,
    /// The heartbeat is to renew at once.
    pub hurry: Notify,
    /// A write under it was refused, because the token was stale or did not speak for the lease.
    refused: AtomicBool,
    pub hooks: Arc<dyn Hooks>,
}

struct State {
    deadline: Moment,
    standing: Standing,
    /// Its holder wants it to end.
    ending: bool,
    /// Its keeper has ended.
    finished: bool,
}

#[derive(Clone)]
enum Standing {
    Asked,
    Held,
    Lost(LeaseLost),
    Released,
}

#[derive(Default)]
struct Breakers {
    last: u64,
    of: HashMap<u64, AbortHandle>,
}

impl Shared {
    pub fn new(
        names: Arc<[String]>,
        ttl: Duration,
        schema: String,
        hooks: Arc<dyn Hooks>,
    ) -> Shared {
        let state = State {
            deadline: Moment::now(),
            standing: Standing::Asked,
            ending: false,
            finished: false,
        };
        Shared {
            names,
            ttl,
            schema,
            state: watch::Sender::new(state),
            token: AtomicI64::new(0),
            breakers: Mutex::default(),
            renewing: AsyncMutex::default(),
            hurry: Notify::new(),
            refused: AtomicBool::new(false),
            hooks,
        }
    }

    /// Between two renewals, and how long a call may take.
    pub fn third(&self) -> Duration {
        self.ttl / 3
    }

    pub fn select(&self, call: &str) -> String {
        format!("SELECT {}{call}", self.schema)
    }

    pub fn token(&self) -> i64 {
        self.token.load(Ordering::Acquire)
    }

    // Where it stands

    pub fn granted(&self, token: i64, before: Moment) {
        self.token.store(token, Ordering::Release);
        self.state.send_modify(|state| {
            state.standing = Standing::Held;
            state.deadline = before + self.ttl;
        });
    }

    /// By a call that was begun at `before`: from there the ttl counts.
    pub fn renewed(&self, token: i64, before: Moment) {
        self.state.send_modify(|state| state.deadline = before + self.ttl);
        self.hooks.renewed(token, self.remaining());
    }

    pub fn remaining(&self) -> Duration {
        let state = self.state.borrow();
        match state.standing {
            Standing::Held => state.deadline.remaining(),
            _ => Duration::ZERO,
        }
    }

    pub fn loss(&self) -> Option<LeaseLost> {
        self.state.borrow().loss()
    }

    /// Fails when it is ours no more, by our own clock.
    pub fn check(&self) -> Result<(), LeaseLost> {
        let (standing, is_late) = {
            let state = self.state.borrow();
            (state.standing.clone(), state.deadline.has_passed())
        };
        match standing {
            Standing::Held if !is_late => Ok(()),
            Standing::Held => {
                self.lose(Reason::Deadline, None);
                Err(self.loss().unwrap_or_else(|| self.no_more()))
            }
            Standing::Lost(loss) => Err(loss),
            Standing::Asked | Standing::Released => Err(self.no_more()),
        }
    }

    fn no_more(&self) -> LeaseLost {
        LeaseLost::new(Reason::Released, &self.names, None)
    }

    /// Tells the loss, once.
    pub fn lose(&self, reason: Reason, cause: Option<Error>) {
        let loss = LeaseLost::new(reason, &self.names, cause);
        let is_news = self.state.send_if_modified(|state| {
            let is_held = matches!(state.standing, Standing::Held);
            if is_held {
                state.standing = Standing::Lost(loss.clone());
            }
            is_held
        });
        if is_news {
            // What still works under it ends here, wherever it hangs.
            self.breakers().of.values().for_each(AbortHandle::abort);
            log::warn!("{loss}");
            self.hooks.lost(&loss);
        }
    }

    /// It has been given back.
    pub fn released(&self) {
        self.state.send_modify(|state| {
            if matches!(state.standing, Standing::Held) {
                state.standing = Standing::Released;
            }
        });
    }

    pub fn is_held(&self) -> bool {
        matches!(self.state.borrow().standing, Standing::Held)
    }

    /// Its holder wants it to end.
    pub fn end(&self) {
        self.state.send_modify(|state| state.ending = true);
    }

    pub fn is_ending(&self) -> bool {
        self.state.borrow().ending
    }

    pub fn finish(&self) {
        self.state.send_modify(|state| state.finished = true);
    }

    // Waits, which hold nothing of this while they last

    pub async fn until_ending(&self) {
        self.until(|state| state.ending).await;
    }

    /// Until there is nothing to renew any more.
    pub async fn until_over(&self) {
        self.until(|state| state.ending || !matches!(state.standing, Standing::Held)).await;
    }

    pub async fn until_not_held(&self) {
        self.until(|state| !matches!(state.standing, Standing::Held)).await;
    }

    pub async fn until_finished(&self) {
        self.until(|state| state.finished).await;
    }

    /// The loss, or nothing where it ends without one.
    pub fn lost(&self) -> impl Future<Output = Option<LeaseLost>> + Send + use<> {
        let mut state = self.state.subscribe();
        async move {
            let is_over = |state: &State| state.finished || state.ended();
            state.wait_for(is_over).await.ok()?.loss()
        }
    }

    /// What `work` comes to, unless the lease is lost before: then the work is dropped where it waits.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> Result<T, LeaseLost> {
        tokio::select! {
            biased;
            done = work => Ok(done),
            Some(loss) = self.lost() => Err(loss),
        }
    }

    async fn until(&self, condition: impl Fn(&State) -> bool) {
        // The sender is `self`, so that it cannot be gone.
        let _ = self.state.subscribe().wait_for(|state| condition(state)).await;
    }

    /// Tells a loss at the deadline, whatever the keeper does.
    pub async fn watch(&self) {
        loop {
            let deadline = self.state.borrow().deadline;
            tokio::select! {
                () = clock::sleep_until(deadline) => {}
                () = self.until(|state| state.finished || state.ended()) => return,
            }
            if self.state.borrow().deadline.has_passed() {
                self.lose(Reason::Deadline, None);
            }
        }
    }

    // What is under it

    /// From here on a loss breaks off that connection, until the value is dropped.
    pub fn enter(self: &Arc<Shared>, breaker: Option<AbortHandle>) -> Entered {
        let mut breakers = self.breakers();
        breakers.last += 1;
        let key = breakers.last;
        if let Some(breaker) = breaker {
            breakers.of.insert(key, breaker);
        }
        Entered { shared: self.clone(), key }
    }

    fn breakers(&self) -> MutexGuard<'_, Breakers> {
        self.breakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The server refused a write: the next renewal, or adoption, tells whether the lease is lost.
    pub fn refuse(&self) {
        self.refused.store(true, Ordering::Release);
        self.hurry.notify_one();
    }

    /// Whether it did so, and nothing has been mended since.
    pub fn was_refused(&self) -> bool {
        self.refused.load(Ordering::Acquire)
    }

    /// It was only that no token speaks after a failover.
    pub fn was_mended(&self) {
        self.refused.store(false, Ordering::Release);
    }

    /// Whether the work has been told that the lease is not its own.
    pub fn is_doubtful(&self) -> bool {
        self.was_refused() || self.check().is_err()
    }
}

impl State {
    fn loss(&self) -> Option<LeaseLost> {
        match &self.standing {
            Standing::Lost(loss) => Some(loss.clone()),
            _ => None,
        }
    }

    fn ended(&self) -> bool {
        matches!(self.standing, Standing::Lost(_) | Standing::Released)
    }
}

/// A transaction under a lease.
pub(crate) struct Entered {
    shared: Arc<Shared>,
    key: u64,
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.shared.breakers().of.remove(&self.key);
    }
}
