//! The state machine of the client's leases. Its specification is `clients/spec/lease_state.md`,
//! and the tests play the vectors of `clients/spec/vectors`.
//!
//! The machine has no clock, thread or socket: each input comes with the time, in milliseconds of a
//! monotonic clock, and returns effects, which the heartbeat carries out in their order.

use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::mem::take;
use std::sync::Arc;

pub const NEVER: i64 = 1 << 53;
pub const LONGEST_CALL: i64 = 10_000;
pub const SHORTEST_OPENING: i64 = 2_000;
pub const CHECK_INTERVAL: i64 = 1_000;
const SHORTEST_PAUSE: i64 = 10;
const SHORTEST_WAIT: i64 = 250;
const LONGEST_PAUSE: i64 = 10_000;
const WAIT_PORTION: i64 = 2_000;
const RETRY_INTERVAL: i64 = 250;
const PORTION_INTERVAL: i64 = 50;
const FIRST_RETRY: i64 = 20;
const SHORTEST_RETRY_TIME: i64 = 1_000;
const QUEUE_TIMEOUT: i64 = 20_000;
const CLOSE_TIMEOUT: i64 = 5_000;
const MAX_PAIRS: usize = 10_000;
const MAX_RELEASED_NAMES: usize = 200;
const MAX_BEATS_IN_A_ROW: u32 = 2;
/// A lease is renewed when its ttl, divided by this number, has passed.
pub const BEATS_PER_TTL: u32 = 3;

/// The number of an acquire, and of the lease that it is granted. The heartbeat uses each once.
pub type Id = u64;

/// What the program requests of one acquire. Spans are in milliseconds.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The names; of a row lease its key alone.
    pub names: Vec<String>,
    pub ttl: i64,
    pub wait: i64,
    /// The holder is unique for this acquire, unless the program has named it.
    pub holder: String,
    pub is_named: bool,
    pub reclaim: bool,
    pub is_session: bool,
    pub is_shared: bool,
    pub slots: i32,
    pub at_most: Option<i64>,
    /// The machine only passes the metadata on.
    pub metadata: Option<Value>,
    /// The table of a row lease, whose row the program has claimed with `token`.
    pub table: Option<RowTable>,
    pub token: i64,
}

/// A table whose rows are leases, with its columns, in the names that the program uses.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RowTable {
    pub name: String,
    pub keys: Vec<String>,
    pub fence: String,
    pub deadline: String,
}

impl Options {
    /// The names in events and errors: of a row lease, its table and its key.
    pub fn display_names(&self) -> Vec<String> {
        let table = self.table.iter().map(|table| table.name.clone());
        table.chain(self.names.clone()).collect()
    }

    fn has_one_name(&self) -> bool {
        self.names.len() == 1
    }

    /// True if a separate connection acquires the lease.
    fn acquires_separately(&self) -> bool {
        self.is_session || self.wait > 0 && self.has_one_name()
    }

    fn may_reclaim(&self) -> bool {
        let is_exclusive = self.has_one_name() && !self.is_shared && self.slots <= 1;
        self.reclaim || is_exclusive && !self.is_named
    }
}

/// The stages of a last transaction, which releases leases.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Stage {
    /// The release statement is sent next.
    Begins,
    Committed,
    RolledBack,
    /// The commit got no answer.
    InDoubt,
    /// A savepoint was released, and the program's transaction goes on.
    Inner,
}

/// The rows that answer a call.
pub enum Answer {
    /// The token of the grant.
    Granted(i64),
    Taken {
        holder: String,
        remaining: i64,
        state: String,
    },
    /// The outcome for each pair.
    Kept(Vec<Outcome>),
    /// For each pair, true if the server has released it.
    Released(Vec<bool>),
    /// The number of names that an undo has released.
    Undone(i64),
}

/// The outcome of a renewal for one name.
#[derive(Default)]
pub struct Outcome {
    /// `kept`, `later`, `lost` or `refused`.
    pub kind: String,
    pub remaining: Option<i64>,
    pub again_in: Option<i64>,
    pub code: String,
}

/// What a call does, and for whom.
pub enum Operation {
    Acquire {
        id: Id,
        options: Arc<Options>,
        reclaim: bool,
        wait: i64,
    },
    /// Renews leases. Each comes with the number of its names.
    Keep(Vec<(Id, usize)>),
    /// Sends the release of this number.
    Release(u64),
    /// Sends the undo of this number.
    Undo {
        number: u64,
        options: Arc<Options>,
    },
}

/// The names in a call, with the token and the ttl of each. If there is a table, the names are keys
/// of its rows.
#[derive(Clone, Default)]
pub struct Pairs {
    pub names: Vec<String>,
    pub tokens: Vec<i64>,
    pub ttls: Vec<i64>,
    pub table: Option<RowTable>,
}

/// One statement on one connection.
pub struct Call {
    pub number: u64,
    pub connection: u64,
    /// True if the connection is opened first.
    pub opens: bool,
    pub limit: i64,
    pub pairs: Pairs,
    pub operation: Operation,
}

/// Why a lease is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The lease could not be renewed in time.
    Deadline,
    /// The server says so: the lease was taken over or revoked, or has expired.
    Gone,
    /// The server refuses to renew the lease for this client, and always will.
    Refused,
    /// The session of a session lease has ended.
    Session,
    /// The thread of the heartbeat has died.
    Heartbeat,
    /// The time that `at_most` gave is over.
    AtMost,
    /// The program has released the lease.
    Released,
}

/// What ends a lease that another holder has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitsFor {
    /// The end of its ttl, unless its holder renews it.
    Ttl,
    /// The commit of the transaction that acquires it.
    Commit,
    /// The end of a transaction that guards it: its ttl is over already.
    Guard,
}

/// Writes the name that the reason has in all clients.
impl Display for Reason {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Reason::AtMost => f.write_str("at_most"),
            other => f.write_str(&format!("{other:?}").to_lowercase()),
        }
    }
}

impl Call {
    /// The acquire that the call is for, if there is one. A call that keeps rows may be for the
    /// acquire of the first: a row that is confirmed has no other beside it.
    pub fn acquire(&self) -> Option<Id> {
        match &self.operation {
            Operation::Acquire { id, .. } => Some(*id),
            Operation::Keep(rows) if self.pairs.table.is_some() => rows.first().map(|(id, _)| *id),
            _ => None,
        }
    }
}

/// What has happened to a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// The lease is held.
    Acquired,
    /// The lease was renewed.
    Renewed,
    /// The lease is lost: somebody else may hold it.
    Lost(Reason),
    /// The lease was released. If the server has not answered, it keeps the lease until its ttl.
    Released {
        /// False if the server has not answered.
        confirmed: bool,
    },
    /// [`Fence::lead`](crate::Fence::lead) has stopped leading, and acquires its lease again.
    Interrupted,
}

/// The types of errors that follow from what a server or a connection has done.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ErrorType {
    LeaseLost,
    LeaseTaken,
    NoAnswer,
    NoConnection,
    NotGranted,
    NotInstalled,
    Refused,
    TransactionLost,
}

/// Why an acquire got no lease.
#[derive(Debug, Clone, PartialEq)]
pub enum Denial {
    LeaseTaken { holder: String, remaining: i64, waits_for: Option<WaitsFor> },
    LeaseLost { reason: Reason, other_role: bool },
    Failed(ErrorType),
    Closed,
    GivenUp,
}

pub enum Effect {
    Call(Arc<Call>),
    /// Ends the connection at once, whatever hangs in it.
    Cut(u64),
    /// Closes the connection as it should be closed.
    HangUp(u64),
    Event {
        kind: EventKind,
        id: Id,
        token: i64,
        remaining: i64,
        other_role: bool,
    },
    /// Replies to an acquire: with its lease, if there is no denial.
    Reply {
        id: Id,
        denial: Option<Denial>,
        sqlstate: Option<String>,
        in_doubt: bool,
    },
    /// Logs that an outage of the heartbeat has begun, with the code of the error.
    NotRenewed(String),
    /// Logs that an outage has begun for whose end acquires wait, with one of them and the code of
    /// its error.
    NotAcquired(Id, String),
    /// Logs the number of leases that were lost for a reason or, without a reason, not released.
    Ended(Option<Reason>, usize),
    Closed,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum State {
    #[default]
    Acquiring,
    Confirming,
    Held,
    Lost(Reason),
}

/// One lease, from its acquire until it is lost, or its release is queued. A separate connection may
/// acquire and confirm it. A session lease keeps that connection, and ends with it.
#[derive(Default)]
struct LeaseState {
    id: Id,
    options: Arc<Options>,
    state: State,
    /// True while an acquire or a renewal has no answer.
    is_calling: bool,

