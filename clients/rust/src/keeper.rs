//! What keeps all leases of a fence: a thread of its own, in which one task renews them and another one watches their
//! deadlines. Work that blocks its own runtime does not lose its leases.

use crate::asked::{Asked, any, holder_of, keep, release_aside};
use crate::clock::{self, Moment};
use crate::connected::Connected;
use crate::error::{Error, LeaseLost, LeaseTaken, Reason};
use crate::line::{BoxFuture, Call, Line, Opener};
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{Mutex as AsyncMutex, oneshot, watch};
use tokio::task::AbortHandle;
use tokio_postgres::Row;

/// What `lease_keep` takes at once; and how many are released in one transaction, which has its share of locks.
const MOST_PAIRS: usize = 10_000;
const MOST_RELEASED: usize = 200;
/// No portion of a wait takes longer: its snapshot holds up others.
const PORTION: Duration = Duration::from_secs(2);
/// Several names have no queue: so often they are tried.
const TRY_AGAIN: Duration = Duration::from_millis(250);
/// How often it is looked whether the session of session leases has ended.
const LOOK_AT_SESSIONS: Duration = Duration::from_millis(250);

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

pub(crate) type OnEvent = Arc<dyn Fn(&Event) + Send + Sync>;

/// What `lease_keep` says of one name.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Answer {
    pub outcome: String,
    pub remaining: Option<f64>,
    pub again_in: Option<f64>,
}

/// The laboratory's: does the call, or something else in its place.
pub type Lab = Arc<
    dyn Fn(
            Vec<String>,
            Vec<i64>,
            BoxFuture<Result<Vec<Answer>, Error>>,
        ) -> BoxFuture<Result<Vec<Answer>, Error>>
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
    /// The transactions under it.
    guards: Mutex<BTreeMap<u64, Breaker>>,
}

#[derive(Debug, Clone, Copy)]
struct Times {
    deadline: Moment,
    beat_at: Moment,
    /// Transactions that are about to release it: it is not renewed meanwhile.
    resting: u32,
}

/// Ends what hangs in a transaction.
#[derive(Clone)]
pub(crate) struct Breaker {
    pub connection: Option<AbortHandle>,
    pub loss: watch::Sender<Option<LeaseLost>>,
}

impl Grant {
    /// By a call that began at `before`: from there the ttl counts.
    fn new(
        names: Vec<String>,
        token: i64,
        ttl: Duration,
        before: Moment,
        session: Option<u64>,
    ) -> Arc<Grant> {
        let times = Times { deadline: before + ttl, beat_at: before + ttl / 3, resting: 0 };
        let (times, guards, ended) =
            (Mutex::new(times), Mutex::default(), watch::Sender::new(None));
        Arc::new(Grant { names, token, ttl, session, times, ended, guards })
    }

    fn times(&self) -> MutexGuard<'_, Times> {
        lock(&self.times)
    }

    pub fn reason(&self) -> Option<Reason> {
        *self.ended.borrow()
    }

    pub fn remaining(&self) -> Duration {
        match self.reason() {
            None => self.times().deadline.remaining(),
            Some(_) => Duration::ZERO,
        }
    }

    pub fn loss(&self, reason: Reason) -> LeaseLost {
        LeaseLost { names: self.names.clone(), reason, in_doubt: false }
    }

    pub fn rest(&self, more: bool) {
        let mut times = self.times();
        times.resting = if more { times.resting + 1 } else { times.resting.saturating_sub(1) };
    }

    /// From here on a loss breaks that off.
    pub fn enter(&self, key: u64, breaker: &Breaker) {
        lock(&self.guards).insert(key, breaker.clone());
    }

    pub fn leave(&self, key: u64) {
        lock(&self.guards).remove(&key);
    }

    /// Takes the answers, one for each name, to a call that began at `before`. Why it is lost, if it is; or else whether it
    /// was renewed.
    fn answered(&self, answers: &[Answer], before: Moment, got_on: bool) -> Result<bool, Reason> {
        let mut times = self.times();
        let is = |outcome: &str| answers.iter().any(|answer| answer.outcome == outcome);
        match (is("lost"), is("refused")) {
            _ if times.resting > 0 && (is("lost") || is("refused")) => return Ok(false),
            (true, _) => return Err(Reason::Gone),
            (_, true) => return Err(Reason::Refused),
            _ => {}
        }
        let again =
            answers.iter().map(|answer| answer.again_in.map_or(self.ttl / 12, seconds)).min();
        let again = again.unwrap_or(self.ttl / 3);
        let is_kept = answers.iter().all(|answer| answer.outcome == "kept");
        if is_kept {
            let left = answers.iter().filter_map(|answer| answer.remaining.map(seconds)).min();
            times.deadline = before + left.unwrap_or_default();
            times.beat_at = before + again;
        } else {
            // Out of locks: at once, in another transaction, as long as that helps.
            let again = if again.is_zero() && !got_on { self.ttl / 12 } else { again };
            times.beat_at = Moment::now() + again;
        }
        Ok(is_kept)
    }
}

