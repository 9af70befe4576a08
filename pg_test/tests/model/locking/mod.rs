//! A model of one lease whose locks are taken one at a time: between any two steps of a call, other clients may take
//! theirs.
//!
//! It has exclusive, shared and slot acquires, guards, renewals, releases and prunes, with the locks and decisions of
//! the extension's rules. An acquire, which is one event in the model of the whole system, is a search of many steps
//! here. Tokens, crashes and ended sessions are left to that model.

mod protections;
mod state;
mod steps;

use crate::search::{self, never, once_more, searches};
use protections::{Bounds, Protections};
pub use state::Kind;
use state::{Next, State};
use stateright::{Model, Property};
use steps::Step;

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Action {
    /// The client calls `lease_acquire`.
    Acquire(usize),
    /// The client guards its grant.
    Guard(usize),
    Renew(usize),
    Release(usize),
    /// The client revokes the grant in a slot.
    Revoke(usize, i32),
    /// The client prunes the row of a slot.
    Prune(usize, i32),
    /// The next step of what the client has called.
    Step(usize),
    Commit(usize),
    RollBack(usize),
    Second,
    StepBack,
}

/// Clients of one lease, and the clock.
struct Lease {
    bounds: Bounds,
    protections: Protections,
}

impl Lease {
    fn idle(&self, state: &State, index: usize, actions: &mut Vec<Action>) {
        let b = &self.bounds;
        if state.calls == b.calls {
            return;
        }
        let over = state.rows.iter().filter(|row| b.prunes && !row.is_live(state.clock));
        actions.extend(over.map(|row| Action::Prune(index, row.slot)));
        let live = state.rows.iter().filter(|row| b.revocations && row.is_live(state.clock));
        actions.extend(live.map(|row| Action::Revoke(index, row.slot)));
        if state.clients[index].grant.is_none() {
            actions.push(Action::Acquire(index));
            return;
        }
        actions.extend(b.guards.then_some(Action::Guard(index)));
        actions.extend(b.renewals.then_some(Action::Renew(index)));
        actions.extend(b.releases.then_some(Action::Release(index)));
        // A client whose grant is gone acquires again, with no memory.
        if !b.guards && !b.renewals && !b.releases {
            actions.push(Action::Acquire(index));
        }
    }

    fn carry_out(&self, state: &mut State, action: Action) -> Option<()> {
        let (bounds, p) = (&self.bounds, &self.protections);
        if !matches!(
            action,
            Action::Step(_)
                | Action::Commit(_)
                | Action::RollBack(_)
                | Action::Second
                | Action::StepBack
        ) {
            state.calls += 1;
        }
        match action {
            Action::Acquire(c) => {
                state.clients[c].grant = None;
                state.clients[c].next = match bounds.kinds[c] {
                    Kind::Alone => Next::LockSlot0,
                    _ => Next::TakeTurn,
                };
            }
            Action::Guard(c) => self.of_own(state, c, |slot| Next::Guard { slot }),
            Action::Renew(c) => self.of_own(state, c, |slot| Next::Renew { slot }),
            Action::Release(c) => self.of_own(state, c, |slot| Next::Release { slot }),
            Action::Revoke(c, slot) => state.clients[c].next = Next::Revoke { slot },
            Action::Prune(c, slot) => {
                state.clients[c].next = Next::LockToPrune(state.row(slot)?);
            }
            Action::Step(client) => Step { bounds, p, state, client }.take()?,
            Action::Commit(c) => {
                let released = state.clients[c].writes.iter().any(|write| {
                    matches!(write, state::Write::Put(row)
                        if row.closed && Some(row.grant) == state.clients[c].grant)
                });
                if released {
                    state.clients[c].grant = None;
                }
                state.commit(c);
            }
            Action::RollBack(c) => {
                once_more(&mut state.rollbacks, bounds.rollbacks)?;
                state.give_up(c);
                // Nothing remains of a grant that is rolled back.
                let own = state.clients[c].grant;
                if !state.rows.iter().any(|row| Some(row.grant) == own) {
                    state.clients[c].grant = None;
                }
            }
            Action::Second => {
                state.clock += 1;
                (state.clock <= bounds.seconds).then_some(())?;
            }
            Action::StepBack => {
                once_more(&mut state.steps_back, bounds.steps_back)?;
                state.clock = state.clock.checked_sub(1)?;
            }
        }
        state.check();
        Some(())
    }

