//! The server's work on a request. The decisions are the extension's own; what surrounds them (locks,
//! reads, draws) is told here in the order in which the extension does it.

use crate::server::{micros, mode, Row, TTL};
use crate::state::{Change, Early, Guarded, Op, Phase, State, Transaction, Violation};
use crate::system::System;
use pg_test::rules::fence::{self, Landing, Order, Verdict, Write};
use pg_test::rules::grant::{self, Acquire, Ask, ExistingGrant, Grant, Release};
use pg_test::rules::locks::{
    LockMode, ACQUIRE_ALONE, CHANGE, EXCLUDE_ALONE, GUARD, IS_GUARDED, TAKE_SLOT,
};
use pg_test::rules::moves::Due;
use pg_test::rules::{Floor, Token};

impl System {
    /// Carries out a request; None where it waits, or cannot happen within the bounds.
    pub fn carry_out(&self, state: &mut State, c: usize, op: Op, early: Early) -> Option<()> {
        match op {
            Op::Acquire => self.acquire(state, c, early),
            Op::Renew | Op::Release => self.change(state, c, op, early),
            Op::WriteBound => self.write_bound(state, c, op, early),
            Op::WriteBoundByFirst => self.write_bound(state, c, op, early),
            Op::WriteUnbound => self.write_unbound(state, c),
        }
    }

    /// Draws a token, after the move or jump that may be due.
    pub fn draw(&self, state: &mut State) -> Option<Token> {
        if state.spent.draws == self.bounds.draws || self.must_move_on(state) {
            return None;
        }
        state.spent.draws += 1;
        Some(state.server.draw())
    }

    fn must_move_on(&self, state: &State) -> bool {
        state.server.due(&self.protections) != Due::Nothing
    }

    fn floor(&self, state: &State) -> Floor {
        if self.protections.floor {
            state.server.data.floor
        } else {
            Floor::NONE
        }
    }

    /// The grant as a request sees it that may look at its session's lock now.
    fn grant(&self, state: &State, early: &Early, row: &Row) -> Grant {
        row.grant(match &early.abandoned {
            Some(abandoned) => abandoned.contains(&row.first),
            None => state.server.is_abandoned(&self.protections, row),
        })
    }

    fn acquire(&self, state: &mut State, c: usize, early: Early) -> Option<()> {
        let exclusive = self.bounds.exclusive[c];
        let rows = early.rows.clone().unwrap_or_else(|| state.server.data.leases.clone());
        let clock = early.clock.unwrap_or(state.clock);
        let ask = Ask { mode: mode(exclusive), reclaim: self.bounds.reclaim };
        let grant_of = |state: &State, row: &Row| self.grant(state, &early, row);
        let decide = |state: &State, guarded: &dyn Fn(i32) -> bool| {
            let as_existing = |row: &Row| ExistingGrant {
                grant: grant_of(state, row),
                mine: ask.reclaim && row.owner == c,
                guarded: guarded(row.slot),
            };
            let existing: Vec<ExistingGrant> = rows.iter().map(as_existing).collect();
            match grant::admit(&existing, &ask, micros(clock)) {
                Acquire::Grant { slot } => Some(slot),
                _ => None,
            }
        };
        let mut locks = Vec::new();
        let lock = |state: &State, locks: &mut Vec<(i32, LockMode)>, slot, lock| {
            if self.protections.grant_lock {
                locks.push((slot, lock));
                return state.may_lock(c, slot, lock);
            }
            true
        };
        let slot = if exclusive {
            let all = std::iter::once(0).chain(rows.iter().map(|r| r.slot));
            if !all.fold(true, |had, slot| had & lock(state, &mut locks, slot, ACQUIRE_ALONE.mode))
            {
                return None;
            }
            // Under these locks nobody else guards anything.
            let Some(slot) = decide(state, &|_| false) else {
                return self.taken(state, &early);
            };
            slot
        } else {
            if !lock(state, &mut locks, 0, EXCLUDE_ALONE.mode) {
                return None;
            }
            let guarded = |slot: i32| {
                let is_over =
                    |r: &Row| grant_of(state, r).phase(micros(clock)) != grant::Phase::Held;
                let over = rows.iter().any(|r| r.slot == slot && is_over(r));
                over && !state.may_lock(c, slot, IS_GUARDED.mode)
            };
            let slot = decide(state, &guarded)?;
            if !lock(state, &mut locks, slot, TAKE_SLOT.mode) {
                return None;
            }
            slot
        };
        let token = match early.token {
            Some(drawn) => drawn,
            None => self.draw(state)?,
        };
        let expires = clock + TTL;
        let (first, renewed, closing) = (token, Vec::new(), None);
        let ends = rows.iter().filter(|r| r.slot == slot).map(|r| r.first).collect();
        let session = state.clients[c].session;
        let row = Row { slot, exclusive, owner: c, first, renewed, closing, expires, session };
        if session.is_some() && self.protections.session_lock_first {
            state.server.session_locks.push((c, first));
        }
        self.check_rises(state, token);
        self.check_alone(state, c, &row);
        let change = Change::Lease(row);
        let transaction = Transaction { op: Op::Acquire, locks, change, guarded: None, ends };
        state.clients[c].phase = Phase::Drawn(transaction, token);
        Some(())
    }

