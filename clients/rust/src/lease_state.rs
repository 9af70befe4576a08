//! What a client decides about its leases: the state machine of `clients/spec/lease_state.md`.
//!
//! The machine has no clock, thread or socket. Each input is a step, which has the time, in
//! milliseconds of a monotonic clock, and returns effects. The heartbeat carries them out in their
//! order.

use crate::errors::{Reason, WaitsFor};
use crate::statements::RowTable;
use serde_json::Value;
use std::collections::BTreeMap;
use std::mem::take;
use std::sync::Arc;

pub const NEVER: i64 = 1 << 53;
pub const LONGEST_CALL: i64 = 10_000;
pub const SHORTEST_OPENING: i64 = 2_000;
pub const LOOK_AGAIN: i64 = 1_000;
const SHORTEST_PAUSE: i64 = 10;
const SHORTEST_WAIT: i64 = 250;
const LONGEST_PAUSE: i64 = 10_000;
const PORTION: i64 = 2_000;
const TRY_AGAIN: i64 = 250;
const AFTER_PORTION: i64 = 50;
const FIRST_RETRY: i64 = 20;
const LEAST_PATIENCE: i64 = 1_000;
const LONGEST_QUEUE: i64 = 20_000;
const CLOSING: i64 = 5_000;
const MOST_PAIRS: usize = 10_000;
const MOST_RELEASED: usize = 200;
const MOST_BEATS: u32 = 2;
/// A lease is renewed when its ttl, divided by this, has passed.
pub const BEATS_PER_TTL: u32 = 3;

/// The number of an acquire, and of the lease that comes of it. The heartbeat uses each once.
pub type Id = u64;

/// What an acquire asks for. Spans are in milliseconds.
#[derive(Debug, Clone, Default)]
pub struct Ask {
    /// The key alone, if the lease is a row.
    pub names: Vec<String>,
    pub ttl: i64,
    pub wait: i64,
    /// The holder is unique for this acquire, unless the caller has named it.
    pub holder: String,
    pub is_named: bool,
    pub reclaims: bool,
    pub is_session: bool,
    pub is_shared: bool,
    pub slots: i32,
    pub at_most: Option<i64>,
    pub metadata: Option<Value>,
    /// The table of a row that a statement of the worker's has claimed under that token.
    pub table: Option<RowTable>,
    pub token: i64,
}

impl Ask {
    fn is_one(&self) -> bool {
        self.names.len() == 1
    }

    /// True if the acquire has a connection of its own.
    fn is_own(&self) -> bool {
        self.is_session || self.wait > 0 && self.is_one()
    }

    fn may_reclaim(&self) -> bool {
        let is_exclusive = self.is_one() && !self.is_shared && self.slots <= 1;
        self.reclaims || is_exclusive && !self.is_named
    }
}

/// How far the transaction has come that releases leases.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Stage {
    Begins,
    Committed,
    RolledBack,
    InDoubt,
    /// The savepoint has ended, and the transaction of the program's goes on.
    Inner,
}

/// The rows that a call is answered with.
pub enum Answer {
    Granted(i64),
    Taken { holder: String, remaining: i64, state: String },
    Kept(Vec<Outcome>),
    Released(Vec<bool>),
    Undone(i64),
}

#[derive(Default)]
pub struct Outcome {
    pub is: String,
    pub remaining: Option<i64>,
    pub again_in: Option<i64>,
    pub code: String,
}

/// What a call is about.
pub enum About {
    Acquire {
        id: Id,
        ask: Arc<Ask>,
        reclaims: bool,
        wait: i64,
    },
    /// Leases that are renewed, and how many names each has.
    Leases(Vec<(Id, usize)>),
    Release(u64),
    Undo {
        number: u64,
        ask: Arc<Ask>,
    },
}

/// The names that a call is of, and their tokens and ttls; of rows of a table their keys.
#[derive(Clone, Default)]
pub struct Pairs {
    pub names: Vec<String>,
    pub tokens: Vec<i64>,
    pub ttls: Vec<i64>,
    pub table: Option<RowTable>,
}

/// A statement that is to be sent.
pub struct Call {
    pub number: u64,
    pub connection: u64,
    /// The connection is to be opened first.
    pub opens: bool,
    pub limit: i64,
    pub pairs: Pairs,
    pub about: About,
}

/// What has become of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// The lease is held.
    Acquired,
    /// The lease was renewed.
    Renewed,
    /// The lease is ours no more.
    Lost(Reason),
    /// The lease was given back. Without an answer of the server's it lasts there until its ttl.
    Released {
        /// False if the server has not answered.
        confirmed: bool,
    },
    /// [`Fence::lead`](crate::Fence::lead) leads no more, and goes on.
    Interrupted,
}

/// Why an acquire has no lease.
#[derive(Debug, Clone, PartialEq)]
pub enum Denial {
    LeaseTaken { holder: String, remaining: i64, waits_for: Option<WaitsFor> },
    LeaseLost { reason: Reason, is_other_role: bool },
    NoConnection,
    NoAnswer,
    NotGranted,
    NotInstalled,
    Refused,
    Closed,
    GivenUp,
}

pub enum Effect {
    Call(Arc<Call>),
    /// The connection ends, and nothing waits for what hangs in it.
    Cut(u64),
    /// The connection ends as it should.
    HangUp(u64),
    Event {
        kind: EventKind,
        id: Id,
        token: i64,
        remaining: i64,
        is_other_role: bool,
    },
    Reply {
        id: Id,
        denial: Option<Denial>,
        sqlstate: Option<String>,
        in_doubt: bool,
    },
    NotRenewed(String),
    /// An outage has begun for which acquires wait: one of them, and the code of its error.
    NotAcquired(Id, String),
    /// So many leases were lost, or were not released.
    Ended(Option<Reason>, usize),
    Closed,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum State {
    #[default]
    Confirming,
    Held,
    Lost(Reason),
}

/// A lease, from its grant until it is lost or is being given back. Its events begin when it is
/// held.
#[derive(Default)]
struct Lease {
    id: Id,
    ask: Arc<Ask>,
    token: i64,
    state: State,
    is_other_role: bool,
    deadline: i64,
    beat_at: i64,
    at_most: i64,
    is_calling: bool,
    /// How many last transactions are under way.
    resting: u32,
    /// How many transactions of its own worker hold the row of a row lease.
    touched: u32,
    /// The lease was released in a transaction that the program goes on with.
    is_ending: bool,
    /// False while the last renewal that was sent has had no answer.
    is_answered: bool,
    /// Names of a lost lease that the server may still hold.
    rest: Vec<String>,
}

impl Lease {
    fn holds(&self) -> bool {
        self.state == State::Held
    }

