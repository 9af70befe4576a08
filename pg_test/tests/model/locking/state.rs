//! One lease: its rows, and clients each of which is between two steps of a call.

use super::protections::{Bounds, Protections};
use super::{APART, GUARD_EXCLUDES, ONE_WRITER};
use crate::search::{self, Held};
use pg_test::rules::grant::{Grant, Mode, Phase};
use pg_test::rules::locks::{Lock, LockMode, LockStep, SLOT_IS_BEING_TAKEN, TAKE_SLOT};
use pg_test::rules::{Instant, Span, Token};

/// How a client asks for the lease.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    Alone,
    Shared,
    Slots(i32),
}

impl Kind {
    /// As the rules see it.
    pub fn mode(self) -> Mode {
        match self {
            Kind::Alone => Mode::Exclusive,
            Kind::Shared => Mode::Shared,
            Kind::Slots(n) => Mode::Slots(n),
        }
    }

    /// Must grants of these kinds not live together, whatever their number?
    pub fn excludes(self, other: Kind) -> bool {
        self == Kind::Alone || self != other
    }
}

/// How long a grant lasts, in seconds.
pub const TTL: u8 = 2;

/// A version of a row of the lease table: what it says is what tells it from another version.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Row {
    pub slot: i32,
    pub kind: Kind,
    /// The number of the grant among all that were made.
    pub grant: u8,
    pub renewals: u8,
    pub expires: u8,
    pub closed: bool,
}

impl Row {
    /// Current by this clock, as far as the row tells?
    pub fn is_live(&self, clock: u8) -> bool {
        self.as_grant().phase(at(clock)) == Phase::Held
    }

    /// As the extension's rules see it.
    pub fn as_grant(&self) -> Grant {
        let closing = self.closed.then(|| self.token());
        let held = search::grant(self.slot, self.kind.mode(), self.token());
        Grant { closing, expires_at: at(self.expires), ..held }
    }

    /// The token of its acquire, which serves as long as the grant lives.
    pub fn token(&self) -> Token {
        Token::from_bigint(i64::from(self.grant) + 1)
    }
}

/// The clock as the rules see it.
pub fn at(seconds: u8) -> Instant {
    Instant::from_micros(0) + Span::from_secs(i64::from(seconds))
}

/// The changes of a transaction when it commits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Write {
    Put(Row),
    Delete(i32),
}

impl Write {
    /// The slot whose row it is.
    pub fn slot(&self) -> i32 {
        match self {
            Write::Put(row) => row.slot,
            Write::Delete(slot) => *slot,
        }
    }
}

/// A search for a place beside others, as far as it has come.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Search {
    /// The rows by which the place was chosen.
    pub rows: Vec<Row>,
    /// Slots whose grants are over, but guarded.
    pub guarded: Vec<i32>,
    /// Slots that somebody else is just writing.
    pub busy: Vec<i32>,
    pub slot: i32,
    /// Slots of grants that are to be ended.
    pub ended: Vec<i32>,
    /// How many locks there were before the slot was chosen.
    pub mark: usize,
}

/// The next step of a client.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Next {
    /// Nothing is under way.
    Idle,
    // An exclusive acquire.
    LockSlot0,
    Look,
    LockOthers {
        rows: Vec<Row>,
        left: Vec<i32>,
    },
    // A shared acquire, or one of slots.
    ExcludeAlone,
    ExcludeOtherShape,
    LookBeside {
        busy: Vec<i32>,
    },
    AskWhetherGuarded {
        search: Search,
        left: Vec<i32>,
    },
    TakeSlot(Search),
    TakeEnded {
        search: Search,
        left: Vec<i32>,
    },
    Settle(Search),
    Write(Search),
    CompareNumber,
    // A guard: two locks that are waited for.
    Guard {
        slot: i32,
    },
    GuardSeen {
        slot: i32,
    },
    // A renewal or a release: one that is.
    Renew {
        slot: i32,
    },
    Release {
        slot: i32,
    },
    // A prune of one row.
    LockToPrune(Row),
    Prune(Row),
    /// The statement has answered; the transaction is open.
    Open,
    /// The transaction has committed, its changes are visible, and its locks not yet given back.
    Visible,
}

