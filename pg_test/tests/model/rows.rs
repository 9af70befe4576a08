//! A model of leases in rows: one row of a table of work, and workers that claim it, write it, renew it, give it up and
//! evict it.
//!
//! A worker may freeze anywhere, also between the moment at which its statement reads the clock and the row's lock. Its
//! transaction may stay open for any time, roll back to a savepoint, be prepared, or be lost in a crash, which may also
//! lose the latest commit. The decision is the extension's own code (`row_lease::check`). PostgreSQL's row lock is
//! modelled as it is: a statement waits for the end of an open transaction that has written the row. Isolation levels
//! above READ COMMITTED only add refusals (40001).

use crate::search::{self, never, once_more, protections, searches};
use pg_test::rules::row_lease::{self, Presented, Reason, Stored, Verdict};
use pg_test::rules::{Instant, Span, Token};
use stateright::{Model, Property};

/// How many seconds a claim lasts.
const TTL: u8 = 2;

/// A version of the row, and its true history, which the extension does not know.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
struct RowVersion {
    fence: Option<u8>,
    /// The deadline, in seconds.
    deadline: Option<u8>,
    /// The worker whose claim drew the fence.
    claimant: Option<usize>,
    /// True if another worker has written the row since that claim.
    written_since: bool,
}

impl RowVersion {
    fn is_held(&self, clock: u8) -> bool {
        self.fence.is_some() && self.deadline.is_some_and(|deadline| deadline > clock)
    }
}

/// A statement.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Statement {
    /// Sets a future deadline and names no fence.
    Claim,
    /// The claim of an object-relational mapper: of a row that its condition finds free, with the fence that it has
    /// just read.
    Save,
    /// A write with the worker's own token, as the next two.
    Write,
    Renew,
    GiveUp,
    /// Names neither column.
    Edit,
    /// Ends another worker's claim, with the fence of the row.
    Evict,
}

use Statement::*;

const STATEMENTS: [Statement; 7] = [Claim, Save, Write, Renew, GiveUp, Edit, Evict];

impl Statement {
    fn shows_own_token(self) -> bool {
        matches!(self, Write | Renew | GiveUp)
    }
}

/// The open transaction that has written the row.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Writer {
    Worker(usize),
    /// A prepared transaction, which has no session.
    Prepared,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
struct Worker {
    /// The latest token that it was given, whatever became of the transaction.
    token: Option<u8>,
    /// The running statement, and the clock that it read.
    sent: Option<(Statement, u8)>,
}

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Action {
    /// The worker sends a statement, which reads the clock at once.
    Send(usize, Statement),
    /// The statement gets the row's lock.
    Land(usize),
    Commit(usize),
    RollBack(usize),
    /// The transaction rolls back to a savepoint before its latest statement.
    Undo(usize),
    Prepare(usize),
    CommitPrepared,
    RollBackPrepared,
    Second,
    /// The server is killed. With `true` the latest commit is lost.
    Crash(bool),
}

/// What a statement has shown: searches check that it happens.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Shown {
    LateWrite,
    EditOfWhatWasOver,
    TakeOver,
    WriteAfterCrash,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct State {
    /// The committed version, followed by those of the open transaction.
    versions: Vec<RowVersion>,
    /// The committed version before the latest commit.
    before: RowVersion,
    writer: Option<Writer>,
    workers: Vec<Worker>,
    clock: u8,
    drawn: u8,
    sent: u8,
    crashes: u8,
    shown: Option<Shown>,
    violation: Option<&'static str>,
}

impl State {
    fn row(&self) -> RowVersion {
        self.versions[self.versions.len() - 1]
    }

    fn commit(&mut self) {
        let row = self.row();
        self.before = std::mem::replace(&mut self.versions, vec![row])[0];
        self.writer = None;
    }

    fn roll_back(&mut self) {
        self.versions.truncate(1);
        self.writer = None;
    }
}