    // Used until the grant.
    requested_at: i64,
    /// The end of `wait`.
    until: i64,
    /// The time of the next call, and the number of failed calls so far.
    due_at: i64,
    tries: u32,
    /// True once the acquire has its reply.
    has_reply: bool,
    /// True while it waits for the end of an outage.
    in_outage: bool,
    doubt: Option<Doubt>,

    // Used after the grant.
    token: i64,
    /// True if another role has acquired the lease, which the server therefore refuses to renew.
    other_role: bool,
    deadline: i64,
    beat_at: i64,
    /// When `at_most` is over, and the lease is lost.
    ends_at: i64,
    /// The number of last transactions under way.
    last_transactions: u32,
    /// The number of the worker's transactions that have locked the row.
    row_locks: u32,
    /// True after a release in a savepoint: the program's transaction has not committed yet.
    has_uncommitted_release: bool,
    /// False while the last renewal that was sent has no answer.
    is_renewal_answered: bool,
    /// After a loss: the names that the server may still hold for this lease.
    unreleased: Vec<String>,
}

impl LeaseState {
    fn is_held(&self) -> bool {
        self.state == State::Held
    }

    fn is_live(&self) -> bool {
        matches!(self.state, State::Confirming | State::Held)
    }

    fn is_lost(&self) -> bool {
        matches!(self.state, State::Lost(_))
    }

    /// True if it waits to send its next acquire.
    fn is_queued(&self) -> bool {
        self.state == State::Acquiring && !self.has_reply && !self.is_calling
    }

    fn is_acquire_due(&self, now: i64) -> bool {
        self.is_queued() && self.due_at <= now
    }

    fn in_transaction(&self) -> bool {
        self.last_transactions > 0 || self.row_locks > 0
    }

    /// True if the lease must not be renewed now.
    fn is_busy(&self) -> bool {
        self.is_calling || self.in_transaction()
    }

    /// True if the next call confirms a row. That call has no other leases: its error is returned
    /// by `keep_row`, as a name or a value of the key may be wrong.
    fn confirms_row(&self) -> bool {
        self.options.table.is_some() && self.state == State::Confirming
    }

    /// The shortest time until the next renewal, if `left` remains until the deadline.
    fn shortest_interval(&self, left: i64) -> i64 {
        SHORTEST_PAUSE.max(self.options.ttl / 60).min(left / 4)
    }

    /// How long the client may believe that it holds the lease, without an input.
    fn remaining(&self, now: i64) -> i64 {
        let left = self.deadline.min(self.ends_at) - now;
        if self.is_held() { left.max(0) } else { 0 }
    }

    /// The time of the lease's next step by the clock. `is_free`: its connection has no call.
    fn wake(&self, is_free: bool) -> i64 {
        if self.is_queued() {
            let due_at = if is_free { self.due_at } else { NEVER };
            return due_at.min(self.until + QUEUE_TIMEOUT);
        }
        let deadline = if self.row_locks == 0 { self.deadline } else { NEVER };
        let beat_at = if is_free && !self.is_busy() { self.beat_at } else { NEVER };
        self.ends_at.min(deadline).min(beat_at)
    }

    /// The names that the server may hold for this lease.
    fn names_on_server(&self) -> &[String] {
        if self.unreleased.is_empty() { &self.options.names } else { &self.unreleased }
    }

    fn event(&self, now: i64, kind: EventKind) -> Effect {
        let is_held = matches!(kind, EventKind::Acquired | EventKind::Renewed);
        let remaining = if is_held { self.deadline - now } else { 0 };
        let LeaseState { id, token, other_role, .. } = *self;
        Effect::Event { kind, id, token, remaining, other_role }
    }
}

/// A call was sent and got no answer: the server may carry it out until then.
#[derive(Clone, Copy, Default)]
struct Doubt {
    sent: i64,
    until: i64,
}

/// Releases what the server may have granted to an acquire that got no answer.
#[derive(Default)]
struct Undo {
    options: Arc<Options>,
    doubt: Doubt,
    due_at: i64,
    tries: u32,
    is_calling: bool,
}

/// A release of some leases, from its queueing to its answer or its end without one.
#[derive(Default)]
struct Release {
    leases: Vec<LeaseState>,
    due_at: i64,
    /// The end of the retry time.
    until: i64,
    tries: u32,
    is_calling: bool,
    /// True if an earlier attempt may have released the leases.
    is_in_doubt: bool,
    /// True if no other release joins its call.
    is_alone: bool,
}

impl Release {
    fn table(&self) -> Option<&RowTable> {
        self.leases[0].options.table.as_ref()
    }

    fn is_due(&self, now: i64) -> bool {
        !self.is_calling && self.due_at <= now
    }

    /// The time of its next step by the clock. `is_free`: the shared connection has no call.
    fn wake(&self, is_free: bool) -> i64 {
        match (self.is_calling, is_free) {
            (true, _) => NEVER,
            (_, true) => self.due_at.min(self.until),
            (..) => self.until,
        }
    }
}

/// A call that has no answer yet.
struct PendingCall {
    call: Arc<Call>,
    /// None while the connection is being opened.
    sent: Option<i64>,
    until: i64,
}

/// The owner of a connection. The shared connection belongs to the machine itself.
#[derive(Clone, Copy, PartialEq)]
enum Owner {
    Shared,
    Lease(Id),
    Undo(u64),
}

struct Connection {
    /// None if the connection is closed after the call on it.
    owner: Option<Owner>,
    /// The number of errors in a row.
    errors: u32,
}

/// The machine of all leases of a fence.
#[derive(Default)]
pub struct LeaseStates {
    /// Between 0 and 1000. It shortens the pauses, so that clients do not retry at the same time.
    jitter: i64,
    /// The longest limit of a renewal.
    pub longest_beat: i64,
    now: i64,
    effects: Vec<Effect>,
    /// The number of leases that this input has ended, by reason, for the log.
    logs: Vec<(Option<Reason>, usize)>,
    leases: BTreeMap<Id, LeaseState>,
    undos: BTreeMap<u64, Undo>,
    releases: BTreeMap<u64, Release>,
    calls: BTreeMap<u64, PendingCall>,
    connections: BTreeMap<u64, Connection>,
    /// The call on the shared connection.
    shared_call: Option<u64>,
    last_call: u64,
    last_connection: u64,
    /// The last number of an undo or a release.
    last_number: u64,
    beats_in_a_row: u32,
    in_outage: bool,
    is_loss_logged: bool,
    closed_at: Option<i64>,
    has_closed: bool,
}

impl LeaseStates {
    pub fn new(jitter: i64, longest_beat: i64) -> LeaseStates {
        LeaseStates { jitter, longest_beat, ..LeaseStates::default() }
    }

    // Inputs from the program. Each is passed to `step`.

    pub fn acquire(&mut self, id: Id, options: Arc<Options>) {
        let (now, is_row) = (self.now, options.table.is_some());
        let (token, claimed_at) = (options.token, now - options.ttl);
        let lease = LeaseState {
            id,
            requested_at: now,
            until: now + options.wait,
            due_at: now,
            options,
            ends_at: NEVER,
            is_renewal_answered: true,
            ..LeaseState::default()
        };
        self.leases.insert(id, lease);
        if self.is_closing() {
            self.reply(id, Some(Denial::Closed), None);
        } else if is_row {
            // The program has claimed the row at an unknown time, so a renewal confirms it first.
            self.granted(id, token, claimed_at);
        }
    }

    pub fn give_up(&mut self, id: Id) {
        self.reply(id, Some(Denial::GivenUp), None);
    }

    pub fn release(&mut self, id: Id) {
        let Some(lease) = self.leases.get(&id) else { return };
        if lease.is_held() {
            self.queue_release(id, false);
        } else if lease.is_lost() {
            self.release_after_loss(id);
        }
    }