    /// The client finds the slot of its grant.
    fn of_own(&self, state: &mut State, c: usize, next: impl Fn(i32) -> Next) {
        let own = state.rows.iter().find(|row| Some(row.grant) == state.clients[c].grant);
        match own {
            Some(row) => state.clients[c].next = next(row.slot),
            None => state.clients[c].grant = None,
        }
    }
}

impl Model for Lease {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State::new(&self.bounds)]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.violation.is_some() {
            return;
        }
        for (index, client) in state.clients.iter().enumerate() {
            match client.next {
                Next::Idle => self.idle(state, index, actions),
                Next::Open => actions.extend([Action::Commit(index), Action::RollBack(index)]),
                _ => actions.push(Action::Step(index)),
            }
        }
        actions.extend([Action::Second, Action::StepBack]);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        self.carry_out(&mut next, action)?;
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Lease>> {
        vec![
            never!(Lease, APART),
            never!(Lease, ONE_WRITER),
            never!(Lease, GUARD_EXCLUDES),
            never!(Lease, NOT_PRUNED),
            // These show that the properties above do not hold merely because nothing happens.
            Property::<Lease>::sometimes("grants of each kind are committed", |lease, state| {
                let mut kinds = lease.bounds.kinds.iter();
                let last = kinds.next_back();
                state.grants > 1 && state.rows.iter().any(|row| Some(&row.kind) == last)
            }),
        ]
    }
}

/// No two live grants exclude each other, and there are never more than the slots.
const APART: &str = "grants that exclude each other are apart";
/// No two open transactions have written the same row.
const ONE_WRITER: &str = "a row has one writer";
/// While a transaction relies on a grant, neither its slot nor an excluding grant is granted.
const GUARD_EXCLUDES: &str = "a guard excludes a take-over, whatever its mode";
/// A pruned grant is over, and no transaction relies on it.
const NOT_PRUNED: &str = "what is in use is not pruned";

fn holds(bounds: Bounds) {
    search::holds(Lease { bounds, protections: Protections::ALL });
}

/// Checks that the property breaks without this protection.
fn breaks(bounds: Bounds, property: &'static str, take_away: fn(&mut Protections)) {
    search::breaks(Lease { bounds, protections: Protections::without(take_away) }, property);
}

use Kind::{Alone, Shared, Slots};

/// A writer and two readers.
const READERS: Bounds = Bounds {
    kinds: &[Alone, Shared, Shared],
    calls: 4,
    seconds: 2,
    steps_back: 0,
    rollbacks: 1,
    prunes: false,
    guards: false,
    renewals: false,
    releases: false,
    revocations: false,
};
/// Readers, and two clients that acquire slots.
const MIXED: Bounds = Bounds { kinds: &[Shared, Slots(2), Slots(2)], ..READERS };
/// Clients that acquire slots with different numbers of slots.
const NUMBERS: Bounds = Bounds { kinds: &[Slots(2), Slots(3)], ..READERS };
/// A reader, a slot and a writer.
const ALL_KINDS: Bounds = Bounds { kinds: &[Alone, Slots(2), Shared], calls: 5, ..READERS };
/// Holders guard and renew their grants.
const HOLDERS: Bounds = Bounds { guards: true, renewals: true, rollbacks: 0, ..READERS };
/// Rows are pruned.
const PRUNED: Bounds = Bounds { prunes: true, guards: true, ..READERS };
/// Grants are revoked while transactions guard them.
const REVOKED: Bounds = Bounds { guards: true, revocations: true, calls: 5, seconds: 0, ..READERS };
/// The clock is set back. There is one client of each kind: if two of a kind find an expired grant of another kind, one
/// leaves it to the other to end it, and that one may be rolled back. A clock that is set back then makes the grant
/// current again, which is among the things that are not promised (`docs/tutorial/concepts.md`, Clocks).
const STEPS_BACK: Bounds =
    Bounds { kinds: &[Shared, Slots(2)], steps_back: 1, calls: 5, ..READERS };