    fn lives(&self) -> bool {
        matches!(self.state, State::Confirming | State::Held)
    }

    fn rests(&self) -> bool {
        self.resting > 0 || self.touched > 0
    }

    /// The error of a row that is confirmed is its caller's.
    fn is_alone(&self) -> bool {
        self.ask.table.is_some() && self.state == State::Confirming
    }

    /// The shortest time until the next renewal, if that much is left.
    fn least(&self, left: i64) -> i64 {
        SHORTEST_PAUSE.max(self.ask.ttl / 60).min(left / 4)
    }

    fn remaining(&self, now: i64) -> i64 {
        let left = self.deadline - now;
        let left = if self.touched > 0 { left.max(1) } else { left };
        if self.holds() { left.min(self.at_most - now).max(0) } else { 0 }
    }

    /// When something happens to it by the clock; `is_free`: its connection is.
    fn wake(&self, is_free: bool) -> i64 {
        let is_beating = is_free && !self.rests() && !self.is_calling;
        let deadline = if self.touched == 0 { self.deadline } else { NEVER };
        self.at_most.min(deadline).min(if is_beating { self.beat_at } else { NEVER })
    }

    /// The names that the server may have for it.
    fn pending(&self) -> &[String] {
        if self.rest.is_empty() { &self.ask.names } else { &self.rest }
    }

    fn event(&self, now: i64, kind: EventKind) -> Effect {
        let is_held = matches!(kind, EventKind::Acquired | EventKind::Renewed);
        let remaining = if is_held { self.deadline - now } else { 0 };
        let Lease { id, token, is_other_role, .. } = *self;
        Effect::Event { kind, id, token, remaining, is_other_role }
    }
}

/// An acquire, until it is answered and its last call has ended.
#[derive(Default)]
struct Request {
    ask: Arc<Ask>,
    begun: i64,
    until: i64,
    at: i64,
    tries: u32,
    is_asking: bool,
    /// It waits for the end of an outage.
    is_out: bool,
    is_over: bool,
    is_granted: bool,
    doubt: Option<Doubt>,
}

/// A call was sent and has had no answer: until then it may still be carried out.
#[derive(Clone, Copy, Default)]
struct Doubt {
    sent: i64,
    until: i64,
}

impl Request {
    fn waits_for_turn(&self) -> bool {
        !self.is_over && !self.is_asking && !self.is_granted
    }

    fn wake(&self, is_free: bool) -> i64 {
        if self.ask.is_own() || is_free {
            self.at.min(self.until + LONGEST_QUEUE)
        } else {
            self.until + LONGEST_QUEUE
        }
    }

    fn is_due(&self, now: i64) -> bool {
        self.waits_for_turn() && self.at <= now
    }
}

/// Releases what an acquire in doubt may have been granted.
#[derive(Default)]
struct Undo {
    ask: Arc<Ask>,
    doubt: Doubt,
    at: i64,
    tries: u32,
    is_calling: bool,
}

/// Leases that are given back together.
#[derive(Default)]
struct Release {
    leases: Vec<Lease>,
    at: i64,
    until: i64,
    tries: u32,
    is_calling: bool,
    is_in_doubt: bool,
    is_alone: bool,
}

impl Release {
    fn table(&self) -> Option<&RowTable> {
        self.leases[0].ask.table.as_ref()
    }

    fn is_due(&self, now: i64) -> bool {
        !self.is_calling && self.at <= now
    }

    fn wake(&self, is_free: bool) -> i64 {
        match (self.is_calling, is_free) {
            (true, _) => NEVER,
            (_, true) => self.at.min(self.until),
            (..) => self.until,
        }
    }
}

/// A call that has had no answer.
struct Pending {
    call: Arc<Call>,
    /// None while the connection is being opened.
    sent: Option<i64>,
    until: i64,
}

/// Whose connection it is.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    Shared,
    Request(Id),
    Lease(Id),
    Undo(u64),
}

struct Connection {
    /// None if the connection ends after the call on it.
    place: Option<Place>,
    /// Errors in a row.
    errors: u32,
}

/// All leases of a fence.
#[derive(Default)]
pub struct LeaseStates {
    /// Between 0 and 1000: it makes the pauses of clients differ.
    spread: i64,
    /// How long a renewal may take at most.
    pub longest_beat: i64,
    now: i64,
    effects: Vec<Effect>,
    /// How many leases this input has ended, for the log.
    ended: Vec<(Option<Reason>, usize)>,
    leases: BTreeMap<Id, Lease>,
    requests: BTreeMap<Id, Request>,
    undos: BTreeMap<u64, Undo>,
    releases: BTreeMap<u64, Release>,
    calls: BTreeMap<u64, Pending>,
    connections: BTreeMap<u64, Connection>,
    /// The call on the shared connection.
    calling: Option<u64>,
    last_call: u64,
    last_connection: u64,
    last_number: u64,
    /// Heartbeats in a row.
    beats: u32,
    is_out: bool,
    is_loss_logged: bool,
    closed_at: Option<i64>,
    is_done: bool,
}

impl LeaseStates {
    pub fn new(spread: i64, longest_beat: i64) -> LeaseStates {
        LeaseStates { spread, longest_beat, ..LeaseStates::default() }
    }

    /// Takes an input, and returns what is to be carried out. The clock goes first: it ends calls
    /// that are past their limit, but the one that is answered.
    pub fn step(
        &mut self,
        now: i64,
        answered: u64,
        input: impl FnOnce(&mut LeaseStates),
    ) -> Vec<Effect> {
        self.now = now;
        self.end_by_clock(answered);
        input(self);
        self.send();
        for (reason, count) in take(&mut self.ended) {
            // An outage is one line of the log, and so are the losses by it.
            let is_of_outage = reason == Some(Reason::Deadline) && self.is_out;
            if !is_of_outage || !self.is_loss_logged {
                self.effects.push(Effect::Ended(reason, count));
            }
            self.is_loss_logged |= is_of_outage;
        }
        take(&mut self.effects)
    }

    // What the program asks. Each of these is an input, within a step.

    pub fn acquire(&mut self, id: Id, ask: Arc<Ask>) {
        let (now, is_row) = (self.now, ask.table.is_some());
        let (token, claimed) = (ask.token, now - ask.ttl);
        let until = now + ask.wait;
        let request = Request { ask, begun: now, until, at: now, ..Request::default() };
        self.requests.insert(id, request);
        if self.closed_at.is_some() {
            self.finish(id, Some(Denial::Closed), None);
        } else if is_row {
            // When it was claimed is not known here: too long ago to be believed unconfirmed.
            self.granted(id, token, claimed);
        }
    }

