//! What a lease's holder, the keeper and the watch share.

use crate::clock::Moment;
use crate::error::{Error, LeaseLost, Reason};
use crate::hooks::Hooks;
use crate::keeping::Keeping;
use crate::lease::Renewal;
use crate::telemetry;
use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard, watch};
use tokio::task::AbortHandle;

/// How long a lease is kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    pub ttl: Duration,
    /// After that it is not renewed any more.
    pub at_most: Option<Duration>,
    /// Before that a release lets it live on.
    pub at_least: Duration,
    /// It ends with the connection that acquired it.
    pub session: bool,
}

impl Terms {
    pub fn of(ttl: Duration) -> Terms {
        Terms { ttl, at_most: None, at_least: Duration::ZERO, session: false }
    }
}

pub(crate) struct Shared {
    pub names: Arc<[String]>,
    pub terms: Terms,
    /// How to call a function of the extension.
    schema: String,
    state: watch::Sender<State>,
    token: AtomicI64,
    /// Of the transactions under it.
    breakers: Mutex<Breakers>,
    /// Held during a renewal, and by a transaction that releases: a renewal would wait for it.
    renewing: Arc<AsyncMutex<()>>,
    schedule: Mutex<Schedule>,
    /// A write under it was refused, because the token was stale or did not speak for the lease.
    refused: AtomicBool,
    /// Nobody's, where it is not kept.
    keeping: Weak<Keeping>,
    pub hooks: Arc<dyn Hooks>,
}

struct State {
    deadline: Moment,
    /// When it was granted.
    since: Moment,
    standing: Standing,
    /// Since when its holder wants it to end.
    ending: Option<Moment>,
    /// Nothing is done for it any more.
    finished: bool,
}

#[derive(Clone)]
enum Standing {
    Asked,
    Held,
    Lost(LeaseLost),
    Released,
}

/// What the keeper is to do for it, and when.
pub(crate) struct Schedule {
    /// The next renewal.
    pub next: Moment,
    /// One is wanted at once.
    pub hurries: bool,
    /// The next try to release it, once it is ending.
    pub release: Moment,
    /// It has failed alone, and is tried alone until it succeeds.
    pub is_apart: bool,
    pub asked: Vec<Renewal>,
    /// By those who had asked before the renewal that is under way began.
    pub begun: Vec<Renewal>,
}

impl Schedule {
    fn new(now: Moment) -> Schedule {
        let (asked, begun) = (Vec::new(), Vec::new());
        Schedule { next: now, hurries: false, release: now, is_apart: false, asked, begun }
    }

    /// When there is something to do.
    pub fn at(&self, is_ending: bool) -> Moment {
        match is_ending {
            true => self.release,
            false if self.hurries => Moment::default(),
            false => self.next,
        }
    }
}

#[derive(Default)]
struct Breakers {
    last: u64,
    of: HashMap<u64, Breaker>,
}

/// Ends what hangs in a transaction.
#[derive(Clone)]
pub(crate) struct Breaker {
    pub connection: Option<AbortHandle>,
    pub loss: watch::Sender<Option<LeaseLost>>,
}

impl Breaker {
    fn break_off(&self, loss: &LeaseLost) {
        self.loss.send_replace(Some(loss.clone()));
        self.connection.iter().for_each(AbortHandle::abort);
    }
}

impl Shared {
    pub fn new(
        names: Arc<[String]>,
        terms: Terms,
        schema: String,
        hooks: Arc<dyn Hooks>,
        keeping: Weak<Keeping>,
    ) -> Shared {
        let now = Moment::now();
        let state = State {
            deadline: now,
            since: now,
            standing: Standing::Asked,
            ending: None,
            finished: false,
        };
        Shared {
            names,
            terms,
            schema,
            state: watch::Sender::new(state),
            token: AtomicI64::new(0),
            breakers: Mutex::default(),
            renewing: Arc::default(),
            schedule: Mutex::new(Schedule::new(now)),
            refused: AtomicBool::new(false),
            keeping,
            hooks,
        }
    }

    /// Between two renewals, and how long a call may take.
    pub fn third(&self) -> Duration {
        self.terms.ttl / 3
    }

    /// Before what has failed is tried again.
    pub fn twelfth(&self) -> Duration {
        self.terms.ttl / 12
    }

    pub fn select(&self, call: &str) -> String {
        format!("SELECT {}", self.function(call))
    }

    pub fn function(&self, call: &str) -> String {
        format!("{}{call}", self.schema)
    }

    pub fn token(&self) -> i64 {
        self.token.load(Ordering::Acquire)
    }

    // Where it stands

    /// By a call that was begun at `before`: from there the ttl counts.
    pub fn granted(&self, token: i64, before: Moment) {
        self.token.store(token, Ordering::Release);
        self.state.send_modify(|state| {
            state.standing = Standing::Held;
            state.since = before;
            state.deadline = before + self.terms.ttl;
        });
        self.schedule().next = before + self.third();
    }

