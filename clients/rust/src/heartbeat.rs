//! Keeps all leases of a fence. It gives the inputs to the state machine, which decides, and
//! carries out the effects: it has the clock, the timer and the connections.
//!
//! They live in a thread of their own, so that work that blocks its runtime does not lose its
//! leases.

use crate::clock;
use crate::connection::{Connected, Cut, Opener};
use crate::errors::{Error, Reason, is_broken};
use crate::lease_state::{
    Answer, Ask, Call, Effect, EventKind, Id, Input, LONGEST_CALL, LOOK_AGAIN, LeaseStates, NEVER,
    Outcome, SHORTEST_OPENING, Stage, Verb,
};
use crate::statements::{self, Options, Place, Statement, millis, span};
use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::mem::take;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::{AbortHandle, JoinError};
use tokio_postgres::Row;

/// An event for `on_event`, which must not block.
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
        self.heartbeat.input(Input::Release(self.grant.id));
    }
}

pub(crate) struct Heartbeat {
    pub setup: Setup,
    pub spread: i64,
    inner: Mutex<Inner>,
    /// Wakes the timer.
    timer: Notify,
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
    /// Events and answers are told in their order, without the lock.
    to_tell: VecDeque<Tell>,
    is_telling: bool,
    is_closed: bool,
    /// Names of leases that were lost by the input in hand, for the log.
    lost: Vec<(Reason, String)>,
    /// Transactions in which something is to be cancelled.
    hanging: Vec<Place>,
}

/// An acquire that is under way.
struct Acquire {
    options: Options,
    reply: oneshot::Sender<Result<Held, Error>>,
    /// The error of its last call, and the role that has sent it.
    cause: Option<Error>,
    role: String,
}

enum Slot {
    Idle(Connected),
    Busy(AbortHandle),
}

