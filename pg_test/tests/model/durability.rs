//! Grants that end with their session do not wait for the disk: does a crash ever let an older grant speak again, after
//! somebody was told of a newer one?
//!
//! One lease, whose row each transaction writes again; a log that is on disk up to some record; a server that crashes at any
//! moment. A holder keeps its token and goes on trying. The decision is the extension's own
//! (`rules::durability`).

use crate::search::{self, protections};
use pg_test::rules::durability::{may_come_back, Predecessor};
use stateright::{Model, Property};

// The protections that keep older grants silent.
protections! {
    /// An acquire that replaces a lasting grant that is live waits.
    live_waits,
    /// An acquire that replaces a lasting grant whose end is not on disk waits.
    unwritten_waits,
    /// So does one whose own transactions wait for nothing.
    waits_always,
    /// Deleting a row waits.
    prune_waits,
    /// The transaction's own writes are not on disk.
    own_is_unwritten,
}

/// The row of the lease: its latest grant.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Row {
    grant: u8,
    ends_with_session: bool,
    closed: bool,
    /// By which record of the log the row says so.
    record: u8,
}

/// The request of a call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Call {
    /// For the session, or a lasting grant; over a grant that is over, or of its own.
    Acquire {
        session: bool,
        reclaim: bool,
    },
    /// Releases the current grant and acquires the lease for the session, in one transaction.
    Pass,
    Release,
    Prune,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Action {
    /// A call in a transaction of its own, and whether its session has `synchronous_commit` on.
    Do(Call, bool),
    /// The server writes the log by itself.
    WriteLog,
    Crash,
    /// Somebody writes by this grant's token, and waits for the disk.
    Write(u8),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct State {
    /// The row after each record, or none.
    log: Vec<Option<Row>>,
    on_disk: usize,
    /// The latest grant that a session with `synchronous_commit` was told of.
    answered: u8,
    granted: u8,
    crashes: u8,
    stale: bool,
}

impl State {
    fn row(&self) -> Option<Row> {
        *self.log.last().expect("there is a first record")
    }

    /// The lease's grant that a token speaks for: one of a session has ended with the server.
    fn current(&self) -> Option<Row> {
        self.row().filter(|row| !row.closed)
    }

    fn put(&mut self, row: Option<Row>) {
        let record = self.log.len() as u8;
        self.log.push(row.map(|row| Row { record, ..row }));
    }

    fn flush(&mut self) {
        self.on_disk = self.log.len();
    }
}

const STAYS_SILENT: &str = "no grant writes after a newer one was answered";

struct Durability {
    protections: Protections,
    grants: u8,
    crashes: u8,
}

impl Durability {
    /// Writes a new grant; whether its commit must wait, whatever its session says, and whether it may not wait.
    fn acquire(&self, state: &mut State, session: bool, own: usize) -> (bool, bool) {
        let p = &self.protections;
        let before = state.row();
        state.granted += 1;
        let (grant, record) = (state.granted, 0);
        state.put(Some(Row { grant, ends_with_session: session, closed: false, record }));
        let comes_back = before.is_some_and(|row| {
            let is_own = usize::from(row.record) >= own;
            let on_disk = match is_own {
                true => !p.own_is_unwritten,
                false => usize::from(row.record) < state.on_disk,
            };
            may_come_back(&Predecessor {
                ends_with_session: row.ends_with_session,
                live: !row.closed && p.live_waits,
                on_disk: on_disk || !p.unwritten_waits,
            })
        });
        (session && comes_back, session)
    }

    fn call(&self, state: &mut State, call: Call, synchronous: bool) -> Option<()> {
        let own = state.log.len();
        let live = state.current();
        let (forced, losable) = match call {
            Call::Acquire { session, reclaim } => {
                (state.granted < self.grants && live.is_some() == reclaim).then_some(())?;
                self.acquire(state, session, own)
            }
            Call::Pass => {
                (state.granted < self.grants).then_some(())?;
                state.put(Some(Row { closed: true, ..live? }));
                self.acquire(state, true, own)
            }
            Call::Release => {
                state.put(Some(Row { closed: true, ..live? }));
                (false, true)
            }
            Call::Prune => {
                state.row().filter(|row| row.closed)?;
                state.put(None);
                (self.protections.prune_waits, false)
            }
        };
        let waits = match forced {
            true => synchronous || self.protections.waits_always,
            false => synchronous && !losable,
        };
        if waits {
            state.flush();
        }
        if synchronous && matches!(call, Call::Acquire { .. } | Call::Pass) {
            state.answered = state.granted;
        }
        Some(())
    }
}

impl Model for Durability {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            log: vec![None],
            on_disk: 1,
            answered: 0,
            granted: 0,
            crashes: 0,
            stale: false,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.stale {
            return;
        }
        for synchronous in [true, false] {
            for session in [true, false] {
                for reclaim in [true, false] {
                    let call = Call::Acquire { session, reclaim };
                    actions.push(Action::Do(call, synchronous));
                }
            }
            let others = [Call::Pass, Call::Release, Call::Prune];
            actions.extend(others.map(|call| Action::Do(call, synchronous)));
        }
        actions.extend([Action::WriteLog, Action::Crash]);
        actions.extend((1..=state.granted).map(Action::Write));
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Do(call, synchronous) => self.call(&mut state, call, synchronous)?,
            Action::WriteLog => state.flush(),
            Action::Crash => {
                state.crashes += 1;
                (state.crashes <= self.crashes).then_some(())?;
                state.log.truncate(state.on_disk);
                // No session is left.
                if let Some(row) = state.current().filter(|row| row.ends_with_session) {
                    state.put(Some(Row { closed: true, ..row }));
                }
                state.flush();
            }
            Action::Write(grant) => {
                state.current().filter(|row| row.grant == grant)?;
                state.stale = grant < state.answered;
                state.flush();
            }
        }
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always(STAYS_SILENT, |_: &Self, state: &State| !state.stale)]
    }
}

fn all_that_can_happen(protections: Protections) -> Durability {
    Durability { protections, grants: 4, crashes: 2 }
}

#[test]
fn a_crash_brings_no_grant_back_that_was_replaced() {
    search::holds(all_that_can_happen(Protections::ALL));
}

#[test]
fn each_wait_is_needed() {
    let without: [fn(&mut Protections); 5] = [
        |p| p.live_waits = false,
        |p| p.unwritten_waits = false,
        |p| p.waits_always = false,
        |p| p.prune_waits = false,
        |p| p.own_is_unwritten = false,
    ];
    for take_away in without {
        let protections = Protections::without(take_away);
        println!("{protections:?}");
        search::breaks(all_that_can_happen(protections), STAYS_SILENT);
    }
}
