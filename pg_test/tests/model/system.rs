//! The state machine: the possible next events, and what each does.

use crate::protections::{Bounds, Protections};
use crate::search::{never, once_more};
use crate::server::{LeaseRow, Server};
use crate::state::{Action, Change, Client, EarlyReads, EventCounts, Op, Phase, State};
use pg_test::rules::Token;
use stateright::{Model, Property};

/// Clients, a server, its standbys and the clock.
pub struct System {
    pub bounds: Bounds,
    pub protections: Protections,
}

impl System {
    /// Returns a new client's state.
    fn client(&self, index: usize) -> Client {
        let session = self.bounds.sessions.get(index).filter(|ends| **ends).map(|_| 0);
        Client { token: None, first: None, phase: Phase::Idle, session, to_lock: None }
    }

    fn requests(&self, client: &Client, index: usize, actions: &mut Vec<Action>) {
        let request = |op| match self.protections.looks_early() {
            true => Action::Request(index, op),
            false => Action::Do(index, op),
        };
        if client.token.is_none() {
            actions.push(request(Op::Acquire));
            return;
        }
        actions.extend([request(Op::Renew), request(Op::Release), request(Op::WriteBound)]);
        actions.extend(client.first.is_some().then(|| request(Op::WriteBoundByFirst)));
        if self.bounds.reclaim {
            actions.push(request(Op::Acquire));
        }
    }

    /// Returns what a request reads before it holds its locks, if a protection is missing.
    fn early(&self, state: &mut State, op: Op) -> Option<EarlyReads> {
        let p = &self.protections;
        let mut early = EarlyReads::default();
        if !p.clock_after_lock {
            early.clock = Some(state.clock);
        }
        if !p.reread {
            early.row = Some(state.server.data.lease.clone());
        }
        if !p.session_after_lock {
            let row = state.server.data.lease.as_ref();
            let abandoned = row.filter(|row| state.server.is_abandoned(p, row));
            early.abandoned = Some(abandoned.map(|row| row.first));
        }
        if !p.draw_under_lock && matches!(op, Op::Acquire | Op::Renew) {
            early.token = Some(self.draw(state)?);
        }
        Some(early)
    }

    /// Applies the changes of a transaction.
    fn commit(&self, state: &mut State, index: usize) -> Option<()> {
        let p = &self.protections;
        let client = &mut state.clients[index];
        let Phase::Open(transaction) = std::mem::replace(&mut client.phase, Phase::Idle) else {
            return None;
        };
        if let Some(first) = transaction.ends {
            state.server.session_unlocked(index, Some(first));
        }
        let data = &mut state.server.data;
        match transaction.change {
            Change::Lease(row) => {
                let latest = row.tokens().latest();
                client.token = row.closing.is_none().then_some(latest);
                client.first = client.token.and(Some(row.first)).filter(|first| *first != latest);
                if row.session.is_some() && transaction.op == Op::Acquire && !p.session_lock_first {
                    client.to_lock = Some(row.first);
                }
                if row.closing.is_none() {
                    data.granted = data.granted.max(latest);
                }
                let is_over = |old: &LeaseRow| old.first == row.first && old.closing.is_some();
                let revived = row.closing.is_none() && data.lease.as_ref().is_some_and(is_over);
                data.lease = Some(row);
                if revived {
                    state.violate(NOT_REVIVED);
                }
            }
            Change::Bound(landing) => {
                let went_back = data.bound > Some(landing.fence);
                data.bound = Some(landing.fence);
                let guarded = |row: &&LeaseRow| Some(row.first) == transaction.guarded;
                let relied_on = data.lease.as_ref().filter(guarded);
                if relied_on.is_none_or(|row| row.tokens().latest() < data.granted) {
                    state.violate(NO_STALE_BOUND);
                }
                if went_back {
                    state.violate(NEVER_BACK);
                }
            }
        }
        if self.bounds.synchronous_commit {
            state.server.flush();
        }
        Some(())
    }

    fn step(&self, state: &mut State, action: Action) -> Option<()> {
        let (b, p) = (&self.bounds, &self.protections);
        match action {
            Action::Request(client, op) => {
                let early = self.early(state, op)?;
                state.clients[client].phase = Phase::Asked(op, early);
            }
            Action::Do(client, op) => {
                let phase = std::mem::replace(&mut state.clients[client].phase, Phase::Idle);
                let early = match phase {
                    Phase::Asked(_, early) => early,
                    _ => EarlyReads::default(),
                };
                self.carry_out(state, client, op, early)?;
            }
            Action::Answer(client) => {
                let phase = std::mem::replace(&mut state.clients[client].phase, Phase::Idle);
                let Phase::Drawn(transaction, token) = phase else { return None };
                state.seen = state.seen.max(token);
                state.clients[client].phase = Phase::Open(transaction);
            }
            Action::Commit(client) => self.commit(state, client)?,
            Action::RollBack(client) => {
                once_more(&mut state.spent.rollbacks, b.rollbacks)?;
                let phase = std::mem::replace(&mut state.clients[client].phase, Phase::Idle);
                let Phase::Open(transaction) = phase else { return None };
                let Change::Lease(row) = transaction.change else { return None };
                if transaction.op == Op::Acquire {
                    state.server.session_unlocked(client, Some(row.first));
                }
            }
            Action::Kill(client) => {
                once_more(&mut state.spent.kills, b.kills)?;
                state.session_ends(client);
            }
            Action::Unlock(client) => {
                once_more(&mut state.spent.unlocks, b.unlocks)?;
                state.unlock_session(client);
            }
            Action::LockSession(client) => {
                let first = state.clients[client].to_lock.take()?;
                state.server.session_locks.push((client, first));
            }
            Action::Revoke => {
                once_more(&mut state.spent.revocations, b.revocations)?;
                self.revoke(state)?;
            }
            Action::MoveOn => state.server.step(p, state.clock).then_some(())?,
            Action::WriteLog => state.server.flush(),
            Action::Ship(standby) => {
                if state.server.standbys[standby] == state.server.disk {
                    return None;
                }
                if b.ships != u8::MAX {
                    once_more(&mut state.spent.ships, b.ships)?;
                }
                state.server.standbys[standby] = state.server.disk.clone();
            }
            Action::Crash => {
                once_more(&mut state.spent.crashes, b.crashes)?;
                state.server.crash();
                state.sessions_end();
            }
            Action::Promote(standby) => {
                once_more(&mut state.spent.promotions, b.promotions)?;
                // A promotion takes at least a second, so that no two advances use the same one.
                state.clock += 1;
                state.server.promote(standby);
                state.sessions_end();
            }
            Action::Restore(backup) => {
                once_more(&mut state.spent.restores, b.restores)?;
                state.clock += 1;
                state.server.restore(backup);
                state.sessions_end();
            }
            Action::Second => {
                state.clock += 1;
                (state.clock <= b.seconds).then_some(())?;
            }
            Action::StepBack => {
                once_more(&mut state.spent.steps_back, b.steps_back)?;
                state.clock = state.clock.checked_sub(1)?;
            }
        }
        Some(())
    }
}