enum Tell {
    Event(Event),
    Reply(oneshot::Sender<Result<Held, Error>>, Result<Held, Error>),
}

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
        let mut states = LeaseStates::new(spread);
        states.longest_beat = states.longest_beat.min(millis(setup.longest_beat));
        let inner = Mutex::new(Inner { states, ..Inner::default() });
        let (timer, changed) = (Notify::new(), watch::Sender::default());
        Arc::new(Heartbeat { setup, spread, inner, timer, changed })
    }

    /// Gives an input to the states, and carries out what comes of it. It returns the answer to a
    /// check.
    pub fn input(self: &Arc<Self>, input: Input) -> Option<(Reason, bool)> {
        self.locked_input(lock(&self.inner), input)
    }

    fn locked_input(
        self: &Arc<Self>,
        mut inner: MutexGuard<'_, Inner>,
        input: Input,
    ) -> Option<(Reason, bool)> {
        let (mut inputs, mut checked, mut has_died) = (VecDeque::from([input]), None, false);
        while let Some(input) = inputs.pop_front() {
            for effect in inner.states.step(now(), input) {
                match effect {
                    Effect::Checked(why) => checked = why,
                    effect => inputs.extend(self.carry_out(&mut inner, effect)),
                }
            }
            // A row lease begins without a call, and has to be watched all the same.
            let is_unwatched = inner.runtime.is_none() && inner.states.wake(now()) < NEVER;
            if is_unwatched && !has_died && self.start(&mut inner).is_err() {
                has_died = true;
                inputs.push_back(Input::Died);
            }
        }
        inner.lost.clear();
        drop(inner);
        self.timer.notify_one();
        self.tell();
        checked
    }

    /// Tells events and answers, in one thread at a time, so that their order stays.
    fn tell(self: &Arc<Self>) {
        let mut inner = lock(&self.inner);
        if inner.is_telling {
            return;
        }
        inner.is_telling = true;
        while let Some(next) = inner.to_tell.pop_front() {
            drop(inner);
            match next {
                Tell::Event(event) => {
                    let told = AssertUnwindSafe(|| (self.setup.on_event)(&event));
                    if catch_unwind(told).is_err() {
                        log::error!("the function of on_event has panicked");
                    }
                }
                // A lease that nobody waits for any more is given back.
                Tell::Reply(to, reply) => drop(to.send(reply)),
            }
            inner = lock(&self.inner);
        }
        inner.is_telling = false;
    }

    pub fn event(self: &Arc<Self>, event: Event) {
        lock(&self.inner).to_tell.push_back(Tell::Event(event));
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
        let thread = std::thread::Builder::new().name("pg_fence".to_owned());
        thread.spawn(move || heartbeat.serve(runtime))?;
        Ok(inner.runtime.insert(handle).clone())
    }

    /// Runs until there is nothing to do, or its timer has died.
    fn serve(self: Arc<Self>, runtime: Runtime) {
        let ended = runtime.block_on(runtime.spawn(self.clone().keep_time()));
        runtime.shutdown_background();
        if ended.is_err() {
            let mut inner = lock(&self.inner);
            (inner.runtime, inner.tasks) = (None, 0);
            inner.connections.clear();
            self.locked_input(inner, Input::Died);
        }
        self.changed.send_replace(());
    }

    async fn keep_time(self: Arc<Self>) {
        while let Some(pause) = self.tick() {
            let _ = clock::within(pause, self.timer.notified()).await;
        }
    }

    /// Gives a tick if it is time, and looks whether idle connections have ended: nothing else
    /// tells that. It returns how long to wait, or nothing if there is nothing to do any more.
    fn tick(self: &Arc<Self>) -> Option<Duration> {
        let mut inner = lock(&self.inner);
        let has_ended = |slot: &Slot| matches!(slot, Slot::Idle(one) if one.has_ended());
        let mut ended = inner.connections.iter().filter(|(_, slot)| has_ended(slot));
        let ended = ended.next().map(|(on, _)| *on);
        let (now, mut wait) = (now(), Duration::ZERO);
        let wake = inner.states.wake(now);
        if let Some(on) = ended {
            inner.connections.remove(&on);
            self.locked_input(inner, Input::Disconnected(on));
        } else if wake <= now {
            self.locked_input(inner, Input::Tick);
        } else if wake < NEVER || inner.tasks > 0 || !inner.connections.is_empty() {
            wait = span((wake - now).min(LOOK_AGAIN));
        } else {
            inner.runtime = None;
            return None;
        }
        Some(wait)
    }

    /// Has a task run in the thread, which lives as long. If there is no thread, it is not run.
    fn spawn(
        self: &Arc<Self>,
        inner: &mut Inner,
        work: impl Future<Output: Send> + Send + 'static,
    ) {
        let Ok(runtime) = self.start(inner) else { return };
        let (task, heartbeat) = (runtime.spawn(work), self.clone());
        inner.tasks += 1;
        runtime.spawn(async move {
            let _ = task.await;
            lock(&heartbeat.inner).tasks -= 1;
            heartbeat.timer.notify_one();
        });
    }

    // Effects

    /// Returns a further input, if a call cannot be sent.
    fn carry_out(self: &Arc<Self>, inner: &mut Inner, effect: Effect) -> Option<Input> {
        match effect {
            Effect::Call(call) => return self.send(inner, call),
            Effect::Cut(on) => match inner.connections.remove(&on) {
                Some(Slot::Busy(call)) => call.abort(),
                Some(Slot::Idle(connected)) => drop(Cut(Some(connected))),
                None => {}
            },
            Effect::HangUp(on) => {
                if let Some(Slot::Idle(connected)) = inner.connections.remove(&on) {
                    self.spawn(inner, connected.close());
                }
            }
            Effect::Event { kind, id, token, remaining, is_other_role } => {
                self.lease_event(inner, id, (kind, token, is_other_role));
                if let Some(grant) = inner.leases.get(&id) {
                    let (names, remaining) = (grant.names.clone(), span(remaining));
                    let event = Event { kind, names, token, remaining };
                    inner.to_tell.push_back(Tell::Event(event));
                }
                if matches!(kind, EventKind::Lost(_) | EventKind::Released { .. }) {
                    inner.leases.remove(&id);
                    self.changed.send_replace(());
                }
            }
            Effect::Reply { id, denial, sqlstate, in_doubt } => {
                let Acquire { options, reply, cause, role } = inner.acquires.remove(&id)?;
                let result = match denial {
                    Some(denial) => {
                        let about = (&options, cause, &*role);
                        Err(Error::of_denial(denial, about, (sqlstate, in_doubt)))
                    }
                    None => {
                        let (heartbeat, grant) = (self.clone(), inner.leases.get(&id)?.clone());
                        Ok(Held { heartbeat, grant })
                    }
                };
                inner.to_tell.push_back(Tell::Reply(reply, result));
            }
            Effect::NotRenewed(code) => {
                log::warn!("leases are not renewed, and it is tried again: {code}");
            }
            Effect::NotAcquired(id, code) => {
                let cause = inner.acquires.get(&id).and_then(|acquire| acquire.cause.as_ref());
                let cause = cause.filter(|_| code != "no answer").map(ToString::to_string);
                let cause = cause.unwrap_or(code);
                log::warn!("no lease could be acquired, and it is tried again: {cause}");
            }
            Effect::Lost(reason, count) => {
                let first = inner.lost.iter().find(|(of, _)| *of == reason);
                let first = first.map(|(_, names)| names.as_str()).unwrap_or_default();
                match count {
                    1 => log::warn!("the lease {first} is lost ({reason})"),
                    _ => log::warn!("{count} leases ({first}, …) are lost ({reason})"),
                }
            }
            Effect::NotReleased(count) => {
                log::warn!("leases are not released, and end at their ttl: {count}");
            }
            Effect::Closed => {
                inner.is_closed = true;
                self.changed.send_replace(());
            }
            Effect::Checked(..) => {}
        }
        None
    }

    fn lease_event(
        &self,
        inner: &mut Inner,
        id: Id,
        (kind, token, is_other_role): (EventKind, i64, bool),
    ) {
        match (kind, inner.leases.get(&id)) {
            (EventKind::Acquired, _) => {
                let Some(Acquire { options, .. }) = inner.acquires.get(&id) else { return };
                let grant = Grant {
                    id,
                    names: options.told(),
                    token,
                    row: options.row.map(|token| options.table.row(&options.names[0], token)),
                    status: watch::Sender::default(),
                    guards: Mutex::default(),
                };
                inner.leases.insert(id, Arc::new(grant));
            }
            (EventKind::Renewed, Some(grant)) => {
                grant.status.send_modify(|status| status.renewals += 1);
            }
            (EventKind::Lost(reason), Some(grant)) => {
                grant.ends(reason, is_other_role);
                inner.lost.push((reason, grant.names.join(", ")));
            }
            (EventKind::Released { .. }, Some(grant)) => grant.ends(Reason::Released, false),
            _ => {}
        }
    }

    /// Has a call be sent by a task of its own.
    fn send(self: &Arc<Self>, inner: &mut Inner, call: Call) -> Option<Input> {
        let number = call.number;
        let (on, is_answered) = (call.on, call.acquire);
        let Some(statement) = self.statement(inner, &call) else {
            return Some(failed(number, "unreadable", false));
        };
        let connected = match inner.connections.remove(&on) {
            Some(Slot::Idle(connected)) => Some(connected),
            _ => None,
        };
        let task = self.start(inner).map(|runtime| {
            inner.tasks += 1;
            let task = runtime.spawn(self.clone().call(call, connected, statement));
            inner.connections.insert(on, Slot::Busy(task.abort_handle()));
            let heartbeat = self.clone();
            runtime.spawn(async move { heartbeat.ended(number, on, is_answered, task.await) });
        });
        let error = task.err()?;
        let acquire = is_answered.and_then(|id| inner.acquires.get_mut(&id));
        acquire
            .into_iter()
            .for_each(|acquire| acquire.cause = Some(Error::other(error.to_string())));
        Some(failed(number, "panicked", true))
    }

    fn statement(&self, inner: &Inner, call: &Call) -> Option<Statement> {
        let schema = &self.setup.schema;
        Some(match (call.verb, &call.table) {
            (Verb::Acquire, _) => {
                statements::acquire(schema, call, &inner.acquires.get(&call.acquire?)?.options)
            }
            (Verb::Keep | Verb::KeepRow, Some(table)) => table.keep(schema, call),
            (Verb::Keep | Verb::KeepRow, None) => statements::keep(schema, call),
            (Verb::Release, Some(table)) => table.release(schema, call),
            (Verb::Release, None) => statements::release(schema, call),
            (Verb::Undo, _) => statements::undo(schema, call),
        })
    }

    /// Sends a call. Aborted, it cuts the connection.
    async fn call(
        self: Arc<Self>,
        call: Call,
        connected: Option<Connected>,
        statement: Statement,
    ) -> (Cut, Outcomes) {
        let mut cut = Cut(connected);
        if call.opens {
            // A little less than the limit, so that it is told what was tried.
            let limit = span(call.limit.max(SHORTEST_OPENING) / 10 * 9);
            match (self.setup.open)(limit).await {
                Ok(opened) => cut.0 = Some(opened),
                Err(error) => {
                    return (cut, Err((error.code_of_opening(), Some(error))));
                }
            }
            self.input(Input::Sent(call.number));
        }
        let Some(connected) = cut.0.as_ref().filter(|connected| !connected.has_ended()) else {
            return (cut, Err(("unsent".to_owned(), None)));
        };
        let answer = match connected.rows(&statement).await {
            Ok(rows) => {
                let unread = || ("unreadable".to_owned(), None);
                read(&call, &rows).ok_or_else(unread)
            }
            Err(error) => {
                let state = error.code().map(|code| code.code().to_owned());
                let has_ended = connected.has_ended() || is_broken(&error);
                let code = if has_ended { "ended" } else { "unreadable" };
                Err((state.unwrap_or_else(|| code.to_owned()), Some(Error::from(error))))
            }
        };
        (cut, answer)
    }

    /// Gives the answer to the states.
    fn ended(
        self: &Arc<Self>,
        call: u64,
        on: u64,
        acquire: Option<Id>,
        ended: Result<(Cut, Outcomes), JoinError>,
    ) {
        let mut inner = lock(&self.inner);
        inner.tasks -= 1;
        let (mut cut, outcome) = match ended {
            Ok(ended) => ended,
            Err(error) if error.is_panic() => {
                let error = Error::other(error.to_string());
                (Cut(None), Err(("panicked".to_owned(), Some(error))))
            }
            Err(_) => {
                drop(inner);
                return self.timer.notify_one();
            }
        };
        let role = cut.0.as_ref().map(|connected| connected.role.clone());
        let mut is_broken = true;
        if inner.connections.contains_key(&on)
            && let Some(connected) = cut.0.take()
        {
            is_broken = connected.has_ended();
            inner.connections.insert(on, Slot::Idle(connected));
        }
        let (code, error) = match outcome {
            Ok(answer) => {
                self.locked_input(inner, Input::Answer(call, answer));
                return;
            }
            Err(failure) => failure,
        };
        let asking = acquire.and_then(|id| inner.acquires.get_mut(&id));
        if let (Some(asking), Some(error)) = (asking, error) {
            (asking.cause, asking.role) = (Some(error), role.unwrap_or_default());
        }
        self.locked_input(inner, failed(call, &code, is_broken));
    }

    // What a program asks for

    /// A lease that is held, or why there is none. Dropped while it waits, it gives up.
    pub async fn acquire(self: &Arc<Self>, options: Options, ask: Ask) -> Result<Held, Error> {
        let (reply, answer) = oneshot::channel();
        let (id, input) = {
            let mut inner = lock(&self.inner);
            inner.last_id += 1;
            let id = inner.last_id;
            let input = match options.row {
                Some(token) => Input::KeepRow(id, ask, options.table.clone().into(), token),
                None => Input::Acquire(id, ask),
            };
            let acquire = Acquire { options, reply, cause: None, role: String::new() };
            inner.acquires.insert(id, acquire);
            (id, input)
        };
        let _gives_up = GivesUp { heartbeat: self.clone(), id };
        self.input(input);
        let held = answer.await.map_err(Error::other)??;
        self.check(&held.grant)?;
        Ok(held)
    }

    /// Fails if the lease is ours no more, whatever the thread does.
    pub fn check(self: &Arc<Self>, grant: &Grant) -> Result<(), Error> {
        match self.input(Input::Check(grant.id)) {
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
    pub async fn renew(self: &Arc<Self>, grants: &[Arc<Grant>]) {
        let mut all = Vec::new();
        for grant in grants {
            let status = grant.status.subscribe();
            let renewals = status.borrow().renewals;
            all.push((status, renewals));
        }
        self.suspect(grants);
        let renewed = async {
            for (status, before) in &mut all {
                let _ = status.wait_for(|is| is.over.is_some() || is.renewals > *before).await;
            }
        };
        let _ = clock::within(span(LONGEST_CALL), renewed).await;
    }

    /// The next renewal is to tell whether these are lost.
    pub fn suspect(self: &Arc<Self>, grants: &[Arc<Grant>]) {
        self.input(Input::Suspect(grants.iter().map(|grant| grant.id).collect()));
    }

    /// Tells how far the transaction has come that releases them.
    pub fn last(self: &Arc<Self>, grants: &[Arc<Grant>], stage: Stage) {
        self.input(Input::Last(grants.iter().map(|grant| grant.id).collect(), stage));
    }

    /// Gives everything back, and ends all waits.
    pub async fn close(self: &Arc<Self>) {
        self.input(Input::Close);
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
        self.spawn(&mut inner, cancels);
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
            self.heartbeat.input(Input::GiveUp(self.id));
        }
    }
}