/// A client and its transaction.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Client {
    /// The grant that it believes to have.
    pub grant: Option<u8>,
    pub next: Next,
    pub locks: Vec<Held>,
    pub writes: Vec<Write>,
    /// The grant that it guards.
    pub guards: Option<Row>,
}

impl Client {
    /// Has the call that wrote something answered?
    fn is_answered(&self) -> bool {
        self.next != Next::CompareNumber
    }
}

/// Everything.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    pub clock: u8,
    pub rows: Vec<Row>,
    pub clients: Vec<Client>,
    pub grants: u8,
    pub steps_back: u8,
    pub rollbacks: u8,
    pub calls: u8,
    /// The first property that was broken.
    pub violation: Option<&'static str>,
}

impl State {
    /// Nobody has done anything.
    pub fn new(bounds: &Bounds) -> State {
        let client = Client {
            grant: None,
            next: Next::Idle,
            locks: Vec::new(),
            writes: Vec::new(),
            guards: None,
        };
        State {
            clock: 0,
            rows: Vec::new(),
            clients: vec![client; bounds.kinds.len()],
            grants: 0,
            steps_back: 0,
            rollbacks: 0,
            calls: 0,
            violation: None,
        }
    }

    /// All clients but one.
    pub fn others(&self, client: usize) -> impl Iterator<Item = &Client> {
        self.clients.iter().enumerate().filter(move |(i, _)| *i != client).map(|(_, c)| c)
    }

    /// Could this client have the lock now?
    pub fn is_free(&self, client: usize, want: LockStep, slot: i32) -> bool {
        search::is_free(self.others(client).flat_map(|c| &c.locks), want, slot)
    }

    /// Takes a lock, where it is to be had now.
    pub fn take(&mut self, client: usize, want: LockStep, slot: i32) -> bool {
        let free = self.is_free(client, want, slot);
        if free {
            self.clients[client].locks.push((want.lock, slot, want.mode));
        }
        free
    }

    /// Is somebody changing the grant in a slot, or relying on it, and not just putting another one in its slot?
    pub fn is_relied_on(&self, client: usize, slot: i32) -> bool {
        self.others(client).any(|other| {
            let conflicts = |mode: LockMode| {
                let mut on = other.locks.iter().filter(|l| (l.0, l.1) == (Lock::Grant, slot));
                on.any(|(_, _, held)| mode.conflicts_with(*held))
            };
            conflicts(TAKE_SLOT.mode) && !conflicts(SLOT_IS_BEING_TAKEN.mode)
        })
    }

    /// Is another open transaction replacing or deleting the row that a slot has?
    pub fn is_being_deleted(&self, client: usize, slot: i32) -> bool {
        self.row(slot).is_some() && self.is_written(client, slot)
    }

    fn is_written(&self, client: usize, slot: i32) -> bool {
        self.others(client).flat_map(|c| &c.writes).any(|write| write.slot() == slot)
    }

    /// The row of a slot, as committed.
    pub fn row(&self, slot: i32) -> Option<Row> {
        self.rows.iter().find(|row| row.slot == slot).copied()
    }

    /// The rows that another open transaction has written, and those that are committed.
    pub fn rows_in_flight(&self, client: usize) -> impl Iterator<Item = &Row> {
        let written = self.others(client).flat_map(|c| &c.writes).filter_map(|write| match write {
            Write::Put(row) => Some(row),
            Write::Delete(_) => None,
        });
        self.rows.iter().chain(written)
    }

    /// The call ends, and with it the transaction: nothing was changed.
    pub fn give_up(&mut self, client: usize) {
        let client = &mut self.clients[client];
        (client.next, client.guards) = (Next::Idle, None);
        client.locks.clear();
        client.writes.clear();
    }

