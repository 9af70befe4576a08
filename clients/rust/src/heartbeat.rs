//! The heartbeat of all leases of a fence. It gives the inputs to the state machine, which decides,
//! and carries out the effects: it has the clock, the timer and the connections.
//!
//! The connections have a separate thread, so that work that blocks its runtime does not lose its
//! leases. The timer has another thread: a function of the program opens the connections, and may
//! block.

use crate::clock;
use crate::connection::{Connected, Opener};
use crate::errors::{Error, code_of};
use crate::lease_state::{
    Answer, CHECK_INTERVAL, Call, Effect, EventKind, Id, LONGEST_CALL, LeaseStates, NEVER, Options,
    Reason, SHORTEST_OPENING, error_type,
};
use crate::statements::{self, ServerTransaction, millis, span};
use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::mem::{replace, take};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{oneshot, watch};
use tokio::task::{AbortHandle, JoinError};

/// An event for `on_event`, which must not block: the replies to acquires wait for it.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Event {
    pub kind: EventKind,
    /// The names of the lease; of a row lease, its table and its key.
    pub names: Vec<String>,
    pub token: i64,
    /// How long the lease remains held if no further renewal succeeds.
    pub remaining: Duration,
}

/// The configuration of a fence.
#[derive(Clone)]
pub(crate) struct Setup {
    pub open: Opener,
    /// The schema of the extension, quoted and with a dot, or empty.
    pub schema: String,
    /// The longest limit of a renewal.
    pub longest_beat: Duration,
    pub on_event: Arc<dyn Fn(&Event) + Send + Sync>,
}

/// A lease that was granted.
#[derive(Debug)]
pub(crate) struct Grant {
    pub id: Id,
    pub names: Vec<String>,
    pub token: i64,
    /// Of a row lease, the row as an argument of a guard's statements.
    pub row: Option<Value>,
    pub status: watch::Sender<Status>,
    /// The tasks of the connections with a transaction that this lease guards.
    pub guards: Mutex<Vec<AbortHandle>>,
}

#[derive(Debug, Default)]
pub(crate) struct Status {
    renewals: u64,
    /// Why the lease has ended, and true if it belongs to another role. None while it is held.
    pub end: Option<(Reason, bool)>,
}

impl Grant {
    fn new(id: Id, token: i64, options: &Options) -> Grant {
        let row = options.table.as_ref().map(|table| table.row(&options.names[0], token));
        let (status, guards) = (watch::Sender::default(), Mutex::default());
        Grant { id, names: options.display_names(), token, row, status, guards }
    }

    /// The error of a lease whose event `lost` or `released` was emitted.
    pub fn end_error(&self) -> Option<Error> {
        let (reason, other_role) = self.status.borrow().end?;
        Some(Error::lost(&self.names, reason, other_role))
    }

    /// The error of a lease that was lost; None if it was released.
    pub fn loss(&self) -> Option<Error> {
        let end = self.status.borrow().end;
        self.end_error().filter(|_| end.is_some_and(|(reason, _)| reason != Reason::Released))
    }

    fn end(&self, reason: Reason, other_role: bool) {
        self.status.send_modify(|status| {
            status.end.get_or_insert((reason, other_role));
            if reason != Reason::Released {
                // Before the loss is visible: a task that sees it leaves the guard.
                lock(&self.guards).iter().for_each(AbortHandle::abort);
            }
        });
    }
}

/// A lease that the program holds. When this is dropped, the lease is released in the background.
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
    pub jitter: i64,
    inner: Mutex<Inner>,
    /// Wakes the timer.
    timer: Condvar,
    /// Notified when a lease ends, when the fence is closed, and when the thread ends.
    changed: watch::Sender<()>,
}

#[derive(Default)]
pub(crate) struct Inner {
    states: LeaseStates,
    /// The runtime of the heartbeat's thread, while the thread runs.
    runtime: Option<Handle>,
    /// The number of tasks in the thread, without its timer.
    tasks: usize,
    last_id: Id,
    acquires: HashMap<Id, Acquire>,
    leases: HashMap<Id, Arc<Grant>>,
    connections: HashMap<u64, HeartbeatConnection>,
    /// Events, replies and lines of the log are delivered in their order, without the lock.
    deliveries: VecDeque<Delivery>,
    is_delivering: bool,
    /// The thread that delivers now.
    delivers: Option<ThreadId>,
    is_closed: bool,
    /// The reasons and names of the leases that the current input has ended, for the log.
    ended: Vec<(Reason, String)>,
    /// The transactions whose running statement is cancelled next.
    to_cancel: Vec<ServerTransaction>,
}