    /// An exclusive acquire that has all the locks finds the lease taken: somebody must have it.
    fn taken(&self, state: &mut State, early: &Early) -> Option<()> {
        let had = state.server.data.leases.iter().any(|row| state.lives(row));
        if had || *early != Early::default() {
            return None;
        }
        state.violate(Violation::KeptFromAll);
        Some(())
    }

    /// A token has been let speak for this grant.
    fn check_speaks(&self, state: &mut State, row: &Row) {
        if !row.is_live(state.clock) {
            state.violate(Violation::Expired);
        }
        if state.session_has_ended(row) {
            state.violate(Violation::Abandoned);
        }
    }

    /// A token that a grant gets is greater than all that anyone has seen: the lease is locked now.
    fn check_rises(&self, state: &mut State, token: Token) {
        if token <= state.seen {
            state.violate(Violation::Reissued);
        }
    }

    /// Holds each new grant against the true clock and the true rows.
    fn check_alone(&self, state: &mut State, c: usize, new: &Row) {
        if !new.is_live(state.clock) {
            state.violate(Violation::Expired);
        }
        let yields = |row: &Row| self.bounds.reclaim && row.owner == c;
        let excludes = |row: &Row| state.lives(row) && (row.exclusive || new.exclusive);
        let pending = |t: &Transaction| matches!(&t.change, Change::Lease(row) if excludes(row));
        let committed = state.server.data.leases.iter().any(|r| excludes(r) && !yields(r));
        let relied_on = state.others(c).filter_map(|t| t.guarded).any(|g| {
            let rows = &state.server.data.leases;
            let shared = rows.iter().any(|r| r.slot == g.slot && !r.exclusive);
            new.exclusive || !shared || g.slot == new.slot
        });
        let stands = |row: &Row| row.is_live(state.clock) && row.owner != c && row.exclusive;
        let passes_on = state.server.data.leases.iter().any(stands);
        if committed || state.others(c).any(pending) {
            state.violate(Violation::TwoHolders);
        }
        state.passed_on |= passes_on;
        if relied_on && self.protections.report_take_over {
            state.violate(Violation::TakenOverGuard);
        }
    }

    /// The grant of the client's token, as committed.
    fn own_row(&self, state: &State, early: &Early, token: Token) -> Option<Row> {
        let rows = early.rows.as_ref().unwrap_or(&state.server.data.leases);
        rows.iter().find(|r| r.tokens().contains(token)).cloned()
    }

    /// The client has been told that its token does not speak. It gives up, unless renewing can help.
    fn refuse(&self, state: &mut State, c: usize, row: Option<&Row>) -> Option<()> {
        let token = state.clients[c].token?;
        let now = micros(state.clock);
        let grant = row.map(|row| self.grant(state, &Early::default(), row));
        if !grant.is_some_and(|grant| grant.renewable(token, now)) {
            (state.clients[c].token, state.clients[c].first) = (None, None);
        }
        Some(())
    }

    fn change(&self, state: &mut State, c: usize, op: Op, early: Early) -> Option<()> {
        let token = state.clients[c].token?;
        let Some(mut row) = self.own_row(state, &early, token) else {
            return self.refuse(state, c, None);
        };
        if !state.may_lock(c, row.slot, CHANGE.mode) {
            return None;
        }
        let now = micros(early.clock.unwrap_or(state.clock));
        let grant = self.grant(state, &early, &row);
        let allowed = if op == Op::Renew {
            grant.renewable(token, now)
        } else {
            grant.release(token, now) == Release::Close
        };
        if !allowed {
            return self.refuse(state, c, Some(&row));
        }
        self.check_speaks(state, &row);
        let fresh = match early.token {
            Some(drawn) => drawn,
            None => self.draw(state)?,
        };
        self.check_rises(state, fresh);
        let mut ends = Vec::new();
        if op == Op::Renew {
            row.renewed = row.tokens().renew(fresh).renewed().to_vec();
            row.expires = early.clock.unwrap_or(state.clock) + TTL;
        } else {
            row.closing = Some(fresh);
            if self.protections.session_lock_to_commit {
                ends.push(row.first);
            } else {
                state.server.session_unlocked(c, Some(row.first));
            }
        }
        let locks = vec![(row.slot, CHANGE.mode)];
        let change = Change::Lease(row);
        let transaction = Transaction { op, locks, change, guarded: None, ends };
        state.clients[c].phase = Phase::Drawn(transaction, fresh);
        Some(())
    }

