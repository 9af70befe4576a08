//! The server's work on a request. The decisions are the extension's own code. The steps around them (locks, reads,
//! draws) are modelled in the extension's order.

use crate::server::{LeaseRow, TTL, micros};
use crate::state::{Change, EarlyReads, Op, Phase, State, Transaction};
use crate::system::{
    GUARD_EXCLUDES, NEVER_REISSUED, NOBODY_KEPT_OUT, NOT_ABANDONED, NOT_EXPIRED, ONE_HOLDER, System,
};
use pg_test::rules::epochs::Due;
use pg_test::rules::fence::{self, Order, Verdict, Write};
use pg_test::rules::grant::{self, Acquire, AcquireRequest, ExistingGrant, Grant, Mode, Release};
use pg_test::rules::locks::{ACQUIRE_EXCLUSIVE, CHANGE, GUARD, LockMode};
use pg_test::rules::{Epoch, Token};

impl System {
    /// Carries out a request. Returns `None` if it waits, or cannot happen within the bounds.
    pub fn carry_out(&self, state: &mut State, c: usize, op: Op, early: EarlyReads) -> Option<()> {
        match op {
            Op::Acquire => self.acquire(state, c, early),
            Op::Renew | Op::Release => self.change(state, c, op, early),
            Op::WriteBound | Op::WriteBoundByFirst => self.write_bound(state, c, op, early),
        }
    }

    /// Draws a token, after the advance or new epoch that may be due.
    pub fn draw(&self, state: &mut State) -> Option<Token> {
        if state.spent.draws == self.bounds.draws || self.must_advance(state) {
            return None;
        }
        state.spent.draws += 1;
        Some(state.server.draw())
    }

    fn must_advance(&self, state: &State) -> bool {
        state.server.due(&self.protections) != Due::Nothing
    }

    fn epoch(&self, state: &State) -> Epoch {
        if self.protections.epoch_checked { state.server.data.epoch } else { Epoch::FIRST }
    }

    /// Returns the grant as seen by a request that may check its session's lock now.
    fn grant(&self, state: &State, early: &EarlyReads, row: &LeaseRow) -> Grant {
        row.grant(match early.abandoned {
            Some(abandoned) => abandoned == Some(row.first),
            None => state.server.is_abandoned(&self.protections, row),
        })
    }

    /// Takes the lock of a step, or none if its protection is taken away. Returns `None` if it is not free.
    fn lock(
        &self,
        state: &State,
        c: usize,
        takes: bool,
        mode: LockMode,
    ) -> Option<Option<LockMode>> {
        (!takes || state.may_lock(c, mode)).then_some(takes.then_some(mode))
    }

    fn acquire(&self, state: &mut State, c: usize, early: EarlyReads) -> Option<()> {
        let seen = early.row.clone().unwrap_or_else(|| state.server.data.lease.clone());
        let clock = early.clock.unwrap_or(state.clock);
        let lock = self.lock(state, c, self.protections.grant_lock, ACQUIRE_EXCLUSIVE.mode)?;
        let reclaim = self.bounds.reclaim;
        // Under this lock no other transaction guards anything.
        let existing = seen.as_ref().map(|row| ExistingGrant {
            grant: self.grant(state, &early, row),
            mine: reclaim && row.owner == c,
            guarded: false,
        });
        let request = AcquireRequest { mode: Mode::Exclusive, reclaim };
        let verdict = grant::admit(existing.as_slice(), &request, micros(clock));
        if !matches!(verdict, Acquire::Grant { .. }) {
            return self.taken(state, &early);
        }
        let token = match early.token {
            Some(drawn) => drawn,
            None => self.draw(state)?,
        };
        let (first, session) = (token, state.clients[c].session);
        let (renewed, closing, expires) = (Vec::new(), None, clock + TTL);
        let row = LeaseRow { owner: c, first, renewed, closing, expires, session };
        if session.is_some() && self.protections.session_lock_first {
            state.server.session_locks.push((c, first));
        }
        self.check_rises(state, token);
        self.check_alone(state, c, &row);
        let (change, ends) = (Change::Lease(row), seen.map(|row| row.first));
        let transaction = Transaction { op: Op::Acquire, lock, change, guarded: None, ends };
        state.clients[c].phase = Phase::Drawn(transaction, token);
        Some(())
    }

    /// An acquire that has the lock finds the lease taken: a client must really hold it.
    fn taken(&self, state: &mut State, early: &EarlyReads) -> Option<()> {
        let had = state.server.data.lease.as_ref().is_some_and(|row| state.lives(row));
        if had || *early != EarlyReads::default() {
            return None;
        }
        state.violate(NOBODY_KEPT_OUT);
        Some(())
    }

    /// Checks a grant for which a token was accepted.
    fn check_speaks(&self, state: &mut State, row: &LeaseRow) {
        if !row.is_live(state.clock) {
            state.violate(NOT_EXPIRED);
        }
        if state.session_has_ended(row) {
            state.violate(NOT_ABANDONED);
        }
    }

    /// Checks that a grant's token is greater than all that any client has seen: the lease is locked now.
    fn check_rises(&self, state: &mut State, token: Token) {
        if token <= state.seen {
            state.violate(NEVER_REISSUED);
        }
    }

