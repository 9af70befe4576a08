//! What keeps all leases of a fence: a thread of its own, in which one task renews them and another one watches their
//! deadlines. Work that blocks its own runtime does not lose its leases.

use crate::asked::{Asked, Pairs, keep, release, seconds};
use crate::clock::{self, after, left, now};
use crate::connected::{Line, Opener};
use crate::error::{Error, Reason};
use crate::fence::Lease;
use std::future::Future;
use std::slice::from_ref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tokio_postgres::Row;

/// What `lease_keep` takes at once; and how many are released in one transaction, which has its share of locks.
const MOST_PAIRS: usize = 10_000;
const MOST_RELEASED: usize = 200;
/// No portion of a wait takes longer: its snapshot holds up others.
const PORTION: Duration = Duration::from_secs(2);
/// No call takes longer than a third of it, whatever the ttl.
const LONGEST: Duration = Duration::from_secs(30);
/// Several names have no queue: so often they are tried. So often it is looked whether a session has ended, too.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// What `on_event` is told, in the keeper's thread; it must not block.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Event {
    pub kind: EventKind,
    pub names: Vec<String>,
    pub token: i64,
    /// How long it is ours if no renewal comes through any more.
    pub remaining: Duration,
}

/// What has become of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum EventKind {
    Acquired,
    Renewed,
    Lost(Reason),
    Released,
}

/// What `lease_keep` says of one name.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Answer {
    pub outcome: String,
    pub remaining: Option<f64>,
    pub again_in: Option<f64>,
}

type Answers = Result<Vec<Answer>, Error>;

/// The laboratory's: does the call, or something else in its place.
#[cfg(feature = "lab")]
pub type Lab = Arc<
    dyn Fn(Pairs, crate::connected::BoxFuture<Answers>) -> crate::connected::BoxFuture<Answers>
        + Send
        + Sync,
>;

/// A lease that was granted, until it is over: then it has a reason.
pub(crate) struct Grant {
    pub names: Vec<String>,
    pub token: i64,
    ttl: Duration,
    /// The connection that a session lease lives on.
    session: Option<u64>,
    times: Mutex<Times>,
    pub ended: watch::Sender<Option<Reason>>,
    /// The connections that are in a transaction under it.
    pub guards: Mutex<Vec<AbortHandle>>,
}

struct Times {
    deadline: Duration,
    beat_at: Duration,
    /// A transaction is about to release it: it is not renewed meanwhile.
    is_resting: bool,
}

impl Grant {
    /// By a call that began at `before`: from there the ttl counts.
    fn new(
        names: Vec<String>,
        token: i64,
        asked: &Asked,
        before: Duration,
        session: u64,
    ) -> Arc<Grant> {
        let ttl = asked.ttl;
        let times = Times { deadline: before + ttl, beat_at: before + ttl / 3, is_resting: false };
        let (session, ended) = (asked.session.then_some(session), watch::Sender::new(None));
        let (times, guards) = (Mutex::new(times), Mutex::default());
        Arc::new(Grant { names, token, ttl, session, times, ended, guards })
    }