impl Inner {
    fn emit(&mut self, mut event: Event) {
        let until = clock::after(event.remaining);
        self.deliveries.push_back(Box::new(move |setup| {
            // An earlier event may have held up this one.
            event.remaining = clock::left(until);
            (setup.on_event)(&event);
        }));
    }

    fn warn(&mut self, line: String) {
        self.deliveries.push_back(Box::new(move |_| log::warn!("{line}")));
    }
}

/// An acquire that has no reply yet.
struct Acquire {
    options: Arc<Options>,
    reply: oneshot::Sender<Result<Held, Error>>,
    /// The error of the last call.
    cause: Option<Error>,
}

/// A connection of the state machine. `Busy` has the task of the call on it.
enum HeartbeatConnection {
    Idle(Connected),
    Busy(AbortHandle),
}

/// Emits an event, sends a reply or writes a line to the log.
type Delivery = Box<dyn FnOnce(&Setup) + Send>;

/// The answer to a call, or the code of its failure and the error.
type CallOutcome = Result<Answer, (String, Option<Error>)>;

impl fmt::Debug for Heartbeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Heartbeat")
    }
}

/// The time, in whole milliseconds.
pub(crate) fn now() -> i64 {
    millis(clock::now())
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Heartbeat {
    pub fn new(setup: Setup) -> Arc<Heartbeat> {
        let jitter = (RandomState::new().hash_one(()) % 1001) as i64;
        let states = LeaseStates::new(jitter, millis(setup.longest_beat));
        let inner = Mutex::new(Inner { states, ..Inner::default() });
        let (timer, changed) = (Condvar::new(), watch::Sender::default());
        Arc::new(Heartbeat { setup, jitter, inner, timer, changed })
    }

    /// Gives an input to the state machine, and carries out the effects.
    pub fn input(self: &Arc<Self>, input: impl FnOnce(&mut LeaseStates)) {
        self.locked_input(lock(&self.inner), 0, input);
    }

    /// As `input`, under the lock. `answer_to` is the number of the call that the input answers, or
    /// 0.
    fn locked_input(
        self: &Arc<Self>,
        mut inner: MutexGuard<'_, Inner>,
        answer_to: u64,
        input: impl FnOnce(&mut LeaseStates),
    ) {
        let mut effects = VecDeque::from(inner.states.step(now(), answer_to, input));
        while let Some(effect) = effects.pop_front() {
            if let Some(call) = self.carry_out(&mut inner, effect) {
                let failed = |states: &mut LeaseStates| states.failed(call, "panicked", true);
                effects.extend(inner.states.step(now(), call, failed));
            }
        }
        // The machine waits for a time, so it needs the timer, even if that has died before.
        if inner.runtime.is_none() && inner.states.wake(now()) < NEVER {
            let _ = self.start(&mut inner);
        }
        inner.ended.clear();
        drop(inner);
        self.timer.notify_one();
        self.deliver();
    }

    /// Starts a thread that delivers events, replies and lines of the log. If the log or `on_event`
    /// blocks, it blocks neither the heartbeat nor the timer.
    fn deliver(self: &Arc<Self>) {
        let mut inner = lock(&self.inner);
        if inner.deliveries.is_empty() || replace(&mut inner.is_delivering, true) {
            return;
        }
        drop(inner);
        let heartbeat = self.clone();
        if thread::Builder::new()
            .name("pg_fence".to_owned())
            .spawn(move || heartbeat.deliver_all())
            .is_err()
        {
            self.deliver_all();
        }
    }

    /// Delivers all. It runs in one thread at a time, to keep their order.
    fn deliver_all(&self) {
        let mut inner = lock(&self.inner);
        inner.delivers = Some(thread::current().id());
        while let Some(next) = inner.deliveries.pop_front() {
            drop(inner);
            if catch_unwind(AssertUnwindSafe(|| next(&self.setup))).is_err() {
                // A log that writes to a closed pipe may panic again.
                let _ = catch_unwind(|| log::error!("on_event has panicked, or the log"));
            }
            inner = lock(&self.inner);
        }
        (inner.is_delivering, inner.delivers) = (false, None);
        self.timer.notify_one();
    }

    pub fn event(self: &Arc<Self>, event: Event) {
        lock(&self.inner).emit(event);
        self.deliver();
    }

    /// Writes a line to the log, which may block or panic.
    pub fn warn(self: &Arc<Self>, line: String) {
        lock(&self.inner).warn(line);
        self.deliver();
    }

    // The thread.

    /// Returns the runtime of the thread, which is started if it does not run.
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

    /// Runs until there is nothing to do, or the timer has died.
    fn serve(self: Arc<Self>, runtime: Runtime) {
        let ((ends, ended), heartbeat) = (oneshot::channel(), self.clone());
        let keep_time = move || {
            while heartbeat.tick() {}
            ends.send(())
        };
        let timer = thread::Builder::new().name("pg_fence timer".to_owned()).spawn(keep_time);
        let ended = runtime.block_on(ended);
        runtime.shutdown_background();
        if timer.is_err() || ended.is_err() {
            let mut inner = lock(&self.inner);
            (inner.runtime, inner.tasks) = (None, 0);
            inner.connections.clear();
            self.locked_input(inner, 0, LeaseStates::heartbeat_died);
        }
        self.changed.send_replace(());
    }

    /// Gives the machine an input if it is time, and finds an idle connection that has ended, which
    /// nothing else reports. Otherwise it waits. Returns false if there is nothing to do any more.
    fn tick(self: &Arc<Self>) -> bool {
        let mut inner = lock(&self.inner);
        let has_ended = |connection: &HeartbeatConnection| match connection {
            HeartbeatConnection::Idle(connected) => connected.has_ended(),
            HeartbeatConnection::Busy(_) => false,
        };
        let mut ended = inner.connections.iter().filter(|(_, one)| has_ended(one));
        let ended = ended.next().map(|(number, _)| *number);
        let now = now();
        let wake = inner.states.wake(now);
        let is_busy = inner.tasks > 0 || inner.is_delivering || !inner.connections.is_empty();
        if let Some(number) = ended {
            inner.connections.remove(&number);
            self.locked_input(inner, 0, |states| states.disconnected(number));
        } else if wake <= now {
            self.locked_input(inner, 0, |_| {});
        } else if wake < NEVER || is_busy {
            drop(self.timer.wait_timeout(inner, span((wake - now).min(CHECK_INTERVAL))));
        } else {
            inner.runtime = None;
            return false;
        }
        true
    }

    /// Runs a task in the thread, which lives until the task has ended and `then` has its result.
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

    // Effects.

    /// Carries out an effect. If it is a call that cannot be sent, its number is returned.
    fn carry_out(self: &Arc<Self>, inner: &mut Inner, effect: Effect) -> Option<u64> {
        match effect {
            Effect::Call(call) => return self.send(inner, call),
            // A connection that is dropped ends without waiting for a goodbye.
            Effect::Cut(number) => {
                if let Some(HeartbeatConnection::Busy(call)) = inner.connections.remove(&number) {
                    call.abort();
                }
            }
            Effect::HangUp(number) => {
                if let Some(HeartbeatConnection::Idle(connected)) =
                    inner.connections.remove(&number)
                {
                    let _ = self.spawn(inner, connected.close(), drop);
                }
            }
            Effect::Event { kind, id, token, remaining, other_role } => {
                if kind == EventKind::Acquired {
                    let options = &inner.acquires.get(&id)?.options;
                    inner.leases.insert(id, Grant::new(id, token, options).into());
                }
                let grant = inner.leases.get(&id)?.clone();
                let end = match kind {
                    EventKind::Lost(reason) => Some((reason, other_role)),
                    EventKind::Released { .. } => Some((Reason::Released, false)),
                    _ => None,
                };
                if kind == EventKind::Renewed {
                    grant.status.send_modify(|status| status.renewals += 1);
                }
                if let Some((reason, other_role)) = end {
                    grant.end(reason, other_role);
                    inner.ended.push((reason, grant.names.join(", ")));
                    inner.leases.remove(&id);
                    self.changed.send_replace(());
                }
                let (names, remaining) = (grant.names.clone(), span(remaining));
                let event = Event { kind, names, token, remaining };
                inner.emit(event);
            }
            Effect::Reply { id, denial, sqlstate, in_doubt } => {
                let Acquire { options, reply, cause } = inner.acquires.remove(&id)?;
                let result = match denial {
                    Some(denial) => {
                        Err(Error::of_denial(denial, (&options, cause), (sqlstate, in_doubt)))
                    }
                    None => {
                        let (heartbeat, grant) = (self.clone(), inner.leases.get(&id)?.clone());
                        Ok(Held { heartbeat, grant })
                    }
                };
                // If the program does not wait any more, the lease is dropped, and so released.
                inner.deliveries.push_back(Box::new(|_| drop(reply.send(result))));
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
                let first = inner.ended.iter().find(|(ended, _)| *ended == reason);
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

    /// Sends a call in a new task. If that cannot be started, the number of the call is returned.
    fn send(self: &Arc<Self>, inner: &mut Inner, call: Arc<Call>) -> Option<u64> {
        let connected = match inner.connections.remove(&call.connection) {
            Some(HeartbeatConnection::Idle(connected)) => Some(connected),
            _ => None,
        };
        let (heartbeat, sent) = (self.clone(), call.clone());
        let work = self.clone().call(call.clone(), connected);
        match self.spawn(inner, work, move |result| heartbeat.call_ended(&sent, result)) {
            Ok(task) => {
                inner.connections.insert(call.connection, HeartbeatConnection::Busy(task));
                None
            }
            Err(error) => {
                let acquire = call.acquire().and_then(|id| inner.acquires.get_mut(&id));
                if let Some(acquire) = acquire {
                    acquire.cause = Some(Error::other(error.to_string()));
                }
                Some(call.number)
            }
        }
    }

    /// Sends a call. Returns the connection, if it can be used again, and the outcome.
    async fn call(
        self: Arc<Self>,
        call: Arc<Call>,
        mut connected: Option<Connected>,
    ) -> (Option<Connected>, CallOutcome) {
        if call.opens {
            // A little less than the limit, so that the opening itself fails: its error names the
            // servers that were tried.
            let limit = span(call.limit.max(SHORTEST_OPENING) / 10 * 9);
            match (self.setup.open)(limit).await {
                Ok(opened) => connected = Some(opened),
                Err(error) => return (None, Err((error.opening_code(), Some(error)))),
            }
            self.input(|states| states.sent(call.number));
        }
        let Some(connection) = connected.as_ref().filter(|one| !one.has_ended()) else {
            return (None, Err(("unsent".to_owned(), None)));
        };
        let statement = statements::of(&self.setup.schema, &call);
        let answer = match connection.rows(&statement).await {
            Ok(rows) => statements::read(&call, &rows).ok_or(("unreadable".to_owned(), None)),
            Err(error) => {
                let code = match code_of(&error) {
                    code if !code.is_empty() => code,
                    _ if connection.has_ended() => "ended".to_owned(),
                    _ => "unreadable".to_owned(),
                };
                let table = call.pairs.table.as_ref().map(|table| &*table.name);
                let kind = error_type(&code, table.is_some());
                let error = Error::other(error).typed(kind, &connection.role, table);
                Err((code, Some(error)))
            }
        };
        (connected, answer)
    }

    /// Gives the outcome of a call to the state machine.
    fn call_ended(
        self: &Arc<Self>,
        call: &Call,
        result: Result<(Option<Connected>, CallOutcome), JoinError>,
    ) {
        let (connected, mut outcome) = match result {
            Ok(result) => result,
            Err(error) if error.is_panic() => {
                let error = Error::other(error.to_string());
                (None, Err(("panicked".to_owned(), Some(error))))
            }
            // The state machine has cut the connection, and has ended the call.
            Err(_) => return,
        };
        let mut inner = lock(&self.inner);
        let is_broken = connected.as_ref().is_none_or(Connected::has_ended);
        if let (Some(connected), Some(connection)) =
            (connected, inner.connections.get_mut(&call.connection))
        {
            *connection = HeartbeatConnection::Idle(connected);
        }
        let acquire = call.acquire().and_then(|id| inner.acquires.get_mut(&id));
        if let (Some(acquire), Err((_, error @ Some(_)))) = (acquire, &mut outcome) {
            acquire.cause = error.take();
        }
        self.locked_input(inner, call.number, |states| match outcome {
            Ok(answer) => states.answered(call.number, answer),
            Err((code, _)) => states.failed(call.number, &code, is_broken),
        });
    }

    // Requests of the program.

    /// Acquires a lease, and waits for it. If the future is dropped, the acquire is given up.
    pub async fn acquire(self: &Arc<Self>, options: Options) -> Result<Held, Error> {
        let ((reply, answer), options) = (oneshot::channel(), Arc::new(options));
        let id = {
            let mut inner = lock(&self.inner);
            if inner.delivers == Some(thread::current().id()) {
                // The reply would wait until this callback has ended.
                return Err(Error::Invalid("on_event and the log cannot acquire a lease"));
            }
            inner.last_id += 1;
            let (id, acquire) =
                (inner.last_id, Acquire { options: options.clone(), reply, cause: None });
            inner.acquires.insert(id, acquire);
            id
        };
        let mut give_up = GiveUpOnDrop { heartbeat: self.clone(), id, has_reply: false };
        self.input(|states| states.acquire(id, options));
        let reply = answer.await;
        give_up.has_reply = true;
        let held = reply.map_err(Error::other)??;
        self.check(&held.grant)?;
        Ok(held)
    }

    /// Fails if the lease is not held. This does not depend on the thread.
    pub fn check(self: &Arc<Self>, grant: &Grant) -> Result<(), Error> {
        if !self.remaining(grant).is_zero() {
            return Ok(());
        }
        let mut reason = Reason::Released;
        self.input(|states| {
            if states.is_over(now(), grant.id) {
                reason = Reason::Deadline;
            }
        });
        Err(grant.end_error().unwrap_or_else(|| Error::lost(&grant.names, reason, false)))
    }

    pub fn remaining(&self, grant: &Grant) -> Duration {
        span(lock(&self.inner).states.remaining(now(), grant.id))
    }

    /// Renews the leases at once, and waits until each is renewed or has ended.
    pub async fn renew(self: &Arc<Self>, leases: &[Arc<Held>]) {
        let status = |lease: &Arc<Held>| lease.grant.status.subscribe();
        let mut statuses: Vec<_> = leases.iter().map(status).collect();
        let before: Vec<_> = statuses.iter().map(|status| status.borrow().renewals).collect();
        let ids: Vec<_> = leases.iter().map(|lease| lease.grant.id).collect();
        self.input(|states| states.suspect(&ids));
        let renewed = async {
            for (status, before) in statuses.iter_mut().zip(before) {
                let _ = status.wait_for(|now| now.end.is_some() || now.renewals > before).await;
            }
        };
        let _ = clock::within(span(LONGEST_CALL), renewed).await;
    }

    /// Releases all leases, ends all waits, and waits for the end of the thread.
    pub async fn close(self: &Arc<Self>) {
        self.input(LeaseStates::close);
        self.wait_until(|inner| inner.is_closed).await;
        let idle = self.wait_until(|inner| inner.runtime.is_none());
        let _ = clock::within(Duration::from_secs(3), idle).await;
    }

    /// True as soon as the program has begun to close the fence.
    pub fn is_closing(&self) -> bool {
        lock(&self.inner).states.is_closing()
    }

    /// Waits for a condition that comes true when a lease or the thread ends, or the fence is closed.
    pub async fn wait_until(&self, condition: impl Fn(&Inner) -> bool) {
        let mut changed = self.changed.subscribe();
        while !condition(&lock(&self.inner)) {
            let _ = changed.changed().await;
        }
    }

    /// Cancels the statement that runs in a transaction. An outage has many such statements at a
    /// time, and one connection cancels them together.
    pub fn cancel(self: &Arc<Self>, transaction: ServerTransaction) {
        let mut inner = lock(&self.inner);
        inner.to_cancel.push(transaction);
        if inner.to_cancel.len() > 1 {
            return;
        }
        let heartbeat = self.clone();
        let work = async move {
            let statement = statements::cancel(take(&mut lock(&heartbeat.inner).to_cancel));
            let cancelled = async {
                let connected = (heartbeat.setup.open)(span(LONGEST_CALL)).await?;
                let rows = connected.rows(&statement).await;
                connected.close().await;
                Ok::<_, Error>(rows?.iter().all(|row| row.get(0)))
            };
            let warn = |why: &str| {
                heartbeat.warn(format!("a statement in a guard goes on in the server: {why}"));
            };
            match clock::within(span(LONGEST_CALL), cancelled).await {
                Some(Ok(true)) => {}
                Some(Ok(false)) => warn("only its own role may cancel it"),
                Some(Err(error)) => warn(&error.to_string()),
                None => warn("the server did not answer in time"),
            }
        };
        let _ = self.spawn(&mut inner, work, drop);
    }
}

/// Gives up an acquire whose future is dropped before the reply. If a reply with a grant waits for
/// a log or an `on_event` that blocks, the grant is released.
struct GiveUpOnDrop {
    heartbeat: Arc<Heartbeat>,
    id: Id,
    has_reply: bool,
}

impl Drop for GiveUpOnDrop {
    fn drop(&mut self) {
        if !self.has_reply {
            self.heartbeat.input(|states| {
                states.give_up(self.id);
                states.release(self.id);
            });
        }
    }
}
