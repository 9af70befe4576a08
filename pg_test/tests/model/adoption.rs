//! Adoption: a lease that somebody else grants. Holders of its numbers, who freeze and thaw at any moment, make their
//! numbers known, guard, write and release; an administrator revokes and forgets; servers crash and fail over.
//!
//! Another service has granted all numbers before the search begins: a holder that comes late was frozen. Between any two
//! steps of a call others take theirs. What becomes of a number, which locks exclude what and which grant a snapshot
//! shows, the extension's own rules decide.

use crate::search::{self, never, once_more, protections};
use pg_test::rules::grant::{self, Adopt, Grant, Mode, Release, Tokens};
use pg_test::rules::locks::*;
use pg_test::rules::snapshot::{age, Age};
use pg_test::rules::{Floor, Instant, Token};
use stateright::{Model, Property};

/// The row of the lease.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Row {
    /// Which adoption it is, among all that were ever made: a number that was forgotten may come again.
    grant: usize,
    number: u8,
    closing: Option<u8>,
    /// The jump that was the latest when it was adopted.
    under: u8,
}

fn token(number: u8) -> Token {
    Token::from_bigint(i64::from(number))
}

fn floor(jumps: u8) -> Floor {
    Floor::at(token(jumps))
}

/// The clock matters to nobody here.
const NOW: Instant = Instant::EARLIEST;

/// What is committed, and so what a snapshot shows.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct World {
    row: Option<Row>,
    /// How many guarded transactions have committed, by grant.
    work: Vec<u8>,
}

impl World {
    fn work_of(&self, grant: usize) -> u8 {
        self.work.get(grant).copied().unwrap_or(0)
    }
}

/// What others may rely on, once a transaction has committed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Promise {
    /// The number was adopted.
    Adopted(u8),
    /// What is older than the number has ended.
    EndedOlder(u8),
    /// The number was released or revoked.
    Over(u8),
    Forgotten,
}

/// A transaction.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct Transaction {
    /// At REPEATABLE READ and above.
    snapshot: Option<World>,
    locks: Vec<LockMode>,
    /// What it has made of the row; None within: deleted.
    written: Option<Option<Row>>,
    /// The grants that it relies on, and their numbers: it writes something under each.
    guards: Vec<(usize, u8)>,
    promises: Vec<Promise>,
    /// Its commit waits for the disk.
    forced: bool,
}