    /// Takes the stage of a transaction that releases these leases.
    pub fn last_transaction(&mut self, ids: &[Id], stage: Stage) {
        for &id in ids {
            let Some(lease) = self.leases.get_mut(&id) else { continue };
            if stage == Stage::Begins {
                lease.last_transactions += 1;
                continue;
            }
            lease.last_transactions -= 1;
            match stage {
                _ if !lease.is_held() => {}
                Stage::Committed => self.mark_released(id),
                Stage::InDoubt => self.queue_release(id, true),
                _ => {
                    lease.beat_at = self.now;
                    lease.has_uncommitted_release = stage == Stage::Inner;
                }
            }
        }
    }

    /// The worker's transaction has locked the row, which nobody else can claim meanwhile.
    pub fn row_locked(&mut self, id: Id) {
        update(&mut self.leases, [id], |lease| lease.row_locks += 1);
    }

    /// The transaction that has locked the row has ended.
    pub fn row_unlocked(&mut self, id: Id) {
        let now = self.now;
        update(&mut self.leases, [id], |lease| {
            lease.row_locks -= 1;
            lease.beat_at = lease.beat_at.min(now);
        });
        self.end_by_clock(0);
    }

    /// A guard was refused: a renewal at once says if the leases are lost.
    pub fn suspect(&mut self, ids: &[Id]) {
        let now = self.now;
        update(&mut self.leases, ids.iter().copied(), |lease| lease.beat_at = now);
    }

    pub fn is_closing(&self) -> bool {
        self.closed_at.is_some()
    }

    pub fn close(&mut self) {
        self.closed_at.get_or_insert(self.now);
        for id in keys(&self.leases, |lease| !lease.has_reply) {
            self.reply(id, Some(Denial::Closed), None);
        }
        for id in keys(&self.leases, LeaseState::is_held) {
            self.queue_release(id, false);
        }
    }

    // Inputs from the connections.

    /// The connection of a call with `opens` is established, and the call is sent next.
    pub fn sent(&mut self, number: u64) {
        if self.calls.get(&number).is_some_and(|pending| pending.sent.is_none()) {
            self.mark_sent(number);
        }
    }

    pub fn answered(&mut self, number: u64, answer: Answer) {
        let Some(PendingCall { call, sent, .. }) = self.end_call(number) else { return };
        let sent = sent.unwrap_or(self.now);
        (self.in_outage, self.is_loss_logged) = (false, false);
        if let Some(connection) = self.connections.get_mut(&call.connection) {
            connection.errors = 0;
        }
        match (&call.operation, answer) {
            (&Operation::Acquire { id, .. }, Answer::Granted(token)) => {
                self.granted(id, token, sent);
            }
            (&Operation::Acquire { id, .. }, Answer::Taken { holder, remaining, state }) => {
                self.taken(id, sent, holder, remaining, &state);
            }
            (Operation::Keep(leases), Answer::Kept(outcomes)) => {
                self.keep_answered(leases, &outcomes, sent);
            }
            (&Operation::Release(number), Answer::Released(released)) => {
                self.release_answered(number, &released);
            }
            (&Operation::Undo { number, .. }, Answer::Undone(count)) => {
                self.undo_answered(number, count);
            }
            _ => unreachable!("a call is answered by its own rows"),
        }
    }

    /// `code` is one of `clients/spec/errors.md`. `is_broken`: the connection cannot be used again.
    pub fn failed(&mut self, number: u64, code: &str, is_broken: bool) {
        let Some(PendingCall { call, sent, .. }) = self.end_call(number) else { return };
        let is_opening = sent.is_none();
        let code = if is_opening && code == "no answer" { "connect" } else { code };
        if let Some(connection) = self.connections.get_mut(&call.connection) {
            connection.errors += u32::from(!is_lock_error(code));
            let is_unused = connection.owner.is_none();
            let is_useless = is_opening || is_broken || code == "panicked";
            // After a second error in a row the next call opens another connection.
            if is_useless || is_connection_error(code) || connection.errors > 1 || is_unused {
                self.effects.push(Effect::Cut(call.connection));
                self.forget_connection(call.connection);
            }
        }
        match &call.operation {
            Operation::Acquire { id, .. } => self.acquire_failed(*id, sent, call.limit, code),
            Operation::Keep(leases) => {
                self.keep_failed(leases, &call.pairs.ttls, code, is_opening);
            }
            Operation::Release(number) => self.release_failed(*number, code, is_opening),
            Operation::Undo { number, .. } => self.undo_failed(*number, code),
        }
    }

    pub fn disconnected(&mut self, connection: u64) {
        match self.calls.values().find(|pending| pending.call.connection == connection) {
            Some(pending) => self.failed(pending.call.number, "ended", true),
            None => self.forget_connection(connection),
        }
    }

    pub fn heartbeat_died(&mut self) {
        for id in keys(&self.leases, LeaseState::is_held) {
            self.mark_lost(id, Reason::Heartbeat, self.leases[&id].options.names.clone());
        }
    }

    // What a program may read at any time, without an input.

    /// How long the client may believe that it holds the lease.
    pub fn remaining(&self, now: i64, id: Id) -> i64 {
        self.leases.get(&id).map_or(0, |lease| lease.remaining(now))
    }

    /// True if the window of a lease is over, but the lease is not lost: a transaction has locked
    /// its row.
    pub fn is_over(&self, now: i64, id: Id) -> bool {
        self.leases.get(&id).is_some_and(|lease| lease.is_held() && lease.remaining(now) == 0)
    }

    // Time. Each step first ends what has ended by its time.

    /// Takes an input, and returns the effects. If the input answers a call, its number is
    /// `answer_to`, and the limit of that call is not applied.
    pub fn step(
        &mut self,
        now: i64,
        answer_to: u64,
        input: impl FnOnce(&mut LeaseStates),
    ) -> Vec<Effect> {
        self.now = now;
        self.end_by_clock(answer_to);
        input(self);
        self.close_unused_connections();
        self.send_due_calls();
        for (reason, count) in take(&mut self.logs) {
            // An outage writes one line to the log, and all losses by it write one more.
            let is_of_outage = reason == Some(Reason::Deadline) && self.in_outage;
            if !is_of_outage || !self.is_loss_logged {
                self.effects.push(Effect::Ended(reason, count));
            }
            self.is_loss_logged |= is_of_outage;
        }
        take(&mut self.effects)
    }

    /// The latest time of the next step, or `NEVER` if there is nothing to do.
    pub fn wake(&self, now: i64) -> i64 {
        let is_free = self.shared_call.is_none();
        let separate = |lease: &LeaseState| {
            lease.is_queued() && lease.options.acquires_separately()
                || self.confirms_separately(lease)
        };
        let leases = self.leases.values().filter(|lease| lease.is_live() || lease.is_queued());
        let leases = leases.map(|lease| lease.wake(is_free || separate(lease)));
        let releases = self.releases.values().map(|release| release.wake(is_free));
        let undos = self.undos.values().filter(|undo| !undo.is_calling).map(|undo| undo.due_at);
        let calls = self.calls.values().map(|pending| pending.until);
        let close = self.closed_at.filter(|_| !self.has_closed).map(|at| at + CLOSE_TIMEOUT);
        let all = leases.chain(releases).chain(undos).chain(calls).chain(close);
        all.min().map_or(NEVER, |next| next.min(now + CHECK_INTERVAL).max(now))
    }

    fn end_by_clock(&mut self, answer_to: u64) {
        let now = self.now;
        let may_end = |lease: &LeaseState| lease.deadline.min(lease.ends_at) <= now;
        for id in keys(&self.leases, |lease| lease.is_live() && may_end(lease)) {
            let lease = &self.leases[&id];
            if lease.is_held() && lease.ends_at <= now {
                self.mark_lost(id, Reason::AtMost, lease.options.names.clone());
            } else if lease.deadline <= now && lease.row_locks == 0 {
                // The server may have received a renewal that got no answer.
                let is_answered = lease.is_renewal_answered;
                let unreleased = if is_answered { Vec::new() } else { lease.options.names.clone() };
                self.mark_lost(id, Reason::Deadline, unreleased);
            }
        }
        let is_late = self.closed_at.is_some_and(|at| now >= at + CLOSE_TIMEOUT);
        let has_ended = |pending: &PendingCall| {
            pending.call.number != answer_to && pending.until <= now || is_late
        };
        for number in keys(&self.calls, has_ended) {
            self.failed(number, "no answer", true);
        }
        if is_late {
            self.undos.clear();
        }
        let has_ended =
            |release: &Release| !release.is_calling && (is_late || release.until <= now);
        for number in keys(&self.releases, has_ended) {
            self.abandon_release(number);
        }
        let is_overdue = |lease: &LeaseState| now >= lease.until + QUEUE_TIMEOUT;
        for id in keys(&self.leases, |lease| lease.is_queued() && is_overdue(lease)) {
            self.reply(id, Some(Denial::Failed(ErrorType::NoConnection)), None);
        }
    }