    /// The statement has answered.
    pub fn answer(&mut self, client: usize, p: &Protections) {
        self.clients[client].next = Next::Open;
        if !p.keep_to_commit && self.clients[client].guards.is_none() {
            self.clients[client].locks.clear();
        }
    }

    /// The transaction commits: what it has changed is visible, but its locks are still held.
    pub fn commit(&mut self, client: usize) {
        for write in std::mem::take(&mut self.clients[client].writes) {
            self.rows.retain(|row| row.slot != write.slot());
            if let Write::Put(row) = write {
                self.rows.push(row);
            }
        }
        self.rows.sort_by_key(|row| row.slot);
        self.clients[client].next = Next::Visible;
    }

    /// States that must never be, of committed rows and of those written beside them.
    pub fn check(&mut self) {
        let found = [
            (self.two_writers(), ONE_WRITER),
            (self.is_guard_passed(), GUARD_EXCLUDES),
            (self.live_together(), APART),
        ];
        if let Some((_, property)) = found.iter().find(|(found, _)| *found) {
            self.violation.get_or_insert(*property);
        }
    }

    fn two_writers(&self) -> bool {
        (0..self.clients.len())
            .any(|c| self.clients[c].writes.iter().any(|write| self.is_written(c, write.slot())))
    }

    /// Has a grant been made (it may yet be rolled back) that excludes one which another transaction guards, or is in
    /// its slot?
    fn is_guard_passed(&self) -> bool {
        (0..self.clients.len()).any(|c| {
            let Some(guarded) = self.clients[c].guards else { return false };
            let another = |row: &Row| row.grant > guarded.grant;
            let passes = |row: &Row| {
                let excludes = row.slot == guarded.slot || row.kind.excludes(guarded.kind);
                another(row) && excludes && !row.closed
            };
            let written = self.others(c).filter(|other| other.is_answered());
            let puts = |write: &Write| matches!(write, Write::Put(row) if passes(row));
            self.rows.iter().any(passes)
                || written.flat_map(|other| &other.writes).any(puts)
                || self.others(c).any(|o| o.writes.contains(&Write::Delete(guarded.slot)))
        })
    }

    /// Each live grant, committed or not, beside each that the same transaction does not replace. One whose number of
    /// slots is still to be compared may be undone: nobody has been told of it.
    fn live_together(&self) -> bool {
        let live = |row: &&Row| row.is_live(self.clock);
        let committed: Vec<&Row> = self.rows.iter().filter(live).collect();
        let clash = |one: &Row, other: &Row| {
            one.grant != other.grant && (one.slot == other.slot || one.kind.excludes(other.kind))
        };
        if committed.iter().any(|one| committed.iter().any(|other| clash(one, other))) {
            return true;
        }
        self.clients.iter().enumerate().any(|(c, client)| {
            let replaces = |row: &Row| client.writes.iter().any(|w| w.slot() == row.slot);
            client.is_answered()
                && client.writes.iter().any(|write| {
                    let Write::Put(own) = write else { return false };
                    if !own.is_live(self.clock) {
                        return false;
                    }
                    let answered = self.others(c).filter(|other| other.is_answered());
                    let others = answered.flat_map(|o| &o.writes).filter_map(|w| match w {
                        Write::Put(row) => Some(row),
                        Write::Delete(_) => None,
                    });
                    let beside: Vec<&Row> = committed
                        .iter()
                        .copied()
                        .filter(|row| !replaces(row))
                        .chain(others.filter(live))
                        .collect();
                    let mut slots: Vec<i32> = beside.iter().map(|row| row.slot).collect();
                    slots.extend(self.others(c).filter_map(|o| o.guards).map(|row| row.slot));
                    slots.push(own.slot);
                    slots.sort_unstable();
                    slots.dedup();
                    let many = matches!(own.kind, Kind::Slots(n) if slots.len() > n as usize);
                    many || beside.iter().any(|row| clash(own, row))
                })
        })
    }
}
