//! The server, as far as it matters here: rows, the sequence, what is on disk, the clock's seconds.

use crate::protections::Protections;
use crate::search;
use pg_test::rules::grant::{Grant, Mode, Tokens};
use pg_test::rules::moves::{self, Due, Identity, Recorded, Start};
use pg_test::rules::{Floor, Instant, Span, Token};
use std::convert::Infallible;

/// How many tokens beyond the drawn one a log record covers (Postgres: 32).
const LOGGED_AHEAD: i64 = 2;
/// How long a grant lasts, in seconds.
pub const TTL: u8 = 2;

/// The row of the lease: its latest grant.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Row {
    pub owner: usize,
    pub first: Token,
    pub renewed: Vec<Token>,
    pub closing: Option<Token>,
    pub expires: u8,
    /// The session that it ends with, by its number among the owner's.
    pub session: Option<u8>,
}

impl Row {
    /// Its tokens.
    pub fn tokens(&self) -> Tokens {
        Tokens::new(self.first, &self.renewed)
    }

    /// As the extension's rules see it, where a look at its session's lock has shown whether it is abandoned.
    pub fn grant(&self, abandoned: bool) -> Grant {
        Grant {
            tokens: self.tokens(),
            closing: self.closing,
            expires_at: micros(self.expires),
            abandoned,
            ..search::grant(0, Mode::Exclusive, self.first)
        }
    }

    /// Current by this clock, as far as the row tells?
    pub fn is_live(&self, clock: u8) -> bool {
        self.closing.is_none() && clock < self.expires
    }
}

/// The clock as the rules see it: some day after tokens were invented, plus seconds.
pub fn micros(seconds: u8) -> Instant {
    moves::CLOCK_ZERO + Span::from_secs(1_000 + i64::from(seconds))
}

/// `fence.token_seq`: what sessions see, and what the log says.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Sequence {
    pub last: Token,
    /// Up to where the latest log record covers it.
    logged: Token,
}

/// All that a database keeps. The last field is the model's own memory of what was acknowledged; it
/// lives and dies with the data that it speaks of.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Data {
    pub timeline: u32,
    /// The base backup that the server was started from.
    backup: Option<u64>,
    pub sequence: Sequence,
    identity: i64,
    /// The number of the sequence that a dump would carry.
    dumped: Token,
    pub floor: Floor,
    pub lease: Option<Row>,
    /// The fence of the row that is bound to the lease.
    pub bound: Option<Token>,
    /// The greatest token of a grant that was acknowledged.
    pub granted: Token,
}

/// The steps of a move or jump, in any order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Step {
    Sequence,
    Floor,
    Identity,
    Start,
}

/// A server and what hangs on it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Server {
    /// The rows that sessions see.
    pub data: Data,
    /// The rows that a crash leaves.
    pub disk: Data,
    /// The rows that promoting a standby leaves, or starting a base backup of that moment.
    pub standbys: Vec<Data>,
    /// The locks that sessions hold for grants that end with them: whose, and the grant's first token.
    pub session_locks: Vec<(usize, Token)>,
    /// Gone after any recovery: the mark of this start.
    begun: Option<i64>,
    /// The rest of a move that somebody has begun.
    steps: Vec<Step>,
}

/// The start of the server. A crash need not change it: one backend's restarts the rest.
const START: Start = Start { server: Instant::from_micros(1), database: 1, file: 1, sequence: 1 };

impl Server {
    /// A new one, nothing drawn yet.
    pub fn new(standbys: usize) -> Server {
        let at = moves::target(Token::BEFORE_ALL, micros(0)).expect("far from the end");
        let sequence = Sequence { last: at, logged: at };
        let floor = Floor::at(at);
        let mut data = Data { timeline: 1, sequence, dumped: at, floor, ..Data::default() };
        data.identity = identity(&data).mark();
        let begun = Some(START.mark(data.identity));
        let (disk, steps) = (data.clone(), Vec::new());
        let (standbys, session_locks) = (vec![disk.clone(); standbys], Vec::new());
        Server { data, disk, standbys, session_locks, begun, steps }
    }

    /// Draws a token, which mostly is not logged, and not on disk.
    pub fn draw(&mut self) -> Token {
        let sequence = &mut self.data.sequence;
        sequence.last = after(sequence.last, 1);
        if sequence.last > sequence.logged {
            sequence.logged = after(sequence.last, LOGGED_AHEAD);
        }
        sequence.last
    }

