//! Keeps all leases of a fence. It gives the inputs to the state machine, which decides, and
//! carries out the effects: it has the clock, the timer and the connections.
//!
//! The connections live in a thread of their own, so that work that blocks its runtime does not lose
//! its leases. The timer has another thread: what opens connections is the program's, and may block.

use crate::clock;
use crate::connection::{Connected, Opener};
use crate::errors::{Error, Reason, is_broken};
use crate::lease_state::{
    Answer, Ask, Call, Effect, EventKind, Id, LONGEST_CALL, LOOK_AGAIN, LeaseStates, NEVER,
    SHORTEST_OPENING,
};
use crate::statements::{self, Place, millis, span};
use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::mem::{replace, take};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{oneshot, watch};
use tokio::task::{AbortHandle, JoinError};

/// An event for `on_event`, which must not block: the answers to acquires come after it.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Event {
    pub kind: EventKind,
    /// Of a row lease, its table and its key.
    pub names: Vec<String>,
    pub token: i64,
    /// How long it is ours if no renewal comes through any more.
    pub remaining: Duration,
}

/// How a fence was made.
#[derive(Clone)]
pub(crate) struct Setup {
    pub open: Opener,
    /// Quoted and with a dot, or empty.
    pub schema: String,
    pub longest_beat: Duration,
    pub on_event: Arc<dyn Fn(&Event) + Send + Sync>,
}

/// A lease that was granted.
#[derive(Debug)]
pub(crate) struct Grant {
    pub id: Id,
    pub names: Vec<String>,
    pub token: i64,
    /// The lease as the statements of its transactions name it, if it is a row.
    pub row: Option<Value>,
    pub status: watch::Sender<Status>,
    /// The connections that are in a transaction under it.
    pub guards: Mutex<Vec<AbortHandle>>,
}

#[derive(Debug, Default)]
pub(crate) struct Status {
    renewals: u64,
    /// The reason of its end, and whether it is another role's.
    pub over: Option<(Reason, bool)>,
}

impl Grant {
    fn new(id: Id, token: i64, ask: &Ask) -> Grant {
        let row = ask.table.as_ref().map(|table| table.row(&ask.names[0], token));
        let (status, guards) = (watch::Sender::default(), Mutex::default());
        Grant { id, names: ask.told(), token, row, status, guards }
    }

    /// Why it is ours no more, as far as its events have told.
    pub fn over(&self) -> Option<Error> {
        let (reason, other_role) = self.status.borrow().over?;
        Some(Error::lost(&self.names, reason, other_role))
    }

    /// The loss that it has come to.
    pub fn loss(&self) -> Option<Error> {
        let over = self.status.borrow().over;
        self.over().filter(|_| over.is_some_and(|(reason, _)| reason != Reason::Released))
    }

    fn ends(&self, reason: Reason, other_role: bool) {
        self.status.send_modify(|status| {
            status.over.get_or_insert((reason, other_role));
            if reason != Reason::Released {
                // Before anybody hears of it, who would leave the guard.
                lock(&self.guards).iter().for_each(AbortHandle::abort);
            }
        });
    }
}

/// A lease that is somebody's. Dropped, it is given back in the background.
#[derive(Debug)]
pub(crate) struct Held {
    pub heartbeat: Arc<Heartbeat>,
    pub grant: Arc<Grant>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let id = self.grant.id;
        self.heartbeat.input(|states| states.release(id));
    }
}

pub(crate) struct Heartbeat {
    pub setup: Setup,
    pub spread: i64,
    inner: Mutex<Inner>,
    /// Wakes the timer.
    timer: Condvar,
    /// Changes when a lease ends, when all is closed, and when the thread ends.
    pub changed: watch::Sender<()>,
}

#[derive(Default)]
struct Inner {
    states: LeaseStates,
    /// The runtime of the thread, while there is one.
    runtime: Option<Handle>,
    /// How many tasks the thread has beside its timer.
    tasks: usize,
    last_id: Id,
    acquires: HashMap<Id, Acquire>,
    leases: HashMap<Id, Arc<Grant>>,
    connections: HashMap<u64, Slot>,
    /// Events, answers and lines of the log are told in their order, without the lock.
    to_tell: VecDeque<Tell>,
    is_telling: bool,
    is_closed: bool,
    /// Names of leases that were lost by the input in hand, for the log.
    lost: Vec<(Reason, String)>,
    /// Transactions in which something is to be cancelled.
    hanging: Vec<Place>,
}