    // Calls. The shared connection has one call at a time, and none of them waits in the server.

    fn send_due_calls(&mut self) {
        let now = self.now;
        let is_due = |lease: &LeaseState| lease.is_acquire_due(now);
        for id in keys(&self.leases, |one| one.options.acquires_separately() && is_due(one)) {
            self.send_acquire(id);
        }
        for number in keys(&self.undos, |undo| !undo.is_calling && undo.due_at <= now) {
            let Some(undo) = self.undos.get_mut(&number) else { continue };
            undo.is_calling = true;
            let (options, limit) = (undo.options.clone(), own_limit(undo.options.ttl));
            let pairs = Pairs { names: options.names.clone(), ..Pairs::default() };
            let operation = Operation::Undo { number, options };
            self.send_call(Owner::Undo(number), limit, pairs, operation);
        }
        let is_due = |lease: &LeaseState| !lease.is_calling && lease.beat_at <= now;
        for id in keys(&self.leases, |lease| self.confirms_separately(lease) && is_due(lease)) {
            self.send_renewal(&[id], Owner::Lease(id));
        }
        if self.shared_call.is_none() {
            self.send_on_shared_connection();
        }
        self.end_if_idle();
    }

    fn send_on_shared_connection(&mut self) {
        let now = self.now;
        let due = self.leases.values().filter(|lease| self.is_renewable_by(lease, now));
        let first = due.min_by_key(|lease| lease.beat_at);
        let due = keys(&self.releases, |release| release.is_due(now));
        let release = due.first().copied();
        let is_shared = |lease: &LeaseState| !lease.options.acquires_separately();
        let due = keys(&self.leases, |lease| is_shared(lease) && lease.is_acquire_due(now));
        let request = due.first().copied();
        // Heartbeats go first, but after two in a row another call has its turn.
        let is_others_turn =
            self.beats_in_a_row >= MAX_BEATS_IN_A_ROW && (release.is_some() || request.is_some());
        if let Some(first) = first.filter(|_| !is_others_turn) {
            let renewable = self.renewable_with(first);
            self.beats_in_a_row += 1;
            self.send_renewal(&renewable, Owner::Shared);
            return;
        }
        self.beats_in_a_row = 0;
        if let Some(number) = release {
            self.send_release(number);
        } else if let Some(id) = request {
            self.send_acquire(id);
        }
    }

    /// True if the connection that has acquired the lease confirms it.
    fn confirms_separately(&self, lease: &LeaseState) -> bool {
        lease.state == State::Confirming && self.connection_of(Owner::Lease(lease.id)).is_some()
    }

    /// True if the shared connection may renew the lease, and it is due by that time.
    fn is_renewable_by(&self, lease: &LeaseState, time: i64) -> bool {
        let is_due = lease.is_live() && lease.beat_at <= time;
        is_due && !lease.is_busy() && !self.confirms_separately(lease)
    }

    /// Returns the leases to renew in one call with `first`: the earliest first.
    fn renewable_with(&self, first: &LeaseState) -> Vec<Id> {
        if first.confirms_row() {
            return vec![first.id];
        }
        let joins = |lease: &&LeaseState| {
            let is_soon = self.is_renewable_by(lease, self.now + lease.options.ttl / 6);
            is_soon && lease.options.table == first.options.table && !lease.confirms_row()
        };
        let mut soon: Vec<_> = self.leases.values().filter(joins).collect();
        soon.sort_by_key(|lease| lease.beat_at);
        let count = count_within(MAX_PAIRS, soon.iter().map(|lease| lease.options.names.len()));
        soon[..count].iter().map(|lease| lease.id).collect()
    }

    fn send_renewal(&mut self, ids: &[Id], owner: Owner) {
        update(&mut self.leases, ids.iter().copied(), |lease| lease.is_calling = true);
        let leases: Vec<_> = ids.iter().map(|id| &self.leases[id]).collect();
        let counts = leases.iter().map(|lease| (lease.id, lease.options.names.len()));
        let operation = Operation::Keep(counts.collect());
        let (limit, pairs) = (self.limit().min(self.longest_beat), pairs(leases));
        self.send_call(owner, limit, pairs, operation);
    }

    /// Sends a call on its owner's connection, which is opened if there is none.
    fn send_call(&mut self, owner: Owner, limit: i64, pairs: Pairs, operation: Operation) {
        self.last_call += 1;
        let number = self.last_call;
        let (existing, until) = (self.connection_of(owner), self.now + limit.max(SHORTEST_OPENING));
        let connection = existing.unwrap_or_else(|| {
            self.last_connection += 1;
            let opened = Connection { owner: Some(owner), errors: 0 };
            self.connections.insert(self.last_connection, opened);
            self.last_connection
        });
        if owner == Owner::Shared {
            self.shared_call = Some(number);
        }
        let opens = existing.is_none();
        let call = Arc::new(Call { number, connection, opens, limit, pairs, operation });
        self.calls.insert(number, PendingCall { call: call.clone(), sent: None, until });
        if !opens {
            self.mark_sent(number);
        }
        self.effects.push(Effect::Call(call));
    }

    fn mark_sent(&mut self, number: u64) {
        let Some(PendingCall { call, sent, until }) = self.calls.get_mut(&number) else { return };
        (*sent, *until) = (Some(self.now), self.now + call.limit);
        if let Operation::Keep(leases) = &call.operation {
            let ids = leases.iter().map(|(id, _)| *id);
            update(&mut self.leases, ids, |lease| lease.is_renewal_answered = false);
        }
    }

    /// The limit of a call: a third of the smallest ttl of all live leases.
    fn limit(&self) -> i64 {
        let live = self.leases.values().filter(|lease| lease.is_live());
        live.map(|lease| lease.options.ttl / 3).fold(LONGEST_CALL, i64::min)
    }

    /// How long conflicts and releases are retried.
    fn retry_time(&self, ttl: i64) -> i64 {
        self.limit().min(ttl / 3).max(SHORTEST_RETRY_TIME)
    }

    fn pause(&self, ttl: i64) -> i64 {
        jittered((ttl / 12).clamp(SHORTEST_PAUSE, LONGEST_PAUSE), self.jitter)
    }

    /// Removes a call that has ended from the calls, and returns it.
    fn end_call(&mut self, number: u64) -> Option<PendingCall> {
        let ended = self.calls.remove(&number)?;
        self.shared_call.take_if(|shared_call| *shared_call == number);
        match &ended.call.operation {
            Operation::Acquire { id, .. } => {
                update(&mut self.leases, [*id], |lease| lease.is_calling = false);
            }
            Operation::Keep(leases) => {
                let ids = leases.iter().map(|(id, _)| *id);
                update(&mut self.leases, ids, |lease| lease.is_calling = false);
            }
            Operation::Release(number) => {
                update(&mut self.releases, [*number], |release| release.is_calling = false);
            }
            Operation::Undo { number, .. } => {
                update(&mut self.undos, [*number], |undo| undo.is_calling = false);
            }
        }
        Some(ended)
    }

    // Connections.

    fn connection_of(&self, owner: Owner) -> Option<u64> {
        let mut all = self.connections.iter();
        all.find(|(_, connection)| connection.owner == Some(owner)).map(|(&number, _)| number)
    }

    /// Forgets a connection that has ended. The session lease on it is lost.
    fn forget_connection(&mut self, number: u64) {
        let connection = self.connections.remove(&number);
        if let Some(Owner::Lease(id)) = connection.and_then(|connection| connection.owner)
            && self.leases.get(&id).is_some_and(|lease| lease.options.is_session && lease.is_live())
        {
            self.mark_lost(id, Reason::Session, Vec::new());
        }
    }

    /// Takes the connection from its owner. It is closed after its call.
    fn drop_connection(&mut self, owner: Owner) {
        let mut all = self.connections.values_mut();
        all.find(|one| one.owner == Some(owner)).map(|connection| connection.owner.take());
    }