impl Model for System {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            clock: 0,
            server: Server::new(self.bounds.standbys),
            clients: (0..self.bounds.clients).map(|i| self.client(i)).collect(),
            spent: EventCounts::default(),
            seen: Token::BEFORE_ALL,
            passed_on: false,
            violation: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.violation.is_some() {
            return;
        }
        for (index, client) in state.clients.iter().enumerate() {
            match &client.phase {
                Phase::Idle => self.requests(client, index, actions),
                Phase::Asked(op, _) => actions.push(Action::Do(index, *op)),
                Phase::Drawn(..) => actions.extend([Action::Answer(index), Action::Kill(index)]),
                Phase::Open(_) => {
                    actions
                        .extend([Action::Commit, Action::Kill, Action::RollBack].map(|a| a(index)));
                }
            }
            if state.has_session_locks(index) {
                actions.push(Action::Unlock(index));
                if client.transaction().is_none() {
                    actions.push(Action::Kill(index));
                }
            }
            if client.to_lock.is_some() {
                actions.push(Action::LockSession(index));
            }
        }
        let standbys = 0..self.bounds.standbys;
        let copies = [Action::Ship, Action::Promote, Action::Restore];
        actions.extend(standbys.flat_map(|i| copies.map(|action| action(i))));
        actions.extend([Action::Revoke, Action::MoveOn, Action::WriteLog]);
        actions.extend([Action::Crash, Action::Second, Action::StepBack]);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        self.step(&mut next, action)?;
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<System>> {
        vec![
            never!(System, NEVER_REISSUED),
            never!(System, ONE_HOLDER),
            never!(System, NOT_REVIVED),
            never!(System, GUARD_EXCLUDES),
            never!(System, NO_STALE_BOUND),
            never!(System, NEVER_BACK),
            never!(System, NOT_EXPIRED),
            never!(System, NOT_ABANDONED),
            never!(System, NOBODY_KEPT_OUT),
            // These show that the properties above do not hold merely because nothing happens.
            Property::<System>::sometimes("a write lands behind its row", |_, state| {
                let behind = |c: &Client| match c.transaction().map(|t| &t.change) {
                    Some(Change::Bound(landing)) => landing.keeps_greater(),
                    _ => false,
                };
                state.clients.iter().any(behind)
            }),
            Property::<System>::sometimes("a grant follows another's", |_, state| {
                let owner = |i: usize| state.clients[i].token.is_some();
                (0..state.clients.len()).all(owner)
            }),
            Property::<System>::sometimes("a lease passes on before its time", |system, state| {
                state.passed_on || !system.bounds.sessions.contains(&true)
            }),
            Property::<System>::sometimes("a write lands after a failover", |system, state| {
                let data = &state.server.data;
                let failed_over = data.timeline > u32::from(system.bounds.promotions);
                failed_over && data.bound > Some(data.epoch.token())
            }),
        ]
    }
}

/// Every token is greater than all that were seen before.
pub const NEVER_REISSUED: &str = "tokens only rise";
/// There is at most one live grant.
pub const ONE_HOLDER: &str = "a grant is alone";
/// A grant that was released or revoked remains ended.
pub const NOT_REVIVED: &str = "what has ended is not renewed";
/// A guarded transaction excludes a take-over.
pub const GUARD_EXCLUDES: &str = "a guard excludes a take-over";
/// A write to a bound row succeeds only under a current or guarded grant.
pub const NO_STALE_BOUND: &str = "no stale write on a bound row";
/// The fence of a bound row never falls.
pub const NEVER_BACK: &str = "the fence of a bound row only rises";
/// No decision uses a clock that was read before a wait.
pub const NOT_EXPIRED: &str = "nothing speaks after its deadline";
/// No token of a grant that ends with a session is accepted after the session's end.
pub const NOT_ABANDONED: &str = "nothing speaks after the end of its session";
/// A lease that is not held can be granted at once.
pub const NOBODY_KEPT_OUT: &str = "a lease that nobody has is granted";
