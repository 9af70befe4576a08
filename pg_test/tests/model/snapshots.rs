//! A model of snapshots: a transaction at REPEATABLE READ that relies on a grant sees all guarded work of earlier
//! holders of the lease.
//!
//! Snapshots are taken at any moment, and guarded transactions commit at any moment that the locks allow. A grant may
//! end at any moment, which stands for its expiry, a release, a revocation, a reclaim and the end of its session: none
//! of these takes the locks of guards. A prepared transaction also stands for a commit that waits for a synchronous
//! standby: its work is invisible, and its locks remain. The extension's own rules decide which session gets the grant,
//! which locks conflict, and which grant may be relied on.

use crate::locking::Kind;
use crate::search::{self, Held, holds, searches};
use Kind::{Alone, Shared, Slots};
use pg_test::rules::grant::{self, Acquire, AcquireRequest, ExistingGrant, Grant, Phase};
use pg_test::rules::locks::*;
use pg_test::rules::snapshot::{InSnapshot, in_snapshot};
use pg_test::rules::{Epoch, Instant, Token};
use stateright::{Model, Property};

/// A row of the lease table: the latest grant of its slot.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct SnapshotRow {
    slot: i32,
    kind: Kind,
    /// The number of the grant among all grants ever made.
    grant: usize,
    /// The number that it was granted with: its token.
    number: u8,
    renewed: bool,
    over: bool,
}

impl SnapshotRow {
    fn token(&self) -> Token {
        Token::from_bigint(i64::from(self.number) + 1)
    }

    /// Returns the grant in the rules' terms.
    fn as_grant(&self) -> Grant {
        let expires_at = if self.over { NOW } else { Instant::LATEST };
        Grant { expires_at, ..search::grant(self.slot, self.kind.mode(), self.token()) }
    }

    /// Returns true if this grant held the lease before a new one in that slot. Grants that live beside each other hold
    /// it together.
    fn is_before(&self, slot: i32, kind: Kind) -> bool {
        self.slot == slot || self.kind.excludes(kind)
    }
}

/// The clock stands still: what has expired had expired before.
const NOW: Instant = Instant::EARLIEST;

/// The committed grants, which a snapshot shows.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct World {
    rows: Vec<SnapshotRow>,
    /// The number of committed guarded transactions, by grant.
    work: Vec<u8>,
}

impl World {
    fn put(&mut self, row: SnapshotRow) {
        self.rows.retain(|other| other.slot != row.slot);
        self.rows.push(row);
        self.rows.sort_by_key(|row| row.slot);
    }

    fn work_of(&self, grant: usize) -> u8 {
        self.work.get(grant).copied().unwrap_or(0)
    }
}