/// How far a session is with its call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Next {
    /// It has no transaction.
    Idle,
    /// It has one, and may commit.
    Open,
    /// It is to adopt its number over this row, and waits for the older grant's guards or not.
    TakeLease {
        wait: bool,
        seen: Option<Row>,
    },
    /// It waits for the lease: who asks for what that excludes waits behind it.
    InQueue {
        seen: Option<Row>,
    },
    /// It has the lease alone.
    Adopt {
        seen: Option<Row>,
    },
    /// It has not, and ends the older grant.
    EndOlder,
    AdoptAgain,
    /// It is to guard this grant, and has then locked it.
    TakeGuard(Row),
    Guard(Row),
    Release,
    Revoke,
}

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Action {
    /// The session begins a transaction; at REPEATABLE READ its snapshot is taken at once.
    Begin(usize, Isolation),
    /// `lease_adopt` looks at the row, without a lock.
    Adopt(usize, Wait),
    Guard(usize),
    Release(usize),
    /// In the middle of its transaction the session is told the next number.
    Learn(usize),
    /// The next step of what the session has called.
    Step(usize),
    /// The session has waited for the lease for as long as it likes.
    TimeIsUp(usize),
    Commit(usize),
    /// Rolled back, killed, or the victim of a deadlock, at any moment.
    RollBack(usize),
    Revoke,
    /// Deletes the row and gives the lock back, long before the commit.
    Forget,
    /// Deletes the row of what is over (which no prune does).
    Prune,
    Jump,
    /// The log is written up to its end.
    WriteLog,
    Crash,
    /// The standby learns all that is on disk.
    Ship,
    /// The standby takes over.
    Promote,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Isolation {
    ReadCommitted,
    RepeatableRead,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Wait {
    No,
    Yes,
}

/// What must not happen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Violation {
    /// A number was adopted while a transaction relied on an older one.
    TookOver,
    /// A transaction of an older number has committed a guarded write after an adoption.
    StaleWrite,
    /// A smaller number than one that was adopted or announced, or one that was released or revoked, was adopted.
    Returned,
    /// It was guarded.
    Spoke,
    /// An adoption that was refused has left the older grant as it was, and nobody is changing that.
    NotEnded,
    /// Two open transactions have written the row.
    TwoWriters,
    /// A number speaks that nobody has adopted since the latest jump.
    NotAdoptedAgain,
    /// Who relies on a grant does not see what was done under those before.
    LacksWork,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct State {
    world: World,
    disk: World,
    standby: World,
    jumps: u8,
    sessions: Vec<(Next, Transaction)>,
    /// The number that each holder has by now; the administrator has none.
    numbers: Vec<u8>,
    /// How many adoptions there were.
    grants: usize,
    /// What was promised, whatever the server remembers: numbers below this one are over,
    least: u8,
    /// and this is the greatest that was adopted.
    adopted: u8,
    calls: u8,
    crashes: u8,
    forgets: u8,
    revocations: u8,
    promotions: u8,
    violation: Option<Violation>,
}

impl State {
    fn others(&self, session: usize) -> impl Iterator<Item = &(Next, Transaction)> {
        self.sessions.iter().enumerate().filter(move |(n, _)| *n != session).map(|(_, s)| s)
    }

    fn open(&mut self, session: usize) -> &mut Transaction {
        &mut self.sessions[session].1
    }

    fn go_on(&mut self, session: usize, next: Next) {
        self.sessions[session].0 = next;
    }

    /// Takes a lock; false where somebody is in the way, or waits for the lease and is to be let go first. (Who has
    /// a lock already goes before those that wait for it.)
    fn take(&mut self, session: usize, step: LockStep) -> bool {
        let had = |(_, other): &(Next, Transaction)| {
            other.locks.iter().any(|mode| step.mode.conflicts_with(*mode))
        };
        let waits = |(next, _): &(Next, Transaction)| matches!(next, Next::InQueue { .. });
        let behind = self.sessions[session].1.locks.is_empty() && self.others(session).any(waits);
        if self.others(session).any(had) || behind {
            return false;
        }
        self.open(session).locks.push(step.mode);
        true
    }

    /// The row as the session sees it now.
    fn row(&self, session: usize) -> Option<Row> {
        self.sessions[session].1.written.unwrap_or(self.world.row)
    }

    fn is_being_deleted(&self, session: usize) -> bool {
        self.others(session).any(|(_, other)| other.written == Some(None))
    }

    fn violate(&mut self, violation: Violation) {
        self.violation.get_or_insert(violation);
    }

    fn write(&mut self, session: usize, row: Option<Row>, promise: Option<Promise>) {
        if self.others(session).any(|(_, other)| other.written.is_some()) {
            self.violate(Violation::TwoWriters);
        }
        let open = self.open(session);
        open.written = Some(row);
        open.promises.extend(promise);
    }

    /// An error: the transaction is rolled back.
    fn roll_back(&mut self, session: usize) {
        self.sessions[session] = (Next::Idle, Transaction::default());
    }

    fn keep_promise(&mut self, promise: Promise) {
        match promise {
            Promise::Adopted(number) => {
                self.adopted = self.adopted.max(number);
                self.least = self.least.max(number);
            }
            Promise::EndedOlder(number) => self.least = self.least.max(number),
            Promise::Over(number) => self.least = self.least.max(number + 1),
            Promise::Forgotten => (self.least, self.adopted) = (0, 0),
        }
    }

    fn sessions_end(&mut self) {
        (0..self.sessions.len()).for_each(|session| self.roll_back(session));
    }

    /// Does the snapshot lack what somebody has done, or may yet do, under a grant before that one?
    fn lacks(&self, session: usize, snapshot: &World, grant: usize) -> bool {
        (0..grant).any(|before| {
            snapshot.work_of(before) < self.world.work_of(before)
                || self.others(session).any(|(_, t)| t.guards.iter().any(|(g, _)| *g == before))
        })
    }
}

// What keeps older numbers out.
protections! {
    /// An adoption takes the lease alone.
    adopt_lock,
    /// It reads the row again then.
    read_again,
    /// It keeps the lock until it commits.
    keep_to_commit,
    /// Its commit, and that of a release, is on disk before anybody learns of it.
    on_disk,
    /// A transaction does not adopt over its own guard.
    own_guard,
    /// A row that an open transaction is forgetting is not written.
    see_deletions,
    /// An adoption that is refused ends the older grant.
    end_older,
    /// It locks the grant for that.
    end_lock,
    /// A guard locks the grant.
    guard_lock,
    /// It reads the row again then.
    guard_reads_again,
    /// A release locks the grant.
    release_lock,
    /// Forgetting takes the lease alone.
    forget_lock,
    /// No prune deletes the row of an adopted lease.
    not_pruned,
    /// A number counts under the jump under which it was adopted.
    by_jump,
    /// A snapshot shows the grant, not only its number.
    by_grant,
}

/// What may happen at any moment, so often.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// The number that each holder has; fellows have the same.
    numbers: &'static [u8],
    calls: u8,
    waits: bool,
    /// A session may go on under the next number.
    learn: bool,
    crashes: u8,
    promotions: u8,
    jumps: u8,
    revocations: u8,
    forgets: u8,
    snapshots: bool,
}

/// An administrator's session, and those of holders.
struct Adopted {
    bounds: Bounds,
    p: Protections,
}

const ADMIN: usize = 0;

impl Adopted {
    /// The row as the rules see it in that session.
    fn grant(&self, state: &State, session: usize, row: &Row) -> Grant {
        let under = if self.p.by_jump { row.under } else { state.jumps };
        Grant {
            slot: 0,
            mode: Mode::Exclusive,
            tokens: Tokens::new(token(row.number), &[]),
            closing: row.closing.map(token),
            closed_here: state.sessions[session].1.written.is_some(),
            expires_at: Instant::LATEST,
            abandoned: false,
            adopted: Some(floor(under)),
        }
    }

    fn judge(&self, state: &State, session: usize, row: Option<Row>) -> Adopt {
        let grants: Vec<Grant> = row.iter().map(|row| self.grant(state, session, row)).collect();
        grant::adopt(&grants, token(state.numbers[session]), floor(state.jumps))
    }

    /// What a look at the row says of the session's number, and so what its adoption does next.
    fn look(&self, state: &mut State, s: usize, wait: bool) {
        let seen = state.row(s);
        match self.judge(state, s, seen) {
            Adopt::Current => state.go_on(s, Next::Open),
            Adopt::AfterJump => state.go_on(s, Next::AdoptAgain),
            Adopt::Greater => state.go_on(s, Next::TakeLease { wait, seen }),
            Adopt::Stale | Adopt::GrantedHere => state.roll_back(s),
        }
    }

    fn take_lease(&self, state: &mut State, s: usize, wait: bool, seen: Option<Row>) {
        let next = match state.take(s, ADOPT) || !self.p.adopt_lock {
            true => Next::Adopt { seen },
            false if wait => Next::InQueue { seen },
            false => Next::EndOlder,
        };
        state.go_on(s, next);
    }

    fn adopt(&self, state: &mut State, s: usize, seen: Option<Row>) -> Option<()> {
        let number = state.numbers[s];
        if self.p.own_guard && !state.open(s).guards.is_empty() {
            state.open(s).locks.pop();
            state.go_on(s, Next::EndOlder);
            return Some(());
        }
        if self.p.see_deletions && state.is_being_deleted(s) {
            // It waits, or is answered NULL.
            return None;
        }
        let row = if self.p.read_again { state.row(s) } else { seen };
        match self.judge(state, s, row) {
            Adopt::Current => {
                state.open(s).locks.pop();
                state.go_on(s, Next::Open);
                return Some(());
            }
            Adopt::AfterJump => {
                state.open(s).locks.pop();
                state.go_on(s, Next::AdoptAgain);
                return Some(());
            }
            Adopt::Greater => {}
            Adopt::Stale | Adopt::GrantedHere => {
                state.roll_back(s);
                return Some(());
            }
        }
        let older = |(_, t): &(Next, Transaction)| t.guards.iter().any(|(_, n)| *n < number);
        if state.sessions.iter().any(older) {
            state.violate(Violation::TookOver);
        }
        if number < state.least {
            state.violate(Violation::Returned);
        }
        let new = Row { grant: state.grants, number, closing: None, under: state.jumps };
        state.grants += 1;
        state.write(s, Some(new), Some(Promise::Adopted(number)));
        state.open(s).forced = true;
        if !self.p.keep_to_commit {
            state.open(s).locks.pop();
        }
        state.go_on(s, Next::Open);
        Some(())
    }

    /// The answer is NULL, whatever comes of it.
    fn end_older(&self, state: &mut State, s: usize) {
        state.go_on(s, Next::Open);
        let number = state.numbers[s];
        if self.p.end_older && self.p.end_lock && !state.take(s, END_OLDER) {
            let changes = |(_, t): &(Next, Transaction)| {
                t.locks.iter().any(|mode| END_OLDER.mode.conflicts_with(*mode))
            };
            let waits = |(next, _): &(Next, Transaction)| matches!(next, Next::InQueue { .. });
            if !state.others(s).any(|other| changes(other) || waits(other)) {
                state.violate(Violation::NotEnded);
            }
            return;
        }
        let row = state.row(s).filter(|_| !self.p.see_deletions || !state.is_being_deleted(s));
        let Some(row) = row else {
            state.open(s).locks.pop();
            return;
        };
        match self.judge(state, s, Some(row)) {
            Adopt::Stale => state.roll_back(s),
            Adopt::Greater if row.closing.is_none_or(|closing| closing < number) => {
                if !self.p.end_older {
                    return state.violate(Violation::NotEnded);
                }
                let ended = Row { closing: Some(number), ..row };
                state.write(s, Some(ended), Some(Promise::EndedOlder(number)));
                state.open(s).forced = true;
            }
            _ => drop(state.open(s).locks.pop()),
        }
    }

    fn adopt_again(&self, state: &mut State, s: usize) -> Option<()> {
        state.take(s, CHANGE).then_some(())?;
        let row = state.row(s);
        match (self.judge(state, s, row), row) {
            (Adopt::AfterJump, Some(row)) => {
                let again = Row { under: state.jumps, ..row };
                state.write(s, Some(again), None);
                state.open(s).forced = true;
                state.go_on(s, Next::Open);
            }
            (Adopt::Current | Adopt::Greater, _) => {
                state.open(s).locks.pop();
                state.go_on(s, Next::Open);
            }
            _ => state.roll_back(s),
        }
        Some(())
    }

    fn guard(&self, state: &mut State, s: usize, seen: Row) {
        let number = state.numbers[s];
        let row = if self.p.guard_reads_again { state.row(s) } else { Some(seen) };
        let speaks =
            |row: &Row| self.grant(state, s, row).speaks(token(number), NOW, floor(state.jumps));
        let Some(row) = row.filter(speaks) else { return state.roll_back(s) };
        if let Some(snapshot) = state.sessions[s].1.snapshot.clone() {
            let is_it = |other: &Row| match self.p.by_grant {
                true => other.grant == row.grant,
                false => other.number == row.number,
            };
            let shows = |world: &World| world.row.iter().any(is_it);
            if age(shows(&snapshot), || shows(&state.world)) != Age::Shown {
                return state.roll_back(s);
            }
            if state.lacks(s, &snapshot, row.grant) {
                state.violate(Violation::LacksWork);
            }
        }
        if number < state.least {
            state.violate(Violation::Spoke);
        }
        if row.under != state.jumps {
            state.violate(Violation::NotAdoptedAgain);
        }
        let open = state.open(s);
        if !open.guards.contains(&(row.grant, number)) {
            open.guards.push((row.grant, number));
        }
        state.go_on(s, Next::Open);
    }

    /// Closes the grant with its own number: the holder's release, or a revocation.
    fn close(&self, state: &mut State, s: usize, number: Option<u8>) -> Option<()> {
        (!self.p.release_lock || state.take(s, CHANGE)).then_some(())?;
        let closable = |row: &Row| {
            let by = token(number.unwrap_or(row.number));
            self.grant(state, s, row).release(by, NOW) == Release::Close
        };
        match state.row(s).filter(closable) {
            Some(row) => {
                let closed = Row { closing: Some(row.number), ..row };
                state.write(s, Some(closed), Some(Promise::Over(row.number)));
                state.open(s).forced = true;
            }
            None => drop(state.open(s).locks.pop()),
        }
        state.go_on(s, Next::Open);
        Some(())
    }

    fn forget(&self, state: &mut State, promise: Option<Promise>) -> Option<()> {
        (state.sessions[ADMIN].0 == Next::Idle).then_some(())?;
        (!self.p.forget_lock || state.take(ADMIN, PRUNE)).then_some(())?;
        (!state.is_being_deleted(ADMIN)).then_some(())?;
        state.row(ADMIN).filter(|row| row.closing.is_some())?;
        state.write(ADMIN, None, promise);
        state.open(ADMIN).locks.clear();
        state.go_on(ADMIN, Next::Open);
        Some(())
    }

    fn step(&self, state: &mut State, s: usize) -> Option<()> {
        match state.sessions[s].0 {
            Next::Idle | Next::Open => return None,
            Next::TakeLease { wait, seen } => self.take_lease(state, s, wait, seen),
            Next::InQueue { seen } => {
                state.go_on(s, Next::Open);
                state.take(s, ADOPT).then_some(())?;
                state.go_on(s, Next::Adopt { seen });
            }
            Next::Adopt { seen } => self.adopt(state, s, seen)?,
            Next::EndOlder => self.end_older(state, s),
            Next::AdoptAgain => self.adopt_again(state, s)?,
            Next::TakeGuard(row) => {
                (!self.p.guard_lock || state.take(s, GUARD)).then_some(())?;
                state.go_on(s, Next::Guard(row));
            }
            Next::Guard(row) => self.guard(state, s, row),
            Next::Release => self.close(state, s, Some(state.numbers[s]))?,
            Next::Revoke => self.close(state, s, None)?,
        }
        Some(())
    }

    fn commit(&self, state: &mut State, s: usize) {
        let (_, done) =
            std::mem::replace(&mut state.sessions[s], (Next::Idle, Transaction::default()));
        if done.guards.iter().any(|(_, number)| *number < state.adopted) {
            state.violate(Violation::StaleWrite);
        }
        if let Some(row) = done.written {
            state.world.row = row;
        }
        if !done.guards.is_empty() {
            state.world.work.resize(state.grants, 0);
            done.guards.iter().for_each(|(grant, _)| state.world.work[*grant] += 1);
        }
        done.promises.iter().for_each(|promise| state.keep_promise(*promise));
        if done.forced && self.p.on_disk {
            state.disk = state.world.clone();
        }
    }

    fn carry_out(&self, state: &mut State, action: Action) -> Option<()> {
        let b = &self.bounds;
        if matches!(action, Action::Adopt(..) | Action::Guard(_) | Action::Release(_)) {
            once_more(&mut state.calls, b.calls)?;
        }
        match action {
            Action::Begin(s, isolation) => {
                let keeps = isolation == Isolation::RepeatableRead;
                state.open(s).snapshot = keeps.then(|| state.world.clone());
                state.go_on(s, Next::Open);
            }
            Action::Adopt(s, wait) => self.look(state, s, wait == Wait::Yes),
            Action::Guard(s) => match state.row(s).filter(|row| row.number == state.numbers[s]) {
                Some(row) => state.go_on(s, Next::TakeGuard(row)),
                None => state.roll_back(s),
            },
            Action::Release(s) => state.go_on(s, Next::Release),
            Action::Learn(s) => {
                state.numbers[s] += 1;
                let greatest = b.numbers.iter().max().copied();
                (b.learn && Some(state.numbers[s]) <= greatest).then_some(())?;
            }
            Action::Step(s) => self.step(state, s)?,
            Action::TimeIsUp(s) => state.go_on(s, Next::EndOlder),
            Action::Commit(s) => self.commit(state, s),
            Action::RollBack(s) => state.roll_back(s),
            Action::Revoke => {
                once_more(&mut state.revocations, b.revocations)?;
                state.go_on(ADMIN, Next::Revoke);
            }
            Action::Forget => {
                once_more(&mut state.forgets, b.forgets)?;
                self.forget(state, Some(Promise::Forgotten))?;
            }
            Action::Prune => {
                (!self.p.not_pruned).then_some(())?;
                self.forget(state, None)?;
            }
            Action::Jump => once_more(&mut state.jumps, b.jumps)?,
            Action::WriteLog => {
                (b.crashes > state.crashes).then_some(())?;
                state.disk = state.world.clone();
            }
            Action::Crash => {
                once_more(&mut state.crashes, b.crashes)?;
                state.sessions_end();
                state.world = state.disk.clone();
            }
            Action::Ship => {
                (b.promotions > state.promotions).then_some(())?;
                state.standby = state.disk.clone();
            }
            Action::Promote => {
                once_more(&mut state.promotions, b.promotions)?;
                state.sessions_end();
                state.world = state.standby.clone();
                state.disk = state.standby.clone();
                state.jumps += 1;
                // What the standby has missed is not promised.
                let least = |row: Row| match row.closing {
                    Some(closing) if closing == row.number => closing + 1,
                    Some(closing) => closing,
                    None => row.number,
                };
                state.least = state.world.row.map_or(0, least);
                state.adopted = state.world.row.map_or(0, |row| row.number);
            }
        }
        Some(())
    }
}

impl Model for Adopted {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let sessions = self.bounds.numbers.len() + 1;
        vec![State {
            world: World::default(),
            disk: World::default(),
            standby: World::default(),
            jumps: 0,
            numbers: [0].iter().chain(self.bounds.numbers).copied().collect(),
            sessions: vec![(Next::Idle, Transaction::default()); sessions],
            grants: 0,
            least: 0,
            adopted: 0,
            calls: 0,
            crashes: 0,
            forgets: 0,
            revocations: 0,
            promotions: 0,
            violation: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.violation.is_some() {
            return;
        }
        for (s, (next, _)) in state.sessions.iter().enumerate() {
            match next {
                Next::Idle if s == ADMIN => {
                    actions.extend([Action::Revoke, Action::Forget, Action::Prune]);
                }
                Next::Idle => {
                    actions.push(Action::Begin(s, Isolation::ReadCommitted));
                    let keeps = self.bounds.snapshots;
                    actions.extend(keeps.then_some(Action::Begin(s, Isolation::RepeatableRead)));
                }
                Next::Open => {
                    actions.extend([Action::Commit(s), Action::RollBack(s)]);
                    if s != ADMIN {
                        actions.push(Action::Adopt(s, Wait::No));
                        actions.extend(self.bounds.waits.then_some(Action::Adopt(s, Wait::Yes)));
                        actions.extend([Action::Guard(s), Action::Release(s), Action::Learn(s)]);
                    }
                }
                Next::InQueue { .. } => {
                    actions.extend([Action::Step(s), Action::TimeIsUp(s), Action::RollBack(s)]);
                }
                _ => actions.extend([Action::Step(s), Action::RollBack(s)]),
            }
        }
        actions.extend([
            Action::Jump,
            Action::WriteLog,
            Action::Crash,
            Action::Ship,
            Action::Promote,
        ]);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        self.carry_out(&mut next, action)?;
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Adopted>> {
        vec![
            never!(Adopted, GUARD_EXCLUDES, TookOver),
            never!(Adopted, NO_STALE_WRITE, StaleWrite),
            never!(Adopted, NEVER_RETURNS, Returned),
            never!(Adopted, NEVER_SPEAKS, Spoke),
            never!(Adopted, OLDER_ENDS, NotEnded),
            never!(Adopted, ONE_WRITER, TwoWriters),
            never!(Adopted, ADOPTED_AGAIN, NotAdoptedAgain),
            never!(Adopted, SEES_ALL, LacksWork),
            // So that the above are not true for want of anything happening.
            Property::<Adopted>::sometimes(
                "the greatest number writes, after another",
                |m, state| {
                    let greatest = m.bounds.numbers.iter().max().copied();
                    let has = state.world.row.filter(|row| Some(row.number) == greatest);
                    let works = has.filter(|row| state.world.work_of(row.grant) > 0);
                    works.is_some_and(|row| (0..row.grant).any(|g| state.world.work_of(g) > 0))
                },
            ),
            Property::<Adopted>::sometimes("an older grant is ended and guarded", |m, state| {
                let fellows = m.bounds.numbers.iter().all(|number| *number == 1);
                let ended = |row: Row| row.closing.is_some_and(|closing| closing > row.number);
                let guarded = state.sessions.iter().any(|(_, t)| !t.guards.is_empty());
                fellows || guarded && state.world.row.is_some_and(ended)
            }),
            Property::<Adopted>::sometimes("a number comes again", |m, state| {
                let recurs = state.grants > 1 && state.world.row.is_some_and(|r| r.number == 1);
                recurs || m.bounds.forgets == 0
            }),
            Property::<Adopted>::sometimes("a number is adopted again", |m, state| {
                let again = |row: Row| row.under > 0 && row.grant + 1 < state.grants.max(2);
                m.bounds.jumps + m.bounds.promotions == 0 || state.world.row.is_some_and(again)
            }),
        ]
    }
}

/// A take-over by adoption cannot pass a guard.
const GUARD_EXCLUDES: &str = "a guard excludes an adoption";
/// Once an adoption is committed, no transaction of an older number commits a guarded write.
const NO_STALE_WRITE: &str = "no older number writes after an adoption";
/// A smaller, released or revoked number never wins; so those that race end with the greatest.
const NEVER_RETURNS: &str = "what is over is not adopted";
/// Nor is it guarded again.
const NEVER_SPEAKS: &str = "what is over is not guarded";
/// Guards that overlap without end keep nobody out.
const OLDER_ENDS: &str = "an adoption that is refused ends the older grant";
const ONE_WRITER: &str = "the row has one writer";
const ADOPTED_AGAIN: &str = "after a jump a number speaks once it was adopted again";
const SEES_ALL: &str = "who relies on a grant sees its predecessors' work";

fn holds(bounds: Bounds) {
    search::holds(Adopted { bounds, p: Protections::ALL });
}

/// Without this protection the property is broken.
fn breaks(bounds: Bounds, property: &'static str, take_away: fn(&mut Protections)) {
    search::breaks(Adopted { bounds, p: Protections::without(take_away) }, property);
}

/// Two holders, one after the other.
const TWO: Bounds = Bounds {
    numbers: &[1, 2],
    calls: 6,
    waits: true,
    learn: false,
    crashes: 0,
    promotions: 0,
    jumps: 0,
    revocations: 0,
    forgets: 0,
    snapshots: false,
};
/// One more, so that two race to follow.
const THREE: Bounds = Bounds { numbers: &[1, 2, 3], calls: 5, ..TWO };
/// Two of the holder's sessions, so that guards overlap.
const FELLOWS: Bounds = Bounds { numbers: &[1, 1, 2], calls: 5, ..TWO };
/// A session goes on under the next number, in the middle of its transaction.
const LEARNERS: Bounds = Bounds { learn: true, waits: false, calls: 5, ..TWO };
const CRASHES: Bounds = Bounds { crashes: 1, revocations: 1, waits: false, calls: 5, ..TWO };
const FAILOVER: Bounds = Bounds { promotions: 1, waits: false, calls: 6, ..TWO };
const JUMPS: Bounds = Bounds { jumps: 1, waits: false, calls: 4, ..FELLOWS };
/// Numbers are forgotten, and come again.
const FORGOTTEN: Bounds = Bounds { revocations: 1, forgets: 1, waits: false, calls: 5, ..TWO };
const SNAPSHOTS: Bounds = Bounds { numbers: &[1, 1], snapshots: true, calls: 4, ..FORGOTTEN };

#[test]
fn holders_that_follow_each_other_break_nothing() {
    holds(TWO);
    holds(THREE);
    holds(FELLOWS);
    holds(LEARNERS);
}

#[test]
fn crashes_and_failovers_break_nothing() {
    holds(CRASHES);
    holds(FAILOVER);
}

#[test]
fn jumps_break_nothing() {
    holds(JUMPS);
}

#[test]
fn what_is_forgotten_and_adopted_again_breaks_nothing() {
    holds(FORGOTTEN);
    holds(SNAPSHOTS);
    holds(Bounds { numbers: &[1, 2], forgets: 0, revocations: 0, ..SNAPSHOTS });
}

#[test]
fn an_adoption_without_the_lock_passes_a_guard() {
    breaks(TWO, GUARD_EXCLUDES, |p| p.adopt_lock = false);
    breaks(TWO, ONE_WRITER, |p| p.adopt_lock = false);
}

#[test]
fn an_adoption_that_does_not_read_again_lets_a_smaller_one_win() {
    breaks(THREE, NEVER_RETURNS, |p| p.read_again = false);
}

#[test]
fn a_lock_given_back_before_the_commit_lets_the_older_one_write() {
    breaks(TWO, NO_STALE_WRITE, |p| p.keep_to_commit = false);
}

#[test]
fn an_adoption_that_is_not_on_disk_is_forgotten_in_a_crash() {
    breaks(CRASHES, NEVER_RETURNS, |p| p.on_disk = false);
    breaks(CRASHES, NEVER_SPEAKS, |p| p.on_disk = false);
}

#[test]
fn a_transaction_that_adopts_over_its_own_guard_takes_it_over() {
    breaks(LEARNERS, GUARD_EXCLUDES, |p| p.own_guard = false);
}

#[test]
fn a_row_that_is_being_forgotten_must_not_be_written() {
    breaks(FORGOTTEN, ONE_WRITER, |p| p.see_deletions = false);
}

#[test]
fn an_adoption_that_ends_nothing_is_kept_out_by_guards_that_overlap() {
    breaks(FELLOWS, OLDER_ENDS, |p| p.end_older = false);
}

#[test]
fn an_end_without_the_lock_crosses_a_release() {
    breaks(FELLOWS, ONE_WRITER, |p| p.end_lock = false);
    breaks(FELLOWS, ONE_WRITER, |p| p.release_lock = false);
}

#[test]
fn a_guard_without_the_lock_is_passed() {
    breaks(TWO, GUARD_EXCLUDES, |p| p.guard_lock = false);
    breaks(TWO, NO_STALE_WRITE, |p| p.guard_lock = false);
}

#[test]
fn a_guard_that_does_not_read_again_relies_on_what_is_over() {
    breaks(TWO, NEVER_SPEAKS, |p| p.guard_reads_again = false);
}

#[test]
fn forgetting_without_the_lock_deletes_what_is_being_adopted() {
    breaks(FORGOTTEN, ONE_WRITER, |p| p.forget_lock = false);
}

#[test]
fn what_is_pruned_is_not_remembered_as_stale() {
    breaks(TWO, NEVER_RETURNS, |p| p.not_pruned = false);
}

#[test]
fn a_number_that_no_jump_silences_speaks_without_being_adopted_again() {
    breaks(FAILOVER, ADOPTED_AGAIN, |p| p.by_jump = false);
    breaks(JUMPS, ADOPTED_AGAIN, |p| p.by_jump = false);
}

#[test]
fn a_number_that_comes_again_is_another_grant() {
    breaks(SNAPSHOTS, SEES_ALL, |p| p.by_grant = false);
}