    pub fn give_up(&mut self, id: Id) {
        self.finish(id, Some(Denial::GivenUp), None);
    }

    pub fn release(&mut self, id: Id) {
        let Some(l) = self.leases.get(&id) else { return };
        if l.holds() || !l.lives() && !l.rest.is_empty() && !self.is_done {
            self.give_back(id, false);
        } else if !l.lives() {
            self.leases.remove(&id);
            self.hang_up(Place::Lease(id));
        }
    }

    /// Tells how far the transaction has come that releases these.
    pub fn last(&mut self, ids: &[Id], stage: Stage) {
        for &id in ids {
            let Some(l) = self.leases.get_mut(&id) else { continue };
            if stage == Stage::Begins {
                l.resting += 1;
                continue;
            }
            l.resting -= 1;
            match stage {
                _ if !l.holds() => {}
                Stage::Committed => self.released(id),
                Stage::InDoubt => self.give_back(id, true),
                _ => (l.beat_at, l.is_ending) = (self.now, stage == Stage::Inner),
            }
        }
    }

    /// A transaction of the worker's has written the row of a row lease.
    pub fn touches(&mut self, id: Id) {
        each(&mut self.leases, [id], |l| l.touched += 1);
    }

    /// That transaction has ended.
    pub fn ended(&mut self, id: Id) {
        let now = self.now;
        each(&mut self.leases, [id], |l| {
            (l.touched, l.beat_at) = (l.touched - 1, l.beat_at.min(now));
        });
        self.end_by_clock(0);
    }

    /// A guard was refused: the next renewal tells.
    pub fn suspect(&mut self, ids: &[Id]) {
        let now = self.now;
        each(&mut self.leases, ids.iter().copied(), |l| l.beat_at = now);
    }

    pub fn close(&mut self) {
        self.closed_at.get_or_insert(self.now);
        for id in keys(&self.requests, |_| true) {
            self.finish(id, Some(Denial::Closed), None);
        }
        for id in keys(&self.leases, Lease::holds) {
            self.give_back(id, false);
        }
    }

    /// What keeps the leases has died.
    pub fn died(&mut self) {
        for id in keys(&self.leases, Lease::holds) {
            self.lose(id, Reason::Heartbeat, self.leases[&id].ask.names.clone());
        }
    }

    // What the connections say

    /// The connection of a call that opens one is there, and the call is sent next.
    pub fn sent(&mut self, number: u64) {
        let pending = self.calls.get_mut(&number).filter(|one| one.sent.is_none());
        let Some(Pending { call, sent, until }) = pending else { return };
        (*sent, *until) = (Some(self.now), self.now + call.limit);
        if let About::Leases(leases) = &call.about {
            let ids = leases.iter().map(|(id, _)| *id);
            each(&mut self.leases, ids, |l| l.is_answered = false);
        }
    }

    pub fn answered(&mut self, number: u64, answer: Answer) {
        let Some(Pending { call, sent, .. }) = self.end_call(number) else { return };
        let sent = sent.unwrap_or(self.now);
        (self.is_out, self.is_loss_logged) = (false, false);
        if let Some(connection) = self.connections.get_mut(&call.connection) {
            connection.errors = 0;
            if connection.place.is_none() {
                self.connections.remove(&call.connection);
                self.effects.push(Effect::HangUp(call.connection));
            }
        }
        match (&call.about, answer) {
            (&About::Acquire { id, .. }, Answer::Granted(token)) => {
                self.granted(id, token, sent);
            }
            (&About::Acquire { id, .. }, Answer::Taken { holder, remaining, state }) => {
                self.taken(id, sent, holder, remaining, &state);
            }
            (About::Leases(leases), Answer::Kept(outcomes)) => {
                self.kept(leases, &outcomes, sent);
            }
            (&About::Release(number), Answer::Released(is)) => {
                self.release_answered(number, &is);
            }
            (&About::Undo { number, .. }, Answer::Undone(count)) => self.undone(number, count),
            _ => unreachable!("a call is answered by its own rows"),
        }
    }

    /// The code is an SQLSTATE, `connect`, `unsent`, `ended`, `unreadable` or `panicked`.
    pub fn failed(&mut self, number: u64, code: &str, is_broken: bool) {
        let Some(Pending { call, sent, .. }) = self.end_call(number) else { return };
        let is_opening = sent.is_none();
        let code = if is_opening && code == "no answer" { "connect" } else { code };
        if let Some(connection) = self.connections.get_mut(&call.connection) {
            connection.errors += u32::from(!is_locked(code));
            let is_leaving = connection.place.is_none();
            // After a second error in a row another connection is tried.
            let is_of_no_use = is_opening || is_broken || code == "panicked";
            if is_of_no_use || is_of_connection(code) || connection.errors > 1 || is_leaving {
                self.effects.push(Effect::Cut(call.connection));
                self.forget(call.connection);
            }
        }
        match &call.about {
            About::Acquire { id, .. } => self.acquire_failed(*id, sent, call.limit, code),
            About::Leases(leases) => self.keep_failed(leases, &call.pairs.ttls, code, is_opening),
            About::Release(number) => self.release_failed(*number, code, is_opening),
            About::Undo { number, .. } => self.undo_failed(*number, code),
        }
    }

    pub fn disconnected(&mut self, on: u64) {
        match self.calls.values().find(|one| one.call.connection == on) {
            Some(one) => self.failed(one.call.number, "ended", true),
            None => self.forget(on),
        }
    }

    // What can be asked at any time

    pub fn remaining(&self, now: i64, id: Id) -> i64 {
        self.leases.get(&id).map_or(0, |l| l.remaining(now))
    }

    /// The reason why a lease is not held, and whether it is another role's.
    pub fn over(&self, id: Id) -> Option<(Reason, bool)> {
        match self.leases.get(&id).map(|l| (l.state, l.is_other_role)) {
            Some((State::Held, _)) => None,
            Some((State::Lost(reason), is_other_role)) => Some((reason, is_other_role)),
            _ => Some((Reason::Released, false)),
        }
    }

    /// When to tick, at the latest; `NEVER` if there is nothing to do.
    pub fn wake(&self, now: i64) -> i64 {
        let is_free = self.calling.is_none();
        let (leases, requests) = (self.leases.values(), self.requests.values());
        let leases = leases.filter(|l| l.lives()).map(|l| l.wake(is_free || self.is_own(l)));
        let requests = requests.filter(|r| r.waits_for_turn()).map(|r| r.wake(is_free));
        let releases = self.releases.values().map(|release| release.wake(is_free));
        let undos = self.undos.values().filter(|undo| !undo.is_calling).map(|undo| undo.at);
        let calls = self.calls.values().map(|call| call.until);
        let closing = self.closed_at.filter(|_| !self.is_done).map(|at| at + CLOSING);
        let all = leases.chain(requests).chain(releases).chain(undos).chain(calls).chain(closing);
        all.min().map_or(NEVER, |next| next.min(now + LOOK_AGAIN).max(now))
    }