/// An open transaction.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct Transaction {
    /// The snapshot, at REPEATABLE READ and above.
    snapshot: Option<World>,
    locks: Vec<Held>,
    /// The rows that it has written.
    rows: Vec<SnapshotRow>,
    /// The grants that it relies on: it writes something under each.
    guards: Vec<usize>,
}

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Action {
    ReadCommitted(usize),
    /// The transaction takes its snapshot at once.
    RepeatableRead(usize),
    Acquire(usize, Kind),
    /// The transaction guards the grant in that slot, and writes under it.
    Guard(usize, i32),
    Renew(usize, i32),
    /// The transaction rolls back to a savepoint at its beginning and keeps its snapshot. (A commit is then a
    /// rollback.)
    UndoAll(usize),
    Commit(usize),
    Prepare(usize),
    CommitPrepared(usize),
    /// The grant in that slot ends.
    End(i32),
    /// The row of that slot is deleted.
    Prune(i32),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct State {
    world: World,
    /// Each session's transaction.
    sessions: Vec<Option<Transaction>>,
    prepared: Vec<Transaction>,
    /// All grants that were made, each with those that held the lease before it.
    grants: Vec<(SnapshotRow, Vec<usize>)>,
    begun: u8,
    acquired: usize,
    /// True if a transaction relies on a grant and does not see the work of an earlier holder.
    lacks_work: bool,
}

impl State {
    fn open(&self, session: usize) -> Option<&Transaction> {
        self.sessions[session].as_ref()
    }

    /// Returns all transactions but that session's.
    fn others(&self, session: usize) -> impl Iterator<Item = &Transaction> {
        let sessions = self.sessions.iter().enumerate().filter(move |(n, _)| *n != session);
        sessions.filter_map(|(_, open)| open.as_ref()).chain(&self.prepared)
    }

    fn is_free(&self, session: usize, step: LockStep, slot: i32) -> bool {
        search::is_free(self.others(session).flat_map(|other| &other.locks), step, slot)
    }

    /// Takes locks as the extension does: all at once, or none. Then the call waits or has failed.
    fn lock(&mut self, session: usize, steps: &[(LockStep, i32)]) -> Option<()> {
        let free = steps.iter().all(|(step, slot)| self.is_free(session, *step, *slot));
        let taken = steps.iter().map(|(step, slot)| (step.lock, *slot, step.mode));
        free.then(|| self.sessions[session].as_mut().map(|open| open.locks.extend(taken)))?
    }

    /// Returns the rows that the session sees now.
    fn rows(&self, session: usize) -> Vec<SnapshotRow> {
        let mut seen = self.world.clone();
        self.open(session).into_iter().flat_map(|open| &open.rows).for_each(|row| seen.put(*row));
        seen.rows
    }

    fn row(&self, session: usize, slot: i32) -> Option<SnapshotRow> {
        self.rows(session).into_iter().find(|row| row.slot == slot)
    }

    fn write(&mut self, session: usize, row: SnapshotRow) {
        let written = &mut self.sessions[session].as_mut().expect("open").rows;
        written.retain(|other| other.slot != row.slot);
        written.push(row);
    }

    fn commit(&mut self, transaction: Transaction) {
        transaction.rows.into_iter().for_each(|row| self.world.put(row));
        self.world.work.resize(self.grants.len(), 0);
        transaction.guards.into_iter().for_each(|grant| self.world.work[grant] += 1);
    }

    /// Returns true if the session's snapshot lacks work of an earlier holder than that grant, done or still possible.
    fn lacks(&self, session: usize, snapshot: &World, grant: usize) -> bool {
        self.grants[grant].1.iter().any(|before| {
            snapshot.work_of(*before) < self.world.work_of(*before)
                || self.others(session).any(|other| other.guards.contains(before))
        })
    }
}

/// The rule for which grants may be relied on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rule {
    /// The extension's rule: the grants that the snapshot shows.
    Visible,
    /// All grants.
    Any,
    /// The grants that the snapshot shows, and the transaction's own.
    VisibleOrOwn,
    /// The grants whose number the snapshot shows.
    VisibleNumber,
    /// The grants of a lease of which the snapshot shows any grant.
    VisibleLease,
}

/// Two sessions of one lease. Each bounded event may happen at any moment.
#[derive(Clone, Copy, Debug)]
struct Lease {
    /// The kinds of acquires, by either session.
    kinds: &'static [Kind],
    transactions: u8,
    acquires: usize,
    rule: Rule,
    /// Guards take their locks.
    guard_lock: bool,
    /// Locks are held until the transaction's work is visible, not only until its commit is durable.
    locks_until_visible: bool,
    /// Numbers come from another system (an adopted lease's): once all rows are deleted, they start over.
    numbers_recur: bool,
    /// Beside acquires and guards there are renewals, savepoints and prunes.
    all_else: bool,
}

/// Each session acquires the lease exclusively.
const ALONE: Lease = Lease {
    kinds: &[Alone],
    transactions: 4,
    acquires: 2,
    rule: Rule::Visible,
    guard_lock: true,
    locks_until_visible: true,
    numbers_recur: false,
    all_else: true,
};
/// Readers and writers.
const READERS: Lease =
    Lease { kinds: &[Alone, Shared], transactions: 3, acquires: 1, all_else: false, ..ALONE };
/// Slots and writers.
const SLOTS: Lease = Lease { kinds: &[Alone, Slots(2)], ..READERS };

impl Lease {
    fn acquire(&self, state: &mut State, session: usize, kind: Kind) -> Option<()> {
        let rows = state.rows(session);
        let guards =
            |row: &SnapshotRow| state.open(session).is_some_and(|t| t.guards.contains(&row.grant));
        let guarded = |row: &SnapshotRow| {
            let asks = row.over && kind != Alone;
            guards(row) || asks && !state.is_free(session, TAKE_SLOT, row.slot)
        };
        let seen = |row: &SnapshotRow| ExistingGrant {
            grant: row.as_grant(),
            mine: false,
            guarded: guarded(row),
        };
        let mut existing: Vec<ExistingGrant> = rows.iter().map(seen).collect();
        if kind != Alone {
            let under_way = state.others(session).flat_map(|other| &other.rows);
            let under_way: Vec<Grant> = under_way.map(SnapshotRow::as_grant).collect();
            grant::add_under_way(&mut existing, &under_way, kind.mode(), NOW);
        }
        let request = AcquireRequest { mode: kind.mode(), reclaim: false };
        let Acquire::Grant { slot } = grant::admit(&existing, &request, NOW) else { return None };
        let ended = rows.iter().zip(&existing).filter(|(_, seen)| grant::ends(&request, seen, NOW));
        let ended: Vec<i32> = ended.map(|(row, _)| row.slot).filter(|at| *at != slot).collect();
        let steps: Vec<(LockStep, i32)> = match kind {
            Alone => {
                let others = rows.iter().map(|row| row.slot).filter(|slot| *slot != 0);
                [0].into_iter().chain(others).map(|slot| (ACQUIRE_EXCLUSIVE, slot)).collect()
            }
            _ => {
                let taken = ended.iter().chain([&slot]).map(|slot| (TAKE_SLOT, *slot));
                [(BLOCK_EXCLUSIVE, 0)].into_iter().chain(taken).collect()
            }
        };
        state.lock(session, &steps)?;
        let grant = state.grants.len();
        let next = rows.iter().map(|row| row.number + 1).max().unwrap_or(0);
        let number = if self.numbers_recur { next } else { grant as u8 };
        let row = SnapshotRow { slot, kind, grant, number, renewed: false, over: false };
        let earlier = state.grants.iter().filter(|(other, _)| other.is_before(slot, kind));
        let before = earlier.map(|(other, _)| other.grant).collect();
        state.grants.push((row, before));
        state.write(session, row);
        state.acquired += 1;
        (state.acquired <= self.acquires).then_some(())
    }