    fn close_unused_connections(&mut self) {
        let calls = self.calls.values();
        let busy: Vec<_> = calls.map(|pending| pending.call.connection).collect();
        self.connections.retain(|number, connection| {
            let is_used = connection.owner.is_some() || busy.contains(number);
            if !is_used {
                self.effects.push(Effect::HangUp(*number));
            }
            is_used
        });
    }

    /// Closes the shared connection after the last lease, and reports the end of `close`.
    fn end_if_idle(&mut self) {
        let is_idle = self.calls.is_empty() && self.releases.is_empty();
        if !is_idle || !self.leases.values().all(LeaseState::is_lost) {
            return;
        }
        if self.is_closing() && !self.has_closed {
            self.has_closed = true;
            self.undos.clear();
            let left = take(&mut self.connections).into_keys();
            self.effects.extend(left.map(Effect::HangUp));
            self.effects.push(Effect::Closed);
        } else if self.undos.is_empty() {
            self.drop_connection(Owner::Shared);
            self.close_unused_connections();
        }
    }

    // Renewals.

    fn keep_answered(&mut self, leases: &[(Id, usize)], mut outcomes: &[Outcome], sent: i64) {
        let parts = leases.iter().map(|(id, count)| Some((*id, outcomes.split_off(..*count)?)));
        let parts: Vec<_> = parts.flatten().collect();
        let is_kept = |outcome: &Outcome| outcome.kind == "kept";
        let kept_any = parts.iter().any(|(_, part)| part.iter().all(is_kept));
        for (id, part) in parts {
            self.take_outcomes(id, part, sent, kept_any);
        }
    }

    /// Applies the outcomes of the names of one lease.
    fn take_outcomes(&mut self, id: Id, outcomes: &[Outcome], sent: i64, kept_any: bool) {
        let now = self.now;
        let pause = self.leases.get(&id).map_or(0, |lease| self.pause(lease.options.ttl));
        let live = self.leases.get_mut(&id).filter(|lease| lease.is_live());
        let Some(lease) = live else { return };
        lease.is_renewal_answered = true;
        let count = |kind: &str| outcomes.iter().filter(|outcome| outcome.kind == kind).count();
        let (gone, refused) = (count("lost"), count("refused"));
        let again = outcomes.iter().filter_map(|outcome| outcome.again_in).min();
        if gone + refused > 0 {
            if lease.last_transactions > 0 {
                return;
            }
            if lease.has_uncommitted_release && gone == outcomes.len() {
                return self.mark_released(id);
            }
            let is_left = |outcome: &Outcome| matches!(&*outcome.kind, "kept" | "later");
            let left = lease.options.names.iter().zip(outcomes);
            let left = left.filter(|(_, outcome)| is_left(outcome));
            let unreleased = left.map(|(name, _)| name.clone()).collect();
            let is_denied = outcomes.iter().any(|one| one.kind == "refused" && one.code == "42501");
            lease.other_role = gone == 0 && lease.options.table.is_none() && is_denied;
            let reason = if gone > 0 { Reason::Gone } else { Reason::Refused };
            self.mark_lost(id, reason, unreleased);
        } else if count("kept") == outcomes.len() {
            let remaining = outcomes.iter().map(|outcome| outcome.remaining.unwrap_or(0));
            self.extend(id, sent, remaining.min().unwrap_or(0), again);
        } else {
            let again = again.filter(|again| *again > 0 || kept_any).unwrap_or(pause);
            // 0: the server was out of locks. The next transaction has them again, if this call has
            // renewed another lease.
            let least = if again == 0 { 0 } else { lease.shortest_interval(lease.deadline - now) };
            lease.beat_at = now + again.max(least);
        }
    }

    fn extend(&mut self, id: Id, sent: i64, remaining: i64, again: Option<i64>) {
        let Some(lease) = self.leases.get_mut(&id) else { return };
        let (deadline, least) = (sent + window(remaining), lease.shortest_interval(remaining));
        let bound = remaining / i64::from(BEATS_PER_TTL);
        lease.beat_at = sent + again.unwrap_or(NEVER).max(least).min(bound);
        if deadline <= self.now {
            return;
        }
        (lease.deadline, lease.has_uncommitted_release) = (deadline, false);
        if lease.is_held() {
            self.effects.push(lease.event(self.now, EventKind::Renewed));
        } else {
            self.acquired(id);
        }
    }

    fn keep_failed(&mut self, leases: &[(Id, usize)], ttls: &[i64], code: &str, is_opening: bool) {
        let now = self.now;
        let is_live = |id: &Id| self.leases.get(id).is_some_and(LeaseState::is_live);
        let ids: Vec<_> = leases.iter().map(|(id, _)| *id).filter(is_live).collect();
        let is_refused = !is_opening && matches!(code, "42501" | "42883" | "3F000");
        let confirms_row = ids.iter().any(|id| self.leases[id].confirms_row());
        let is_lost = is_refused || confirms_row && !is_transient(code);
        let mut beat_at = now + self.pause(ttls.iter().copied().min().unwrap_or(NEVER));
        if code == "unsent" {
            beat_at = now;
        } else if code == "panicked" {
            self.heartbeat_died();
        } else if !is_lost && !self.in_outage && !ids.is_empty() {
            self.effects.push(Effect::NotRenewed(code.to_owned()));
            self.in_outage = true;
            if is_connection_error(code) {
                beat_at = now;
            }
        }
        update(&mut self.leases, ids.iter().copied(), |lease| lease.beat_at = beat_at);
        for id in ids.into_iter().filter(|_| is_lost) {
            let live = self.leases.get_mut(&id).filter(|lease| lease.is_live());
            let Some(lease) = live.filter(|lease| lease.last_transactions == 0) else { continue };
            if lease.state == State::Confirming {
                let denial = denial(code, is_opening, lease.options.table.is_some());
                lease.state = State::Lost(Reason::Refused);
                self.reply(id, Some(denial.0), denial.1);
            }
            self.mark_lost(id, Reason::Refused, Vec::new());
        }
    }

    // Acquires.

    fn send_acquire(&mut self, id: Id) {
        let (limit_of_all, now) = (self.limit(), self.now);
        let Some(lease) = self.leases.get_mut(&id) else { return };
        lease.is_calling = true;
        let (options, mut wait) = (lease.options.clone(), 0);
        let (mut owner, mut limit) = (Owner::Lease(id), own_limit(options.ttl));
        if !options.acquires_separately() {
            (owner, limit) = (Owner::Shared, limit.min(limit_of_all));
        } else if options.has_one_name() {
            // The snapshot of a longer wait would hold back vacuum.
            wait = (lease.until - now).clamp(0, WAIT_PORTION);
        }
        let reclaim = options.reclaim || lease.doubt.is_some();
        let pairs = Pairs { names: options.names.clone(), ..Pairs::default() };
        let operation = Operation::Acquire { id, options, reclaim, wait };
        self.send_call(owner, limit + wait, pairs, operation);
    }

    fn granted(&mut self, id: Id, token: i64, sent: i64) {
        let now = self.now;
        let Some(lease) = self.leases.get_mut(&id) else { return };
        (lease.token, lease.state) = (token, State::Confirming);
        (lease.doubt, lease.in_outage) = (None, false);
        let ttl = lease.options.ttl;
        // If the answer was late, a renewal on the same connection confirms the lease, and until
        // then it may last no longer than a ttl from now.
        (lease.deadline, lease.beat_at) = (now + ttl, now);
        let first_beat = sent + ttl / i64::from(BEATS_PER_TTL);
        if lease.has_reply {
            self.queue_release(id, false);
        } else if now < first_beat {
            (lease.deadline, lease.beat_at) = (sent + window(ttl), first_beat);
            self.acquired(id);
        }
    }

    fn acquired(&mut self, id: Id) {
        let Some(lease) = self.leases.get_mut(&id) else { return };
        lease.state = State::Held;
        lease.ends_at = lease.options.at_most.map_or(NEVER, |at_most| self.now + at_most);
        self.effects.push(lease.event(self.now, EventKind::Acquired));
        self.reply(id, None, None);
    }