    // The clock goes first, whatever comes

    fn end_by_clock(&mut self, answered: u64) {
        let now = self.now;
        for id in keys(&self.leases, |l| l.lives() && l.deadline.min(l.at_most) <= now) {
            let l = &self.leases[&id];
            if l.holds() && l.at_most <= now {
                self.lose(id, Reason::AtMost, l.ask.names.clone());
            } else if l.deadline <= now && l.touched == 0 {
                // A renewal without an answer may have come through all the same.
                let rest = if l.is_answered { Vec::new() } else { l.ask.names.clone() };
                self.lose(id, Reason::Deadline, rest);
            }
        }
        let is_late = !self.is_done && self.closed_at.is_some_and(|at| now >= at + CLOSING);
        let is_over = |one: &Pending| one.call.number != answered && one.until <= now || is_late;
        for number in keys(&self.calls, is_over) {
            self.failed(number, "no answer", true);
        }
        if is_late {
            self.undos.clear();
        }
        let is_over = |release: &Release| !release.is_calling && (is_late || release.until <= now);
        for number in keys(&self.releases, is_over) {
            self.unconfirmed(number);
        }
        for id in keys(&self.requests, |r| r.waits_for_turn()) {
            if now >= self.requests[&id].until + LONGEST_QUEUE {
                self.finish(id, Some(Denial::NoConnection), None);
            }
        }
    }

    // Calls: one at a time on the connection that all share, where none waits for anybody

    fn send(&mut self) {
        let now = self.now;
        for id in keys(&self.requests, |r| r.ask.is_own() && r.is_due(now)) {
            self.try_to_acquire(id);
        }
        for number in keys(&self.undos, |undo| !undo.is_calling && undo.at <= now) {
            let Some(undo) = self.undos.get_mut(&number) else { continue };
            undo.is_calling = true;
            let (ask, limit) = (undo.ask.clone(), own_limit(undo.ask.ttl));
            let pairs = Pairs { names: ask.names.clone(), ..Pairs::default() };
            self.start(Place::Undo(number), limit, pairs, About::Undo { number, ask });
        }
        for id in keys(&self.leases, |l| self.is_own(l) && !l.is_calling && l.beat_at <= now) {
            self.keep(&[id], Place::Lease(id));
        }
        if self.calling.is_none() {
            self.send_shared();
        }
        self.rest();
    }

    fn send_shared(&mut self) {
        let now = self.now;
        let due = self.leases.values().filter(|l| self.is_beat_due(l, now));
        let beat = due.min_by_key(|l| l.beat_at);
        let release = keys(&self.releases, |release| release.is_due(now)).first().copied();
        let request = keys(&self.requests, |r| !r.ask.is_own() && r.is_due(now)).first().copied();
        // Heartbeats go first. After two of them something else has its turn.
        let is_others_turn = self.beats >= MOST_BEATS && (release.is_some() || request.is_some());
        if let Some(beat) = beat.filter(|_| !is_others_turn) {
            let along = self.along(beat);
            self.beats += 1;
            self.keep(&along, Place::Shared);
            return;
        }
        self.beats = 0;
        if let Some(number) = release {
            self.send_release(number);
        } else if let Some(id) = request {
            self.try_to_acquire(id);
        }
    }

    /// True while the lease is confirmed over a connection of its own.
    fn is_own(&self, l: &Lease) -> bool {
        l.state == State::Confirming && self.on(Place::Lease(l.id)).is_some()
    }

    fn is_beat_due(&self, l: &Lease, by: i64) -> bool {
        l.lives() && !l.rests() && !l.is_calling && l.beat_at <= by && !self.is_own(l)
    }

    /// The leases that are renewed with this one: those that are due soon, the earliest first.
    fn along(&self, first: &Lease) -> Vec<Id> {
        if first.is_alone() {
            return vec![first.id];
        }
        let is_like = |l: &&Lease| {
            let is_due = self.is_beat_due(l, self.now + l.ask.ttl / 6);
            is_due && l.ask.table == first.ask.table && !l.is_alone()
        };
        let mut due: Vec<_> = self.leases.values().filter(is_like).collect();
        due.sort_by_key(|l| l.beat_at);
        let count = fitting(MOST_PAIRS, due.iter().map(|l| l.ask.names.len()));
        due[..count].iter().map(|l| l.id).collect()
    }

    fn keep(&mut self, ids: &[Id], place: Place) {
        each(&mut self.leases, ids.iter().copied(), |l| l.is_calling = true);
        let all: Vec<_> = ids.iter().map(|id| &self.leases[id]).collect();
        let about = About::Leases(all.iter().map(|l| (l.id, l.ask.names.len())).collect());
        let (limit, pairs) = (self.limit().min(self.longest_beat), pairs(all));
        self.start(place, limit, pairs, about);
    }

    /// Sends a call, over the connection of that place, which is opened if there is none.
    fn start(&mut self, place: Place, limit: i64, pairs: Pairs, about: About) {
        self.last_call += 1;
        let number = self.last_call;
        let (open, until) = (self.on(place), self.now + limit.max(SHORTEST_OPENING));
        let on = open.unwrap_or_else(|| {
            self.last_connection += 1;
            let connection = Connection { place: Some(place), errors: 0 };
            self.connections.insert(self.last_connection, connection);
            self.last_connection
        });
        if place == Place::Shared {
            self.calling = Some(number);
        }
        let opens = open.is_none();
        let call = Arc::new(Call { number, connection: on, opens, limit, pairs, about });
        self.calls.insert(number, Pending { call: call.clone(), sent: None, until });
        if !opens {
            self.sent(number);
        }
        self.effects.push(Effect::Call(call));
    }

    /// A third of the smallest ttl of all that are held.
    fn limit(&self) -> i64 {
        let ttls = self.leases.values().filter(|l| l.lives()).map(|l| l.ask.ttl / 3);
        ttls.fold(LONGEST_CALL, i64::min)
    }

    /// How long conflicts and releases are tried again.
    fn patience(&self, ttl: i64) -> i64 {
        self.limit().min(ttl / 3).max(LEAST_PATIENCE)
    }

    fn pause(&self, ttl: i64) -> i64 {
        spread((ttl / 12).clamp(SHORTEST_PAUSE, LONGEST_PAUSE), self.spread)
    }