    /// Returns true if the transaction may rely on the grant, by the rule under test.
    fn allows(&self, state: &State, snapshot: &World, row: &SnapshotRow) -> bool {
        let is_it = |other: &SnapshotRow| match self.rule {
            Rule::VisibleNumber => other.number == row.number,
            Rule::VisibleLease => true,
            _ => other.grant == row.grant,
        };
        let shows = |world: &World| world.rows.iter().any(is_it);
        match in_snapshot(shows(snapshot), || shows(&state.world)) {
            InSnapshot::Visible => true,
            InSnapshot::Later => self.rule == Rule::Any,
            InSnapshot::Own => matches!(self.rule, Rule::Any | Rule::VisibleOrOwn),
        }
    }

    fn guard(&self, state: &mut State, session: usize, slot: i32) -> Option<()> {
        let row = state.row(session, slot)?;
        if self.guard_lock {
            state.lock(session, &[(GUARD, slot)])?;
        }
        row.as_grant().speaks(row.token(), NOW, Epoch::FIRST).then_some(())?;
        let open = state.open(session)?;
        (!open.guards.contains(&row.grant)).then_some(())?;
        if let Some(snapshot) = &open.snapshot {
            self.allows(state, snapshot, &row).then_some(())?;
            state.lacks_work = state.lacks(session, snapshot, row.grant);
        }
        state.sessions[session].as_mut()?.guards.push(row.grant);
        Some(())
    }

    fn carry_out(&self, state: &mut State, action: Action) -> Option<()> {
        let begin = |state: &mut State, session: usize, snapshot| {
            state.begun += 1;
            state.sessions[session] = Some(Transaction { snapshot, ..Transaction::default() });
            (state.begun <= self.transactions).then_some(())
        };
        match action {
            Action::ReadCommitted(s) => begin(state, s, None)?,
            Action::RepeatableRead(s) => {
                let snapshot = Some(state.world.clone());
                begin(state, s, snapshot)?;
            }
            Action::Acquire(s, kind) => self.acquire(state, s, kind)?,
            Action::Guard(s, slot) => self.guard(state, s, slot)?,
            Action::Renew(s, slot) => {
                state.lock(s, &[(CHANGE, slot)])?;
                let row = state.row(s, slot)?;
                (!row.renewed && !row.over).then_some(())?;
                state.write(s, SnapshotRow { renewed: true, ..row });
            }
            Action::UndoAll(s) => {
                let snapshot = state.sessions[s].take()?.snapshot;
                state.sessions[s] = Some(Transaction { snapshot, ..Transaction::default() });
            }
            Action::Commit(s) => {
                let open = state.sessions[s].take()?;
                state.commit(open);
            }
            Action::Prepare(s) => {
                let mut open = state.sessions[s].take()?;
                (!open.rows.is_empty() || !open.guards.is_empty()).then_some(())?;
                if !self.locks_until_visible {
                    open.locks.clear();
                }
                state.prepared.push(open);
            }
            Action::CommitPrepared(n) => {
                let prepared = state.prepared.remove(n);
                state.commit(prepared);
            }
            Action::End(slot) => {
                state.world.rows.iter_mut().find(|row| row.slot == slot)?.over = true;
            }
            Action::Prune(slot) => {
                let nobody = state.sessions.len();
                let over = |row: &SnapshotRow| {
                    row.slot == slot && row.as_grant().phase(NOW) != Phase::Held
                };
                let is_over = state.world.rows.iter().any(over);
                (is_over && state.is_free(nobody, PRUNE, slot)).then_some(())?;
                state.world.rows.retain(|row| row.slot != slot);
            }
        }
        Some(())
    }
}