    fn times(&self) -> MutexGuard<'_, Times> {
        lock(&self.times)
    }

    /// When it is to be renewed.
    fn beat_at(&self) -> Option<Duration> {
        let times = self.times();
        (!times.is_resting).then_some(times.beat_at)
    }

    pub fn reason(&self) -> Option<Reason> {
        *self.ended.borrow()
    }

    pub fn remaining(&self) -> Duration {
        self.reason().map_or_else(|| left(self.times().deadline), |_| Duration::ZERO)
    }

    /// What `check` says of it.
    fn over(&self) -> Option<Error> {
        let (names, reason) = (self.names.clone(), self.reason()?);
        Some(Error::LeaseLost { names, reason, in_doubt: false })
    }

    /// The loss that it has come to.
    pub fn loss(&self) -> Option<Error> {
        if self.reason() == Some(Reason::Released) { None } else { self.over() }
    }

    pub fn rest(&self, is_resting: bool) {
        self.times().is_resting = is_resting;
    }

    /// Takes the answers, one for each name, to a call that began at `before`. Why it is lost, if it is; or else whether it
    /// was renewed.
    fn answered(&self, answers: &[Answer], before: Duration, got_on: bool) -> Result<bool, Reason> {
        let mut times = self.times();
        let is = |outcome: &str| answers.iter().any(|answer| answer.outcome == outcome);
        match (is("lost"), is("refused")) {
            (false, false) => {}
            _ if times.is_resting => return Ok(false),
            (true, _) => return Err(Reason::Gone),
            _ => return Err(Reason::Refused),
        }
        let again = answers.iter().map(|answer| answer.again_in.map_or(self.ttl / 12, seconds));
        let again = again.min().unwrap_or(self.ttl / 3);
        let is_kept = answers.iter().all(|answer| answer.outcome == "kept");
        if is_kept {
            let left = answers.iter().filter_map(|answer| answer.remaining.map(seconds)).min();
            times.deadline = before + left.unwrap_or_default();
            times.beat_at = before + again;
        } else {
            // Out of locks: at once, in another transaction, as long as that helps.
            times.beat_at = after(if again.is_zero() && !got_on { self.ttl / 12 } else { again });
        }
        Ok(is_kept)
    }
}

/// How a fence was made.
#[derive(Clone)]
pub(crate) struct Setup {
    pub open: Opener,
    /// With a dot, or empty.
    pub schema: String,
    pub on_event: Arc<dyn Fn(&Event) + Send + Sync>,
    #[cfg(feature = "lab")]
    pub lab: Option<Lab>,
}

pub(crate) struct Keeper {
    pub setup: Setup,
    state: Mutex<State>,
    /// Anything of what follows.
    pub changed: watch::Sender<()>,
    line: Arc<AsyncMutex<Line>>,
}

#[derive(Default)]
struct State {
    /// Of its thread, while there is one. Calls that are under way have it, too.
    runtime: Option<Arc<Handle>>,
    grants: Vec<Arc<Grant>>,
    is_closed: bool,
    /// The last renewal has failed; and leases were lost by that, as was said.
    is_out: bool,
    has_told: bool,
}

