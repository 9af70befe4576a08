//! A state of the whole system, and what may happen next.

use crate::server::{Row, Server};
use pg_test::rules::fence::Landing;
use pg_test::rules::locks::LockMode;
use pg_test::rules::Token;

/// A request of a client to the server.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    Acquire,
    Renew,
    Release,
    /// An update of the row that is bound to the lease: the transaction guards the grant.
    WriteBound,
    /// The same, with the acquire's token, though the client has renewed since.
    WriteBoundByFirst,
}

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Action {
    /// A request reaches the server, and takes along what it should not (only where it does).
    Ask(usize, Op),
    /// The server carries a request out, all its locks being had.
    Do(usize, Op),
    /// The statement's answer reaches the client.
    Answer(usize),
    /// The client's transaction commits, and the client learns of it.
    Commit(usize),
    /// The client's transaction is rolled back.
    RollBack(usize),
    /// The client's session is killed.
    Kill(usize),
    /// The client's session gives back all the locks that it holds as a session.
    Unlock(usize),
    /// The client's session takes the lock of a grant that is there already (only where it does).
    LockSession(usize),
    /// Somebody revokes the lease.
    Revoke,
    /// One step of a move or jump, by whichever session needs it first.
    MoveOn,
    /// The log is written up to its end.
    WriteLog,
    /// A standby has replayed what is on disk (or is made again).
    Ship(usize),
    Crash,
    Promote(usize),
    /// A base backup is started as it is.
    Restore(usize),
    Second,
    StepBack,
}

/// The changes that a transaction will make when it commits.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Change {
    Lease(Row),
    Bound(Landing),
}

/// The knowledge of a request from before its locks.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Early {
    pub token: Option<Token>,
    pub clock: Option<u8>,
    pub row: Option<Option<Row>>,
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
    /// The first token of the grant that it ends: where that ends with this session, its lock goes when it commits.
    pub ends: Option<Token>,
}

impl Transaction {
    /// One that writes a row of a table, and locks nothing.
    pub fn of_write(op: Op, change: Change) -> Transaction {
        Transaction { op, lock: None, change, guarded: None, ends: None }
    }
}

/// How far a client is.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Phase {
    Idle,
    Asked(Op, Early),
    /// A token is drawn, but not yet seen.
    Drawn(Transaction, Token),
    /// The statement has answered.
    Open(Transaction),
}

/// A client. It may do nothing for as long as it likes: it is frozen then.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Client {
    /// The token that it believes in.
    pub token: Option<Token>,
    /// The one that its acquire returned, where that is another.
    pub first: Option<Token>,
    pub phase: Phase,
    /// The number of its session, where its grants end with that. One that has given back all its locks is
    /// another.
    pub session: Option<u8>,
    /// A grant that it has, and whose lock it has yet to take.
    pub to_lock: Option<Token>,
}

impl Client {
    /// Its transaction, if it has one.
    pub fn transaction(&self) -> Option<&Transaction> {
        match &self.phase {
            Phase::Drawn(transaction, ..) | Phase::Open(transaction) => Some(transaction),
            _ => None,
        }
    }
}

/// How often the bounded things have happened.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Spent {
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

/// Everything.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    pub clock: u8,
    pub server: Server,
    pub clients: Vec<Client>,
    pub spent: Spent,
    /// The greatest token that any client has seen, in any life of the database.
    pub seen: Token,
    /// Whether a lease has passed on because a session had ended.
    pub passed_on: bool,
    /// The first property that was broken.
    pub violation: Option<&'static str>,
}

impl State {
    /// Transactions of others, by client.
    pub fn others(&self, client: usize) -> impl Iterator<Item = &Transaction> {
        let indexed = self.clients.iter().enumerate();
        indexed.filter(move |(i, _)| *i != client).filter_map(|(_, c)| c.transaction())
    }

    /// Could this client have the lock now?
    pub fn may_lock(&self, client: usize, lock: LockMode) -> bool {
        self.others(client).filter_map(|t| t.lock).all(|other| !lock.conflicts_with(other))
    }

    /// The lock of a row that somebody is writing.
    pub fn is_written(&self, client: usize, same: impl Fn(&Change) -> bool) -> bool {
        self.others(client).any(|t| same(&t.change))
    }

    /// Has the session ended that the grant ends with? The truth, whatever the locks say.
    pub fn session_has_ended(&self, row: &Row) -> bool {
        row.session.is_some() && row.session != self.clients[row.owner].session
    }

    /// Is the grant current? The truth, whatever the server sees.
    pub fn lives(&self, row: &Row) -> bool {
        row.is_live(self.clock) && !self.session_has_ended(row)
    }

    /// All that the client's session holds as a session is given back.
    pub fn unlock_session(&mut self, client: usize) {
        self.server.session_unlocked(client, None);
        self.clients[client].to_lock = None;
        self.clients[client].session = self.clients[client].session.map(|session| session + 1);
    }

    /// The client's session ends; it remembers what it knew.
    pub fn session_ends(&mut self, client: usize) {
        self.clients[client].phase = Phase::Idle;
        self.unlock_session(client);
    }

    /// Does it hold any?
    pub fn has_session_locks(&self, client: usize) -> bool {
        self.server.session_locks.iter().any(|(c, _)| *c == client)
    }

    /// All sessions are gone.
    pub fn sessions_end(&mut self) {
        (0..self.clients.len()).for_each(|client| self.session_ends(client));
    }

    /// Notes the first property that is broken.
    pub fn violate(&mut self, property: &'static str) {
        self.violation.get_or_insert(property);
    }
}