impl Model for Lease {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        // One session holds the lease already, or all slots are taken.
        let state = |kind: &Kind| {
            let number = if let Slots(n) = kind { *n as u8 } else { 1 };
            let row = |n: u8| {
                let (slot, grant) = (i32::from(n), usize::from(n));
                SnapshotRow { slot, kind: *kind, grant, number: n, renewed: false, over: false }
            };
            let rows: Vec<SnapshotRow> = (0..number).map(row).collect();
            State {
                grants: rows.iter().map(|row| (*row, Vec::new())).collect(),
                world: World { rows, work: vec![0; usize::from(number)] },
                sessions: vec![None; 2],
                prepared: Vec::new(),
                begun: 0,
                acquired: 0,
                lacks_work: false,
            }
        };
        self.kinds.iter().map(state).collect()
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for (session, open) in state.sessions.iter().enumerate() {
            use Action::*;
            match open {
                None => actions.extend([ReadCommitted(session), RepeatableRead(session)]),
                Some(_) => {
                    for row in state.rows(session) {
                        actions.push(Guard(session, row.slot));
                        actions.extend(self.all_else.then_some(Renew(session, row.slot)));
                    }
                    actions.extend(self.kinds.iter().map(|kind| Acquire(session, *kind)));
                    actions.extend([Commit(session), Prepare(session)]);
                    actions.extend(self.all_else.then_some(UndoAll(session)));
                }
            }
        }
        actions.extend((0..state.prepared.len()).map(Action::CommitPrepared));
        for row in &state.world.rows {
            actions.push(Action::End(row.slot));
            actions.extend(self.all_else.then_some(Action::Prune(row.slot)));
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        self.carry_out(&mut next, action)?;
        (next != *state && !state.lacks_work).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Lease>> {
        /// Returns true if a transaction at REPEATABLE READ guards a grant for which `of` is true.
        fn relies(state: &State, of: impl Fn(&World, usize) -> bool) -> bool {
            let open = state.sessions.iter().flatten();
            let mut keeping = open.filter_map(|open| Some((open.snapshot.as_ref()?, &open.guards)));
            keeping.any(|(snapshot, guards)| guards.iter().any(|grant| of(snapshot, *grant)))
        }
        vec![
            Property::<Lease>::always(SEES_ALL, |_, state| !state.lacks_work),
            // This shows that the property above does not hold merely because nothing happens.
            Property::<Lease>::sometimes("a successor relies on its grant", |_, state| {
                relies(state, |snapshot, grant| {
                    state.grants[grant].1.iter().any(|before| snapshot.work_of(*before) > 0)
                })
            }),
            Property::<Lease>::sometimes("a grant renewed since is relied on", |lease, state| {
                !lease.all_else
                    || relies(state, |snapshot, grant| {
                        let renewed = |world: &World| {
                            world.rows.iter().any(|row| row.grant == grant && row.renewed)
                        };
                        renewed(&state.world) && !renewed(snapshot)
                    })
            }),
        ]
    }
}

/// A session that relies on a grant sees all guarded work of earlier holders.
const SEES_ALL: &str = "who relies on a grant sees its predecessors' work";

/// Checks that a search finds a transaction that lacks an earlier holder's work.
fn breaks(lease: Lease) {
    println!("{lease:?}:");
    search::breaks(lease, SEES_ALL);
}

searches! {
    who_relies_on_a_grant_that_its_snapshot_shows_sees_its_predecessors_work =>
        holds(ALONE),
        holds(Lease { numbers_recur: true, ..ALONE });
    so_it_does_beside_others => holds(READERS), holds(SLOTS);
    who_relies_on_any_grant_does_not =>
        breaks(Lease { rule: Rule::Any, ..ALONE }),
        breaks(Lease { rule: Rule::Any, ..READERS }),
        breaks(Lease { rule: Rule::Any, ..SLOTS });
    nor_does_who_relies_on_its_own => breaks(Lease { rule: Rule::VisibleOrOwn, ..ALONE });
    nor_who_relies_on_another_grant_of_the_lease_that_it_sees =>
        breaks(Lease { rule: Rule::VisibleLease, ..ALONE });
    nor_who_identifies_a_grant_by_a_number_that_may_recur =>
        breaks(Lease { rule: Rule::VisibleNumber, numbers_recur: true, ..ALONE });
    the_rule_alone_is_not_enough_without_the_guards_locks =>
        breaks(Lease { guard_lock: false, ..ALONE }),
        breaks(Lease { locks_until_visible: false, ..ALONE });
}
