//! The state of one lease: its rows, and its clients, each between two steps of a call.

use super::protections::{Bounds, Protections};
use super::{APART, GUARD_EXCLUDES, ONE_WRITER};
use crate::search::{self, Held};
use pg_test::rules::grant::{Grant, Mode, Phase};
use pg_test::rules::locks::{Lock, LockStep};
use pg_test::rules::{Instant, Span, Token};

/// How a client acquires the lease.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    Alone,
    Shared,
    Slots(i32),
}

impl Kind {
    /// Returns the mode in the rules' terms.
    pub fn mode(self) -> Mode {
        match self {
            Kind::Alone => Mode::Exclusive,
            Kind::Shared => Mode::Shared,
            Kind::Slots(n) => Mode::Slots(n),
        }
    }

    /// Returns true if grants of these kinds must never live together, whatever their number.
    pub fn excludes(self, other: Kind) -> bool {
        self == Kind::Alone || self != other
    }
}

/// How long a grant lasts, in seconds.
pub const TTL: u8 = 2;

/// A version of a row of the lease table. Two versions with the same fields are the same version.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SlotRow {
    pub slot: i32,
    pub kind: Kind,
    /// The number of the grant among all grants made.
    pub grant: u8,
    pub renewals: u8,
    pub expires: u8,
    pub closed: bool,
    /// True if it was released or revoked: then it has a closing token. Otherwise another grant has ended it.
    pub released: bool,
}

impl SlotRow {
    /// Returns true if the grant is current by this clock, as far as the row says.
    pub fn is_live(&self, clock: u8) -> bool {
        self.as_grant().phase(at(clock)) == Phase::Held
    }

    /// Returns the grant in the rules' terms.
    pub fn as_grant(&self) -> Grant {
        let greater = if self.released { 1_000 } else { 0 };
        let closing = self.closed.then(|| Token::from_bigint(self.token().bigint() + greater));
        let held = search::grant(self.slot, self.kind.mode(), self.token());
        Grant { closing, expires_at: at(self.expires), ..held }
    }

    /// Returns the token of its acquire, which is valid as long as the grant lives.
    pub fn token(&self) -> Token {
        Token::from_bigint(i64::from(self.grant) + 1)
    }
}

/// Returns the clock in the rules' terms.
pub fn at(seconds: u8) -> Instant {
    Instant::from_micros(0) + Span::from_secs(i64::from(seconds))
}

/// A change that a transaction makes when it commits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Write {
    Put(SlotRow),
    Delete(i32),
}

impl Write {
    /// Returns the slot of the row.
    pub fn slot(&self) -> i32 {
        match self {
            Write::Put(row) => row.slot,
            Write::Delete(slot) => *slot,
        }
    }
}

/// A search for a slot beside other grants, as far as it has come.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Search {
    /// The rows that other open transactions had written.
    pub under_way: Vec<SlotRow>,
    /// The committed rows by which the slot was chosen.
    pub rows: Vec<SlotRow>,
    /// Slots whose grants are over, but locked by another transaction.
    pub guarded: Vec<i32>,
    /// Slots that could not be locked.
    pub busy: Vec<i32>,
    pub slot: i32,
    /// Slots of grants that are to be ended.
    pub ended: Vec<i32>,
    /// The number of locks held before the slot was chosen.
    pub mark: usize,
}

/// The next step of a client.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Next {
    /// No call is running.
    Idle,
    // The steps of an exclusive acquire.
    LockSlot0,
    Look,
    LockOthers {
        rows: Vec<SlotRow>,
        left: Vec<i32>,
    },
    // The steps of a shared or slot acquire.
    TakeTurn,
    ExcludeAlone,
    ReadUnderWay {
        busy: Vec<i32>,
    },
    ReadCommitted(Search),
    AskForLock {
        search: Search,
        left: Vec<i32>,
    },
    TakeSlots {
        search: Search,
        left: Vec<i32>,
    },
    Settle(Search),
    Write(Search),
    // The step of a guard, a renewal, a release or a revocation: one lock that it waits for.
    Guard {
        slot: i32,
    },
    Renew {
        slot: i32,
    },
    Release {
        slot: i32,
    },
    Revoke {
        slot: i32,
    },
    // The steps of a prune of one row.
    LockToPrune(SlotRow),
    Prune(SlotRow),
    /// The statement has returned, and the transaction is open.
    Open,
    /// The transaction has committed and its changes are visible, but its locks are not yet released.
    Visible,
}