    /// Checks each new grant against the true clock and the true rows.
    fn check_alone(&self, state: &mut State, c: usize, new: &LeaseRow) {
        if !new.is_live(state.clock) {
            state.violate(NOT_EXPIRED);
        }
        let yields = |row: &LeaseRow| self.bounds.reclaim && row.owner == c;
        let written = state.others(c).filter_map(|t| match &t.change {
            Change::Lease(row) => Some(row),
            _ => None,
        });
        let committed = state.server.data.lease.iter().filter(|row| !yields(row));
        let is_beside = committed.chain(written).any(|row| state.lives(row));
        let is_relied_on = state.others(c).any(|t| t.guarded.is_some());
        let stands = |row: &LeaseRow| row.is_live(state.clock) && row.owner != c;
        state.passed_on |= state.server.data.lease.as_ref().is_some_and(stands);
        if is_beside {
            state.violate(ONE_HOLDER);
        }
        if is_relied_on && self.protections.report_take_over {
            state.violate(GUARD_EXCLUDES);
        }
    }

    /// Returns the committed grant of the client's token.
    fn own_row(&self, state: &State, early: &EarlyReads, token: Token) -> Option<LeaseRow> {
        let row = early.row.as_ref().unwrap_or(&state.server.data.lease);
        row.clone().filter(|row| row.tokens().contains(token))
    }

    /// The client learns that its token is not accepted. It gives up, unless renewing can help.
    fn refuse(&self, state: &mut State, c: usize, row: Option<&LeaseRow>) -> Option<()> {
        let token = state.clients[c].token?;
        let now = micros(state.clock);
        let grant = row.map(|row| self.grant(state, &EarlyReads::default(), row));
        if !grant.is_some_and(|grant| grant.renewable(token, now)) {
            (state.clients[c].token, state.clients[c].first) = (None, None);
        }
        Some(())
    }

    fn change(&self, state: &mut State, c: usize, op: Op, early: EarlyReads) -> Option<()> {
        let token = state.clients[c].token?;
        let Some(mut row) = self.own_row(state, &early, token) else {
            return self.refuse(state, c, None);
        };
        let lock = self.lock(state, c, self.protections.change_lock, CHANGE.mode)?;
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
        let mut ends = None;
        if op == Op::Renew {
            row.renewed = row.tokens().renew(fresh).renewed().to_vec();
            row.expires = early.clock.unwrap_or(state.clock) + TTL;
        } else {
            row.closing = Some(fresh);
            if self.protections.session_lock_to_commit {
                ends = Some(row.first);
            } else {
                state.server.session_unlocked(c, Some(row.first));
            }
        }
        let change = Change::Lease(row);
        let transaction = Transaction { op, lock, change, guarded: None, ends };
        state.clients[c].phase = Phase::Drawn(transaction, fresh);
        Some(())
    }

    fn write_bound(&self, state: &mut State, c: usize, op: Op, early: EarlyReads) -> Option<()> {
        let by_first = op == Op::WriteBoundByFirst;
        let token = if by_first { state.clients[c].first } else { state.clients[c].token }?;
        if state.is_written(c, |change| matches!(change, Change::Bound(_))) {
            return None;
        }
        if self.must_advance(state) {
            return None;
        }
        let (old, last) = (Some(state.server.data.bound), state.server.data.sequence.last);
        let write = Write { old, new: Some(Some(token)), named: true, ambient: None };
        let issued = |token| token > Token::BEFORE_ALL && token <= last;
        let Verdict::Land(mut landing) = fence::check(&write, Order::Monotonic, true, issued)
        else {
            return self.refuse(state, c, None);
        };
        if landing.keeps_greater() && !self.protections.behind_must_speak {
            state.clients[c].phase = Phase::Open(Transaction::of_write(op, Change::Bound(landing)));
            return Some(());
        }
        if !self.protections.keep_greater {
            landing.fence = landing.token;
        }
        let Some(row) = self.own_row(state, &early, token) else {
            return self.refuse(state, c, None);
        };
        let lock = self.lock(state, c, self.protections.guard_lock, GUARD.mode)?;
        let now = micros(early.clock.unwrap_or(state.clock));
        if !self.grant(state, &early, &row).speaks(token, now, self.epoch(state)) {
            return self.refuse(state, c, Some(&row));
        }
        self.check_speaks(state, &row);
        let write = Transaction::of_write(op, Change::Bound(landing));
        let transaction = Transaction { lock, guarded: Some(row.first), ..write };
        state.clients[c].phase = Phase::Open(transaction);
        Some(())
    }

    /// A caller outside of the model's sessions revokes the lease, in one event.
    pub fn revoke(&self, state: &mut State) -> Option<()> {
        let nobody = state.clients.len();
        let mut row = state.server.data.lease.clone()?;
        let phase = self.grant(state, &EarlyReads::default(), &row).phase(micros(state.clock));
        (phase == grant::Phase::Held && state.may_lock(nobody, CHANGE.mode)).then_some(())?;
        let closing = self.draw(state)?;
        self.check_rises(state, closing);
        row.closing = Some(closing);
        state.server.data.lease = Some(row);
        state.seen = state.seen.max(closing);
        if self.bounds.synchronous_commit {
            state.server.flush();
        }
        Some(())
    }
}
