//! A heartbeat of two leases in one call (`leases::keep`), between whose steps others acquire, renew, release, revoke and
//! prune, the clock goes on, and the token sequence jumps. The decisions and the locks are the extension's own.

use crate::search::{self, never, once_more, protections};
use pg_test::rules::grant::{self, Acquire, Ask, ExistingGrant, Grant, Mode, Phase, Tokens};
use pg_test::rules::locks::{LockMode, LockStep, ACQUIRE_ALONE, CHANGE, KEEP, PRUNE};
use pg_test::rules::{Floor, Instant, Span, Token};
use stateright::{Model, Property};

protections! {
    /// Each grant is locked before it is renewed.
    lock,
    /// Its row is read again under the lock.
    read_again,
    /// The token is drawn when all locks are had.
    draw_last,
    /// The clock is read when all locks are had.
    clock_last,
}

/// How long a grant lasts, in seconds.
const TTL: u8 = 2;
const LEASES: usize = 2;
/// The client that keeps. Others are fellows of it that renew and release by its tokens, and acquire for themselves.
const KEEPER: usize = 0;
const CLIENTS: usize = 2;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Row {
    first: u8,
    latest: u8,
    closing: Option<u8>,
    expires: u8,
}

fn token(number: u8) -> Token {
    Token::from_bigint(number.into())
}

fn at(seconds: u8) -> Instant {
    Instant::from_micros(0) + Span::from_secs(seconds.into())
}

impl Row {
    fn grant(&self) -> Grant {
        let renewals: &[Token] =
            if self.latest == self.first { &[] } else { &[token(self.latest)] };
        Grant {
            slot: 0,
            mode: Mode::Exclusive,
            tokens: Tokens::new(token(self.first), renewals),
            closing: self.closing.map(token),
            closed_here: false,
            expires_at: at(self.expires),
            abandoned: false,
            adopted: None,
        }
    }

    fn is_held(&self, clock: u8) -> bool {
        self.grant().phase(at(clock)) == Phase::Held
    }
}