fn failed(call: u64, code: &str, is_broken: bool) -> Input {
    Input::Failed { call, code: code.to_owned(), is_broken }
}

/// Reads the rows of a call; None if they have another form than is known.
fn read(call: &Call, rows: &[Row]) -> Option<Answer> {
    Some(match call.verb {
        Verb::Acquire => {
            let row = rows.first()?;
            match row.try_get::<_, Option<i64>>(0).ok()? {
                Some(token) => Answer::Granted(token),
                None => Answer::Taken {
                    holder: row.try_get::<_, Option<String>>(1).ok()?.unwrap_or_default(),
                    remaining: milliseconds(row, 2)?.unwrap_or(0),
                    state: row.try_get::<_, Option<String>>(3).ok()?.unwrap_or_default(),
                },
            }
        }
        Verb::Keep | Verb::KeepRow => {
            let outcome = |row: &Row| {
                Some(Outcome {
                    is: row.try_get(0).ok()?,
                    remaining: milliseconds(row, 1)?,
                    again_in: milliseconds(row, 2)?,
                    code: row.try_get::<_, Option<String>>(3).ok()?.unwrap_or_default(),
                })
            };
            let outcomes: Vec<_> = rows.iter().map(outcome).collect::<Option<_>>()?;
            Answer::Kept(Some(outcomes).filter(|all| all.len() == call.names.len())?)
        }
        Verb::Release => {
            let all = rows.iter().map(|row| row.try_get(0).ok()).collect::<Option<Vec<_>>>()?;
            Answer::Released(Some(all).filter(|all| all.len() == call.names.len())?)
        }
        Verb::Undo => Answer::Undone(rows.first()?.try_get(0).ok()?),
    })
}

/// A column with seconds, in milliseconds that are rounded down. The outer None: it is no number.
fn milliseconds(row: &Row, at: usize) -> Option<Option<i64>> {
    let seconds: Option<f64> = row.try_get(at).ok()?;
    Some(seconds.map(|seconds| ((seconds.max(0.0) * 1000.0) as i64).min(NEVER)))
}