    fn taken(&mut self, id: Id, sent: i64, holder: String, remaining: i64, state: &str) {
        let now = self.now;
        let Some(lease) = self.leases.get_mut(&id) else { return };
        lease.in_outage = false;
        // The lease may be taken by its own first call, whose answer was lost: that call is not
        // committed yet.
        let own_doubt = lease.doubt.filter(|_| holder == lease.options.holder);
        if own_doubt.is_none() {
            lease.doubt.take_if(|doubt| now >= doubt.until);
        }
        let until = own_doubt.map_or(lease.until, |doubt| lease.until.max(doubt.until));
        if lease.has_reply {
            self.end_acquire(id);
        } else if now < until {
            let options = &lease.options;
            let waits_in_server = options.acquires_separately() && options.has_one_name();
            let is_portion = waits_in_server && own_doubt.is_none();
            let again = if is_portion { sent + PORTION_INTERVAL } else { now + RETRY_INTERVAL };
            lease.due_at = again.max(now).min(until);
        } else if own_doubt.is_some() {
            self.reply(id, Some(Denial::Failed(ErrorType::NoAnswer)), None);
        } else {
            let waits_for = match state {
                "" => None,
                "uncommitted" => Some(WaitsFor::Commit),
                _ if remaining <= 0 => Some(WaitsFor::Guard),
                _ => Some(WaitsFor::Ttl),
            };
            self.reply(id, Some(Denial::LeaseTaken { holder, remaining, waits_for }), None);
        }
    }

    /// Replies to an acquire, once. A grant that is not confirmed, or in doubt, is released.
    fn reply(&mut self, id: Id, denial: Option<Denial>, sqlstate: Option<String>) {
        let waiting = self.leases.get_mut(&id).filter(|lease| !lease.has_reply);
        let Some(lease) = waiting else { return };
        lease.has_reply = true;
        let may_doubt = !matches!(denial, None | Some(Denial::LeaseTaken { .. }));
        let in_doubt = may_doubt && lease.doubt.is_some();
        let is_released = denial.is_some() && lease.is_live();
        self.effects.push(Effect::Reply { id, denial, sqlstate, in_doubt });
        if is_released {
            self.queue_release(id, false);
        }
        self.end_acquire(id);
    }

    /// Ends an acquire that has its reply, unless its last call is still under way.
    fn end_acquire(&mut self, id: Id) {
        let ended = self.leases.get(&id).filter(|lease| !lease.is_calling);
        let Some(LeaseState { options, state, doubt, .. }) = ended else { return };
        let (options, is_acquiring, doubt) = (options.clone(), *state == State::Acquiring, *doubt);
        let keeps_connection = options.is_session && !is_acquiring;
        if let Some(doubt) = doubt {
            self.queue_undo(options, doubt);
        }
        if is_acquiring {
            self.leases.remove(&id);
        }
        if !keeps_connection {
            self.drop_connection(Owner::Lease(id));
        }
    }

    fn acquire_failed(&mut self, id: Id, sent: Option<i64>, limit: i64, code: &str) {
        let now = self.now;
        let ttl = self.leases.get(&id).map_or(0, |lease| lease.options.ttl);
        let retry_time = self.retry_time(ttl);
        let is_waiting = |lease: &LeaseState| lease.in_outage && !lease.has_reply;
        let is_logged = self.leases.values().any(is_waiting);
        let Some(lease) = self.leases.get_mut(&id) else { return };
        let was_in_doubt = lease.doubt.is_some();
        if let Some(sent) = sent.filter(|_| leaves_doubt(code) && !lease.options.is_session) {
            lease.doubt = Some(Doubt { sent, until: sent + limit });
        }
        if lease.has_reply {
            return self.end_acquire(id);
        }
        if code == "unsent" {
            // The lease is still due, and is sent on another connection.
            return;
        }
        lease.tries += 1;
        let (mut until, mut longest) = (lease.until, longest_backoff(ttl));
        let (is_conflict, is_outage) = (is_conflict(code), is_connection_error(code));
        if is_conflict {
            (until, longest) = (until.max(lease.requested_at + retry_time), RETRY_INTERVAL);
        }
        // A retry in doubt reclaims, so it must not take over the grant of another client.
        let may_retry = lease.doubt.is_none() || lease.options.may_reclaim();
        let is_first = lease.tries == 1 || now >= until && !was_in_doubt;
        if lease.doubt.is_some() && may_retry && is_first && is_outage {
            return;
        }
        if !(is_conflict || is_outage) || !may_retry || now >= until {
            let is_opening = sent.is_none() && lease.doubt.is_none();
            let (denial, sqlstate) = denial(code, is_opening, false);
            self.reply(id, Some(denial), sqlstate);
        } else {
            let pause = jittered(backoff(lease.tries, longest), self.jitter);
            lease.due_at = now + pause.min(until - now);
            if is_outage {
                lease.in_outage = true;
                // One line of the log for an outage, however many acquires wait for its end.
                if !is_logged {
                    self.effects.push(Effect::NotAcquired(id, code.to_owned()));
                }
            }
        }
    }

    /// Queues the release of a grant in doubt, if no other client can have the same holder.
    fn queue_undo(&mut self, options: Arc<Options>, doubt: Doubt) {
        if options.is_named {
            return;
        }
        self.last_number += 1;
        let undo = Undo { options, doubt, due_at: self.now, ..Undo::default() };
        self.undos.insert(self.last_number, undo);
    }

    fn undo_answered(&mut self, number: u64, released: i64) {
        let now = self.now;
        let Some(undo) = self.undos.get_mut(&number) else { return };
        undo.tries += 1;
        if released > 0 || now >= undo.doubt.until {
            self.end_undo(number);
        } else {
            // The server may still carry out the acquire.
            undo.due_at = (now + RETRY_INTERVAL).min(undo.doubt.until);
        }
    }

    fn undo_failed(&mut self, number: u64, code: &str) {
        let Some(undo) = self.undos.get_mut(&number) else { return };
        undo.tries += 1;
        let pause = jittered(backoff(undo.tries, LONGEST_PAUSE), self.jitter);
        undo.due_at = self.now + if code == "unsent" { 0 } else { pause };
        let may_pass = is_transient(code) || code == "panicked";
        if !may_pass || undo.due_at >= undo.doubt.sent + undo.options.ttl {
            self.end_undo(number);
        }
    }

    fn end_undo(&mut self, number: u64) {
        self.undos.remove(&number);
        self.drop_connection(Owner::Undo(number));
    }

    // Releases.

    fn queue_release(&mut self, id: Id, is_in_doubt: bool) {
        let Some(lease) = self.leases.remove(&id) else { return };
        let until = self.now + self.retry_time(lease.options.ttl);
        let is_in_doubt = is_in_doubt || lease.has_uncommitted_release || lease.in_transaction();
        if !lease.options.is_session {
            self.drop_connection(Owner::Lease(id));
        }
        let (leases, due_at, is_alone) = (vec![lease], self.now, is_in_doubt);
        let release =
            Release { leases, due_at, until, is_in_doubt, is_alone, ..Release::default() };
        self.add_release(release);
    }

    fn add_release(&mut self, release: Release) -> u64 {
        self.last_number += 1;
        self.releases.insert(self.last_number, release);
        self.last_number
    }

    /// Sends the queued releases in one call, those of rows in one call for each table.
    fn send_release(&mut self, number: u64) {
        let now = self.now;
        let Some(first) = self.releases.get(&number) else { return };
        if !first.is_alone {
            let joins = |release: &Release| {
                release.is_due(now) && release.table() == first.table() && !release.is_alone
            };
            let joined = keys(&self.releases, joins);
            let counts = joined.iter().map(|number| {
                let leases = &self.releases[number].leases;
                leases.iter().map(|lease| lease.names_on_server().len()).sum()
            });
            let count = count_within(MAX_RELEASED_NAMES, counts);
            for other in &joined[1..count] {
                let Some(mut other) = self.releases.remove(other) else { continue };
                let Some(first) = self.releases.get_mut(&number) else { return };
                first.leases.append(&mut other.leases);
                first.until = first.until.min(other.until);
                first.is_in_doubt |= other.is_in_doubt;
            }
        }
        // A retry comes after the other releases.
        let Some(release) = self.releases.remove(&number) else { return };
        let number = self.add_release(release);
        let (limit_of_all, owner) = (self.limit(), self.owner_for_release(number));
        let Some(release) = self.releases.get_mut(&number) else { return };
        release.is_calling = true;
        let shortest = release.leases.iter().map(|lease| lease.options.ttl).min();
        let limit = limit_of_all.min(own_limit(shortest.unwrap_or(NEVER)));
        let pairs = pairs(&release.leases);
        self.send_call(owner, limit, pairs, Operation::Release(number));
    }