/// A client and its transaction.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Client {
    /// The grant that the client believes it holds.
    pub grant: Option<u8>,
    pub next: Next,
    pub locks: Vec<Held>,
    pub writes: Vec<Write>,
    /// The grant that it guards.
    pub guards: Option<SlotRow>,
}

/// The whole state.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    pub clock: u8,
    pub rows: Vec<SlotRow>,
    pub clients: Vec<Client>,
    pub grants: u8,
    pub steps_back: u8,
    pub rollbacks: u8,
    pub calls: u8,
    /// The first property that was broken.
    pub violation: Option<&'static str>,
}

impl State {
    /// Returns the initial state.
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

    /// Returns all clients but one.
    pub fn others(&self, client: usize) -> impl Iterator<Item = &Client> {
        self.clients.iter().enumerate().filter(move |(i, _)| *i != client).map(|(_, c)| c)
    }

    /// Returns true if the lock is free for this client.
    pub fn is_free(&self, client: usize, want: LockStep, slot: i32) -> bool {
        search::is_free(self.others(client).flat_map(|c| &c.locks), want, slot)
    }

    /// Takes a lock. Returns false if it is not free.
    pub fn take(&mut self, client: usize, want: LockStep, slot: i32) -> bool {
        let free = self.is_free(client, want, slot);
        if free {
            self.clients[client].locks.push((want.lock, slot, want.mode));
        }
        free
    }

    /// Returns true if another open transaction is replacing or deleting the row of a slot.
    pub fn is_being_deleted(&self, client: usize, slot: i32) -> bool {
        self.row(slot).is_some() && self.is_written(client, slot)
    }

    fn is_written(&self, client: usize, slot: i32) -> bool {
        self.others(client).flat_map(|c| &c.writes).any(|write| write.slot() == slot)
    }

    /// Returns the committed row of a slot.
    pub fn row(&self, slot: i32) -> Option<SlotRow> {
        self.rows.iter().find(|row| row.slot == slot).copied()
    }

    /// Ends the call and its transaction without any change.
    pub fn give_up(&mut self, client: usize) {
        let client = &mut self.clients[client];
        (client.next, client.guards) = (Next::Idle, None);
        client.locks.clear();
        client.writes.clear();
    }

    /// Returns from the statement, which ends a turn.
    pub fn answer(&mut self, client: usize, p: &Protections) {
        self.clients[client].next = Next::Open;
        self.clients[client].locks.retain(|(lock, ..)| *lock != Lock::Turn);
        if !p.keep_to_commit && self.clients[client].guards.is_none() {
            self.clients[client].locks.clear();
        }
    }

    /// Commits the transaction: its changes become visible, but it still holds its locks.
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

    /// Checks the committed rows and the uncommitted ones for forbidden states.
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

    /// Returns true if a grant was made (and may yet be rolled back) that excludes a grant guarded by another
    /// transaction, or takes its slot.
    fn is_guard_passed(&self) -> bool {
        (0..self.clients.len()).any(|c| {
            let Some(guarded) = self.clients[c].guards else { return false };
            let another = |row: &SlotRow| row.grant > guarded.grant;
            let passes = |row: &SlotRow| {
                let excludes = row.slot == guarded.slot || row.kind.excludes(guarded.kind);
                another(row) && excludes && !row.closed
            };
            let puts = |write: &Write| matches!(write, Write::Put(row) if passes(row));
            self.rows.iter().any(passes)
                || self.others(c).flat_map(|other| &other.writes).any(puts)
                || self.others(c).any(|o| o.writes.contains(&Write::Delete(guarded.slot)))
        })
    }

    /// Returns true if excluding grants live together. Each live grant, committed or not, is compared with each that
    /// the same transaction does not replace.
    fn live_together(&self) -> bool {
        let live = |row: &&SlotRow| row.is_live(self.clock);
        let committed: Vec<&SlotRow> = self.rows.iter().filter(live).collect();
        let clash = |one: &SlotRow, other: &SlotRow| {
            one.grant != other.grant && (one.slot == other.slot || one.kind.excludes(other.kind))
        };
        if committed.iter().any(|one| committed.iter().any(|other| clash(one, other))) {
            return true;
        }
        self.clients.iter().enumerate().any(|(c, client)| {
            let replaces = |row: &SlotRow| client.writes.iter().any(|w| w.slot() == row.slot);
            client.writes.iter().any(|write| {
                let Write::Put(own) = write else { return false };
                if !own.is_live(self.clock) {
                    return false;
                }
                let others = self.others(c).flat_map(|o| &o.writes).filter_map(|w| match w {
                    Write::Put(row) => Some(row),
                    Write::Delete(_) => None,
                });
                let beside: Vec<&SlotRow> = committed
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
