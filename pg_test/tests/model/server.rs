//! The server, as far as the model needs it: rows, the sequence, what is on disk, the clock's seconds.

use crate::protections::Protections;
use crate::search;
use pg_test::rules::epochs::{self, Due, Identity, Recorded, Start};
use pg_test::rules::grant::{Grant, Mode, Tokens};
use pg_test::rules::{Epoch, Instant, Span, Token};
use std::convert::Infallible;

/// How many tokens beyond the drawn one a log record covers (PostgreSQL: 32).
const LOGGED_AHEAD: i64 = 2;
/// How long a grant lasts, in seconds.
pub const TTL: u8 = 2;

/// The row of the lease: its latest grant.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct LeaseRow {
    pub owner: usize,
    pub first: Token,
    pub renewed: Vec<Token>,
    pub closing: Option<Token>,
    pub expires: u8,
    /// The session with which it ends, by its number among the owner's sessions.
    pub session: Option<u8>,
}

impl LeaseRow {
    /// Returns its tokens.
    pub fn tokens(&self) -> Tokens {
        Tokens::new(self.first, &self.renewed)
    }

    /// Returns the grant in the rules' terms. `abandoned` is the result of a check of its session's lock.
    pub fn grant(&self, abandoned: bool) -> Grant {
        Grant {
            tokens: self.tokens(),
            closing: self.closing,
            expires_at: micros(self.expires),
            abandoned,
            ..search::grant(0, Mode::Exclusive, self.first)
        }
    }

    /// Returns true if the grant is current by this clock, as far as the row says.
    pub fn is_live(&self, clock: u8) -> bool {
        self.closing.is_none() && clock < self.expires
    }
}

/// Returns the clock in the rules' terms: 1,000 seconds after `CLOCK_ZERO`, plus `seconds`.
pub fn micros(seconds: u8) -> Instant {
    epochs::CLOCK_ZERO + Span::from_secs(1_000 + i64::from(seconds))
}

/// `fence.token_seq`: what sessions see, and what the log says.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Sequence {
    pub last: Token,
    /// The last token that the latest log record covers.
    logged: Token,
}

/// All that a database stores. The last field is the model's memory of acknowledged grants: it is lost together with
/// the data.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Data {
    pub timeline: u32,
    /// The base backup from which the server was started.
    backup: Option<u64>,
    pub sequence: Sequence,
    identity: i64,
    /// The sequence's number as a dump would carry it.
    dumped: Token,
    pub epoch: Epoch,
    pub lease: Option<LeaseRow>,
    /// The fence of the row that is bound to the lease.
    pub bound: Option<Token>,
    /// The greatest token of an acknowledged grant.
    pub granted: Token,
}

/// The steps of an advance or a new epoch, in any order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum AdvanceStep {
    Sequence,
    Epoch,
    Identity,
    Start,
}

/// A server, its standbys and its sessions' locks.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Server {
    /// The rows that sessions see.
    pub data: Data,
    /// The rows that a crash leaves.
    pub disk: Data,
    /// The rows after promoting each standby, or after starting a base backup of that moment.
    pub standbys: Vec<Data>,
    /// The locks that sessions hold for grants that end with them: the client, and the grant's first token.
    pub session_locks: Vec<(usize, Token)>,
    /// The recorded start. Any recovery resets it.
    begun: Option<i64>,
    /// The remaining steps of an advance that a session has begun.
    steps: Vec<AdvanceStep>,
}

/// The server's start time. A crash need not change it: if one backend crashes, the postmaster restarts the others and
/// lives on.
const START: Start = Start { server: Instant::from_micros(1), database: 1, file: 1, sequence: 1 };

impl Server {
    /// Returns a new server with no token drawn.
    pub fn new(standbys: usize) -> Server {
        let at = epochs::target(Token::BEFORE_ALL, micros(0)).expect("far from the end");
        let sequence = Sequence { last: at, logged: at };
        let epoch = Epoch::at(at);
        let mut data = Data { timeline: 1, sequence, dumped: at, epoch, ..Data::default() };
        data.identity = identity(&data).fingerprint();
        let begun = Some(START.fingerprint(data.identity));
        let (disk, steps) = (data.clone(), Vec::new());
        let (standbys, session_locks) = (vec![disk.clone(); standbys], Vec::new());
        Server { data, disk, standbys, session_locks, begun, steps }
    }