pub(crate) struct Keeper {
    pub open: Opener,
    /// With a dot, or empty.
    pub schema: String,
    pub on_event: Option<OnEvent>,
    pub lab: Option<Lab>,
    state: Mutex<State>,
    changed: watch::Sender<()>,
    line: AsyncMutex<Line>,
}

#[derive(Default)]
struct State {
    /// Of its thread, while there is one.
    runtime: Option<Handle>,
    /// Calls that are under way.
    users: usize,
    grants: Vec<Arc<Grant>>,
    is_closed: bool,
    /// The last renewal has failed.
    is_out: bool,
    /// And leases were lost by that, as was said.
    has_told_losses: bool,
}

/// As long as it lives the thread goes on.
struct InUse(Arc<Keeper>);

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.state().users -= 1;
        self.0.changed.send_replace(());
    }
}

impl Keeper {
    pub fn new(open: Opener) -> Keeper {
        let (schema, on_event, lab) = (String::new(), None, None);
        let (state, changed, line) =
            (Mutex::default(), watch::Sender::new(()), AsyncMutex::default());
        Keeper { open, schema, on_event, lab, state, changed, line }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    // Its thread

    /// Does that in its thread; to the end, also where nobody waits for it any more.
    pub async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        let in_use = self.enter();
        let handle = self.start()?;
        let done = handle.spawn(async move {
            let _in_use = in_use;
            work.await
        });
        done.await.unwrap_or_else(|gone| Err(Error::other(gone)))
    }

    /// The same without waiting for it.
    pub fn run_aside(self: &Arc<Self>, work: impl Future<Output = ()> + Send + 'static) {
        let in_use = self.enter();
        if let Ok(handle) = self.start() {
            handle.spawn(async move {
                let _in_use = in_use;
                work.await;
            });
        }
    }

    fn enter(self: &Arc<Self>) -> InUse {
        self.state().users += 1;
        InUse(self.clone())
    }

    fn start(self: &Arc<Self>) -> Result<Handle, Error> {
        let mut state = self.state();
        if let Some(handle) = &state.runtime {
            return Ok(handle.clone());
        }
        let runtime = Builder::new_current_thread().enable_all().build().map_err(Error::other)?;
        let (handle, keeper) = (runtime.handle().clone(), self.clone());
        let thread = std::thread::Builder::new().name("pg_fence".to_owned());
        thread.spawn(move || keeper.serve(runtime)).map_err(Error::other)?;
        state.runtime = Some(handle.clone());
        Ok(handle)
    }

    /// Until there is nothing to do, or one of its tasks has died of whatever.
    fn serve(self: Arc<Self>, runtime: Runtime) {
        let mut watching = runtime.spawn(self.clone().watch());
        let mut beating = runtime.spawn(self.clone().beat());
        let ended = runtime.block_on(async {
            tokio::select! { ended = &mut beating => ended, ended = &mut watching => ended }
        });
        if ended.is_ok() {
            return runtime.shutdown_background();
        }
        drop(runtime);
        // Nothing uses it any more.
        drop(self.line.blocking_lock().take());
        let grants = {
            let mut state = self.state();
            state.runtime = None;
            state.grants.clone()
        };
        self.end(&grants, Reason::Keeper);
    }