    /// Takes a call that has ended out of the calls.
    fn end_call(&mut self, number: u64) -> Option<Pending> {
        let ended = self.calls.remove(&number)?;
        self.calling.take_if(|calling| *calling == number);
        match &ended.call.about {
            About::Acquire { id, .. } => each(&mut self.requests, [*id], |r| r.is_asking = false),
            About::Leases(leases) => {
                let ids = leases.iter().map(|(id, _)| *id);
                each(&mut self.leases, ids, |l| l.is_calling = false);
            }
            About::Release(number) => {
                each(&mut self.releases, [*number], |one| one.is_calling = false);
            }
            About::Undo { number, .. } => {
                each(&mut self.undos, [*number], |one| one.is_calling = false);
            }
        }
        Some(ended)
    }

    // Connections

    fn on(&self, place: Place) -> Option<u64> {
        let mut all = self.connections.iter();
        all.find(|(_, one)| one.place == Some(place)).map(|(&number, _)| number)
    }

    /// Forgets a connection, which has ended. A session lease ends with its connection.
    fn forget(&mut self, on: u64) {
        let connection = self.connections.remove(&on);
        if let Some(Place::Lease(id)) = connection.and_then(|connection| connection.place)
            && self.leases.get(&id).is_some_and(|l| l.ask.is_session && l.lives())
        {
            self.lose(id, Reason::Session, Vec::new());
        }
    }

    /// Ends a connection that nobody needs any more, after the call on it.
    fn hang_up(&mut self, place: Place) {
        let Some(on) = self.on(place) else { return };
        if self.calls.values().any(|one| one.call.connection == on) {
            self.connections.insert(on, Connection { place: None, errors: 0 });
        } else {
            self.connections.remove(&on);
            self.effects.push(Effect::HangUp(on));
        }
    }

    /// Ends the shared connection with the last lease, and tells when a closed fence is done.
    fn rest(&mut self) {
        let is_idle = self.calls.is_empty() && self.releases.is_empty() && self.requests.is_empty();
        if !is_idle || self.leases.values().any(Lease::lives) {
            return;
        }
        if self.closed_at.is_some() && !self.is_done {
            self.is_done = true;
            self.undos.clear();
            let left = take(&mut self.connections).into_keys();
            self.effects.extend(left.map(Effect::HangUp));
            self.effects.push(Effect::Closed);
        } else if self.undos.is_empty() {
            self.hang_up(Place::Shared);
        }
    }

    // Renewals

    fn kept(&mut self, leases: &[(Id, usize)], mut outcomes: &[Outcome], sent: i64) {
        let parts = leases.iter().map(|(id, count)| Some((*id, outcomes.split_off(..*count)?)));
        let parts: Vec<_> = parts.flatten().collect();
        let got_on = parts.iter().any(|(_, of)| of.iter().all(|one| one.is == "kept"));
        for (id, of) in parts {
            self.renewal(id, of, sent, got_on);
        }
    }

    /// Takes the outcomes of the names of a lease.
    fn renewal(&mut self, id: Id, of: &[Outcome], sent: i64, got_on: bool) {
        let (now, pause) = (self.now, self.leases.get(&id).map_or(0, |l| self.pause(l.ask.ttl)));
        let Some(l) = self.leases.get_mut(&id).filter(|l| l.lives()) else { return };
        l.is_answered = true;
        let count = |is: &str| of.iter().filter(|one| one.is == is).count();
        let (gone, refused) = (count("lost"), count("refused"));
        let again = of.iter().filter_map(|one| one.again_in).min();
        if gone + refused > 0 {
            if l.resting > 0 {
                return;
            }
            if l.is_ending && gone == of.len() {
                return self.released(id);
            }
            let is_left = |one: &Outcome| matches!(&*one.is, "kept" | "later");
            let rest = l.ask.names.iter().zip(of).filter(|(_, one)| is_left(one));
            let rest = rest.map(|(name, _)| name.clone()).collect();
            let is_denied = |one: &Outcome| one.code == "42501";
            l.is_other_role = gone == 0 && l.ask.table.is_none() && of.iter().any(is_denied);
            self.lose(id, if gone > 0 { Reason::Gone } else { Reason::Refused }, rest);
        } else if count("kept") == of.len() {
            let remaining = of.iter().map(|one| one.remaining.unwrap_or(0)).min().unwrap_or(0);
            let (deadline, again) = (sent + window(remaining), again.unwrap_or(NEVER));
            let bound = remaining / i64::from(BEATS_PER_TTL);
            l.beat_at = sent + again.max(l.least(remaining)).min(bound);
            if deadline <= now {
                return;
            }
            (l.deadline, l.is_ending) = (deadline, false);
            if l.holds() {
                self.effects.push(l.event(now, EventKind::Renewed));
            } else {
                if !l.ask.is_session {
                    self.hang_up(Place::Lease(id));
                }
                self.acquired(id);
            }
        } else {
            let again = again.filter(|again| *again > 0 || got_on).unwrap_or(pause);
            // Out of locks: at once, in another transaction, as long as that helps.
            let least = if again == 0 { 0 } else { l.least(l.deadline - now) };
            l.beat_at = now + again.max(least);
        }
    }

    fn keep_failed(&mut self, leases: &[(Id, usize)], ttls: &[i64], code: &str, is_opening: bool) {
        let now = self.now;
        let lives = |id: &Id| self.leases.get(id).is_some_and(Lease::lives);
        let ids: Vec<_> = leases.iter().map(|(id, _)| *id).filter(lives).collect();
        let is_refused = !is_opening && matches!(code, "42501" | "42883" | "3F000");
        // What confirms a row may be wrong in itself: a name, or a value of the key.
        let is_wrong = !passes(code) && ids.iter().any(|id| self.leases[id].is_alone());
        let is_over = is_refused || is_wrong;
        let mut again = now + self.pause(ttls.iter().copied().min().unwrap_or(NEVER));
        if code == "unsent" {
            again = now;
        } else if code == "panicked" {
            self.died();
        } else if !is_over && !self.is_out && !ids.is_empty() {
            self.effects.push(Effect::NotRenewed(code.to_owned()));
            self.is_out = true;
            if is_of_connection(code) {
                again = now;
            }
        }
        each(&mut self.leases, ids.iter().copied(), |l| l.beat_at = again);
        for id in ids.into_iter().filter(|_| is_over) {
            if self.leases.get(&id).is_some_and(|l| l.lives() && l.resting == 0) {
                self.lose(id, Reason::Refused, Vec::new());
            }
        }
    }

    // Acquires

