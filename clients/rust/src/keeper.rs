//! Keeps all leases of a fence: a thread of its own, in which one task renews them and watches their deadlines. Work
//! that blocks its own runtime does not lose its leases.

use crate::asked::{Asked, Place, cancel, keep, release, seconds};
use crate::clock::{self, after, left, now};
use crate::connected::{BoxFuture, Line, Opener};
use crate::error::{Error, Reason};
use crate::lease::{Answer, Event, EventKind, Grant, all_of, lock, pairs};
use std::fmt;
use std::mem::{replace, take};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice::from_ref;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{Mutex as AsyncMutex, watch};

/// The most for one `lease_keep`, the others come right after it; and for a release in one transaction, which has its share of locks.
const MOST_PAIRS: usize = 10_000;
const MOST_RELEASED: usize = 200;
/// No portion of a wait takes longer: its snapshot holds up others.
const PORTION: Duration = Duration::from_secs(2);
/// No call takes longer than a third of it, whatever the ttl.
const LONGEST: Duration = Duration::from_secs(30);
/// Several names have no queue: so often they are tried. So often it is looked whether a session has ended, too.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

type Answers = Result<Vec<Answer>, Error>;

/// How a fence was made.
#[derive(Clone)]
pub(crate) struct Setup {
    pub open: Opener,
    /// With a dot, or empty.
    pub schema: String,
    pub on_event: Arc<dyn Fn(&Event) + Send + Sync>,
}

pub(crate) struct Keeper {
    pub setup: Setup,
    state: Mutex<State>,
    /// Anything of what follows.
    pub changed: watch::Sender<()>,
    line: AsyncMutex<Line>,
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
    /// Transactions in which something is to be cancelled.
    hanging: Vec<Place>,
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keeper")
    }
}

/// A grant that is somebody's. Dropped, it is given back in the background; where there is no thread to be had it ends at
/// its ttl.
#[derive(Debug)]
pub(crate) struct Held {
    pub keeper: Arc<Keeper>,
    pub grant: Arc<Grant>,
}

impl Held {
    /// Nothing where it is over. To the end, also where what it returns is dropped.
    pub fn give_back(&self) -> Option<impl Future<Output = Result<(), Error>> + use<>> {
        let (keeper, grant) = (self.keeper.clone(), self.grant.clone());
        let released = async move { keeper.release(&[grant]).await };
        self.grant.reason().is_none().then(|| self.keeper.run(released))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.give_back());
    }
}