    /// As [`granted`](Shared::granted).
    pub fn renewed(&self, token: i64, before: Moment) {
        self.state.send_modify(|state| state.deadline = before + self.terms.ttl);
        self.hooks.renewed(&self.names, token, self.remaining());
    }

    pub fn remaining(&self) -> Duration {
        let state = self.state.borrow();
        match state.standing {
            Standing::Held => state.deadline.remaining(),
            _ => Duration::ZERO,
        }
    }

    pub fn deadline(&self) -> Moment {
        self.state.borrow().deadline
    }

    /// Whether it has been held for so long that it is not renewed any more.
    pub fn is_left_to_its_deadline(&self) -> bool {
        let since = self.state.borrow().since;
        self.terms.at_most.is_some_and(|at_most| (since + at_most).has_passed())
    }

    /// How long it is to live on after a release.
    pub fn lives_on(&self) -> Duration {
        let since = self.state.borrow().since;
        (since + self.terms.at_least).remaining()
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
            self.breakers().of.values().for_each(|breaker| breaker.break_off(&loss));
            log::warn!("{loss}");
            telemetry::lost(&loss);
            self.hooks.lost(&loss);
            self.wake();
        }
    }

    /// It has been given back, or is left to somebody else. False where it had been lost.
    pub fn released(&self) -> bool {
        self.state.send_if_modified(|state| {
            let is_held = matches!(state.standing, Standing::Held);
            if is_held {
                state.standing = Standing::Released;
            }
            is_held
        });
        self.wake();
        self.loss().is_none()
    }

    pub fn is_held(&self) -> bool {
        matches!(self.state.borrow().standing, Standing::Held)
    }

    /// Its holder wants it to end.
    pub fn end(&self) {
        let now = Moment::now();
        let is_news = self.state.send_if_modified(|state| {
            let is_news = state.ending.is_none();
            state.ending.get_or_insert(now);
            is_news
        });
        if is_news {
            self.wake();
        }
    }

    pub fn is_ending(&self) -> bool {
        self.state.borrow().ending.is_some()
    }

    /// Whether a release has been waited for as long as any call is.
    pub fn has_waited_for_its_end(&self) -> bool {
        let ending = self.state.borrow().ending;
        ending.is_some_and(|since| (since + self.third()).has_passed())
    }

    pub fn finish(&self) {
        *self.schedule() = Schedule::new(Moment::now());
        self.state.send_modify(|state| state.finished = true);
    }

    // What the keeper is to do

    pub fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has it renewed at once.
    pub fn hurry(&self, asked: Option<Renewal>) {
        {
            let mut schedule = self.schedule();
            schedule.asked.extend(asked);
            schedule.hurries = true;
        }
        self.wake();
    }

    fn wake(&self) {
        if let Some(keeping) = self.keeping.upgrade() {
            keeping.wake();
        }
    }

    /// None where a transaction releases it: then it is tried again later.
    pub fn begin_renewal(&self) -> Option<OwnedMutexGuard<()>> {
        let renewing = self.renewing.clone().try_lock_owned().ok();
        let mut schedule = self.schedule();
        schedule.hurries = false;
        if renewing.is_some() {
            schedule.begun = std::mem::take(&mut schedule.asked);
        } else {
            schedule.next = Moment::now() + self.twelfth();
        }
        renewing
    }

    /// Until that is dropped nothing is renewed.
    pub async fn rest(self: &Arc<Shared>) -> Resting {
        let renewing = self.renewing.clone().lock_owned().await;
        Resting { shared: self.clone(), renewing: Some(renewing) }
    }

    // Waits, which hold nothing of this while they last

    pub async fn until_ending(&self) {
        self.until(|state| state.ending.is_some()).await;
    }

    /// Until nothing is done for it any more. What is lost need not be waited for.
    pub async fn until_over(&self) {
        self.until(|state| state.finished || matches!(state.standing, Standing::Lost(_))).await;
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

    // What is under it

    /// From here on a loss breaks that off, until the value is dropped.
    pub fn enter(self: &Arc<Shared>, breaker: Breaker) -> Entered {
        let mut breakers = self.breakers();
        breakers.last += 1;
        let key = breakers.last;
        breakers.of.insert(key, breaker);
        Entered { shared: self.clone(), key }
    }

    fn breakers(&self) -> MutexGuard<'_, Breakers> {
        self.breakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The server refused a write: the next renewal, or adoption, tells whether the lease is lost.
    pub fn refuse(&self) {
        self.refused.store(true, Ordering::Release);
        self.hurry(None);
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

/// A transaction that releases a lease. Where it has not come to that, the next renewal finds out.
pub(crate) struct Resting {
    shared: Arc<Shared>,
    renewing: Option<OwnedMutexGuard<()>>,
}

impl Drop for Resting {
    fn drop(&mut self) {
        drop(self.renewing.take());
        if self.shared.is_held() {
            self.shared.hurry(None);
        }
    }
}