protections! {
    /// The clock is read under the row's lock, not when the statement began.
    clock_after_lock,
    /// A row whose deadline is NULL was given up: its own token does not write it.
    closed_is_checked,
    /// A version counts as a transaction's own only if that transaction has written it.
    own_is_own,
    /// A write without a token ends an expired claim.
    edit_closes,
    /// A renewal after the deadline is refused.
    late_renewal_is_refused,
}

/// The bounds of the model, and the protections it has.
#[derive(Clone, Copy, Debug)]
struct Rows {
    workers: usize,
    /// Statements that may be sent.
    statements: u8,
    seconds: u8,
    crashes: u8,
    protections: Protections,
}

const ROWS: Rows =
    Rows { workers: 2, statements: 4, seconds: 3, crashes: 1, protections: Protections::ALL };

fn at(seconds: u8) -> Instant {
    Instant::from_micros(0) + Span::from_secs(i64::from(seconds))
}

fn token(number: u8) -> Token {
    Token::from_bigint(i64::from(number))
}

/// Returns the seconds of a deadline from the rule or from a row.
fn seconds(deadline: Instant) -> u8 {
    u8::try_from(deadline.micros() / 1_000_000).expect("a deadline of the model")
}

impl Rows {
    /// Returns the extension's verdict on a statement on that row.
    fn check(&self, state: &State, worker: usize, (statement, sent): (Statement, u8)) -> Verdict {
        let (p, row) = (&self.protections, state.row());
        let of_row = || row.fence.map_or(Presented::Null, |fence| Presented::Token(token(fence)));
        let of_worker = || {
            let own = state.workers[worker].token;
            own.map_or(Presented::Nothing, |own| Presented::Token(token(own)))
        };
        let (presented, new) = match statement {
            Claim => (Presented::Nothing, Some(sent + TTL)),
            Save => (of_row(), Some(sent + TTL)),
            Write => (of_worker(), row.deadline),
            Renew => (of_worker(), Some(sent + TTL)),
            GiveUp => (of_worker(), None),
            Edit => (Presented::Nothing, row.deadline),
            Evict => (of_row(), None),
        };
        let is_own = state.writer == Some(Writer::Worker(worker));
        let is_closed = row.fence.is_some() && row.deadline.is_none();
        // Without the protection a NULL deadline is taken for one long past.
        let unasked = is_closed && !p.closed_is_checked && statement.shows_own_token();
        let deadline = |seconds: Option<u8>| match seconds {
            None if unasked && statement == Write => Some(Instant::EARLIEST),
            seconds => seconds.map(at),
        };
        let stored = Stored {
            fence: row.fence.map(token),
            deadline: if unasked { Some(Instant::EARLIEST) } else { row.deadline.map(at) },
            is_own: is_own || !p.own_is_own,
        };
        let write = row_lease::Write { old: stored, presented, new_deadline: Some(deadline(new)) };
        let now = at(if p.clock_after_lock { state.clock } else { sent });
        let issued = |asked: Token| asked <= token(state.drawn);
        match row_lease::check(&write, now, issued) {
            Verdict::Land(Some(Instant::EARLIEST)) => Verdict::Land(None),
            Verdict::Land(None) if statement == Edit && !p.edit_closes => {
                Verdict::Land(stored.deadline)
            }
            Verdict::Refused(Reason::LateRenewal) if !p.late_renewal_is_refused => {
                Verdict::Land(new.map(at))
            }
            verdict => verdict,
        }
    }