/// The next step of a client.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Next {
    Idle,
    /// A keep has seen this lease and is about to lock it; it has locked those, and has perhaps the token or the time
    /// already.
    Lock {
        lease: usize,
        seen: Option<Row>,
        found: Vec<(usize, Row)>,
        drawn: Option<u8>,
        clock: Option<u8>,
    },
    /// It has all that was to be had.
    Write {
        found: Vec<(usize, Row)>,
        drawn: Option<u8>,
        clock: Option<u8>,
    },
    /// Written, not committed.
    Open(Vec<(usize, Row)>),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Action {
    Keep,
    Step(usize),
    Acquire(usize),
    Renew(usize),
    Release(usize),
    Commit(usize),
    RollBack(usize),
    Revoke(usize),
    Prune(usize),
    Jump,
    Second,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Violation {
    /// A token is not greater than one that was drawn for that lease before.
    NotRising,
    /// A grant was renewed that was over, or another's row was written over.
    Revived,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct State {
    clock: u8,
    drawn: u8,
    floor: u8,
    rows: [Option<Row>; LEASES],
    /// The greatest token that was drawn for each lease under its lock.
    greatest: [u8; LEASES],
    next: [Next; CLIENTS],
    locks: Vec<(usize, usize, LockMode)>,
    /// The keeper's tokens.
    kept: [u8; LEASES],
    calls: u8,
    /// A keep was committed after a jump.
    spoke_again: bool,
    violation: Option<Violation>,
}

struct Heartbeat(Protections);

const CALLS: u8 = 5;
const SECONDS: u8 = 3;

impl State {
    fn draw(&mut self) -> u8 {
        self.drawn += 1;
        self.drawn
    }

    fn take(&mut self, client: usize, lease: usize, want: LockStep) -> bool {
        let free = self.locks.iter().all(|(other, on, mode)| {
            *other == client || *on != lease || !want.mode.conflicts_with(*mode)
        });
        if free {
            self.locks.push((client, lease, want.mode));
        }
        free
    }

    /// The row, if the keeper's token may renew it now.
    fn renewable(&self, lease: usize, clock: u8) -> Option<Row> {
        let by = token(self.kept[lease]);
        self.rows[lease].filter(|row| row.grant().renewable(by, at(clock)))
    }

    fn note_drawn(&mut self, lease: usize, token: u8) {
        if token <= self.greatest[lease] {
            self.violation.get_or_insert(Violation::NotRising);
        }
        self.greatest[lease] = self.greatest[lease].max(token);
    }

    fn end(&mut self, client: usize) {
        self.next[client] = Next::Idle;
        self.locks.retain(|(other, ..)| *other != client);
    }

    fn open(&mut self, client: usize, lease: usize, row: Row) {
        self.next[client] = Next::Open(vec![(lease, row)]);
    }
}

impl Heartbeat {
    fn begin(&self, state: &mut State) {
        let (drawn, clock) = (
            (!self.0.draw_last).then(|| state.draw()),
            (!self.0.clock_last).then_some(state.clock),
        );
        let seen = state.renewable(0, state.clock);
        state.next[KEEPER] = Next::Lock { lease: 0, seen, found: Vec::new(), drawn, clock };
    }

    fn step(&self, state: &mut State, client: usize) -> Option<()> {
        match std::mem::replace(&mut state.next[client], Next::Idle) {
            Next::Lock { lease, seen, mut found, drawn, clock } => {
                let now = clock.unwrap_or(state.clock);
                // A lease in somebody's hands is left for later.
                if seen.is_some() && (!self.0.lock || state.take(client, lease, KEEP)) {
                    let row = if self.0.read_again { state.renewable(lease, now) } else { seen };
                    found.extend(row.map(|row| (lease, row)));
                }
                state.next[client] = match lease + 1 {
                    LEASES => Next::Write { found, drawn, clock },
                    lease => {
                        let seen = state.renewable(lease, now);
                        Next::Lock { lease, seen, found, drawn, clock }
                    }
                };
            }
            Next::Write { mut found, drawn, clock } => {
                let now = clock.unwrap_or(state.clock);
                found.retain(|(_, row)| row.is_held(now));
                if found.is_empty() {
                    state.end(client);
                    return Some(());
                }
                let token = drawn.unwrap_or_else(|| state.draw());
                for (lease, row) in &mut found {
                    state.note_drawn(*lease, token);
                    if !row.is_held(state.clock) {
                        state.violation.get_or_insert(Violation::Revived);
                    }
                    (row.latest, row.expires) = (token, now + TTL);
                }
                state.next[client] = Next::Open(found);
            }
            _ => return None,
        }
        Some(())
    }

    fn acquire(&self, state: &mut State, lease: usize) -> Option<()> {
        let client = CLIENTS - 1;
        let seat = |row: &Row| ExistingGrant { grant: row.grant(), mine: false, guarded: false };
        let ask = Ask { mode: Mode::Exclusive, reclaim: false };
        let existing: Vec<ExistingGrant> = state.rows[lease].iter().map(seat).collect();
        let free = grant::admit(&existing, &ask, at(state.clock)) == Acquire::Grant { slot: 0 };
        (free && state.take(client, lease, ACQUIRE_ALONE)).then_some(())?;
        let first = state.draw();
        state.note_drawn(lease, first);
        state.open(
            client,
            lease,
            Row { first, latest: first, closing: None, expires: state.clock + TTL },
        );
        Some(())
    }

    fn change(&self, state: &mut State, lease: usize, renew: bool) -> Option<()> {
        let client = CLIENTS - 1;
        let mut row = state.renewable(lease, state.clock)?;
        state.take(client, lease, CHANGE).then_some(())?;
        let drawn = state.draw();
        state.note_drawn(lease, drawn);
        match renew {
            true => (row.latest, row.expires) = (drawn, state.clock + TTL),
            false => row.closing = Some(drawn),
        }
        state.open(client, lease, row);
        Some(())
    }

    fn commit(&self, state: &mut State, client: usize) -> Option<()> {
        let Next::Open(writes) = std::mem::replace(&mut state.next[client], Next::Idle) else {
            return None;
        };
        for (lease, row) in writes {
            // The owner of the row when it was read, and open for a renewal.
            let is_same = state.rows[lease]
                .is_some_and(|now| now.first == row.first && now.closing.is_none());
            if client == KEEPER && !is_same {
                state.violation.get_or_insert(Violation::Revived);
            }
            state.rows[lease] = Some(row);
            let speaks = row.grant().speaks(
                token(state.kept[lease]),
                at(state.clock),
                Floor::at(token(state.floor)),
            );
            state.spoke_again |= client == KEEPER && state.floor > 0 && speaks;
        }
        state.end(client);
        Some(())
    }

    fn apply(&self, state: &mut State, action: Action) -> Option<()> {
        use Action::*;
        if matches!(action, Keep | Acquire(_) | Renew(_) | Release(_) | Revoke(_) | Prune(_) | Jump)
        {
            once_more(&mut state.calls, CALLS)?;
        }
        match action {
            Keep => self.begin(state),
            Step(client) => self.step(state, client)?,
            Acquire(lease) => self.acquire(state, lease)?,
            Renew(lease) => self.change(state, lease, true)?,
            Release(lease) => self.change(state, lease, false)?,
            Commit(client) => self.commit(state, client)?,
            RollBack(client) => state.end(client),
            // At once, and committed.
            Revoke(lease) => {
                let admin = CLIENTS;
                let mut row = state.rows[lease].filter(|row| row.is_held(state.clock))?;
                state.take(admin, lease, CHANGE).then_some(())?;
                let closing = state.draw();
                state.note_drawn(lease, closing);
                row.closing = Some(closing);
                state.rows[lease] = Some(row);
                state.locks.retain(|(other, ..)| *other != admin);
            }
            Prune(lease) => {
                let admin = CLIENTS;
                state.rows[lease].filter(|row| !row.is_held(state.clock))?;
                state.take(admin, lease, PRUNE).then_some(())?;
                state.rows[lease] = None;
                state.locks.retain(|(other, ..)| *other != admin);
            }
            Jump => {
                (state.floor == 0).then_some(())?;
                state.floor = state.draw();
            }
            Second => once_more(&mut state.clock, SECONDS)?,
        }
        Some(())
    }
}

impl Model for Heartbeat {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let row = |first| Some(Row { first, latest: first, closing: None, expires: TTL });
        vec![State {
            clock: 0,
            drawn: 2,
            floor: 0,
            rows: [row(1), row(2)],
            greatest: [1, 2],
            next: [Next::Idle, Next::Idle],
            locks: Vec::new(),
            kept: [1, 2],
            calls: 0,
            spoke_again: false,
            violation: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.violation.is_some() {
            return;
        }
        for (client, next) in state.next.iter().enumerate() {
            match next {
                Next::Idle if client == KEEPER => actions.push(Action::Keep),
                Next::Idle => {
                    for lease in 0..LEASES {
                        actions.extend(
                            [Action::Acquire, Action::Renew, Action::Release].map(|a| a(lease)),
                        );
                    }
                }
                Next::Open(_) => actions.extend([Action::Commit(client), Action::RollBack(client)]),
                _ => actions.push(Action::Step(client)),
            }
        }
        actions.extend((0..LEASES).flat_map(|lease| [Action::Revoke(lease), Action::Prune(lease)]));
        actions.extend([Action::Jump, Action::Second]);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        self.apply(&mut next, action)?;
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Heartbeat>> {
        vec![
            never!(Heartbeat, RISING, NotRising),
            never!(Heartbeat, NOT_REVIVED, Revived),
            Property::<Heartbeat>::sometimes("a keep lets tokens speak again", |_, s| {
                s.spoke_again
            }),
            Property::<Heartbeat>::sometimes(
                "one is kept beside one that is in somebody's hands",
                |_, s| matches!((&s.next[KEEPER], &s.next[1]), (Next::Open(kept), Next::Open(_)) if kept.len() == 1),
            ),
        ]
    }
}

const RISING: &str = "of two tokens of a lease the one drawn later is greater";
const NOT_REVIVED: &str = "what is over, or another's, is not renewed";

#[test]
fn a_heartbeat_between_the_steps_of_others_breaks_nothing() {
    search::holds(Heartbeat(Protections::ALL));
}

#[test]
fn a_heartbeat_without_locks_writes_over_what_has_ended() {
    search::breaks(Heartbeat(Protections::without(|p| p.lock = false)), NOT_REVIVED);
}

#[test]
fn a_heartbeat_that_does_not_read_again_writes_over_what_has_ended() {
    search::breaks(Heartbeat(Protections::without(|p| p.read_again = false)), NOT_REVIVED);
}

#[test]
fn a_token_drawn_before_the_last_lock_is_out_of_order() {
    search::breaks(Heartbeat(Protections::without(|p| p.draw_last = false)), RISING);
}

#[test]
fn a_clock_read_before_the_last_lock_renews_what_is_over() {
    search::breaks(Heartbeat(Protections::without(|p| p.clock_last = false)), NOT_REVIVED);
}