    /// Draws a token, which usually is not logged and not on disk.
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
        // After a crash the sequence continues at its logged value.
        self.disk.sequence.last = self.disk.sequence.logged;
    }

    /// Kills and restarts the server.
    pub fn crash(&mut self) {
        self.data = self.disk.clone();
        self.recovered();
    }

    fn recovered(&mut self) {
        self.begun = None;
        self.steps.clear();
        self.session_locks.clear();
    }

    /// Returns true if a check of the session's lock now shows the grant as abandoned.
    pub fn is_abandoned(&self, p: &Protections, row: &LeaseRow) -> bool {
        let holds = |(_, first): &(usize, Token)| *first == row.first || !p.session_lock_by_token;
        row.session.is_some() && !self.session_locks.iter().any(holds)
    }

    /// The client's session has released the lock of the grant with this first token, or all its locks.
    pub fn session_unlocked(&mut self, client: usize, first: Option<Token>) {
        self.session_locks.retain(|(c, f)| *c != client || first.is_some_and(|first| *f != first));
    }

    /// Promotes a standby. The primary is gone for good.
    pub fn promote(&mut self, standby: usize) {
        let timeline = self.standbys[standby].timeline + 1;
        let copy = Data { timeline, ..self.standbys[standby].clone() };
        self.go_on_as(copy, standby);
    }

    /// Starts a base backup as it is, on the same timeline. The primary is gone for good.
    pub fn restore(&mut self, backup: usize) {
        let data = self.standbys[backup].clone();
        let label = Some(data.backup.map_or(1, |label| label + 1));
        self.go_on_as(Data { backup: label, ..data }, backup);
    }

    fn go_on_as(&mut self, copy: Data, standby: usize) {
        let granted = self.data.granted;
        self.data = copy;
        // A transaction that was acknowledged remains so, even if the standby does not have it.
        self.data.granted = granted;
        self.flush();
        self.standbys[standby] = self.disk.clone();
        self.recovered();
    }

    fn identity(&self, p: &Protections) -> Identity {
        let backup = self.data.backup.filter(|_| p.backup_label);
        Identity { backup, ..identity(&self.data) }
    }

    /// Returns the advance that a session must make before it may draw or check.
    pub fn due(&self, p: &Protections) -> Due {
        let recorded = Recorded {
            identity: Some(self.data.identity),
            start: self.begun,
            dumped: self.data.dumped,
            last: self.data.sequence.last,
        };
        let identity = || Ok::<_, Infallible>(self.identity(p));
        match epochs::due(&recorded, identity, Some(&START), Token::BEFORE_ALL).unwrap() {
            Due::NewEpoch if !p.new_epoch => Due::Nothing,
            Due::Advance if !p.start_advance => Due::Nothing,
            due => due,
        }
    }

    /// Makes one step of an advance or a new epoch, by whichever session needs it first. Returns false if none is due.
    pub fn step(&mut self, p: &Protections, clock: u8) -> bool {
        if self.steps.is_empty() {
            let mut steps = match self.due(p) {
                Due::Nothing => return false,
                Due::Advance => vec![AdvanceStep::Sequence, AdvanceStep::Start],
                Due::NewEpoch => vec![
                    AdvanceStep::Sequence,
                    AdvanceStep::Epoch,
                    AdvanceStep::Identity,
                    AdvanceStep::Start,
                ],
            };
            if !p.identity_last {
                steps.sort_by_key(|step| *step != AdvanceStep::Identity);
            }
            if !p.start_last {
                steps.sort_by_key(|step| *step != AdvanceStep::Start);
            }
            self.steps = steps;
        }
        match self.steps.remove(0) {
            AdvanceStep::Sequence => {
                let now = if p.advance_by_clock { micros(clock) } else { Instant::EARLIEST };
                let target = epochs::target(self.data.sequence.last, now);
                let target = target.expect("far from the end");
                self.data.sequence = Sequence { last: target, logged: target };
                if p.durable_advance {
                    self.flush();
                }
            }
            AdvanceStep::Epoch => {
                self.data.epoch = Epoch::at(self.data.sequence.last);
                self.flush();
            }
            AdvanceStep::Identity => {
                self.data.identity = self.identity(p).fingerprint();
                self.flush();
            }
            AdvanceStep::Start => {
                self.data.dumped = self.data.sequence.last;
                self.begun = Some(START.fingerprint(self.data.identity));
            }
        }
        true
    }
}

/// Returns the token that many draws after this one.
fn after(token: Token, draws: i64) -> Token {
    Token::from_bigint(token.bigint() + draws)
}

fn identity(data: &Data) -> Identity {
    let (timeline, backup) = (data.timeline, data.backup);
    Identity { timeline, system_identifier: 1, database: 1, sequence: 1, backup }
}