impl Inner {
    fn warn(&mut self, line: String) {
        self.to_tell.push_back(Box::new(move |_| log::warn!("{line}")));
    }
}

/// An acquire that is under way.
struct Acquire {
    ask: Arc<Ask>,
    reply: oneshot::Sender<Result<Held, Error>>,
    /// The error of its last call.
    cause: Option<Error>,
}

enum Slot {
    Idle(Connected),
    Busy(AbortHandle),
}

/// An event, an answer or a line of the log that is to be told.
type Tell = Box<dyn FnOnce(&Setup) + Send>;

/// What has become of a call: its answer, or the code and the error.
type Outcomes = Result<Answer, (String, Option<Error>)>;

impl fmt::Debug for Heartbeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Heartbeat")
    }
}

/// Now, in whole milliseconds.
pub(crate) fn now() -> i64 {
    millis(clock::now())
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Heartbeat {
    pub fn new(setup: Setup) -> Arc<Heartbeat> {
        let spread = (RandomState::new().hash_one(()) % 1001) as i64;
        let states = LeaseStates::new(spread, millis(setup.longest_beat));
        let inner = Mutex::new(Inner { states, ..Inner::default() });
        let (timer, changed) = (Condvar::new(), watch::Sender::default());
        Arc::new(Heartbeat { setup, spread, inner, timer, changed })
    }

    /// Gives an input to the states, and carries out what comes of it.
    pub fn input(self: &Arc<Self>, input: impl FnOnce(&mut LeaseStates)) {
        self.locked_input(lock(&self.inner), 0, input);
    }

    /// The same, of the answer to a call.
    fn locked_input(
        self: &Arc<Self>,
        mut inner: MutexGuard<'_, Inner>,
        answered: u64,
        input: impl FnOnce(&mut LeaseStates),
    ) {
        let mut effects = VecDeque::from(inner.states.step(now(), answered, input));
        while let Some(effect) = effects.pop_front() {
            if let Some(call) = self.carry_out(&mut inner, effect) {
                let fails = |states: &mut LeaseStates| states.failed(call, "panicked", true);
                effects.extend(inner.states.step(now(), call, fails));
            }
        }
        // What waits for its time needs the timer, also after that has died.
        if inner.runtime.is_none() && inner.states.wake(now()) < NEVER {
            let _ = self.start(&mut inner);
        }
        inner.lost.clear();
        drop(inner);
        self.timer.notify_one();
        self.tell();
    }

    /// Has events and answers be told by a thread that does nothing else: a log and an `on_event`
    /// that block are to hold up neither the heartbeat nor the timer.
    fn tell(self: &Arc<Self>) {
        let mut inner = lock(&self.inner);
        if inner.to_tell.is_empty() || replace(&mut inner.is_telling, true) {
            return;
        }
        drop(inner);
        let heartbeat = self.clone();
        if thread::Builder::new()
            .name("pg_fence".to_owned())
            .spawn(move || heartbeat.tell_all())
            .is_err()
        {
            self.tell_all();
        }
    }

    /// Runs in one thread at a time, so that the order stays.
    fn tell_all(&self) {
        let mut inner = lock(&self.inner);
        while let Some(next) = inner.to_tell.pop_front() {
            drop(inner);
            if catch_unwind(AssertUnwindSafe(|| next(&self.setup))).is_err() {
                // A log whose pipe is closed may panic again.
                let _ = catch_unwind(|| log::error!("on_event has panicked, or the log"));
            }
            inner = lock(&self.inner);
        }
        inner.is_telling = false;
        self.timer.notify_one();
    }

    pub fn event(self: &Arc<Self>, event: Event) {
        lock(&self.inner).to_tell.push_back(Box::new(move |setup| (setup.on_event)(&event)));
        self.tell();
    }

    // Its thread

    /// The runtime of the thread, which is started if there is none.
    fn start(self: &Arc<Self>, inner: &mut Inner) -> std::io::Result<Handle> {
        if let Some(runtime) = &inner.runtime {
            return Ok(runtime.clone());
        }
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (handle, heartbeat) = (runtime.handle().clone(), self.clone());
        thread::Builder::new()
            .name("pg_fence".to_owned())
            .spawn(move || heartbeat.serve(runtime))?;
        Ok(inner.runtime.insert(handle).clone())
    }

    /// Runs until there is nothing to do, or its timer has died.
    fn serve(self: Arc<Self>, runtime: Runtime) {
        let ((ends, ended), heartbeat) = (oneshot::channel(), self.clone());
        let keeps_time = move || {
            while heartbeat.tick() {}
            ends.send(())
        };
        let timer = thread::Builder::new().name("pg_fence timer".to_owned()).spawn(keeps_time);
        let ended = runtime.block_on(ended);
        runtime.shutdown_background();
        if timer.is_err() || ended.is_err() {
            let mut inner = lock(&self.inner);
            (inner.runtime, inner.tasks) = (None, 0);
            inner.connections.clear();
            self.locked_input(inner, 0, LeaseStates::died);
        }
        self.changed.send_replace(());
    }

    /// Gives a tick if it is time, and looks whether idle connections have ended: nothing else
    /// tells that. Otherwise it waits. It returns false if there is nothing to do any more.
    fn tick(self: &Arc<Self>) -> bool {
        let mut inner = lock(&self.inner);
        let has_ended = |slot: &Slot| matches!(slot, Slot::Idle(one) if one.has_ended());
        let mut ended = inner.connections.iter().filter(|(_, slot)| has_ended(slot));
        let ended = ended.next().map(|(on, _)| *on);
        let now = now();
        let wake = inner.states.wake(now);
        let is_busy = inner.tasks > 0 || inner.is_telling || !inner.connections.is_empty();
        if let Some(on) = ended {
            inner.connections.remove(&on);
            self.locked_input(inner, 0, |states| states.disconnected(on));
        } else if wake <= now {
            self.locked_input(inner, 0, |_| {});
        } else if wake < NEVER || is_busy {
            drop(self.timer.wait_timeout(inner, span((wake - now).min(LOOK_AGAIN))));
        } else {
            inner.runtime = None;
            return false;
        }
        true
    }

    /// Has a task run in the thread, which lives as long, and then does that with its result.
    fn spawn<W: Future<Output: Send> + Send + 'static>(
        self: &Arc<Self>,
        inner: &mut Inner,
        work: W,
        then: impl FnOnce(Result<W::Output, JoinError>) + Send + 'static,
    ) -> std::io::Result<AbortHandle> {
        let runtime = self.start(inner)?;
        let (task, heartbeat) = (runtime.spawn(work), self.clone());
        let handle = task.abort_handle();
        inner.tasks += 1;
        runtime.spawn(async move {
            then(task.await);
            lock(&heartbeat.inner).tasks -= 1;
            heartbeat.timer.notify_one();
        });
        Ok(handle)
    }

    // Effects

    /// Returns a call that cannot be sent.
    fn carry_out(self: &Arc<Self>, inner: &mut Inner, effect: Effect) -> Option<u64> {
        match effect {
            Effect::Call(call) => return self.send(inner, call),
            // Dropped, it ends without a goodbye that is waited for.
            Effect::Cut(on) => {
                if let Some(Slot::Busy(call)) = inner.connections.remove(&on) {
                    call.abort();
                }
            }
            Effect::HangUp(on) => {
                if let Some(Slot::Idle(connected)) = inner.connections.remove(&on) {
                    let _ = self.spawn(inner, connected.close(), drop);
                }
            }
            Effect::Event { kind, id, token, remaining, is_other_role } => {
                if kind == EventKind::Acquired {
                    let ask = &inner.acquires.get(&id)?.ask;
                    inner.leases.insert(id, Grant::new(id, token, ask).into());
                }
                let grant = inner.leases.get(&id)?.clone();
                let ended = match kind {
                    EventKind::Lost(reason) => Some((reason, is_other_role)),
                    EventKind::Released { .. } => Some((Reason::Released, false)),
                    _ => None,
                };
                if kind == EventKind::Renewed {
                    grant.status.send_modify(|status| status.renewals += 1);
                }
                if let Some((reason, is_other_role)) = ended {
                    grant.ends(reason, is_other_role);
                    inner.lost.push((reason, grant.names.join(", ")));
                    inner.leases.remove(&id);
                    self.changed.send_replace(());
                }
                let (names, remaining) = (grant.names.clone(), span(remaining));
                let event = Event { kind, names, token, remaining };
                inner.to_tell.push_back(Box::new(move |setup| (setup.on_event)(&event)));
            }
            Effect::Reply { id, denial, sqlstate, in_doubt } => {
                let Acquire { ask, reply, cause } = inner.acquires.remove(&id)?;
                let result = match denial {
                    Some(denial) => {
                        Err(Error::of_denial(denial, (&ask, cause), (sqlstate, in_doubt)))
                    }
                    None => {
                        let (heartbeat, grant) = (self.clone(), inner.leases.get(&id)?.clone());
                        Ok(Held { heartbeat, grant })
                    }
                };
                // A lease that nobody waits for any more is given back.
                inner.to_tell.push_back(Box::new(|_| drop(reply.send(result))));
            }
            Effect::NotRenewed(code) => {
                inner.warn(format!("leases are not renewed, and it is tried again: {code}"));
            }
            Effect::NotAcquired(id, code) => {
                let cause = inner.acquires.get(&id).and_then(|acquire| acquire.cause.as_ref());
                let cause = cause.filter(|_| code != "no answer").map(ToString::to_string);
                let cause = cause.unwrap_or(code);
                inner.warn(format!("no lease could be acquired, and it is tried again: {cause}"));
            }
            Effect::Ended(Some(reason), count) => {
                let first = inner.lost.iter().find(|(of, _)| *of == reason);
                let first = first.map(|(_, names)| names.as_str()).unwrap_or_default();
                inner.warn(match count {
                    1 => format!("the lease {first} is lost ({reason})"),
                    _ => format!("{count} leases ({first}, …) are lost ({reason})"),
                });
            }
            Effect::Ended(None, count) => {
                inner.warn(format!("leases are not released, and end at their ttl: {count}"));
            }
            Effect::Closed => {
                inner.is_closed = true;
                self.changed.send_replace(());
            }
        }
        None
    }

    /// Has a call be sent by a task of its own.
    fn send(self: &Arc<Self>, inner: &mut Inner, call: Arc<Call>) -> Option<u64> {
        let connected = match inner.connections.remove(&call.connection) {
            Some(Slot::Idle(connected)) => Some(connected),
            _ => None,
        };
        let (heartbeat, of) = (self.clone(), call.clone());
        let sends = self.clone().call(call.clone(), connected);
        match self.spawn(inner, sends, move |ended| heartbeat.ended(&of, ended)) {
            Ok(task) => {
                inner.connections.insert(call.connection, Slot::Busy(task));
                None
            }
            Err(error) => {
                let asking = call.acquire().and_then(|id| inner.acquires.get_mut(&id));
                asking
                    .into_iter()
                    .for_each(|one| one.cause = Some(Error::other(error.to_string())));
                Some(call.number)
            }
        }
    }

    /// Sends a call, on a connection that it gives back.
    async fn call(
        self: Arc<Self>,
        call: Arc<Call>,
        mut connected: Option<Connected>,
    ) -> (Option<Connected>, Outcomes) {
        if call.opens {
            // A little less than the limit, so that it is told what was tried.
            let limit = span(call.limit.max(SHORTEST_OPENING) / 10 * 9);
            match (self.setup.open)(limit).await {
                Ok(opened) => connected = Some(opened),
                Err(error) => return (None, Err((error.code_of_opening(), Some(error)))),
            }
            self.input(|states| states.sent(call.number));
        }
        let Some(on) = connected.as_ref().filter(|one| !one.has_ended()) else {
            return (None, Err(("unsent".to_owned(), None)));
        };
        let statement = statements::of(&self.setup.schema, &call);
        let answer = match on.rows(&statement).await {
            Ok(rows) => statements::read(&call, &rows).ok_or(("unreadable".to_owned(), None)),
            Err(error) => {
                let state = error.code().map(|code| code.code().to_owned());
                let has_ended = on.has_ended() || is_broken(&error);
                let code = if has_ended { "ended" } else { "unreadable" };
                let table = call.pairs.table.as_ref().map(|table| &*table.name);
                let error = Error::from(error).of_call(&on.role, table);
                Err((state.unwrap_or_else(|| code.to_owned()), Some(error)))
            }
        };
        (connected, answer)
    }

    /// Gives the answer to the states.
    fn ended(
        self: &Arc<Self>,
        call: &Call,
        ended: Result<(Option<Connected>, Outcomes), JoinError>,
    ) {
        let (connected, mut outcome) = match ended {
            Ok(ended) => ended,
            Err(error) if error.is_panic() => {
                let error = Error::other(error.to_string());
                (None, Err(("panicked".to_owned(), Some(error))))
            }
            // It was cut, which the states have decided.
            Err(_) => return,
        };
        let mut inner = lock(&self.inner);
        let is_broken = connected.as_ref().is_none_or(Connected::has_ended);
        if let (Some(connected), Some(slot)) = (connected, inner.connections.get_mut(&call.connection)) {
            *slot = Slot::Idle(connected);
        }
        let asking = call.acquire().and_then(|id| inner.acquires.get_mut(&id));
        if let (Some(asking), Err((_, error @ Some(_)))) = (asking, &mut outcome) {
            asking.cause = error.take();
        }
        self.locked_input(inner, call.number, |states| match outcome {
            Ok(answer) => states.answered(call.number, answer),
            Err((code, _)) => states.failed(call.number, &code, is_broken),
        });
    }

    // What a program asks for

    /// A lease that is held, or why there is none. Dropped while it waits, it gives up.
    pub async fn acquire(self: &Arc<Self>, ask: Ask) -> Result<Held, Error> {
        let ((reply, answer), ask) = (oneshot::channel(), Arc::new(ask));
        let id = {
            let mut inner = lock(&self.inner);
            inner.last_id += 1;
            let (id, acquire) = (inner.last_id, Acquire { ask: ask.clone(), reply, cause: None });
            inner.acquires.insert(id, acquire);
            id
        };
        let _gives_up = GivesUp { heartbeat: self.clone(), id };
        self.input(|states| states.acquire(id, ask));
        let held = answer.await.map_err(Error::other)??;
        self.check(&held.grant)?;
        Ok(held)
    }

    /// Fails if the lease is ours no more, whatever the thread does.
    pub fn check(self: &Arc<Self>, grant: &Grant) -> Result<(), Error> {
        self.input(|_| {});
        match lock(&self.inner).states.over(grant.id) {
            None => Ok(()),
            Some((reason, other_role)) => {
                let over = grant.over();
                Err(over.unwrap_or_else(|| Error::lost(&grant.names, reason, other_role)))
            }
        }
    }

    pub fn remaining(&self, grant: &Grant) -> Duration {
        span(lock(&self.inner).states.remaining(now(), grant.id))
    }

    /// Waits for the next renewal of these, or their end.
    pub async fn renew(self: &Arc<Self>, leases: &[Arc<Held>]) {
        let status = |lease: &Arc<Held>| lease.grant.status.subscribe();
        let mut all: Vec<_> = leases.iter().map(status).collect();
        let before: Vec<_> = all.iter().map(|status| status.borrow().renewals).collect();
        let ids: Vec<_> = leases.iter().map(|lease| lease.grant.id).collect();
        self.input(|states| states.suspect(&ids));
        let renewed = async {
            for (status, before) in all.iter_mut().zip(before) {
                let _ = status.wait_for(|is| is.over.is_some() || is.renewals > before).await;
            }
        };
        let _ = clock::within(span(LONGEST_CALL), renewed).await;
    }

    /// Gives everything back, and ends all waits.
    pub async fn close(self: &Arc<Self>) {
        self.input(LeaseStates::close);
        self.until(|inner| inner.is_closed).await;
        let idle = self.until(|inner| inner.runtime.is_none());
        let _ = clock::within(Duration::from_secs(3), idle).await;
    }

    async fn until(&self, is: impl Fn(&Inner) -> bool) {
        let mut changed = self.changed.subscribe();
        while !is(&lock(&self.inner)) {
            let _ = changed.changed().await;
        }
    }

    /// Ends what hangs in that transaction. An outage has many at a time, and they go together.
    pub fn cancel(self: &Arc<Self>, place: Place) {
        let mut inner = lock(&self.inner);
        inner.hanging.push(place);
        if inner.hanging.len() > 1 {
            return;
        }
        let heartbeat = self.clone();
        let cancels = async move {
            let statement = statements::cancel(take(&mut lock(&heartbeat.inner).hanging));
            let cancelled = async {
                let connected = (heartbeat.setup.open)(span(LONGEST_CALL)).await?;
                let rows = connected.rows(&statement).await;
                connected.close().await;
                Ok::<_, Error>(rows?.iter().all(|row| row.get(0)))
            };
            let warn =
                |why: &str| log::warn!("a statement in a guard goes on in the server: {why}");
            match clock::within(span(LONGEST_CALL), cancelled).await {
                Some(Ok(true)) => {}
                Some(Ok(false)) => warn("only its own role may cancel it"),
                Some(Err(error)) => warn(&error.to_string()),
                None => warn("the server did not answer in time"),
            }
        };
        let _ = self.spawn(&mut inner, cancels, drop);
    }
}

/// Tells that nobody waits for an acquire any more.
struct GivesUp {
    heartbeat: Arc<Heartbeat>,
    id: Id,
}

impl Drop for GivesUp {
    fn drop(&mut self) {
        if lock(&self.heartbeat.inner).acquires.contains_key(&self.id) {
            self.heartbeat.input(|states| states.give_up(self.id));
        }
    }
}