    fn try_to_acquire(&mut self, id: Id) {
        let (of_all, now) = (self.limit(), self.now);
        let Some(r) = self.requests.get_mut(&id) else { return };
        r.is_asking = true;
        let (is_own, own) = (r.ask.is_own(), own_limit(r.ask.ttl));
        // A longer portion would hold back vacuum.
        let is_waiting = is_own && r.ask.is_one();
        let wait = if is_waiting { (r.until - now).clamp(0, PORTION) } else { 0 };
        let limit = wait + if is_own { own } else { own.min(of_all) };
        let place = if is_own { Place::Request(id) } else { Place::Shared };
        let reclaims = r.ask.reclaims || r.doubt.is_some() && r.ask.may_reclaim();
        let ask = r.ask.clone();
        let pairs = Pairs { names: ask.names.clone(), ..Pairs::default() };
        self.start(place, limit, pairs, About::Acquire { id, ask, reclaims, wait });
    }

    fn granted(&mut self, id: Id, token: i64, sent: i64) {
        let now = self.now;
        let Some(r) = self.requests.get_mut(&id) else { return };
        (r.doubt, r.is_granted, r.is_out) = (None, true, false);
        let (is_over, ask) = (r.is_over, r.ask.clone());
        let (ttl, is_session) = (ask.ttl, ask.is_session);
        let first_beat = sent + ttl / i64::from(BEATS_PER_TTL);
        let is_believed = now < first_beat;
        let (deadline, beat_at) =
            if is_believed { (sent + window(ttl), first_beat) } else { (now + ttl, now) };
        let (at_most, is_answered, more) = (NEVER, true, Lease::default());
        let lease = Lease { id, ask, token, deadline, beat_at, at_most, is_answered, ..more };
        self.leases.insert(id, lease);
        if is_session || !is_over && !is_believed {
            // The server counts from a later moment: a renewal confirms the lease, over the same
            // connection.
            let own = self.on(Place::Request(id)).into_iter();
            each(&mut self.connections, own, |own| own.place = Some(Place::Lease(id)));
        }
        if is_over {
            self.give_back(id, false);
            self.leave(id);
        } else if is_believed {
            self.acquired(id);
        }
    }

    /// Tells that the lease is held from now on, and answers its acquire.
    fn acquired(&mut self, id: Id) {
        let Some(l) = self.leases.get_mut(&id) else { return };
        l.state = State::Held;
        l.at_most = l.ask.at_most.map_or(NEVER, |longest| self.now + longest);
        self.effects.push(l.event(self.now, EventKind::Acquired));
        self.finish(id, None, None);
    }

    fn taken(&mut self, id: Id, sent: i64, holder: String, remaining: i64, state: &str) {
        let now = self.now;
        let Some(r) = self.requests.get_mut(&id) else { return };
        r.is_out = false;
        // Its own first call, whose answer was lost, is not committed yet.
        let own = r.doubt.filter(|_| holder == r.ask.holder);
        if own.is_none() {
            r.doubt.take_if(|doubt| now >= doubt.until);
        }
        let until = own.map_or(r.until, |doubt| r.until.max(doubt.until));
        if r.is_over {
            self.leave(id);
        } else if now < until {
            let is_portion = r.ask.is_own() && r.ask.is_one() && own.is_none();
            r.at = if is_portion { (sent + AFTER_PORTION).max(now) } else { now + TRY_AGAIN };
            r.at = r.at.min(until);
        } else if own.is_some() {
            self.finish(id, Some(Denial::NoAnswer), None);
        } else {
            let waits_for = match state {
                "" => None,
                "uncommitted" => Some(WaitsFor::Commit),
                _ if remaining <= 0 => Some(WaitsFor::Guard),
                _ => Some(WaitsFor::Ttl),
            };
            self.finish(id, Some(Denial::LeaseTaken { holder, remaining, waits_for }), None);
        }
    }

    /// Answers an acquire, once. What was granted, or may be, and is nobody's, is given back.
    fn finish(&mut self, id: Id, denial: Option<Denial>, sqlstate: Option<String>) {
        let Some(r) = self.requests.get_mut(&id).filter(|r| !r.is_over) else { return };
        r.is_over = true;
        let is_told = !matches!(denial, None | Some(Denial::LeaseTaken { .. }));
        let in_doubt = is_told && r.doubt.is_some();
        let is_denied = denial.is_some();
        self.effects.push(Effect::Reply { id, denial, sqlstate, in_doubt });
        if is_denied && self.leases.get(&id).is_some_and(Lease::lives) {
            self.give_back(id, false);
        }
        self.leave(id);
    }

    /// Forgets an acquire that is over. What may have been granted is released, if the holder is
    /// nobody else's.
    fn leave(&mut self, id: Id) {
        let Some(r) = self.requests.get(&id).filter(|r| r.is_over && !r.is_asking) else { return };
        if let Some(doubt) = r.doubt.filter(|_| !r.ask.is_named && !self.is_done) {
            let (ask, at) = (r.ask.clone(), self.now);
            self.last_number += 1;
            self.undos.insert(self.last_number, Undo { ask, doubt, at, ..Undo::default() });
        }
        self.requests.remove(&id);
        self.hang_up(Place::Request(id));
    }

    fn acquire_failed(&mut self, id: Id, sent: Option<i64>, limit: i64, code: &str) {
        let now = self.now;
        let patience = self.requests.get(&id).map_or(0, |r| self.patience(r.ask.ttl));
        let is_told = self.requests.values().any(|r| r.is_out && !r.is_over);
        let Some(r) = self.requests.get_mut(&id) else { return };
        if let Some(sent) = sent.filter(|_| is_doubtful(code) && !r.ask.is_session) {
            r.doubt = Some(Doubt { sent, until: sent + limit });
        }
        if r.is_over {
            return self.leave(id);
        }
        r.tries += u32::from(code != "unsent");
        let (mut until, mut longest) = (r.until, longest_wait(r.ask.ttl));
        if is_conflict(code) {
            (until, longest) = (until.max(r.begun + patience), TRY_AGAIN);
        }
        let may_pass = is_conflict(code) || is_of_connection(code);
        let is_stuck = r.doubt.is_some() && !r.ask.may_reclaim();
        let is_first_doubt = r.doubt.is_some() && !is_stuck && r.tries == 1;
        if code == "unsent" || is_first_doubt && is_of_connection(code) {
            r.at = now;
        } else if !may_pass || is_stuck || now >= until {
            let denial = denial(code, sent.is_none() && r.doubt.is_none());
            let is_state = code.len() == 5 && code.to_uppercase() == code;
            self.finish(id, Some(denial), is_state.then(|| code.to_owned()));
        } else {
            let pause = spread(growing(r.tries, longest), self.spread);
            r.at = now + pause.min((until - now).max(1));
            if !is_conflict(code) {
                r.is_out = true;
                // An outage is told once, however many wait for its end.
                if !is_told {
                    self.effects.push(Effect::NotAcquired(id, code.to_owned()));
                }
            }
        }
    }