impl Keeper {
    pub fn new(setup: Setup) -> Arc<Keeper> {
        let line = AsyncMutex::new(Line::new(setup.open.clone()));
        Arc::new(Keeper { setup, state: Mutex::default(), changed: watch::Sender::default(), line })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    // Its thread

    /// Does that in its thread; to the end, also where what it returns is dropped, which waits for it.
    pub fn run<W>(
        self: &Arc<Self>,
        work: W,
    ) -> impl Future<Output = Result<W::Output, Error>> + use<W>
    where
        W: Future<Output: Send> + Send + 'static,
    {
        let keeper = self.clone();
        let task = self.start().map(|runtime| {
            runtime.clone().spawn(async move {
                let done = work.await;
                drop(runtime);
                keeper.changed.send_replace(());
                done
            })
        });
        async move { task?.await.map_err(Error::other) }
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

    /// Until there is nothing to do, or its task has died of whatever.
    fn serve(self: Arc<Self>, runtime: Runtime) {
        let ended = runtime.block_on(runtime.spawn(self.clone().watch()));
        runtime.shutdown_background();
        if ended.is_err() {
            // Nothing uses it any more.
            self.line.blocking_lock().take();
            let grants = {
                let mut state = self.state();
                state.runtime = None;
                state.grants.clone()
            };
            self.end(&grants, Reason::Keeper);
        }
    }

    /// The deadlines are looked at while a renewal hangs, too.
    async fn watch(self: Arc<Self>) {
        let mut changed = self.changed.subscribe();
        let mut beat: Option<BoxFuture<()>> = None;
        let left_over = loop {
            let mut grants = {
                let mut state = self.state();
                let is_in_use =
                    state.runtime.as_ref().is_some_and(|one| Arc::strong_count(one) > 1);
                if state.grants.is_empty() && !is_in_use {
                    // A caller that comes now begins with another thread, and with another connection.
                    drop((beat.take(), state.runtime.take()));
                    break self.line.try_lock().ok().and_then(|mut line| line.take());
                }
                state.grants.clone()
            };
            // A line that is in use is looked at by its call.
            if let Ok(mut line) = self.line.try_lock() {
                line.look();
                let is_over =
                    |grant: &&Arc<Grant>| grant.session.is_some_and(|on| on != line.session);
                let over: Vec<_> = grants.iter().filter(is_over).cloned().collect();
                drop(line);
                self.end(&over, Reason::Session);
            }
            grants.retain(|grant| self.check(grant).is_ok());
            let mut pause =
                grants.iter().map(|grant| grant.remaining()).fold(LOOK_AGAIN, Duration::min);
            let next = grants.iter().map(|grant| left(grant.beat_at())).min();
            if let Some(next) = next.filter(|_| beat.is_none()) {
                pause = pause.min(next);
                if next.is_zero() {
                    // Leases that are nearly due go along.
                    let mut count = 0;
                    grants.retain(|grant| {
                        let is_due = left(grant.beat_at()) <= grant.ttl / 6;
                        count += if is_due { grant.names.len() } else { 0 };
                        is_due && count <= MOST_PAIRS
                    });
                    let keeper = self.clone();
                    beat = Some(Box::pin(async move { keeper.keep(&grants).await }));
                }
            }
            tokio::select! {
                biased;
                () = async { beat.as_mut().expect("it is looked at before").await }, if beat.is_some() => beat = None,
                _ = clock::within(pause, changed.changed()) => {}
            }
        };
        if let Some(connected) = left_over {
            connected.close().await;
        }
        self.changed.send_replace(());
    }

    // Renewals

    /// Renews them now.
    pub async fn keep(self: &Arc<Self>, grants: &[Arc<Grant>]) {
        // So much less that where a connection falls silent, another one can be opened in time.
        let (before, limit) = (now(), self.limit(LONGEST, grants) * 3 / 4);
        let mut asked = self.ask(grants, limit).await;
        // After a failover it is only the connection that had ended; but once in an outage, or a server that refuses
        // all of them would be hammered.
        if asked.as_ref().is_err_and(Error::is_of_connection) && !self.state().is_out {
            asked = self.ask(grants, limit).await;
        }
        let answers = match asked {
            Ok(answers) => answers,
            Err(error) => {
                // An outage is one line of the log, however many leases there are.
                if !replace(&mut self.state().is_out, true) {
                    log::warn!("leases are not renewed, and it is tried again: {error}");
                }
                if matches!(error, Error::NotGranted { .. } | Error::NotInstalled(_)) {
                    // The statement itself: it never will.
                    self.end(grants, Reason::Refused);
                }
                // Else no loss: the deadline tells.
                let again = grants.iter().map(|grant| grant.ttl / 12).min().unwrap_or_default();
                return self.beat_at(grants, after(again));
            }
        };
        {
            let mut state = self.state();
            (state.is_out, state.has_told) = (false, false);
        }
        let got_on = answers.iter().any(|(outcome, ..)| outcome == "kept");
        let (mut rest, mut lost) = (answers.as_slice(), Vec::new());
        for grant in grants {
            let (mine, others) = rest.split_at(grant.names.len().min(rest.len()));
            rest = others;
            match grant.answered(mine, before, got_on) {
                Ok(true) if grant.reason().is_none() => self.tell(EventKind::Renewed, grant),
                Ok(_) => {}
                Err(reason) => lost.push((reason, grant)),
            }
        }
        for reason in [Reason::Gone, Reason::Refused] {
            let these = lost.iter().filter(|(why, _)| *why == reason);
            self.end(&these.map(|(_, grant)| Arc::clone(grant)).collect::<Vec<_>>(), reason);
        }
        self.changed.send_replace(());
    }

    async fn ask(&self, grants: &[Arc<Grant>], limit: Duration) -> Answers {
        let call = keep(&self.setup.schema, pairs(grants));
        let rows = self.line.lock().await.call(limit, &call).await?;
        rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?))).collect()
    }

    /// With nothing as the time: the next renewal is to tell whether they are lost.
    pub fn beat_at(&self, grants: &[Arc<Grant>], at: Duration) {
        grants.iter().for_each(|grant| grant.times.send_modify(|times| times.beat_at = at));
        self.changed.send_replace(());
    }

    /// How long a call on their connection may take: a third of that ttl and of all that are kept.
    fn limit(&self, ttl: Duration, grants: &[Arc<Grant>]) -> Duration {
        let state = self.state();
        let ttls = grants.iter().chain(&state.grants).map(|grant| grant.ttl);
        ttls.fold(ttl.min(LONGEST), Duration::min) / 3
    }

    // How a lease comes

    /// Where `wanted` has gone, nobody waits for it any more.
    pub async fn acquire(self: Arc<Self>, asked: Asked, wanted: Weak<()>) -> Result<Held, Error> {
        // While it waits on a connection of its own, the others are renewed.
        let own = AsyncMutex::new(Line::new(self.setup.open.clone()));
        let waits = !asked.wait.is_zero() && !asked.session;
        let grant = self.wait_for(&asked, if waits { &own } else { &self.line }, wanted).await;
        let mut spare = own.into_inner().connected;
        if grant.is_ok()
            && let Ok(mut line) = self.line.try_lock()
            && !line.look()
        {
            // It goes on as the fence's.
            line.connected = spare.take();
        }
        let granted = match grant {
            Ok(grant) => self.granted(grant).await,
            Err(error) => Err(error),
        };
        if let Some(spare) = spare {
            spare.close().await;
        }
        granted
    }

    async fn wait_for(
        &self,
        asked: &Asked,
        line: &AsyncMutex<Line>,
        wanted: Weak<()>,
    ) -> Result<Arc<Grant>, Error> {
        let (schema, until) = (&self.setup.schema, after(asked.wait));
        let is_own = !std::ptr::eq(line, &self.line);
        loop {
            let mut line = line.lock().await;
            if wanted.strong_count() == 0 {
                return Err(Error::Invalid("nobody waits for it any more"));
            }
            self.refuse_if_closed()?;
            let limit =
                if is_own { asked.ttl.min(LONGEST) / 3 } else { self.limit(asked.ttl, &[]) };
            // A session lease waits on the connection that keeps the others.
            let portion = if asked.session { PORTION.min(limit) } else { PORTION }.min(left(until));
            let before = now();
            let rows = line.call(portion + limit, &asked.call(schema, portion)).await?;
            if let Some(token) = rows.first().map_or(Ok(None), |row| row.try_get(0))? {
                let session = asked.session.then_some(line.session);
                return Ok(Grant::new(asked.names.clone(), token, before, asked.ttl, session));
            }
            if until <= now() {
                let holder = rows.first().and_then(|row| row.try_get(1).ok()).flatten();
                let left: Option<f64> = rows.first().and_then(|row| row.try_get(2).ok()).flatten();
                let (names, remaining) = (asked.names.clone(), left.map(seconds));
                return Err(Error::LeaseTaken { names, holder, remaining });
            }
            drop(line);
            if asked.names.len() > 1 {
                clock::sleep(LOOK_AGAIN.min(left(until))).await;
            }
        }
    }

    fn refuse_if_closed(&self) -> Result<(), Error> {
        if self.state().is_closed { Err(Error::Invalid("the fence is closed")) } else { Ok(()) }
    }

    async fn granted(self: &Arc<Self>, grant: Arc<Grant>) -> Result<Held, Error> {
        self.tell(EventKind::Acquired, &grant);
        if grant.beat_at() <= now() {
            // The call has waited, and the server counts from a later moment. The heartbeat does not know of it yet.
            self.keep(from_ref(&grant)).await;
        }
        if grant.reason().is_none() {
            self.state().grants.push(grant.clone());
            self.changed.send_replace(());
        }
        if self.refuse_if_closed().is_err() {
            self.release(from_ref(&grant)).await;
        }
        self.check(&grant)?;
        Ok(Held { keeper: self.clone(), grant })
    }

    // How it ends

    /// Fails where it is over, whatever the thread does.
    pub fn check(&self, grant: &Arc<Grant>) -> Result<(), Error> {
        let times = grant.times();
        if times.reason.is_none() && times.deadline <= now() {
            self.end(from_ref(grant), Reason::Deadline);
        }
        grant.over().map_or(Ok(()), Err)
    }

    /// Returns the leases that were not over before.
    pub fn end(&self, grants: &[Arc<Grant>], reason: Reason) -> Vec<Arc<Grant>> {
        let ended: Vec<_> = grants.iter().filter(|grant| grant.end(reason)).cloned().collect();
        if ended.is_empty() {
            return ended;
        }
        let is_known = {
            let mut state = self.state();
            state.grants.retain(|grant| grant.reason().is_none());
            // Of an outage that is one line more, however many are lost by it one after the other.
            let of_outage = state.is_out && reason == Reason::Deadline;
            of_outage && replace(&mut state.has_told, true)
        };
        self.changed.send_replace(());
        if reason != Reason::Released {
            if !is_known {
                log::warn!("{} lost ({reason})", all_of(&ended));
            }
            ended.iter().for_each(|grant| self.tell(EventKind::Lost(reason), grant));
        }
        ended
    }

    /// Gives them back. No error where that fails: then they end at their ttl.
    pub async fn release(&self, grants: &[Arc<Grant>]) {
        let ended = self.end(grants, Reason::Released);
        let mut all: Vec<_> = ended.chunks(MOST_RELEASED).collect();
        while let Some(some) = all.pop() {
            match self.release_some(some).await {
                // Somebody's open transaction has changed one of them: the others need not wait for it.
                Err(error) if error.has_state("55P03") && some.len() > 1 => {
                    all.extend(some.chunks(1))
                }
                // Nor would the server be there for the others.
                Err(error) if error.is_of_connection() => return,
                _ => {}
            }
        }
    }

    async fn release_some(&self, grants: &[Arc<Grant>]) -> Result<(), Error> {
        let limit = self.limit(LONGEST, grants);
        let (until, call) = (after(limit), release(&self.setup.schema, pairs(grants), limit / 4));
        let mut has_repeated = false;
        let rows = loop {
            let error = match self.line.lock().await.call(limit, &call).await {
                Ok(rows) => break rows,
                Err(error) => error,
            };
            match (&error, error.sqlstate().as_deref()) {
                (_, Some("55P03")) if grants.len() > 1 => return Err(error),
                (_, Some("55P03")) if now() < until => clock::sleep(limit / 4).await,
                // It has only shown that the connection had ended before.
                (Error::TransactionLost { .. }, _) if !has_repeated => has_repeated = true,
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
                grant.times.send_modify(|times| times.reason = Some(Reason::Gone));
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

    /// Ends what hangs in that transaction, if anything does. An outage has many at a time: they go along.
    pub fn cancel(self: &Arc<Self>, place: Place) {
        self.state().hanging.push(place);
        let keeper = self.clone();
        drop(self.run(async move {
            let (limit, mut line) = (keeper.limit(LONGEST, &[]), keeper.line.lock().await);
            let places = take(&mut keeper.state().hanging);
            if places.is_empty() {
                return;
            }
            let warn = |error| log::warn!("a statement in a guard goes on in the server: {error}");
            match line.call(limit, &cancel(places)).await {
                Ok(rows) if rows.iter().all(|row| row.get(0)) => {}
                Ok(_) => warn(Error::Invalid("only its own role may cancel it")),
                Err(error) => warn(error),
            }
        }));
    }

    pub fn tell(&self, kind: EventKind, grant: &Grant) {
        let (names, token) = (grant.names.clone(), grant.token);
        let event = Event { kind, names, token, remaining: grant.remaining() };
        if catch_unwind(AssertUnwindSafe(|| (self.setup.on_event)(&event))).is_err() {
            log::error!("the function of on_event has panicked");
        }
    }
}
