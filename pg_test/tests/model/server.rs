//! The server, as far as it matters here: rows, the sequence, what is on disk, the clock's seconds.

use crate::protections::{Flush, Protections};
use pg_test::protocol::ahead::{self, Logged};
use pg_test::protocol::epoch::{self, Epoch, Identity};
use pg_test::protocol::grant::{Grant, Mode, Tokens};
use pg_test::protocol::{Micros, Token};

/// How many tokens beyond the drawn one a log record covers (Postgres: 32).
const LOGGED_AHEAD: i64 = 2;
/// How long a grant lasts, in seconds.
pub const TTL: u8 = 2;

/// A row of the lease table.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Row {
    pub slot: i32,
    pub exclusive: bool,
    pub owner: usize,
    pub first: Token,
    pub renewed: Vec<Token>,
    pub closing: Option<Token>,
    pub expires: u8,
}

impl Row {
    /// As the extension's rules see it.
    pub fn grant(&self) -> Grant {
        Grant {
            slot: self.slot,
            mode: mode(self.exclusive),
            tokens: Tokens::new(self.first, &self.renewed),
            closing: self.closing,
            closed_here: false,
            expires_at: micros(self.expires),
            abandoned: false,
        }
    }

    /// Current by this clock?
    pub fn is_live(&self, clock: u8) -> bool {
        self.closing.is_none() && clock < self.expires
    }
}

/// The mode of a grant.
pub fn mode(exclusive: bool) -> Mode {
    if exclusive {
        Mode::Exclusive
    } else {
        Mode::Shared
    }
}

/// The clock as the rules see it: some day after tokens were invented, plus seconds.
pub fn micros(seconds: u8) -> Micros {
    epoch::CLOCK_ZERO + (1_000 + Micros::from(seconds)) * 1_000_000
}

/// `fence.token_seq`: what sessions see, and what the log says.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Sequence {
    pub last: Option<Token>,
    logged: Logged,
    /// The next draw is to be logged, whatever the last record covers.
    log_next: bool,
    /// Records up to here are not read by recovery.
    redo: u64,
}

impl Sequence {
    /// What a session reads from the page.
    fn read(&self) -> (Logged, i64) {
        let last = self.last.unwrap_or(0);
        let left = if self.log_next { 0 } else { self.logged.up_to - last };
        (Logged { up_to: last + left, ..self.logged }, left)
    }

    /// Writes a record that covers tokens up to this one.
    fn log(&mut self, up_to: Token) {
        self.logged = Logged { up_to, at: self.logged.at + 1 };
        self.log_next = false;
    }
}

/// All that a database knows. The last two fields are the model's own memory of what was acknowledged; they
/// live and die with the data that they speak of.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Data {
    pub timeline: u32,
    pub sequence: Sequence,
    identity: i64,
    pub floor: Token,
    pub leases: Vec<Row>,
    /// The fence of the row that is bound to the lease.
    pub bound: Option<Token>,
    /// The fence of the row that is not.
    pub unbound: Option<Token>,
    /// The greatest token that was ever written into the unbound row.
    pub unbound_high: Token,
    /// The greatest token of an exclusive grant that was acknowledged.
    pub granted: Token,
}

/// A server and what hangs on it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Server {
    /// What sessions see.
    pub data: Data,
    /// What a crash leaves.
    pub disk: Data,
    /// What promoting a standby leaves.
    pub standbys: Vec<Data>,
    /// How far a jump has got.
    jump_stage: u8,
}

impl Server {
    /// A new one, nothing drawn yet.
    pub fn new(standbys: usize) -> Server {
        let data = Data { timeline: 1, identity: identity(1).mark(), ..Data::default() };
        let disk = data.clone();
        Server { disk: disk.clone(), standbys: vec![disk; standbys], data, jump_stage: 0 }
    }