    /// The statement gets the row's lock, is checked, and may write a version.
    fn land(&self, state: &mut State, worker: usize) -> Option<()> {
        let (statement, sent) = state.workers[worker].sent.take()?;
        let is_own = state.writer == Some(Writer::Worker(worker));
        (state.writer.is_none() || is_own).then_some(())?;
        let old = state.row();
        if statement == Save && old.deadline.is_some_and(|deadline| deadline > sent) {
            return Some(());
        }
        let is_holder = old.claimant == Some(worker);
        let new = match self.check(state, worker, (statement, sent)) {
            Verdict::Refused(_) => return Some(()),
            Verdict::Claim(deadline) => {
                state.drawn += 1;
                state.workers[worker].token = Some(state.drawn);
                let (fence, deadline) = (Some(state.drawn), Some(seconds(deadline)));
                RowVersion { fence, deadline, claimant: Some(worker), written_since: false }
            }
            Verdict::Land(deadline) => {
                let written_since = old.written_since || !is_holder;
                RowVersion { deadline: deadline.map(seconds), written_since, ..old }
            }
        };
        state.versions.push(new);
        state.writer = Some(Writer::Worker(worker));
        if new.fence == old.fence && statement == Save {
            // RETURNING has given it a token.
            state.workers[worker].token = new.fence;
        }
        state.violation = violation(state, (worker, is_own), statement, (&old, &new));
        state.shown = shown(state, statement, (&old, &new));
        Some(())
    }

    fn carry_out(&self, state: &mut State, action: Action) -> Option<()> {
        state.shown = None;
        match action {
            Action::Send(worker, statement) => {
                once_more(&mut state.sent, self.statements)?;
                state.workers[worker].sent = Some((statement, state.clock));
            }
            Action::Land(worker) => self.land(state, worker)?,
            Action::Commit(_) | Action::CommitPrepared => state.commit(),
            Action::RollBack(_) | Action::RollBackPrepared => state.roll_back(),
            Action::Undo(_) => {
                state.versions.pop();
                state.writer = state.writer.filter(|_| state.versions.len() > 1);
            }
            Action::Prepare(_) => state.writer = Some(Writer::Prepared),
            Action::Second => once_more(&mut state.clock, self.seconds)?,
            Action::Crash(loses_commit) => {
                once_more(&mut state.crashes, self.crashes)?;
                // A prepared transaction is on disk, and so are all earlier commits.
                let is_prepared = state.writer == Some(Writer::Prepared);
                (!loses_commit || !is_prepared && state.before != state.versions[0])
                    .then_some(())?;
                if !is_prepared {
                    state.roll_back();
                }
                if loses_commit {
                    state.versions = vec![state.before];
                }
                // The starting server advances the sequence.
                state.drawn += 1;
                state.workers.iter_mut().for_each(|worker| worker.sent = None);
            }
        }
        Some(())
    }
}

/// Returns the promise that this write has broken.
fn violation(
    state: &State,
    (worker, is_own): (usize, bool),
    statement: Statement,
    (old, new): (&RowVersion, &RowVersion),
) -> Option<&'static str> {
    let is_claim = new.fence != old.fence;
    let is_holders = old.claimant == Some(worker) && !old.written_since;
    let as_holder = statement.shows_own_token() && !is_claim;
    let is_moved_on = new.deadline > old.deadline;
    if old.is_held(state.clock) && old.claimant != Some(worker) && !is_own && statement != Evict {
        return Some(HELD);
    }
    // If the transaction itself has given up the row, it may write it like anyone else.
    let goes_on = is_own && old.deadline.is_none();
    if as_holder && !goes_on && !is_holders {
        return Some(NOBODY_SINCE);
    }
    if as_holder && !goes_on && old.deadline.is_none() {
        return Some(GIVEN_UP);
    }
    if statement == Save && !is_claim && old.claimant != Some(worker) {
        return Some(OWN_TOKEN);
    }
    let is_late = !new.is_held(state.clock) || !is_claim && !old.is_held(state.clock);
    (is_moved_on && is_late).then_some(IN_TIME)
}

/// Returns what this write has shown to happen.
fn shown(
    state: &State,
    statement: Statement,
    (old, new): (&RowVersion, &RowVersion),
) -> Option<Shown> {
    let was_over = old.deadline.is_some() && !old.is_held(state.clock);
    match statement {
        Write if was_over => Some(Shown::LateWrite),
        Edit if was_over && new.deadline.is_none() => Some(Shown::EditOfWhatWasOver),
        Claim if was_over => Some(Shown::TakeOver),
        Write if state.crashes > 0 => Some(Shown::WriteAfterCrash),
        _ => None,
    }
}