    async fn beat(self: Arc<Self>) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let grants = match self.at_work() {
                Ok(grants) => grants,
                Err(connected) => {
                    if let Some(connected) = connected {
                        connected.close().await;
                    }
                    self.changed.send_replace(());
                    return;
                }
            };
            let has_sessions = grants.iter().any(|grant| grant.session.is_some());
            if has_sessions {
                self.look_at_sessions(&grants);
            }
            let at = |grant: &Grant| {
                Some(grant.times()).filter(|times| times.resting == 0).map(|times| times.beat_at)
            };
            match grants.iter().filter_map(|grant| at(grant)).min() {
                Some(first) if first.has_passed() => {
                    // Those that are nearly due go along.
                    let is_due = |grant: &Grant| {
                        at(grant).is_some_and(|at| at.remaining() <= grant.ttl / 12)
                    };
                    let due: Vec<_> = grants.into_iter().filter(|grant| is_due(grant)).collect();
                    self.keep(&due).await;
                }
                first => {
                    let pause = first.map_or(Duration::MAX, Moment::remaining);
                    let pause = if has_sessions { pause.min(LOOK_AT_SESSIONS) } else { pause };
                    let _ = clock::within(pause, changed.changed()).await;
                }
            }
        }
    }

    /// What it keeps; or the connection that is left, where there is nothing to do any more.
    fn at_work(&self) -> Result<Vec<Arc<Grant>>, Option<Box<Connected>>> {
        let mut state = self.state();
        if state.grants.is_empty() && state.users == 0 {
            state.runtime = None;
            // No call is under way.
            return Err(self.line.try_lock().ok().and_then(|mut line| line.take()).map(Box::new));
        }
        Ok(state.grants.clone())
    }

    async fn watch(self: Arc<Self>) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let grants = self.state().grants.clone();
            let (over, held): (Vec<_>, Vec<_>) =
                grants.into_iter().partition(|grant| grant.times().deadline.has_passed());
            self.end(&over, Reason::Deadline);
            let first = held.iter().map(|grant| grant.times().deadline).min();
            let _ =
                clock::within(first.map_or(Duration::MAX, Moment::remaining), changed.changed())
                    .await;
        }
    }

    fn look_at_sessions(&self, grants: &[Arc<Grant>]) {
        // One that is in use is looked at by its call.
        let Ok(mut line) = self.line.try_lock() else { return };
        line.look();
        let ended =
            |grant: &&Arc<Grant>| grant.session.is_some_and(|session| session != line.session);
        let ended: Vec<_> = grants.iter().filter(ended).cloned().collect();
        drop(line);
        self.end(&ended, Reason::Session);
    }

    // Renewals

    /// Renews them now.
    pub async fn keep(self: &Arc<Self>, grants: &[Arc<Grant>]) {
        let (before, smallest) = (Moment::now(), self.smallest(Duration::MAX, grants));
        let pairs: Vec<(String, i64)> = pairs(grants).collect();
        let mut answers = Vec::new();
        for some in pairs.chunks(MOST_PAIRS) {
            let (names, tokens): (Vec<_>, Vec<_>) = some.iter().cloned().unzip();
            let (keeper, asked) = (self.clone(), (names.clone(), tokens.clone()));
            let ask: BoxFuture<_> = Box::pin(async move { keeper.ask(asked, smallest).await });
            let answered = match &self.lab {
                None => ask.await,
                Some(lab) => lab(names, tokens, ask).await,
            };
            match answered {
                Ok(some) => answers.extend(some),
                // It never will: a right was taken away, the role or the database is gone.
                Err(error) if error.is_permanent() => {
                    self.is_out(Some(&error));
                    self.end(grants, Reason::Refused);
                    return;
                }
                Err(error) => {
                    // No loss: the deadline tells.
                    let again = Moment::now() + smallest / 12;
                    grants.iter().for_each(|grant| grant.times().beat_at = again);
                    return self.is_out(Some(&error));
                }
            }
        }
        self.is_out(None);
        let got_on = answers.iter().any(|answer| answer.outcome == "kept");
        let mut rest = answers.as_slice();
        let mut losses: Vec<(Reason, Vec<Arc<Grant>>)> = Vec::new();
        for grant in grants {
            let (mine, others) = rest.split_at(grant.names.len().min(rest.len()));
            rest = others;
            match grant.answered(mine, before, got_on) {
                Ok(true) if grant.reason().is_none() => self.tell(EventKind::Renewed, grant),
                Ok(_) => {}
                Err(reason) => match losses.iter_mut().find(|(other, _)| *other == reason) {
                    Some((_, lost)) => lost.push(grant.clone()),
                    None => losses.push((reason, vec![grant.clone()])),
                },
            }
        }
        for (reason, lost) in losses {
            self.end(&lost, reason);
        }
        self.changed.send_replace(());
    }

    /// On a connection that falls silent it is not waited for so long that no other one could be opened in time.
    async fn ask(
        &self,
        asked: (Vec<String>, Vec<i64>),
        smallest: Duration,
    ) -> Result<Vec<Answer>, Error> {
        let call = keep(&self.schema, asked.0, asked.1);
        let mut line = self.line.lock().await;
        line.look();
        let was_open = line.is_open();
        let limit = if was_open { smallest / 4 } else { smallest / 3 };
        let mut rows = line.call(&self.open, limit, &call).await;
        if was_open && rows.as_ref().is_err_and(Error::is_of_connection) {
            rows = line.call(&self.open, smallest / 6, &call).await;
        }
        let answer = |row: &Row| -> Result<Answer, Error> {
            let (outcome, remaining) = (row.try_get(0)?, row.try_get(1)?);
            Ok(Answer { outcome, remaining, again_in: row.try_get(2)? })
        };
        rows?.iter().map(answer).collect()
    }

    /// Has the next renewal tell whether they are lost.
    pub fn beat_soon(&self, grants: &[Arc<Grant>]) {
        grants.iter().for_each(|grant| grant.times().beat_at = Moment::default());
        self.changed.send_replace(());
    }

    /// Of that and the ttls that are kept: no call on their connection may take longer than a third of it.
    fn smallest(&self, ttl: Duration, grants: &[Arc<Grant>]) -> Duration {
        let state = self.state();
        grants.iter().chain(&state.grants).map(|grant| grant.ttl).fold(ttl, Duration::min)
    }

    /// An outage is one line of the log, however many leases there are.
    fn is_out(&self, error: Option<&Error>) {
        let was_out = {
            let mut state = self.state();
            state.has_told_losses &= error.is_some();
            std::mem::replace(&mut state.is_out, error.is_some())
        };
        match error {
            Some(error) if !was_out => {
                log::warn!("leases are not renewed, and it is tried again: {error}")
            }
            None if was_out => log::info!("leases are renewed again"),
            _ => {}
        }
    }

    // How a lease comes

    /// Where nobody is `there` any more, a grant that comes all the same is given back.
    pub async fn acquire(
        self: Arc<Self>,
        asked: Asked,
        mut gone: oneshot::Receiver<()>,
    ) -> Result<Arc<Grant>, Error> {
        let mut own = (!asked.wait.is_zero() && !asked.session).then(Line::default);
        let until = Moment::now() + asked.wait;
        let mut is_gone = || !matches!(gone.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        let outcome = loop {
            if self.state().is_closed {
                break Err(Error::Invalid("the fence is closed".to_owned()));
            }
            let (before, smallest) = (Moment::now(), self.smallest(asked.ttl, &[]));
            let longest = if asked.session { PORTION.min(smallest / 3) } else { PORTION };
            let portion = longest.min(until.remaining());
            let call = asked.call(&self.schema, portion);
            let limit = portion + if own.is_some() { asked.ttl } else { smallest } / 3;
            let (token, session) = match self.value(own.as_mut(), limit, &call).await {
                Ok(found) => found,
                // The role's transactions are SERIALIZABLE.
                Err(error) if error.sqlstate().as_deref() == Some("40001") => {
                    tokio::task::yield_now().await;
                    continue;
                }
                Err(error) => break Err(error),
            };
            if let Some(token) = token {
                if let Some(own) = &mut own {
                    self.line.lock().await.adopt(own);
                }
                let session = asked.session.then_some(session);
                let granted = Grant::new(asked.names.clone(), token, asked.ttl, before, session);
                let granted = self.granted(granted).await;
                match granted {
                    Ok(grant) if is_gone() => {
                        self.release(&[grant]).await;
                        break Err(Error::Invalid("nobody waits for it".to_owned()));
                    }
                    granted => break granted,
                }
            }
            if until.has_passed() || is_gone() {
                break Err(Error::LeaseTaken(self.taken(own.as_mut(), &asked).await));
            }
            if asked.names.len() > 1 {
                clock::sleep(TRY_AGAIN.min(until.remaining())).await;
            }
        };
        if let Some(connected) = own.as_mut().and_then(Line::take) {
            connected.close().await;
        }
        outcome
    }

    pub async fn claim(
        self: Arc<Self>,
        asked: Asked,
        n: i32,
        gone: oneshot::Receiver<()>,
    ) -> Result<Vec<Arc<Grant>>, Error> {
        let (before, limit) = (Moment::now(), self.smallest(asked.ttl, &[]) / 3);
        let call = any(&self.schema, &asked, n);
        let (rows, _) = self.rows(None, limit, &call).await?;
        let mut grants = Vec::new();
        for row in &rows {
            let grant = Grant::new(vec![row.try_get(0)?], row.try_get(1)?, asked.ttl, before, None);
            // One that is lost already has been told.
            grants.extend(self.granted(grant).await.ok());
        }
        let mut gone = gone;
        if !matches!(gone.try_recv(), Err(oneshot::error::TryRecvError::Empty)) {
            self.release(&grants).await;
        }
        Ok(grants)
    }

    async fn granted(self: &Arc<Self>, grant: Arc<Grant>) -> Result<Arc<Grant>, Error> {
        if grant.times().beat_at.has_passed() {
            // The call has waited, and the server counts from a later moment.
            self.keep(std::slice::from_ref(&grant)).await;
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
            self.release(std::slice::from_ref(&grant)).await;
        }
        self.check(&grant)?;
        self.tell(EventKind::Acquired, &grant);
        Ok(grant)
    }

    /// By whom, where that can be seen.
    async fn taken(&self, own: Option<&mut Line>, asked: &Asked) -> LeaseTaken {
        let names = asked.names.clone();
        let call = holder_of(&self.schema, &asked.names);
        let rows =
            self.rows(own, asked.ttl / 3, &call).await.map(|(rows, _)| rows).unwrap_or_default();
        let holder = rows.first().and_then(|row| row.try_get(0).ok()).flatten();
        let left: Option<f64> = rows.first().and_then(|row| row.try_get(1).ok()).flatten();
        LeaseTaken { names, holder, remaining: left.map(seconds) }
    }

    async fn value(
        &self,
        own: Option<&mut Line>,
        limit: Duration,
        call: &Call,
    ) -> Result<(Option<i64>, u64), Error> {
        let (rows, session) = self.rows(own, limit, call).await?;
        Ok((rows.first().map_or(Ok(None), |row| row.try_get(0))?, session))
    }

    /// On its own connection, or the one that is given. With the number of the connection.
    async fn rows(
        &self,
        own: Option<&mut Line>,
        limit: Duration,
        call: &Call,
    ) -> Result<(Vec<Row>, u64), Error> {
        let mut shared;
        let line = match own {
            Some(own) => own,
            None => {
                shared = self.line.lock().await;
                &mut *shared
            }
        };
        let rows = line.call(&self.open, limit, call).await;
        match rows {
            Ok(rows) => Ok((rows, line.session)),
            Err(error) if error.sqlstate().as_deref() == Some("42501") => {
                let role =
                    line.call(&self.open, limit, &Call::new("SELECT current_user::text")).await;
                let role: Option<String> = role.ok().and_then(|rows| rows.first()?.try_get(0).ok());
                Err(error.of_call(role.as_deref()))
            }
            Err(error) => Err(error.of_call(None)),
        }
    }

    // How it ends

    /// Fails where it is over, whatever the tasks do.
    pub fn check(&self, grant: &Arc<Grant>) -> Result<(), Error> {
        if grant.reason().is_none() && grant.times().deadline.has_passed() {
            self.end(std::slice::from_ref(grant), Reason::Deadline);
        }
        grant.reason().map_or(Ok(()), |reason| Err(Error::LeaseLost(grant.loss(reason))))
    }

    /// Those that were not over before.
    pub fn end(&self, grants: &[Arc<Grant>], reason: Reason) -> Vec<Arc<Grant>> {
        let mut ended = Vec::new();
        for grant in grants {
            if grant.ended.send_if_modified(|now| now.is_none() && now.replace(reason).is_none()) {
                ended.push(grant.clone());
            }
        }
        if ended.is_empty() {
            return ended;
        }
        self.state().grants.retain(|grant| grant.reason().is_none());
        self.changed.send_replace(());
        if reason != Reason::Released {
            for grant in &ended {
                let loss = grant.loss(reason);
                for breaker in lock(&grant.guards).values() {
                    breaker.loss.send_replace(Some(loss.clone()));
                    breaker.connection.iter().for_each(AbortHandle::abort);
                }
            }
            // Of an outage that is one line more, however many are lost by it one after the other.
            let is_known = {
                let mut state = self.state();
                let of_outage = state.is_out && reason == Reason::Deadline;
                of_outage && std::mem::replace(&mut state.has_told_losses, true)
            };
            if !is_known {
                log::warn!("{} lost ({})", all_of(&ended), reason.as_str());
            }
            ended.iter().for_each(|grant| self.tell(EventKind::Lost(reason), grant));
        }
        ended
    }

    /// Gives them back. No error where that fails: then they end at their ttl.
    pub async fn release(self: &Arc<Self>, grants: &[Arc<Grant>]) {
        for some in self.end(grants, Reason::Released).chunks(MOST_RELEASED) {
            let ttl = self.smallest(Duration::MAX, some);
            let outcome = self.release_some(some, ttl).await;
            // Somebody's open transaction has changed one of them: the others need not wait for it.
            if some.len() > 1 && outcome.as_ref().is_err_and(is_locked) {
                for one in some {
                    let _ = self.release_some(std::slice::from_ref(one), ttl).await;
                }
            } else if outcome.is_err_and(|error| error.is_of_connection()) {
                // Nor would the server be there for the others.
                return;
            }
        }
    }

    async fn release_some(&self, grants: &[Arc<Grant>], ttl: Duration) -> Result<(), Error> {
        let until = Moment::now() + ttl / 3;
        let (names, tokens): (Vec<_>, Vec<_>) = pairs(grants).unzip();
        let call = release_aside(&self.schema, names, tokens, ttl / 12);
        let mut has_repeated = false;
        let rows = loop {
            match self.rows(None, ttl / 3, &call).await {
                Err(error) if is_locked(&error) && grants.len() == 1 && !until.has_passed() => {
                    clock::sleep(ttl / 12).await;
                }
                // It has only shown that the connection had ended before.
                Err(error)
                    if error.is_of_connection()
                        && !has_repeated
                        && !matches!(error, Error::NoAnswer(_)) =>
                {
                    has_repeated = true;
                }
                Err(error) if is_locked(&error) && grants.len() > 1 => return Err(error),
                Err(error) => {
                    log::warn!("{} not released, and ends at its ttl: {error}", all_of(grants));
                    return Err(error);
                }
                Ok((rows, _)) => break rows,
            }
        };
        let mut rows = rows.iter();
        for grant in grants {
            let mine = rows.by_ref().take(grant.names.len());
            // All of its rows are passed over, whatever they say.
            let gone = mine.filter(|row| row.get::<_, Option<i64>>(0).is_none()).count();
            self.was_released(grant, gone == 0 || has_repeated);
        }
        Ok(())
    }

    /// The server says whether it was ours still.
    pub fn was_released(&self, grant: &Grant, is_ours: bool) {
        if is_ours {
            return self.tell(EventKind::Released, grant);
        }
        grant.ended.send_replace(Some(Reason::Gone));
        log::warn!("the lease {} is lost (gone)", grant.names.join(", "));
        self.tell(EventKind::Lost(Reason::Gone), grant);
    }

    /// Gives everything back, and ends all waits.
    pub async fn close(self: Arc<Self>) -> Result<(), Error> {
        let grants = {
            let mut state = self.state();
            state.is_closed = true;
            state.grants.clone()
        };
        self.release(&grants).await;
        Ok(())
    }

    /// Until its thread has nothing to do any more.
    pub async fn until_idle(&self) {
        let mut changed = self.changed.subscribe();
        while self.state().runtime.is_some() {
            let _ = changed.changed().await;
            tokio::task::yield_now().await;
        }
    }

    fn tell(&self, kind: EventKind, grant: &Grant) {
        if let Some(told) = &self.on_event {
            let (names, token) = (grant.names.clone(), grant.token);
            told(&Event { kind, names, token, remaining: grant.remaining() });
        }
    }
}

fn pairs(grants: &[Arc<Grant>]) -> impl Iterator<Item = (String, i64)> {
    grants.iter().flat_map(|grant| grant.names.iter().map(|name| (name.clone(), grant.token)))
}

fn all_of(grants: &[Arc<Grant>]) -> String {
    let names: Vec<&str> =
        grants.iter().take(5).flat_map(|grant| &grant.names).map(String::as_str).collect();
    let more = grants.len().saturating_sub(5);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    match grants.len() {
        1 => format!("the lease {} is", names.join(", ")),
        _ => format!("the leases {}{more} are", names.join(", ")),
    }
}

fn is_locked(error: &Error) -> bool {
    error.sqlstate().as_deref() == Some("55P03")
}

/// What the server says, which is never negative.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