    /// Writes all of the log.
    pub fn flush(&mut self) {
        self.disk = self.data.clone();
        // After a crash the log's idea of the sequence is read back.
        self.disk.sequence.last = self.disk.sequence.logged;
    }

    /// Kill and restart.
    pub fn crash(&mut self) {
        self.data = self.disk.clone();
        self.recovered();
    }

    fn recovered(&mut self) {
        self.begun = None;
        self.steps.clear();
        self.session_locks.clear();
    }

    /// Is the grant abandoned, by a look at its session's lock now?
    pub fn is_abandoned(&self, p: &Protections, row: &Row) -> bool {
        let holds = |(_, first): &(usize, Token)| *first == row.first || !p.session_lock_by_token;
        row.session.is_some() && !self.session_locks.iter().any(holds)
    }

    /// The client's session has given back the lock of the grant with this first token, or of all.
    pub fn session_unlocked(&mut self, client: usize, first: Option<Token>) {
        self.session_locks.retain(|(c, f)| *c != client || first.is_some_and(|first| *f != first));
    }

    /// A standby takes over; the primary is gone for good.
    pub fn promote(&mut self, standby: usize) {
        let timeline = self.standbys[standby].timeline + 1;
        let copy = Data { timeline, ..self.standbys[standby].clone() };
        self.go_on_as(copy, standby);
    }

    /// A base backup is started as it is, on the same timeline; the primary is gone for good.
    pub fn restore(&mut self, backup: usize) {
        let data = self.standbys[backup].clone();
        let label = Some(data.backup.map_or(1, |label| label + 1));
        self.go_on_as(Data { backup: label, ..data }, backup);
    }

    fn go_on_as(&mut self, copy: Data, standby: usize) {
        let granted = self.data.granted;
        self.data = copy;
        // An acknowledged transaction stays so, whatever the standby knows.
        self.data.granted = granted;
        self.flush();
        self.standbys[standby] = self.disk.clone();
        self.recovered();
    }

    fn identity(&self, p: &Protections) -> Identity {
        let backup = self.data.backup.filter(|_| p.backup_label);
        Identity { backup, ..identity(&self.data) }
    }

    /// The move that a session finds due before it may draw or judge.
    pub fn due(&self, p: &Protections) -> Due {
        let recorded = Recorded {
            identity: Some(self.data.identity),
            start: self.begun,
            dumped: self.data.dumped,
            last: self.data.sequence.last,
        };
        let identity = || Ok::<_, Infallible>(self.identity(p));
        match moves::due(&recorded, identity, Some(&START), Token::BEFORE_ALL).unwrap() {
            Due::Jump if !p.jump => Due::Nothing,
            Due::Move if !p.start_move => Due::Nothing,
            due => due,
        }
    }

    /// One step of a move or jump, by whichever session needs it first; false where none is to be done.
    pub fn step(&mut self, p: &Protections, clock: u8) -> bool {
        if self.steps.is_empty() {
            let mut steps = match self.due(p) {
                Due::Nothing => return false,
                Due::Move => vec![Step::Sequence, Step::Start],
                Due::Jump => vec![Step::Sequence, Step::Floor, Step::Identity, Step::Start],
            };
            if !p.identity_last {
                steps.sort_by_key(|step| *step != Step::Identity);
            }
            if !p.start_last {
                steps.sort_by_key(|step| *step != Step::Start);
            }
            self.steps = steps;
        }
        match self.steps.remove(0) {
            Step::Sequence => {
                let now = if p.move_by_clock { micros(clock) } else { Instant::EARLIEST };
                let target = moves::target(self.data.sequence.last, now);
                let target = target.expect("far from the end");
                self.data.sequence = Sequence { last: target, logged: target };
                if p.durable_move {
                    self.flush();
                }
            }
            Step::Floor => {
                self.data.floor = Floor::at(self.data.sequence.last);
                self.flush();
            }
            Step::Identity => {
                self.data.identity = self.identity(p).mark();
                self.flush();
            }
            Step::Start => {
                self.data.dumped = self.data.sequence.last;
                self.begun = Some(START.mark(self.data.identity));
            }
        }
        true
    }
}

/// The token that many draws after this one.
fn after(token: Token, draws: i64) -> Token {
    Token::from_bigint(token.bigint() + draws)
}

fn identity(data: &Data) -> Identity {
    let (timeline, backup) = (data.timeline, data.backup);
    Identity { timeline, system_identifier: 1, database: 1, sequence: 1, backup }
}