    /// The landing of a write of a row with this fence, as far as its token tells.
    fn judge(
        &self,
        state: &State,
        stored: Option<Token>,
        token: Token,
        order: Order,
        bound: bool,
    ) -> Option<Landing> {
        let write = Write { old: Some(stored), new: Some(Some(token)), named: true, ambient: None };
        let last = state.server.data.sequence.last;
        match fence::judge(&write, order, bound, |t| t > Token::BEFORE_ALL && t <= last) {
            Verdict::Land(landing) => Some(landing),
            _ => None,
        }
    }

    fn write_bound(&self, state: &mut State, c: usize, op: Op, early: Early) -> Option<()> {
        let by_first = op == Op::WriteBoundByFirst;
        let token = if by_first { state.clients[c].first } else { state.clients[c].token }?;
        if state.is_written(c, |change| matches!(change, Change::Bound(_))) {
            return None;
        }
        if self.must_move_on(state) {
            return None;
        }
        let stored = state.server.data.bound;
        let Some(mut landing) = self.judge(state, stored, token, Order::Monotonic, true) else {
            return self.refuse(state, c, None);
        };
        if landing.keeps_greater() && !self.protections.behind_must_speak {
            let (change, locks, ends) = (Change::Bound(landing), Vec::new(), Vec::new());
            let transaction = Transaction { op, locks, change, guarded: None, ends };
            state.clients[c].phase = Phase::Open(transaction);
            return Some(());
        }
        if !self.protections.keep_greater {
            landing.fence = landing.token;
        }
        let Some(row) = self.own_row(state, &early, token) else {
            return self.refuse(state, c, None);
        };
        let mut locks = Vec::new();
        if self.protections.guard_lock {
            if !state.may_lock(c, row.slot, GUARD.mode) {
                return None;
            }
            locks.push((row.slot, GUARD.mode));
        }
        let now = micros(early.clock.unwrap_or(state.clock));
        if !self.grant(state, &early, &row).speaks(token, now, self.floor(state)) {
            return self.refuse(state, c, Some(&row));
        }
        self.check_speaks(state, &row);
        let guarded = Some(Guarded { slot: row.slot, first: row.first });
        let (change, ends) = (Change::Bound(landing), Vec::new());
        let transaction = Transaction { op, locks, change, guarded, ends };
        state.clients[c].phase = Phase::Open(transaction);
        Some(())
    }

    fn write_unbound(&self, state: &mut State, c: usize) -> Option<()> {
        let token = state.clients[c].token?;
        let is_written = state.is_written(c, |change| matches!(change, Change::Unbound(_)));
        if is_written || self.must_move_on(state) {
            return None;
        }
        let strict = self.protections.strict_order;
        let order = if strict { Order::Strict } else { Order::Monotonic };
        if self.judge(state, state.server.data.unbound, token, order, false).is_some() {
            let (op, change) = (Op::WriteUnbound, Change::Unbound(token));
            let (locks, ends) = (Vec::new(), Vec::new());
            let transaction = Transaction { op, locks, change, guarded: None, ends };
            state.clients[c].phase = Phase::Open(transaction);
        }
        Some(())
    }

    /// Somebody without a session of the model's revokes, in one go.
    pub fn revoke(&self, state: &mut State) -> Option<()> {
        let nobody = state.clients.len();
        let held = |row: &Row| {
            let grant = self.grant(state, &Early::default(), row);
            grant.phase(micros(state.clock)) == grant::Phase::Held
        };
        let live: Vec<usize> = (0..state.server.data.leases.len())
            .filter(|i| held(&state.server.data.leases[*i]))
            .collect();
        let slot = |i: &usize| state.server.data.leases[*i].slot;
        let lockable = |i: &usize| state.may_lock(nobody, slot(i), CHANGE.mode);
        if live.is_empty() || !live.iter().all(lockable) {
            return None;
        }
        let closing = self.draw(state)?;
        self.check_rises(state, closing);
        for i in live {
            state.server.data.leases[i].closing = Some(closing);
        }
        state.seen = state.seen.max(closing);
        if self.bounds.synchronous_commit {
            state.server.flush();
        }
        Some(())
    }
}