    fn undone(&mut self, number: u64, released: i64) {
        let now = self.now;
        let Some(undo) = self.undos.get_mut(&number) else { return };
        undo.tries += 1;
        if released > 0 || now >= undo.doubt.until {
            self.end_undo(number);
        } else {
            // The call that it is about may still come.
            undo.at = (now + TRY_AGAIN).min(undo.doubt.until);
        }
    }

    fn undo_failed(&mut self, number: u64, code: &str) {
        let Some(undo) = self.undos.get_mut(&number) else { return };
        undo.tries += 1;
        let pause = spread(growing(undo.tries, LONGEST_PAUSE), self.spread);
        undo.at = self.now + if code == "unsent" { 0 } else { pause };
        let may_pass = passes(code) || code == "panicked";
        if !may_pass || undo.at >= undo.doubt.sent + undo.ask.ttl {
            self.end_undo(number);
        }
    }

    fn end_undo(&mut self, number: u64) {
        self.undos.remove(&number);
        self.hang_up(Place::Undo(number));
    }

    // What is given back

    fn give_back(&mut self, id: Id, is_in_doubt: bool) {
        let Some(l) = self.leases.remove(&id) else { return };
        let until = self.now + self.patience(l.ask.ttl);
        let is_in_doubt = is_in_doubt || l.is_ending || l.rests();
        if !l.ask.is_session {
            self.hang_up(Place::Lease(id));
        }
        let (leases, at, is_alone) = (vec![l], self.now, is_in_doubt);
        self.add(Release { leases, at, until, is_in_doubt, is_alone, ..Release::default() });
    }

    fn add(&mut self, release: Release) -> u64 {
        self.last_number += 1;
        self.releases.insert(self.last_number, release);
        self.last_number
    }

    /// Releases that are queued go together, those of rows for each table.
    fn send_release(&mut self, number: u64) {
        let now = self.now;
        let Some(first) = self.releases.get(&number) else { return };
        if !first.is_alone {
            let is_like = |one: &Release| one.table() == first.table() && !one.is_alone;
            let due = keys(&self.releases, |one| one.is_due(now) && is_like(one));
            let sizes = due
                .iter()
                .map(|number| self.releases[number].leases.iter().map(|l| l.ask.names.len()).sum());
            let count = fitting(MOST_RELEASED, sizes);
            for other in &due[1..count] {
                let Some(mut other) = self.releases.remove(other) else { continue };
                let Some(first) = self.releases.get_mut(&number) else { return };
                first.leases.append(&mut other.leases);
                first.until = first.until.min(other.until);
                first.is_in_doubt |= other.is_in_doubt;
            }
        }
        // If it is tried again, others go first.
        let Some(release) = self.releases.remove(&number) else { return };
        let number = self.add(release);
        let (of_all, place) = (self.limit(), self.place_of_release(number));
        let Some(release) = self.releases.get_mut(&number) else { return };
        release.is_calling = true;
        let smallest = release.leases.iter().map(|l| l.ask.ttl).min().unwrap_or(NEVER);
        let (limit, pairs) = (of_all.min(own_limit(smallest)), pairs(&release.leases));
        self.start(place, limit, pairs, About::Release(number));
    }

    /// The connection of a session lease serves if there is no shared one.
    fn place_of_release(&self, number: u64) -> Place {
        let own = match &self.releases[&number].leases[..] {
            [l] if l.ask.is_session => Place::Lease(l.id),
            _ => return Place::Shared,
        };
        let is_idle = |on| self.calls.values().all(|one| one.call.connection != on);
        let serves = self.on(Place::Shared).is_none() && self.on(own).is_some_and(is_idle);
        if serves { own } else { Place::Shared }
    }

    fn release_answered(&mut self, number: u64, is: &[bool]) {
        let Some(release) = self.releases.remove(&number) else { return };
        let mut is = is.iter();
        for l in release.leases {
            let gone = is.by_ref().take(l.pending().len()).filter(|is| !**is).count();
            let has_session = !l.ask.is_session || self.on(Place::Lease(l.id)).is_some();
            let is_known = !release.is_in_doubt && l.ask.table.is_none() && self.now < l.deadline;
            if l.holds() && gone > 0 && is_known && has_session {
                self.count(Some(Reason::Gone));
                self.effects.push(l.event(self.now, EventKind::Lost(Reason::Gone)));
                self.hang_up(Place::Lease(l.id));
            } else {
                self.given_back(&l, true);
            }
        }
    }

    /// Ends a release without an answer: the server keeps the leases until their ttl.
    fn unconfirmed(&mut self, number: u64) {
        let Some(release) = self.releases.remove(&number) else { return };
        for l in release.leases {
            if l.lives() {
                self.count(None);
            }
            self.given_back(&l, false);
        }
    }

    fn release_failed(&mut self, number: u64, code: &str, is_opening: bool) {
        let now = self.now;
        let Some(release) = self.releases.get_mut(&number) else { return };
        let is_of_connection = is_of_connection(code);
        release.is_in_doubt |= !is_opening && is_doubtful(code);
        // What fails of several may be one's: then each is repeated by itself.
        let is_of_one = !is_opening && !is_of_connection && release.leases.len() > 1;
        let may_pass = is_of_one || is_of_connection || is_locked(code);
        if !may_pass || now >= release.until {
            return self.unconfirmed(number);
        }
        release.tries += 1;
        // At once, too, if the connection had only ended before.
        let is_first = release.tries == 1 && is_of_connection;
        let pause = ((release.until - now) / 4).max(SHORTEST_PAUSE);
        release.at = now + if is_of_one || is_first || code == "unsent" { 0 } else { pause };
        if is_of_one && let Some(release) = self.releases.remove(&number) {
            for lease in release.leases {
                self.add(Release { leases: vec![lease], is_alone: true, ..release });
            }
        }
    }

    // Ends

    fn lose(&mut self, id: Id, reason: Reason, rest: Vec<String>) {
        let Some(l) = self.leases.get_mut(&id) else { return };
        let (was_held, is_other_role) = (l.holds(), l.is_other_role);
        (l.state, l.rest) = (State::Lost(reason), rest);
        if was_held {
            self.effects.push(l.event(self.now, EventKind::Lost(reason)));
            self.count(Some(reason));
        } else {
            self.release(id);
            self.finish(id, Some(Denial::LeaseLost { reason, is_other_role }), None);
        }
    }

    /// Ends by the same input, for the same reason, are one line of the log.
    fn count(&mut self, reason: Option<Reason>) {
        match self.ended.iter_mut().find(|(of, _)| *of == reason) {
            Some((_, count)) => *count += 1,
            None => self.ended.push((reason, 1)),
        }
    }