const HELD: &str = "nobody writes a row that another holds";
const NOBODY_SINCE: &str = "a holder's write lands only if nobody else has written since its claim";
const GIVEN_UP: &str = "a token that was given up writes no more";
const OWN_TOKEN: &str = "nobody is answered another's token by a claim";
const IN_TIME: &str = "what is claimed or renewed was not over, and is held then";

impl Model for Rows {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            versions: vec![RowVersion::default()],
            before: RowVersion::default(),
            writer: None,
            workers: vec![Worker::default(); self.workers],
            clock: 0,
            drawn: 0,
            sent: 0,
            crashes: 0,
            shown: None,
            violation: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for (number, worker) in state.workers.iter().enumerate() {
            let may_send =
                |statement: &Statement| worker.token.is_some() || !statement.shows_own_token();
            match worker.sent {
                Some(_) => actions.push(Action::Land(number)),
                None => {
                    let statements = STATEMENTS.into_iter().filter(may_send);
                    actions.extend(statements.map(|statement| Action::Send(number, statement)));
                    if state.writer == Some(Writer::Worker(number)) {
                        actions.extend([
                            Action::Commit(number),
                            Action::RollBack(number),
                            Action::Undo(number),
                            Action::Prepare(number),
                        ]);
                    }
                }
            }
        }
        if state.writer == Some(Writer::Prepared) {
            actions.extend([Action::CommitPrepared, Action::RollBackPrepared]);
        }
        actions.extend([Action::Second, Action::Crash(false), Action::Crash(true)]);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        state.violation.is_none().then_some(())?;
        let mut next = state.clone();
        self.carry_out(&mut next, action)?;
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Rows>> {
        macro_rules! happens {
            ($name:expr, $shown:expr) => {
                Property::<Rows>::sometimes($name, |_, state| state.shown == Some($shown))
            };
        }
        vec![
            never!(Rows, HELD),
            never!(Rows, NOBODY_SINCE),
            never!(Rows, GIVEN_UP),
            never!(Rows, OWN_TOKEN),
            never!(Rows, IN_TIME),
            // This shows that the property above does not hold merely because nothing happens.
            happens!("a late write lands, if nobody came", Shown::LateWrite),
            happens!("an edit ends what was over", Shown::EditOfWhatWasOver),
            happens!("a row whose deadline has passed is taken over", Shown::TakeOver),
            Property::<Rows>::sometimes("a holder goes on after a crash", |rows, state| {
                rows.crashes == 0 || state.shown == Some(Shown::WriteAfterCrash)
            }),
        ]
    }
}

/// Checks that the property breaks without this protection.
fn breaks(property: &'static str, take_away: fn(&mut Protections)) {
    search::breaks(Rows { protections: Protections::without(take_away), ..ROWS }, property);
}

searches! {
    who_claims_a_row_has_it_until_somebody_may_come =>
        search::holds(ROWS),
        search::holds(Rows { workers: 3, statements: 3, crashes: 0, ..ROWS }),
        search::holds(Rows { statements: 5, seconds: 2, crashes: 0, ..ROWS });
    where_closed_is_not_checked_a_token_writes_what_others_have_written =>
        breaks(NOBODY_SINCE, |p| p.closed_is_checked = false),
        breaks(GIVEN_UP, |p| p.closed_is_checked = false);
    where_an_own_version_is_everybody_s_a_held_row_is_written =>
        breaks(HELD, |p| p.own_is_own = false);
    where_an_edit_closes_nothing_a_late_write_lands_over_it =>
        breaks(NOBODY_SINCE, |p| p.edit_closes = false);
    where_a_late_renewal_lands_a_claim_is_answered_the_token_of_the_dead =>
        breaks(OWN_TOKEN, |p| p.late_renewal_is_refused = false);
    where_the_clock_is_read_before_the_row_s_lock_a_renewal_comes_too_late =>
        breaks(IN_TIME, |p| p.clock_after_lock = false);
}