    /// Without a shared connection a session lease is released on its own, unless a renewal that
    /// confirms the lease is under way there.
    fn owner_for_release(&self, number: u64) -> Owner {
        let own = match &self.releases[&number].leases[..] {
            [lease] if lease.options.is_session => Owner::Lease(lease.id),
            _ => return Owner::Shared,
        };
        let is_idle = |number| self.calls.values().all(|pending| pending.call.connection != number);
        let has_own = self.connection_of(own).is_some_and(is_idle);
        if has_own && self.connection_of(Owner::Shared).is_none() { own } else { Owner::Shared }
    }

    fn release_answered(&mut self, number: u64, released: &[bool]) {
        let Some(release) = self.releases.remove(&number) else { return };
        let mut released = released.iter();
        for lease in release.leases {
            let count = lease.names_on_server().len();
            let gone = released.by_ref().take(count).filter(|released| !**released).count();
            let has_session =
                !lease.options.is_session || self.connection_of(Owner::Lease(lease.id)).is_some();
            let is_known = !release.is_in_doubt && lease.options.table.is_none() && has_session;
            if lease.is_held() && gone > 0 && is_known && self.now < lease.deadline {
                self.log_end(Some(Reason::Gone));
                self.effects.push(lease.event(self.now, EventKind::Lost(Reason::Gone)));
                self.drop_connection(Owner::Lease(lease.id));
            } else {
                self.finish_release(&lease, true);
            }
        }
    }

    /// Ends a release without an answer: the server keeps the leases until their ttl.
    fn abandon_release(&mut self, number: u64) {
        let Some(release) = self.releases.remove(&number) else { return };
        for lease in release.leases {
            if lease.is_live() {
                self.log_end(None);
            }
            self.finish_release(&lease, false);
        }
    }

    fn release_failed(&mut self, number: u64, code: &str, is_opening: bool) {
        let now = self.now;
        let Some(release) = self.releases.get_mut(&number) else { return };
        let is_disconnected = is_connection_error(code);
        release.is_in_doubt |= !is_opening && leaves_doubt(code);
        // The error of a statement may be caused by one lease of several.
        let splits = !is_opening && !is_disconnected && release.leases.len() > 1;
        let may_pass = splits || is_disconnected || is_lock_error(code);
        if !may_pass || now >= release.until {
            return self.abandon_release(number);
        }
        release.tries += 1;
        // Retried at once if the connection had ended, and one by one if a lease caused the error.
        let is_first = release.tries == 1 && is_disconnected;
        let pause = ((release.until - now) / 4).max(SHORTEST_PAUSE);
        release.due_at = now + if splits || is_first || code == "unsent" { 0 } else { pause };
        if splits && let Some(release) = self.releases.remove(&number) {
            for lease in release.leases {
                self.add_release(Release { leases: vec![lease], is_alone: true, ..release });
            }
        }
    }

    // Ends.

    fn mark_lost(&mut self, id: Id, reason: Reason, unreleased: Vec<String>) {
        let Some(lease) = self.leases.get_mut(&id) else { return };
        let (was_held, has_reply, other_role) =
            (lease.is_held(), lease.has_reply, lease.other_role);
        (lease.state, lease.unreleased) = (State::Lost(reason), unreleased);
        if was_held {
            self.effects.push(lease.event(self.now, EventKind::Lost(reason)));
            self.log_end(Some(reason));
        } else {
            self.release_after_loss(id);
            if !has_reply {
                let denial = Some(Denial::LeaseLost { reason, other_role });
                self.effects.push(Effect::Reply { id, denial, sqlstate: None, in_doubt: false });
            }
        }
    }

    /// Forgets a lost lease, and releases the names that the server may still hold.
    fn release_after_loss(&mut self, id: Id) {
        let has_unreleased = |lease: &LeaseState| !lease.unreleased.is_empty();
        if self.leases.get(&id).is_some_and(has_unreleased) && !self.has_closed {
            self.queue_release(id, false);
        } else {
            self.leases.remove(&id);
            self.drop_connection(Owner::Lease(id));
        }
    }

    fn mark_released(&mut self, id: Id) {
        if let Some(lease) = self.leases.remove(&id) {
            self.finish_release(&lease, true);
        }
    }

    fn finish_release(&mut self, lease: &LeaseState, confirmed: bool) {
        self.drop_connection(Owner::Lease(lease.id));
        if lease.is_held() {
            self.effects.push(lease.event(self.now, EventKind::Released { confirmed }));
        }
    }

    /// Counts the ends of a step that have the same reason: they are one line of the log.
    fn log_end(&mut self, reason: Option<Reason>) {
        match self.logs.iter_mut().find(|(logged, _)| *logged == reason) {
            Some((_, count)) => *count += 1,
            None => self.logs.push((reason, 1)),
        }
    }
}

/// The state of one `lead`. After an error it acquires again after a pause, or ends.
#[derive(Default)]
pub struct LeadState {
    ttl: i64,
    jitter: i64,
    failures: u32,
    /// None while it does not lead.
    leading_since: Option<i64>,
}

/// The pause of a `lead`. An outage that begins writes one line to the log, and emits the event
/// `interrupted` if this process has led.
pub struct Pause {
    pub pause: i64,
    pub begins_outage: bool,
    pub has_led: bool,
}

/// Why a `lead` ends. Only a stop is no error.
#[derive(Debug, PartialEq)]
pub enum LeadEnd {
    Own,
    Stopped,
    Closed,
}

impl LeadState {
    pub fn new(ttl: i64, jitter: i64) -> LeadState {
        LeadState { ttl, jitter, ..LeadState::default() }
    }

    pub fn granted(&mut self, now: i64) {
        self.leading_since = Some(now);
    }

    /// The acquire or the work has failed. `error` is the type of the error, if this package has one
    /// for it. After a loss of the lease it does not matter. `is_closed`: the fence is closed.
    pub fn failed(
        &mut self,
        now: i64,
        (error, code): (Option<ErrorType>, &str),
        is_lost: bool,
        is_stopped: bool,
        is_closed: bool,
    ) -> Result<Pause, LeadEnd> {
        let since = self.leading_since.take();
        let is_own = !is_lost && cause(error, code, since.is_none()) == "own";
        match (is_own, is_stopped, is_closed) {
            (true, ..) => return Err(LeadEnd::Own),
            (_, true, _) => return Err(LeadEnd::Stopped),
            (.., true) => return Err(LeadEnd::Closed),
            _ => {}
        }
        if since.is_some_and(|since| now - since >= self.ttl.min(60_000)) {
            self.failures = 0;
        }
        let begins_outage = self.failures == 0;
        let shortest = (self.ttl / 12).max(SHORTEST_PAUSE);
        let pause = (shortest << self.failures.min(20)).min(longest_backoff(self.ttl));
        let pause = jittered(pause, self.jitter);
        self.failures += 1;
        Ok(Pause { pause, begins_outage, has_led: since.is_some() })
    }
}

/// Returns why a leader acquires again, or `own` if it does not.
fn cause(error: Option<ErrorType>, code: &str, is_of_acquire: bool) -> &'static str {
    match error {
        Some(ErrorType::LeaseLost) => "LeaseLost",
        Some(ErrorType::LeaseTaken) => "LeaseTaken",
        Some(ErrorType::TransactionLost) => "TransactionLost",
        Some(ErrorType::NoAnswer) => "NoAnswer",
        // The lease may be lost: the next acquire shows it.
        _ if matches!(code, "PF001" | "PF004") => "LeaseLost",
        Some(ErrorType::NoConnection) if code.is_empty() || is_transient(code) => "NoConnection",
        // 53300: the server has no connection left for the work.
        _ if ends_session(code) || code == "53300" => "ConnectionLost",
        _ if is_of_acquire && is_transient(code) => "transient",
        _ => "own",
    }
}

/// Where a guarded transaction has failed, as `clients/spec/errors.md` says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GuardStage {
    Open,
    Begin,
    Work,
    Check,
    Release,
    Commit,
}

/// A guard's own session, as the driver shows it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Session {
    Open,
    Closed,
    Unknown,
}