impl Keeper {
    pub fn new(setup: Setup) -> Arc<Keeper> {
        let line = Arc::new(AsyncMutex::new(Line::new(setup.open.clone())));
        Arc::new(Keeper { setup, state: Mutex::default(), changed: watch::Sender::default(), line })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    // Its thread

    /// Does that in its thread; to the end, also where nobody waits for it any more.
    pub fn spawn<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<JoinHandle<T>, Error> {
        let (keeper, runtime) = (self.clone(), self.start()?);
        Ok(runtime.clone().spawn(async move {
            let done = work.await;
            drop(runtime);
            keeper.changed.send_replace(());
            done
        }))
    }

    /// The same, and waits for it.
    pub async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Error> {
        self.spawn(work)?.await.map_err(Error::other)
    }

    fn start(self: &Arc<Self>) -> Result<Arc<Handle>, Error> {
        let mut state = self.state();
        if let Some(runtime) = &state.runtime {
            return Ok(runtime.clone());
        }
        let runtime = Builder::new_current_thread().enable_all().build().map_err(Error::other)?;
        let (handle, keeper) = (Arc::new(runtime.handle().clone()), self.clone());
        let thread = std::thread::Builder::new().name("pg_fence".to_owned());
        thread.spawn(move || keeper.serve(runtime)).map_err(Error::other)?;
        Ok(state.runtime.insert(handle).clone())
    }

    /// Until there is nothing to do, or one of its tasks has died of whatever.
    fn serve(self: Arc<Self>, runtime: Runtime) {
        let (watching, beating) = (self.clone().watch(), self.clone().beat());
        let (watching, beating) = (runtime.spawn(watching), runtime.spawn(beating));
        let ended = runtime.block_on(async {
            tokio::select! { ended = beating => ended, ended = watching => ended }
        });
        runtime.shutdown_background();
        if ended.is_err() {
            // Nothing uses it any more.
            drop(self.line.blocking_lock().take());
            let grants = {
                let mut state = self.state();
                state.runtime = None;
                state.grants.clone()
            };
            self.end(&grants, Reason::Keeper);
        }
    }

    async fn beat(self: Arc<Self>) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let grants = {
                let mut state = self.state();
                let is_in_use =
                    state.runtime.as_ref().is_some_and(|one| Arc::strong_count(one) > 1);
                if state.grants.is_empty() && !is_in_use {
                    state.runtime = None;
                    break;
                }
                state.grants.clone()
            };
            // A line that is in use is looked at by its call.
            if let Ok(mut line) = self.line.try_lock() {
                line.look();
                let session = line.session;
                drop(line);
                let is_over = |grant: &&Arc<Grant>| grant.session.is_some_and(|on| on != session);
                let over: Vec<_> = grants.iter().filter(is_over).cloned().collect();
                self.end(&over, Reason::Session);
            }
            match grants.iter().filter_map(|grant| grant.beat_at()).min() {
                Some(first) if first <= now() => {
                    // Those that are nearly due go along.
                    let goes = |grant: &&Arc<Grant>| {
                        grant.beat_at().is_some_and(|at| left(at) <= grant.ttl / 12)
                    };
                    let due: Vec<_> = grants.iter().filter(goes).cloned().collect();
                    self.keep(&due).await;
                }
                first => {
                    let pause = first.map_or(LOOK_AGAIN, |first| left(first).min(LOOK_AGAIN));
                    let _ = clock::within(pause, changed.changed()).await;
                }
            }
        }
        // No call is under way.
        if let Some(connected) = self.line.try_lock().ok().and_then(|mut line| line.take()) {
            connected.close().await;
        }
        self.changed.send_replace(());
    }

    async fn watch(self: Arc<Self>) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let grants = self.state().grants.clone();
            grants.iter().for_each(|grant| drop(self.check(grant)));
            let held = grants.iter().filter(|grant| grant.reason().is_none());
            let pause = held.map(|grant| grant.remaining()).min().unwrap_or(Duration::MAX);
            let _ = clock::within(pause, changed.changed()).await;
        }
    }

    // Renewals

    /// Renews them now.
    pub async fn keep(self: &Arc<Self>, grants: &[Arc<Grant>]) {
        let before = now();
        let mut answers = Vec::new();
        for some in pairs(grants).chunks(MOST_PAIRS) {
            match self.ask(some, self.limit(LONGEST, grants)).await {
                Ok(some) => answers.extend(some),
                Err(error) => {
                    self.is_out(Some(&error));
                    if matches!(error, Error::NotGranted { .. } | Error::NotInstalled(_)) {
                        // The statement itself: it never will.
                        self.end(grants, Reason::Refused);
                    }
                    // Else no loss: the deadline tells.
                    let again = grants.iter().map(|grant| grant.ttl / 12).min().unwrap_or_default();
                    return grants.iter().for_each(|grant| grant.times().beat_at = after(again));
                }
            }
        }
        self.is_out(None);
        let got_on = answers.iter().any(|answer| answer.outcome == "kept");
        let mut rest = answers.as_slice();
        let mut lost = Vec::new();
        for grant in grants {
            let (mine, others) = rest.split_at(grant.names.len().min(rest.len()));
            rest = others;
            match grant.answered(mine, before, got_on) {
                Ok(true) if grant.reason().is_none() => self.tell(EventKind::Renewed, grant),
                Ok(_) => {}
                Err(reason) => lost.push((grant, reason)),
            }
        }
        for reason in [Reason::Gone, Reason::Refused] {
            let these = lost.iter().filter(|(_, why)| *why == reason);
            let these: Vec<_> = these.map(|(grant, _)| Arc::clone(grant)).collect();
            self.end(&these, reason);
        }
        self.changed.send_replace(());
    }

    /// On a connection that falls silent it is not waited for so long that no other one could be opened in time.
    async fn ask(&self, pairs: &[(String, i64)], limit: Duration) -> Answers {
        if !self.line.lock().await.look() {
            return self.ask_once(pairs, limit).await;
        }
        match self.ask_once(pairs, limit * 3 / 4).await {
            Err(error) if error.is_of_connection() => self.ask_once(pairs, limit / 2).await,
            answers => answers,
        }
    }

    async fn ask_once(&self, pairs: &[(String, i64)], limit: Duration) -> Answers {
        let (line, call) = (self.line.clone(), keep(&self.setup.schema, pairs.to_vec()));
        let answers = async move {
            let rows = line.lock().await.call(limit, &call).await;
            let answer = |row: &Row| {
                let (outcome, remaining) = (row.try_get(0)?, row.try_get(1)?);
                Ok(Answer { outcome, remaining, again_in: row.try_get(2)? })
            };
            rows?.iter().map(answer).collect()
        };
        #[cfg(feature = "lab")]
        if let Some(lab) = &self.setup.lab {
            return lab(pairs.to_vec(), Box::pin(answers)).await;
        }
        answers.await
    }

    /// Has the next renewal tell whether they are lost.
    pub fn beat_soon(&self, grants: &[Arc<Grant>]) {
        grants.iter().for_each(|grant| grant.times().beat_at = Duration::ZERO);
        self.changed.send_replace(());
    }

    /// How long a call on their connection may take: a third of that ttl and of all that are kept.
    fn limit(&self, ttl: Duration, grants: &[Arc<Grant>]) -> Duration {
        let state = self.state();
        let ttls = grants.iter().chain(&state.grants).map(|grant| grant.ttl);
        ttls.fold(ttl.min(LONGEST), Duration::min) / 3
    }

    /// An outage is one line of the log, however many leases there are.
    fn is_out(&self, error: Option<&Error>) {
        let mut state = self.state();
        let was_out = std::mem::replace(&mut state.is_out, error.is_some());
        state.has_told &= error.is_some();
        match error {
            Some(error) if !was_out => {
                log::warn!("leases are not renewed, and it is tried again: {error}")
            }
            None if was_out => log::info!("leases are renewed again"),
            _ => {}
        }
    }

    // How a lease comes

    /// Where `wanted` has gone, nobody waits for it any more. What comes all the same is dropped, and so given back.
    pub async fn acquire(self: Arc<Self>, asked: Asked, wanted: Weak<()>) -> Result<Lease, Error> {
        // The others are renewed meanwhile.
        let has_own = !asked.wait.is_zero() && !asked.session;
        let own = || Arc::new(AsyncMutex::new(Line::new(self.setup.open.clone())));
        let line = if has_own { own() } else { self.line.clone() };
        let grant = self.wait_for(&asked, &line, wanted).await;
        // It goes on as the fence's. One that is in use is open already.
        if has_own
            && grant.is_ok()
            && let Ok(mut kept) = self.line.try_lock()
        {
            kept.adopt(&mut *line.lock().await);
        }
        let granted = match grant {
            Ok(grant) => self.granted(grant).await,
            Err(error) => Err(error),
        };
        if has_own && let Some(connected) = line.lock().await.take() {
            connected.close().await;
        }
        granted
    }

    async fn wait_for(
        &self,
        asked: &Asked,
        line: &Arc<AsyncMutex<Line>>,
        wanted: Weak<()>,
    ) -> Result<Arc<Grant>, Error> {
        let (schema, until) = (&self.setup.schema, after(asked.wait));
        loop {
            self.refuse_if_closed()?;
            let is_own = !Arc::ptr_eq(line, &self.line);
            let limit =
                if is_own { asked.ttl.min(LONGEST) / 3 } else { self.limit(asked.ttl, &[]) };
            // A session lease waits on the connection that keeps the others.
            let portion = if asked.session { PORTION.min(limit) } else { PORTION }.min(left(until));
            let mut line = line.lock().await;
            let (before, call) = (now(), asked.call(schema, portion));
            let rows = match line.call(portion + limit, &call).await {
                // The role's transactions are SERIALIZABLE.
                Err(error) if error.has_state("40001") => continue,
                rows => rows?,
            };
            if let Some(token) = rows.first().map_or(Ok(None), |row| row.try_get(0))? {
                return Ok(Grant::new(asked.names.clone(), token, asked, before, line.session));
            }
            if until <= now() || wanted.strong_count() == 0 {
                let rows = line.call(limit, &asked.holder(schema)).await.unwrap_or_default();
                let holder = rows.first().and_then(|row| row.try_get(0).ok()).flatten();
                let left: Option<f64> = rows.first().and_then(|row| row.try_get(1).ok()).flatten();
                let (names, remaining) = (asked.names.clone(), left.map(seconds));
                return Err(Error::LeaseTaken { names, holder, remaining });
            }
            drop(line);
            if asked.names.len() > 1 {
                clock::sleep(LOOK_AGAIN.min(left(until))).await;
            }
        }
    }

    pub async fn claim(self: Arc<Self>, asked: Asked, n: i32) -> Result<Vec<Lease>, Error> {
        self.refuse_if_closed()?;
        let (limit, mut line) = (self.limit(asked.ttl, &[]), self.line.lock().await);
        let before = now();
        let rows = line.call(limit, &asked.any(&self.setup.schema, n)).await?;
        drop(line);
        let mut leases = Vec::new();
        for row in &rows {
            let grant = Grant::new(vec![row.try_get(0)?], row.try_get(1)?, &asked, before, 0);
            // One that is lost already has been told.
            leases.extend(self.granted(grant).await.ok());
        }
        Ok(leases)
    }

    fn refuse_if_closed(&self) -> Result<(), Error> {
        if self.state().is_closed { Err(Error::Invalid("the fence is closed")) } else { Ok(()) }
    }

    async fn granted(self: &Arc<Self>, grant: Arc<Grant>) -> Result<Lease, Error> {
        if grant.beat_at().is_some_and(|at| at <= now()) {
            // The call has waited, and the server counts from a later moment.
            self.keep(from_ref(&grant)).await;
        }
        let is_closed = {
            let mut state = self.state();
            if grant.reason().is_none() && !state.is_closed {
                state.grants.push(grant.clone());
            }
            state.is_closed
        };
        self.changed.send_replace(());
        if is_closed {
            self.release(from_ref(&grant)).await;
        }
        self.check(&grant)?;
        self.tell(EventKind::Acquired, &grant);
        Ok(Lease::new(self, grant))
    }

    // How it ends

    /// Fails where it is over, whatever the tasks do.
    pub fn check(&self, grant: &Arc<Grant>) -> Result<(), Error> {
        if grant.reason().is_none() && grant.times().deadline <= now() {
            self.end(from_ref(grant), Reason::Deadline);
        }
        grant.over().map_or(Ok(()), Err)
    }

    /// Those that were not over before.
    pub fn end(&self, grants: &[Arc<Grant>], reason: Reason) -> Vec<Arc<Grant>> {
        let ends = |now: &mut Option<Reason>| now.is_none() && now.replace(reason).is_none();
        let ended = grants.iter().filter(|grant| grant.ended.send_if_modified(ends));
        let ended: Vec<_> = ended.cloned().collect();
        if ended.is_empty() {
            return ended;
        }
        let is_known = {
            let mut state = self.state();
            state.grants.retain(|grant| grant.reason().is_none());
            // Of an outage that is one line more, however many are lost by it one after the other.
            let of_outage = state.is_out && reason == Reason::Deadline;
            of_outage && std::mem::replace(&mut state.has_told, true)
        };
        self.changed.send_replace(());
        if reason != Reason::Released {
            for grant in &ended {
                lock(&grant.guards).iter().for_each(AbortHandle::abort);
            }
            if !is_known {
                log::warn!("{} lost ({reason})", all_of(&ended));
            }
            ended.iter().for_each(|grant| self.tell(EventKind::Lost(reason), grant));
        }
        ended
    }

    /// Gives them back. No error where that fails: then they end at their ttl.
    pub async fn release(&self, grants: &[Arc<Grant>]) {
        for some in self.end(grants, Reason::Released).chunks(MOST_RELEASED) {
            match self.release_some(some).await {
                // Somebody's open transaction has changed one of them: the others need not wait for it.
                Err(error) if error.has_state("55P03") && some.len() > 1 => {
                    for one in some {
                        let _ = self.release_some(from_ref(one)).await;
                    }
                }
                // Nor would the server be there for the others.
                Err(error) if error.is_of_connection() => return,
                _ => {}
            }
        }
    }

    async fn release_some(&self, grants: &[Arc<Grant>]) -> Result<(), Error> {
        let limit = self.limit(LONGEST, grants);
        let until = after(limit);
        let call = release(&self.setup.schema, pairs(grants), limit / 4);
        let mut has_repeated = false;
        let rows = loop {
            let error = match self.line.lock().await.call(limit, &call).await {
                Ok(rows) => break rows,
                Err(error) => error,
            };
            match error.has_state("55P03") {
                true if grants.len() > 1 => return Err(error),
                true if now() < until => clock::sleep(limit / 4).await,
                // It has only shown that the connection had ended before.
                false if !has_repeated && matches!(error, Error::TransactionLost { .. }) => {
                    has_repeated = true;
                }
                _ => {
                    log::warn!("{} not released, and ends at its ttl: {error}", all_of(grants));
                    return Err(error);
                }
            }
        };
        let mut rows = rows.iter();
        for grant in grants {
            let mine = rows.by_ref().take(grant.names.len());
            // All of its rows are passed over, whatever they say.
            let gone = mine.filter(|row| row.get::<_, Option<i64>>(0).is_none()).count();
            if gone > 0 && !has_repeated {
                grant.ended.send_replace(Some(Reason::Gone));
                log::warn!("{} lost (gone)", all_of(from_ref(grant)));
                self.tell(EventKind::Lost(Reason::Gone), grant);
            } else {
                self.tell(EventKind::Released, grant);
            }
        }
        Ok(())
    }

    /// Gives everything back, and ends all waits.
    pub async fn close(self: Arc<Self>) {
        let grants = {
            let mut state = self.state();
            state.is_closed = true;
            state.grants.clone()
        };
        self.release(&grants).await;
    }

    /// Until its thread has nothing to do any more.
    pub async fn until_idle(&self) {
        let mut changed = self.changed.subscribe();
        let _ = changed.wait_for(|()| self.state().runtime.is_none()).await;
    }

    pub fn tell(&self, kind: EventKind, grant: &Grant) {
        let (names, token) = (grant.names.clone(), grant.token);
        (self.setup.on_event)(&Event { kind, names, token, remaining: grant.remaining() });
    }
}

pub(crate) fn pairs(grants: &[Arc<Grant>]) -> Pairs {
    let of_one = |grant: &Arc<Grant>| {
        let token = grant.token;
        grant.names.clone().into_iter().map(move |name| (name, token))
    };
    grants.iter().flat_map(of_one).collect()
}

/// For the log: the leases … are.
fn all_of(grants: &[Arc<Grant>]) -> String {
    let names: Vec<_> = grants.iter().take(5).flat_map(|grant| grant.names.clone()).collect();
    let names = names.join(", ");
    match grants.len() {
        1 => format!("the lease {names} is"),
        ..=5 => format!("the leases {names} are"),
        all => format!("the leases {names} and {} more are", all - 5),
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