    fn released(&mut self, id: Id) {
        if let Some(l) = self.leases.remove(&id) {
            self.given_back(&l, true);
        }
    }

    fn given_back(&mut self, l: &Lease, confirmed: bool) {
        self.hang_up(Place::Lease(l.id));
        if l.holds() {
            self.effects.push(l.event(self.now, EventKind::Released { confirmed }));
        }
    }
}

fn pairs<'l>(leases: impl IntoIterator<Item = &'l Lease>) -> Pairs {
    let mut pairs = Pairs::default();
    for l in leases {
        pairs.table.clone_from(&l.ask.table);
        for name in l.pending() {
            pairs.names.push(name.clone());
            pairs.tokens.push(l.token);
            pairs.ttls.push(l.ask.ttl);
        }
    }
    pairs
}

/// Changes those that are there.
fn each<T>(
    all: &mut BTreeMap<u64, T>,
    ids: impl IntoIterator<Item = u64>,
    change: impl Fn(&mut T),
) {
    for id in ids {
        all.get_mut(&id).into_iter().for_each(&change);
    }
}

fn keys<T>(all: &BTreeMap<u64, T>, is: impl Fn(&T) -> bool) -> Vec<u64> {
    all.iter().filter(|(_, one)| is(one)).map(|(number, _)| *number).collect()
}

/// How many of these have no more than that together; one in any case.
fn fitting(most: usize, sizes: impl Iterator<Item = usize>) -> usize {
    let sums = sizes.scan(0, |sum, size| {
        *sum += size;
        Some(*sum)
    });
    sums.take_while(|sum| *sum <= most).count().max(1)
}

/// What is believed of a span that the server counts from a later moment, by another clock.
fn window(span: i64) -> i64 {
    span - (span + 49) / 50
}

/// The limit of an acquire, a release or an undo that has no shorter lease beside it.
fn own_limit(ttl: i64) -> i64 {
    (ttl / 3).clamp(LEAST_PATIENCE, LONGEST_CALL)
}

fn spread(pause: i64, spread: i64) -> i64 {
    pause - pause * spread / 4000
}

fn growing(tries: u32, longest: i64) -> i64 {
    (FIRST_RETRY << (tries - 1).min(20)).min(longest)
}

fn longest_wait(ttl: i64) -> i64 {
    (ttl / 3).clamp(SHORTEST_WAIT, LONGEST_PAUSE)
}

/// True if the SQLSTATE is one of these, or of one of these classes.
pub fn is_in(all: &[&str], state: &str) -> bool {
    all.iter().any(|one| state.starts_with(one))
}

/// True if another connection may help.
fn is_of_connection(code: &str) -> bool {
    let is_word = matches!(code, "connect" | "unsent" | "ended" | "no answer");
    is_word || is_in(&["08", "57P0", "25006", "53300"], code)
}

/// True if a statement of an acquire fails for no longer than a while, as on a standby.
pub fn passes(code: &str) -> bool {
    is_in(&["25", "40", "53", "55P03", "57", "58"], code) || is_of_connection(code)
}

/// True if the statement may have been carried out all the same.
fn is_doubtful(code: &str) -> bool {
    let is_unread = matches!(code, "unreadable" | "panicked");
    is_unread || is_of_connection(code) && !matches!(code, "unsent" | "25006" | "53300")
}

fn is_conflict(code: &str) -> bool {
    matches!(code, "40001" | "40P01")
}

fn is_locked(code: &str) -> bool {
    is_conflict(code) || code == "55P03"
}

fn denial(code: &str, is_opening: bool) -> Denial {
    match code {
        _ if is_opening => Denial::NoConnection,
        _ if is_of_connection(code) || is_doubtful(code) => Denial::NoAnswer,
        "42501" => Denial::NotGranted,
        "42883" | "3F000" => Denial::NotInstalled,
        _ => Denial::Refused,
    }
}

/// One who leads, or waits to.
#[derive(Default)]
pub struct LeadState {
    ttl: i64,
    spread: i64,
    failures: u32,
    is_leading: bool,
    since: i64,
    /// The end of the pause.
    at: Option<i64>,
}

#[derive(Debug)]
pub enum Lead {
    Acquire,
    Work,
    /// If an outage begins it is a line of the log; and the event `interrupted`, if it has led.
    Pause {
        pause: i64,
        begins: bool,
        has_led: bool,
    },
    /// The end by the work or a stop; or by the last error.
    End,
    Fail,
}

impl LeadState {
    pub fn new(ttl: i64, spread: i64) -> LeadState {
        LeadState { ttl, spread, ..LeadState::default() }
    }

    pub fn start(&mut self) -> Lead {
        self.at = None;
        Lead::Acquire
    }

    pub fn granted(&mut self, now: i64) -> Lead {
        (self.is_leading, self.since) = (true, now);
        Lead::Work
    }

    pub fn work_done(&mut self) -> Lead {
        Lead::End
    }

    /// The cause is the kind of the work's error. A lost lease is no end, whatever the error says.
    pub fn work_failed(&mut self, now: i64, cause: &str, is_lost: bool) -> Lead {
        if now - self.since >= self.ttl.min(60_000) {
            self.failures = 0;
        }
        if is_lost || goes_on_after(cause) { self.again(now) } else { Lead::Fail }
    }

    pub fn not_granted(&mut self, now: i64, cause: &str) -> Lead {
        if goes_on_after(cause) { self.again(now) } else { Lead::Fail }
    }

    /// Lets the work end by itself.
    pub fn stop(&mut self) -> Option<Lead> {
        self.at = None;
        (!self.is_leading).then_some(Lead::End)
    }

    pub fn tick(&mut self, now: i64) -> Option<Lead> {
        self.at.is_some_and(|at| now >= at).then(|| self.start())
    }

    fn again(&mut self, now: i64) -> Lead {
        let (begins, has_led) = (self.failures == 0, self.is_leading);
        let shortest = (self.ttl / 12).max(SHORTEST_PAUSE);
        let pause = (shortest << self.failures.min(20)).min(longest_wait(self.ttl));
        let pause = spread(pause, self.spread);
        self.failures += 1;
        (self.is_leading, self.at) = (false, Some(now + pause));
        Lead::Pause { pause, begins, has_led }
    }
}

fn goes_on_after(cause: &str) -> bool {
    let of_lease = matches!(cause, "LeaseLost" | "LeaseTaken" | "TransactionLost");
    let of_server = matches!(cause, "ConnectionLost" | "NoAnswer" | "NoConnection" | "transient");
    of_lease || of_server
}

#[cfg(test)]
#[path = "../tests/unit/lease_state.rs"]
mod tests;
