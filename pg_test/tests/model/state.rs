//! A state of the whole system, and its possible next events.

use crate::server::{LeaseRow, Server};
use pg_test::rules::Token;
use pg_test::rules::fence::Landing;
use pg_test::rules::locks::LockMode;

/// A request of a client to the server.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    Acquire,
    Renew,
    Release,
    /// An update of the row that is bound to the lease: the transaction guards the grant.
    WriteBound,
    /// The same update, with the acquire's token, though the client has renewed since.
    WriteBoundByFirst,
}

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Action {
    /// A request reaches the server. If a protection is missing, it reads something before it holds its locks.
    Request(usize, Op),
    /// The server carries a request out, once all its locks are free.
    Do(usize, Op),
    /// The statement returns to the client.
    Answer(usize),
    /// The client's transaction commits, and the client learns of it.
    Commit(usize),
    /// The client's transaction is rolled back.
    RollBack(usize),
    /// The client's session is killed.
    Kill(usize),
    /// The client's session releases all its session-level locks.
    Unlock(usize),
    /// The client's session takes the lock of a grant that is already visible (only if a protection is missing).
    LockSession(usize),
    /// The lease is revoked.
    Revoke,
    /// One step of an advance or a new epoch, by whichever session needs it first.
    MoveOn,
    /// The log is written up to its end.
    WriteLog,
    /// A standby replays what is on disk (or is made again).
    Ship(usize),
    Crash,
    Promote(usize),
    /// A base backup is started as it is.
    Restore(usize),
    Second,
    StepBack,
}

/// A change that a transaction makes when it commits.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Change {
    Lease(LeaseRow),
    Bound(Landing),
}

/// What a request has read before it holds its locks.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct EarlyReads {
    pub token: Option<Token>,
    pub clock: Option<u8>,
    pub row: Option<Option<LeaseRow>>,
    /// The first token of the grant that was abandoned then, if it was.
    pub abandoned: Option<Option<Token>>,
}

/// An open transaction.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Transaction {
    pub op: Op,
    pub lock: Option<LockMode>,
    pub change: Change,
    /// The first token of the grant that it guards.
    pub guarded: Option<Token>,
    /// The first token of the grant that it ends. If that grant ends with this session, its lock is released at commit.
    pub ends: Option<Token>,
}

impl Transaction {
    /// Returns a transaction that writes a table's row and takes no locks.
    pub fn of_write(op: Op, change: Change) -> Transaction {
        Transaction { op, lock: None, change, guarded: None, ends: None }
    }
}

/// The progress of a client.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Phase {
    Idle,
    Asked(Op, EarlyReads),
    /// A token is drawn, but not yet visible.
    Drawn(Transaction, Token),
    /// The statement has returned.
    Open(Transaction),
}

/// A client. It may do nothing for any time: it is frozen then.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Client {
    /// The token that it believes valid.
    pub token: Option<Token>,
    /// The token that its acquire returned, if it is another.
    pub first: Option<Token>,
    pub phase: Phase,
    /// The number of its session, if its grants end with the session. A session that has released all its locks counts
    /// as a new one.
    pub session: Option<u8>,
    /// A grant whose session lock it has yet to take.
    pub to_lock: Option<Token>,
}

impl Client {
    /// Returns its transaction, if it has one.
    pub fn transaction(&self) -> Option<&Transaction> {
        match &self.phase {
            Phase::Drawn(transaction, ..) | Phase::Open(transaction) => Some(transaction),
            _ => None,
        }
    }
}

/// How often each bounded event has happened.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct EventCounts {
    pub draws: u8,
    pub crashes: u8,
    pub promotions: u8,
    pub restores: u8,
    pub ships: u8,
    pub steps_back: u8,
    pub revocations: u8,
    pub kills: u8,
    pub unlocks: u8,
    pub rollbacks: u8,
}

/// The whole state.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    pub clock: u8,
    pub server: Server,
    pub clients: Vec<Client>,
    pub spent: EventCounts,
    /// The greatest token that any client has seen, in any epoch of the database.
    pub seen: Token,
    /// True if a lease was granted again because a session had ended.
    pub passed_on: bool,
    /// The first property that was broken.
    pub violation: Option<&'static str>,
}

impl State {
    /// Returns the transactions of the other clients.
    pub fn others(&self, client: usize) -> impl Iterator<Item = &Transaction> {
        let indexed = self.clients.iter().enumerate();
        indexed.filter(move |(i, _)| *i != client).filter_map(|(_, c)| c.transaction())
    }

    /// Returns true if the lock is free for this client.
    pub fn may_lock(&self, client: usize, lock: LockMode) -> bool {
        self.others(client).filter_map(|t| t.lock).all(|other| !lock.conflicts_with(other))
    }

    /// Returns true if another transaction has written the row.
    pub fn is_written(&self, client: usize, same: impl Fn(&Change) -> bool) -> bool {
        self.others(client).any(|t| same(&t.change))
    }

    /// Returns true if the session with which the grant ends has really ended, whatever the locks say.
    pub fn session_has_ended(&self, row: &LeaseRow) -> bool {
        row.session.is_some() && row.session != self.clients[row.owner].session
    }

    /// Returns true if the grant is really current, whatever the server sees.
    pub fn lives(&self, row: &LeaseRow) -> bool {
        row.is_live(self.clock) && !self.session_has_ended(row)
    }

    /// Releases all session-level locks of the client's session.
    pub fn unlock_session(&mut self, client: usize) {
        self.server.session_unlocked(client, None);
        self.clients[client].to_lock = None;
        self.clients[client].session = self.clients[client].session.map(|session| session + 1);
    }

    /// Ends the client's session. The client remembers what it knew.
    pub fn session_ends(&mut self, client: usize) {
        self.clients[client].phase = Phase::Idle;
        self.unlock_session(client);
    }

    /// Returns true if the session holds any session-level lock.
    pub fn has_session_locks(&self, client: usize) -> bool {
        self.server.session_locks.iter().any(|(c, _)| *c == client)
    }

    /// Ends all sessions.
    pub fn sessions_end(&mut self) {
        (0..self.clients.len()).for_each(|client| self.session_ends(client));
    }

    /// Notes the first property that is broken.
    pub fn violate(&mut self, property: &'static str) {
        self.violation.get_or_insert(property);
    }
}