searches! {
    readers_and_writers_that_cross_each_other_stay_apart => holds(READERS), holds(HOLDERS);
    readers_and_slots_that_cross_each_other_stay_apart =>
        holds(MIXED),
        holds(Bounds { kinds: MIXED.kinds, ..HOLDERS });
    different_numbers_of_slots_stay_apart =>
        holds(NUMBERS),
        holds(Bounds { kinds: NUMBERS.kinds, ..HOLDERS });
    grants_of_all_kinds_that_cross_each_other_stay_apart =>
        holds(ALL_KINDS),
        holds(Bounds { kinds: ALL_KINDS.kinds, calls: 5, ..HOLDERS });
    prunes_between_the_steps_of_others_break_nothing =>
        holds(PRUNED),
        holds(Bounds { kinds: ALL_KINDS.kinds, ..PRUNED });
    a_clock_set_back_between_the_steps_of_others_breaks_nothing =>
        holds(STEPS_BACK),
        holds(Bounds { kinds: ALL_KINDS.kinds, calls: 4, ..STEPS_BACK });
    an_exclusive_acquire_that_locks_slot_0_alone_passes_a_guard =>
        breaks(Bounds { calls: 5, ..HOLDERS }, GUARD_EXCLUDES, |p| p.own_every_slot = false);
    an_exclusive_acquire_that_does_not_read_again_overlooks_a_renewal =>
        breaks(Bounds { calls: 5, ..HOLDERS }, APART, |p| p.read_again_under_all = false);
    an_exclusive_acquire_that_nobody_excludes_is_not_alone =>
        breaks(READERS, APART, |p| p.exclude_alone = false);
    revocations_of_guarded_grants_let_nobody_pass =>
        holds(Bounds { kinds: MIXED.kinds, ..REVOKED }),
        holds(Bounds { kinds: NUMBERS.kinds, ..REVOKED });
    acquires_that_do_not_take_turns_overlook_each_other =>
        breaks(MIXED, APART, |p| p.turn = false),
        breaks(NUMBERS, APART, |p| p.turn = false);
    acquires_that_see_committed_rows_only_are_granted_together =>
        breaks(MIXED, APART, |p| p.see_under_way = false),
        breaks(NUMBERS, APART, |p| p.see_under_way = false);
    without_a_look_at_its_lock_a_guarded_grant_is_taken_over =>
        breaks(
            Bounds { kinds: MIXED.kinds, calls: 6, rollbacks: 0, ..REVOKED },
            GUARD_EXCLUDES,
            |p| p.ask_for_locks = false
        );
    without_the_slot_s_lock_a_prune_deletes_what_is_being_written =>
        breaks(
            Bounds { kinds: &[Shared, Shared, Slots(2)], rollbacks: 0, ..PRUNED },
            ONE_WRITER,
            |p| p.take_slot = false
        );
    without_a_second_look_at_the_slot_a_grant_is_overwritten => breaks(HOLDERS, APART, |p| p.settle = false);
    a_grant_of_another_mode_that_is_not_ended_comes_back =>
        breaks(STEPS_BACK, APART, |p| p.end_others = false);
    a_row_that_a_prune_is_deleting_is_not_a_free_slot =>
        breaks(PRUNED, ONE_WRITER, |p| p.see_deletions = false),
        breaks(Bounds { kinds: &[Alone, Alone], ..PRUNED }, ONE_WRITER, |p| p.see_deletions = false);
    locks_given_back_before_the_commit_let_two_in => breaks(READERS, APART, |p| p.keep_to_commit = false);
    a_guard_without_locks_excludes_no_mode =>
        breaks(HOLDERS, GUARD_EXCLUDES, |p| p.guard_lock = false),
        breaks(Bounds { kinds: &[Shared, Alone], ..HOLDERS }, GUARD_EXCLUDES, |p| p.guard_lock = false),
        breaks(Bounds { kinds: &[Alone, Slots(2)], ..HOLDERS }, GUARD_EXCLUDES, |p| p.guard_lock = false);
    a_prune_without_the_lock_deletes_what_is_being_granted_or_guarded =>
        breaks(PRUNED, NOT_PRUNED, |p| p.prune_locks = false);
    a_prune_that_does_not_read_again_deletes_a_new_grant =>
        breaks(PRUNED, NOT_PRUNED, |p| p.prune_reads_again = false);
}
