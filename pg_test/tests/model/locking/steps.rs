//! The steps of a call, in the order of the extension's code (`leases::free_slot`, `leases::guard`, `leases::change`,
//! `leases::prune`). The locks come from the rules' table, the decisions from the rules themselves.

use super::protections::{Bounds, Protections};
use super::state::{Client, Kind, Next, Search, SlotRow, State, TTL, Write, at};
use super::{APART, NOT_PRUNED};
use pg_test::rules::Epoch;
use pg_test::rules::grant::{self, Acquire, AcquireRequest, ExistingGrant};
use pg_test::rules::locks::{
    ACQUIRE_EXCLUSIVE, BLOCK_EXCLUSIVE, CHANGE, GUARD, PRUNE, TAKE_SLOT, TAKE_TURN,
};

/// One client's next step.
pub struct Step<'a> {
    pub bounds: &'a Bounds,
    pub p: &'a Protections,
    pub state: &'a mut State,
    pub client: usize,
}

impl Step<'_> {
    /// Runs the step. Returns `None` if it waits, or if there is none.
    pub fn take(mut self) -> Option<()> {
        let next = std::mem::replace(&mut self.state.clients[self.client].next, Next::Idle);
        match next {
            Next::Idle | Next::Open => return None,
            Next::LockSlot0 => self.lock_slot_0(),
            Next::Look => self.look(),
            Next::LockOthers { rows, left } => self.lock_others(rows, left),
            Next::TakeTurn => self.take_turn()?,
            Next::ExcludeAlone => self.exclude_alone(),
            Next::ReadUnderWay { busy } => self.read_under_way(busy),
            Next::ReadCommitted(search) => self.read_committed(search),
            Next::AskForLock { search, left } => self.ask_for_lock(search, left),
            Next::TakeSlots { search, left } => self.take_slots(search, left),
            Next::Settle(search) => self.settle(search),
            Next::Write(search) => self.write_beside(&search),
            Next::Guard { slot } => self.guard(slot)?,
            Next::Renew { slot } => self.change(slot, true)?,
            Next::Release { slot } => self.change(slot, false)?,
            Next::Revoke { slot } => self.revoke(slot)?,
            Next::LockToPrune(row) => self.lock_to_prune(row),
            Next::Prune(row) => self.prune(row),
            Next::Visible => self.state.give_up(self.client),
        }
        Some(())
    }

    fn go_on(&mut self, next: Next) {
        self.state.clients[self.client].next = next;
    }

    /// Ends a failed attempt: it releases all its locks.
    fn lose(&mut self) {
        self.state.give_up(self.client);
    }

    fn request(&self) -> AcquireRequest {
        AcquireRequest { mode: self.kind().mode(), reclaim: false }
    }

    fn kind(&self) -> Kind {
        self.bounds.kinds[self.client]
    }

    /// Returns the slot for a new grant, and the slots of the grants that it ends.
    fn decide(&self, rows: &[SlotRow], existing: &[ExistingGrant]) -> Option<(i32, Vec<i32>)> {
        let now = at(self.state.clock);
        let Acquire::Grant { slot } = grant::admit(existing, &self.request(), now) else {
            return None;
        };
        let both = rows.iter().zip(existing);
        let is_ended = |row: &SlotRow, seat: &ExistingGrant| {
            self.p.end_others && row.slot != slot && grant::ends(&self.request(), seat, now)
        };
        let ended = both.filter(|(row, seat)| is_ended(row, seat)).map(|(row, _)| row.slot);
        Some((slot, ended.collect()))
    }

    /// Writes the grant, and closes the grants that it ends. `seen` are the rows by which that was decided.
    fn write(&mut self, seen: &[SlotRow], slot: i32, ended: &[i32]) {
        let (kind, grant, expires) = (self.kind(), self.state.grants, self.state.clock + TTL);
        self.state.grants += 1;
        let closed = |slot: &i32| self.state.row(*slot).map(|row| SlotRow { closed: true, ..row });
        let mut writes: Vec<Write> = ended.iter().filter_map(closed).map(Write::Put).collect();
        // A grant that is ended or replaced has expired (or had when that was decided), and is the one that the
        // decision saw.
        let mut replaced = ended.iter().chain([&slot]).filter_map(|slot| self.state.row(*slot));
        if replaced.any(|row| row.is_live(self.state.clock) && !seen.contains(&row)) {
            self.state.violation.get_or_insert(APART);
        }
        let new =
            SlotRow { slot, kind, grant, renewals: 0, expires, closed: false, released: false };
        writes.push(Write::Put(new));
        self.state.clients[self.client].writes = writes;
        self.state.clients[self.client].grant = Some(grant);
    }

    // Exclusive --------------------------------------------------------------------------------------------------

    fn lock_slot_0(&mut self) {
        if self.state.take(self.client, ACQUIRE_EXCLUSIVE, 0) {
            self.go_on(Next::Look);
        } else {
            self.lose();
        }
    }

    fn is_any_being_deleted(&self) -> bool {
        let deleted = |row: &SlotRow| self.state.is_being_deleted(self.client, row.slot);
        self.p.see_deletions && self.state.rows.iter().any(deleted)
    }

    fn look(&mut self) {
        if self.is_any_being_deleted() {
            return self.lose();
        }
        let rows = self.state.rows.clone();
        let others = rows.iter().map(|row| row.slot).filter(|slot| *slot != 0);
        let left: Vec<i32> = others.filter(|_| self.p.own_every_slot).collect();
        if left.is_empty() {
            return self.decide_alone(&rows);
        }
        self.go_on(Next::LockOthers { rows, left });
    }

    fn lock_others(&mut self, rows: Vec<SlotRow>, mut left: Vec<i32>) {
        let slot = left.remove(0);
        let is_closed = rows.iter().any(|row| row.slot == slot && row.closed);
        let is_free = match is_closed {
            true => self.state.is_free(self.client, ACQUIRE_EXCLUSIVE, slot),
            false => self.state.take(self.client, ACQUIRE_EXCLUSIVE, slot),
        };
        if !is_free {
            self.lose();
        } else if left.is_empty() {
            self.decide_alone(&rows);
        } else {
            self.go_on(Next::LockOthers { rows, left });
        }
    }

    fn decide_alone(&mut self, seen: &[SlotRow]) {
        if self.is_any_being_deleted() {
            return self.lose();
        }
        let again = self.p.read_again_under_all && seen.iter().any(|row| row.slot != 0);
        let rows = if again { self.state.rows.clone() } else { seen.to_vec() };
        let seat =
            |row: &SlotRow| ExistingGrant { grant: row.as_grant(), mine: false, guarded: false };
        let existing: Vec<ExistingGrant> = rows.iter().map(seat).collect();
        match self.decide(&rows, &existing) {
            Some((slot, ended)) => {
                self.write(&rows, slot, &ended);
                self.state.answer(self.client, self.p);
            }
            None => self.lose(),
        }
    }

    // Shared and slots -------------------------------------------------------------------------------------------

    fn take_turn(&mut self) -> Option<()> {
        if self.p.turn && !self.state.take(self.client, TAKE_TURN, 0) {
            return None;
        }
        self.go_on(Next::ExcludeAlone);
        Some(())
    }

    fn exclude_alone(&mut self) {
        if !self.p.exclude_alone || self.state.take(self.client, BLOCK_EXCLUSIVE, 0) {
            self.go_on(Next::ReadUnderWay { busy: Vec::new() });
        } else {
            self.lose();
        }
    }

    fn read_under_way(&mut self, busy: Vec<i32>) {
        let written = self.state.others(self.client).flat_map(|other| &other.writes);
        let under_way = written.filter_map(|write| match write {
            Write::Put(row) => Some(*row),
            Write::Delete(_) => None,
        });
        let under_way = under_way.filter(|_| self.p.see_under_way).collect();
        let mark = self.state.clients[self.client].locks.len();
        self.go_on(Next::ReadCommitted(Search { under_way, busy, mark, ..Search::default() }));
    }

    fn read_committed(&mut self, mut search: Search) {
        search.rows = self.state.rows.clone();
        let over = search.rows.iter().filter(|row| !row.is_live(self.state.clock));
        let left: Vec<i32> = over.filter(|_| self.p.ask_for_locks).map(|row| row.slot).collect();
        if left.is_empty() {
            return self.choose(search);
        }
        self.go_on(Next::AskForLock { search, left });
    }

    fn ask_for_lock(&mut self, mut search: Search, mut left: Vec<i32>) {
        let slot = left.remove(0);
        if !self.state.is_free(self.client, TAKE_SLOT, slot) {
            search.guarded.push(slot);
        }
        if left.is_empty() {
            return self.choose(search);
        }
        self.go_on(Next::AskForLock { search, left });
    }

    fn choose(&mut self, mut search: Search) {
        let (mode, now) = (self.request().mode, at(self.state.clock));
        let seat = |row: &SlotRow| ExistingGrant {
            grant: row.as_grant(),
            mine: false,
            guarded: search.guarded.contains(&row.slot),
        };
        let mut existing: Vec<ExistingGrant> = search.rows.iter().map(seat).collect();
        let under_way: Vec<_> = search.under_way.iter().map(SlotRow::as_grant).collect();
        grant::add_under_way(&mut existing, &under_way, mode, now);
        for slot in &search.busy {
            match existing.iter_mut().find(|seat| seat.grant.slot == *slot) {
                Some(seat) => seat.guarded = true,
                None => existing.push(ExistingGrant::in_the_making(*slot, mode)),
            }
        }
        match self.decide(&search.rows, &existing) {
            Some((slot, ended)) => {
                let left = ended.iter().copied().chain([slot]).collect();
                (search.slot, search.ended) = (slot, ended);
                self.go_on(Next::TakeSlots { search, left });
            }
            None => self.lose(),
        }
    }

    fn take_slots(&mut self, mut search: Search, mut left: Vec<i32>) {
        let slot = left.remove(0);
        if self.p.take_slot && !self.state.take(self.client, TAKE_SLOT, slot) {
            search.busy.push(slot);
        }
        self.go_on(match left.is_empty() {
            true => Next::Settle(search),
            false => Next::TakeSlots { search, left },
        });
    }

    /// Reads again, and goes on to the write if all locks were taken and nothing has changed.
    fn settle(&mut self, mut search: Search) {
        let slots: Vec<i32> = search.ended.iter().copied().chain([search.slot]).collect();
        let deleted =
            |slot: &&i32| self.p.see_deletions && self.state.is_being_deleted(self.client, **slot);
        let busy = slots.iter().filter(deleted).copied().collect::<Vec<_>>();
        search.busy.extend(busy);
        let then = |slot: i32| search.rows.iter().find(|row| row.slot == slot).copied();
        let same = slots.iter().all(|slot| then(*slot) == self.state.row(*slot));
        let is_busy = slots.iter().any(|slot| search.busy.contains(slot));
        if is_busy || self.p.settle && !same {
            self.state.clients[self.client].locks.truncate(search.mark);
            return self.go_on(Next::ReadUnderWay { busy: search.busy });
        }
        self.go_on(Next::Write(search));
    }

    fn write_beside(&mut self, search: &Search) {
        self.write(&search.rows, search.slot, &search.ended);
        self.state.answer(self.client, self.p);
    }

    // Guards, changes and prunes ---------------------------------------------------------------------------------

    /// Takes the lock, reads the row again and decides.
    fn guard(&mut self, slot: i32) -> Option<()> {
        if self.p.guard_lock && !self.state.take(self.client, GUARD, slot) {
            return None;
        }
        let now = at(self.state.clock);
        let speaks = |row: &SlotRow| row.as_grant().speaks(row.token(), now, Epoch::FIRST);
        match self.own_row(slot).filter(speaks) {
            Some(row) => {
                self.state.clients[self.client].guards = Some(row);
                self.state.answer(self.client, self.p);
            }
            None => self.lost_grant(),
        }
        Some(())
    }

    /// Returns the row of the client's grant.
    fn own_row(&self, slot: i32) -> Option<SlotRow> {
        let grant = self.state.clients[self.client].grant;
        self.state.row(slot).filter(|row| Some(row.grant) == grant)
    }

    /// The client learns that its grant is lost.
    fn lost_grant(&mut self) {
        self.state.clients[self.client].grant = None;
        self.lose();
    }

    fn change(&mut self, slot: i32, renew: bool) -> Option<()> {
        if !self.state.take(self.client, CHANGE, slot) {
            return None;
        }
        let now = at(self.state.clock);
        let renewable = |row: &SlotRow| row.as_grant().renewable(row.token(), now);
        let Some(row) = self.own_row(slot).filter(renewable) else {
            self.lost_grant();
            return Some(());
        };
        let row = match renew {
            true => SlotRow { expires: self.state.clock + TTL, renewals: row.renewals + 1, ..row },
            false => SlotRow { closed: true, released: true, ..row },
        };
        self.state.clients[self.client].writes = vec![Write::Put(row)];
        self.state.answer(self.client, self.p);
        Some(())
    }

    /// Ends a live grant, whoever has it.
    fn revoke(&mut self, slot: i32) -> Option<()> {
        if !self.state.take(self.client, CHANGE, slot) {
            return None;
        }
        match self.state.row(slot).filter(|row| row.is_live(self.state.clock)) {
            Some(row) => {
                self.state.clients[self.client].writes =
                    vec![Write::Put(SlotRow { closed: true, released: true, ..row })];
                self.state.answer(self.client, self.p);
            }
            None => self.lose(),
        }
        Some(())
    }

    fn lock_to_prune(&mut self, row: SlotRow) {
        if !self.p.prune_locks || self.state.take(self.client, PRUNE, row.slot) {
            self.go_on(Next::Prune(row));
        } else {
            self.lose();
        }
    }

    /// Reads the row again, deletes it and releases the lock, long before the commit.
    fn prune(&mut self, seen: SlotRow) {
        let slot = seen.slot;
        let is_over = |row: &SlotRow| !row.is_live(self.state.clock);
        let found = match self.p.prune_reads_again {
            true => self.state.row(slot).filter(is_over),
            false => self.state.row(slot),
        };
        let deleted = self.p.see_deletions && self.state.is_being_deleted(self.client, slot);
        let Some(found) = found.filter(|_| !deleted) else { return self.lose() };
        let guards = |other: &Client| other.guards.is_some_and(|row| row.slot == slot);
        let guarded = self.state.others(self.client).any(guards);
        if found.is_live(self.state.clock) || guarded {
            self.state.violation.get_or_insert(NOT_PRUNED);
        }
        self.state.clients[self.client].writes = vec![Write::Delete(slot)];
        self.state.clients[self.client].locks.clear();
        self.go_on(Next::Open);
    }
}