    /// Draws a token; true: it was logged by this draw.
    pub fn draw(&mut self) -> (Token, bool) {
        let sequence = &mut self.data.sequence;
        let token = sequence.last.map_or(1, |last| last + 1);
        sequence.last = Some(token);
        let before_redo = sequence.logged.at <= sequence.redo;
        let logs = token > sequence.logged.up_to || sequence.log_next || before_redo;
        if logs {
            sequence.log(token + LOGGED_AHEAD);
        }
        (token, logs)
    }

    /// Makes a drawn token durable, as far as the protections go. `known` is what the session knows to be
    /// on disk.
    pub fn flush_token(
        &mut self,
        p: &Protections,
        token: Token,
        logged_here: bool,
        known: &mut Logged,
    ) {
        let (found, left) = self.data.sequence.read();
        let flushed = self.disk.sequence.logged.at == found.at;
        let redo = if p.redo { self.data.sequence.redo } else { 0 };
        match p.flush {
            Flush::Covered if flushed => *known = known.and(found),
            Flush::Covered if known.covers(token, redo) => {}
            Flush::Covered => {
                self.flush();
                *known = known.and(found);
            }
            Flush::OwnRecord if logged_here => self.flush(),
            Flush::OwnRecord | Flush::Never => {}
        }
        self.data.sequence.log_next |= ahead::log_early(left, LOGGED_AHEAD);
    }

    /// Writes all of the log.
    pub fn flush(&mut self) {
        self.disk = self.data.clone();
        // What is read back after a crash is the log's idea of the sequence, or where recovery does not
        // read that, the page's.
        let sequence = &mut self.disk.sequence;
        if sequence.logged.at > sequence.redo {
            sequence.last = sequence.last.map(|_| sequence.logged.up_to);
        }
        sequence.logged.up_to = sequence.last.unwrap_or(0);
        sequence.log_next = false;
    }

    /// Writes the pages, too; recovery starts here from now on.
    pub fn checkpoint(&mut self) {
        self.data.sequence.redo = self.data.sequence.logged.at;
        self.flush();
    }

    /// Kill and restart.
    pub fn crash(&mut self) {
        self.data = self.disk.clone();
        self.jump_stage = 0;
    }

    /// A standby takes over; the primary is gone for good.
    pub fn promote(&mut self, standby: usize) {
        let granted = self.data.granted;
        self.data = self.standbys[standby].clone();
        self.data.timeline += 1;
        // What was acknowledged stays so, whatever the standby knows.
        self.data.granted = granted;
        self.flush();
        self.standbys[standby] = self.disk.clone();
        self.jump_stage = 0;
    }

    /// What the recorded identity says.
    pub fn epoch(&self) -> Epoch {
        epoch::compare(Some(self.data.identity), &self.identity())
    }

    /// Whether a session must do one more step of a jump before it may go on.
    pub fn must_jump(&self) -> bool {
        self.epoch() != Epoch::Same || self.jump_stage > 0
    }

    /// Whether others wait for it: they do where its lock is held or they find the identity changed.
    pub fn holds_up(&self) -> bool {
        self.epoch() != Epoch::Same
    }

    /// One step of a jump, each durable.
    pub fn jump_step(&mut self, clock: u8, by_clock: bool, identity_last: bool) {
        let stage = if identity_last { self.jump_stage } else { (self.jump_stage + 2) % 3 };
        match stage {
            0 => {
                let now = if by_clock { micros(clock) } else { 0 };
                let last = self.data.sequence.last.unwrap_or(0);
                let target = epoch::jump_target(last, now).expect("far from the end");
                self.data.sequence.last = Some(target);
                self.data.sequence.log(target);
            }
            1 => self.data.floor = self.data.sequence.last.unwrap_or(0),
            _ => self.data.identity = self.identity().mark(),
        }
        self.jump_stage = (self.jump_stage + 1) % 3;
        self.flush();
    }

    fn identity(&self) -> Identity {
        identity(self.data.timeline)
    }
}

fn identity(timeline: u32) -> Identity {
    Identity { timeline, system_identifier: 1, database: 1, sequence: 1 }
}