/// What guards a transaction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GuardedBy {
    Names,
    /// Rows of a table alone.
    Rows,
    Adopted,
}

/// What follows from an error in a guarded transaction.
pub struct GuardFailure {
    /// None if the error remains the driver's or the work's own.
    pub error: Option<ErrorType>,
    pub in_doubt: bool,
    /// The stage of a last transaction.
    pub last: Stage,
    /// The next renewal, which is due at once, shows whether the leases are lost.
    pub suspect: bool,
    /// After a failover a token is valid only after a renewal: the guard begins once more.
    pub again: bool,
}

/// Returns what follows from an error in a guarded transaction. `code` is one of
/// `clients/spec/errors.md`. `is_fatal`: by its severity. `is_inner`: it is a savepoint. `is_lost`: a
/// lease of it is lost.
pub fn guard_failed(
    stage: GuardStage,
    code: &str,
    is_fatal: bool,
    session: Session,
    of: GuardedBy,
    is_inner: bool,
    is_lost: bool,
) -> GuardFailure {
    // A fatal error ends a session, whatever its SQLSTATE: poolers have some of their own.
    let ends = is_fatal || ends_session(code);
    // An answer of the server is no end, even if the session has ended after it.
    let is_own_end = session == Session::Closed && (ends || code.is_empty());
    let is_broken = match stage {
        // Without a connection no transaction has begun.
        GuardStage::Open => ends_open_session(code) || is_own_end,
        // The work may use other connections, whose end is not the end of this one.
        GuardStage::Work => ends_open_session(code) || ends && session != Session::Open,
        _ => ends || is_own_end,
    };
    let is_end = matches!(stage, GuardStage::Check | GuardStage::Release | GuardStage::Commit);
    let is_own = matches!(stage, GuardStage::Begin | GuardStage::Release);
    // With 25P03 and 25P04 the server has ended an idle transaction before it read the commit.
    let is_unknown = stage == GuardStage::Commit && !is_inner && !matches!(code, "25P03" | "25P04");
    let in_doubt = if is_broken || code.is_empty() { is_unknown } else { code == "no transaction" };
    let error = match code {
        _ if is_broken && is_lost => Some(ErrorType::LeaseLost),
        _ if is_broken => Some(ErrorType::TransactionLost),
        "25P02" if is_end => Some(ErrorType::TransactionLost),
        "no transaction" => Some(ErrorType::TransactionLost),
        // 22004: lease_adopt has returned NULL, as a transaction guards an older number. PF004:
        // another holder has adopted this number.
        "22004" | "PF004" if of == GuardedBy::Adopted && stage == GuardStage::Begin => {
            Some(ErrorType::LeaseTaken)
        }
        _ if is_own => error_type(code, of == GuardedBy::Rows),
        // An error of the work: deferred triggers and constraints run at the commit.
        _ => code.starts_with("PF").then_some(ErrorType::Refused),
    };
    let is_refused = error == Some(ErrorType::Refused);
    let suspect = of != GuardedBy::Adopted && matches!(code, "PF001" | "PF004");
    GuardFailure {
        error,
        in_doubt,
        last: match stage {
            GuardStage::Commit if in_doubt => Stage::InDoubt,
            _ => Stage::RolledBack,
        },
        suspect,
        again: is_refused && stage == GuardStage::Begin && code == "PF004" && !is_inner,
    }
}

/// Returns the type of an error of one of the client's statements, or None if it remains the
/// driver's. If the statement is about rows of a table, 3F000 may mean the table's schema.
pub fn error_type(code: &str, is_of_table: bool) -> Option<ErrorType> {
    match code {
        "42883" => Some(ErrorType::NotInstalled),
        "3F000" if !is_of_table => Some(ErrorType::NotInstalled),
        "42501" => Some(ErrorType::NotGranted),
        "55P03" => None,
        _ => is_one_of(&["PF", "22", "55", "0A", "53"], code).then_some(ErrorType::Refused),
    }
}

fn pairs<'l>(leases: impl IntoIterator<Item = &'l LeaseState>) -> Pairs {
    let mut pairs = Pairs::default();
    for lease in leases {
        pairs.table.clone_from(&lease.options.table);
        for name in lease.names_on_server() {
            pairs.names.push(name.clone());
            pairs.tokens.push(lease.token);
            pairs.ttls.push(lease.options.ttl);
        }
    }
    pairs
}

/// Changes the entries with these numbers, as far as they exist.
fn update<T>(
    all: &mut BTreeMap<u64, T>,
    numbers: impl IntoIterator<Item = u64>,
    change: impl Fn(&mut T),
) {
    for number in numbers {
        all.get_mut(&number).into_iter().for_each(&change);
    }
}

/// Returns the numbers of the entries for which `is_wanted` is true.
fn keys<T>(all: &BTreeMap<u64, T>, is_wanted: impl Fn(&T) -> bool) -> Vec<u64> {
    all.iter().filter(|(_, entry)| is_wanted(entry)).map(|(number, _)| *number).collect()
}

/// Returns how many of the first counts add up to at most `most`, and at least 1.
fn count_within(most: usize, counts: impl Iterator<Item = usize>) -> usize {
    let sums = counts.scan(0, |sum, count| {
        *sum += count;
        Some(*sum)
    });
    sums.take_while(|sum| *sum <= most).count().max(1)
}

/// Returns the part of a span that the client trusts: the server counts it by another clock.
fn window(span: i64) -> i64 {
    span - (span + 49) / 50
}

/// Returns the limit of an acquire, a release or an undo without regard to other leases.
fn own_limit(ttl: i64) -> i64 {
    (ttl / 3).clamp(SHORTEST_RETRY_TIME, LONGEST_CALL)
}

fn jittered(pause: i64, jitter: i64) -> i64 {
    pause - pause * jitter / 4000
}

fn backoff(tries: u32, longest: i64) -> i64 {
    (FIRST_RETRY << (tries - 1).min(20)).min(longest)
}

fn longest_backoff(ttl: i64) -> i64 {
    (ttl / 3).clamp(SHORTEST_WAIT, LONGEST_PAUSE)
}

/// True if the SQLSTATE is in the list, or its class is.
fn is_one_of(list: &[&str], sqlstate: &str) -> bool {
    list.iter().any(|code| sqlstate.starts_with(code))
}

/// True if a call on another connection may succeed.
fn is_connection_error(code: &str) -> bool {
    let is_word = matches!(code, "connect" | "unsent" | "ended" | "no answer");
    is_word || is_one_of(&["08", "57P0", "25006", "53300"], code)
}

/// True if the same statement may succeed later, as on a standby that is promoted.
fn is_transient(code: &str) -> bool {
    is_one_of(&["25", "40", "53", "55P03", "57", "58"], code) || is_connection_error(code)
}

/// True if the server may have carried out the statement.
fn leaves_doubt(code: &str) -> bool {
    let is_unread = matches!(code, "unreadable" | "panicked");
    is_unread || is_connection_error(code) && !matches!(code, "unsent" | "25006" | "53300")
}

fn is_conflict(code: &str) -> bool {
    matches!(code, "40001" | "40P01")
}

fn is_lock_error(code: &str) -> bool {
    is_conflict(code) || code == "55P03"
}

/// True if a session has ended, or could not be opened.
fn ends_session(code: &str) -> bool {
    is_one_of(&["ended", "57P03", "08"], code) || ends_open_session(code)
}

/// True if the server has ended an open session: idle in transaction, transaction_timeout,
/// terminated, crashed, idle.
fn ends_open_session(code: &str) -> bool {
    matches!(code, "25P03" | "25P04" | "57P01" | "57P02" | "57P05")
}

fn denial(code: &str, is_opening: bool, is_of_table: bool) -> (Denial, Option<String>) {
    let denial = Denial::Failed(match code {
        _ if is_opening => ErrorType::NoConnection,
        _ if is_connection_error(code) || leaves_doubt(code) => ErrorType::NoAnswer,
        _ => error_type(code, is_of_table).unwrap_or(ErrorType::Refused),
    });
    // The codes in lower case are the client's own.
    let is_sqlstate = code.len() == 5 && code.to_uppercase() == code;
    (denial, is_sqlstate.then(|| code.to_owned()))
}

#[cfg(test)]
#[path = "../tests/unit/lease_state.rs"]
mod tests;
