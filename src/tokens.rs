//! The token sequence: drawing tokens, advancing the sequence, and what a backend knows of both.

use crate::errors::{self, Refusal};
use crate::pg::locks::lock::LockTag;
use crate::pg::locks::wait;
use crate::pg::session::clock;
use crate::pg::session::server;
use crate::pg::session::xact;
use crate::pg::state::relation::{self, state_oid};
use crate::pg::state::sequence::{self, PageState};
use crate::statistics::{self, Counter};
use pg_fence_rules::locks::MOVE_ON;
use pg_fence_rules::moves::{self, Due, Identity, Recorded};
use pg_fence_rules::{Floor, Token};
use pgrx::pg_sys::Oid;
use std::cell::Cell;

/// What this backend knows of its database's epoch.
///
/// It determines the epoch once, because no backend survives a recovery: the start of the server and the identity of
/// the database stay the same. A dump may still be loaded, which changes `dumped`.
#[derive(Clone, Copy)]
struct Life {
    /// The sequence whose advance in this epoch is done; invalid if that is not known yet.
    begun: Oid,
    /// The sequence to which the two numbers belong: a restore may replace it.
    sequence: Oid,
    /// A token that the sequence is known to have reached.
    passed: Token,
    /// The number in a dump made when this epoch was determined. Another number shows that the sequence was advanced
    /// since, or that a dump was loaded.
    dumped: Token,
    /// The epoch, and the state of the page of `dumped` before the epoch was read. Each new epoch and each loaded dump
    /// changes that page, so an unchanged page means an unchanged epoch.
    floor: Option<(PageState, Floor)>,
}

thread_local! {
    static LIFE: Cell<Life> = const {
        Cell::new(Life::unknown(Oid::INVALID))
    };
}

impl Life {
    /// What is known of a sequence at first: nothing.
    const fn unknown(sequence: Oid) -> Life {
        Life {
            begun: Oid::INVALID,
            sequence,
            passed: Token::BEFORE_ALL,
            dumped: Token::BEFORE_ALL,
            floor: None,
        }
    }

    /// What is known of this sequence.
    fn of(sequence: Oid) -> Life {
        let known = LIFE.get();
        if known.sequence == sequence {
            return known;
        }
        Life::unknown(sequence)
    }

    fn has_begun(&self) -> bool {
        self.begun == self.sequence
    }
}

/// Draws a token. The caller holds the lock of the lease.
///
/// The token need not be on disk when it is returned, because the start after a crash advances the sequence beyond it.
///
/// `above` is the greatest token known of the lease. If the sequence is not above that, and above what this backend
/// drew before, it was set back by hand: a new epoch begins. Errors: 55000 if the sequence is altered or exhausted, and
/// 2200H from Postgres.
pub fn draw(above: Token) -> Result<Token, Refusal> {
    let oid = sequence()?;
    check_fit(oid)?;
    loop {
        xact::serve_interrupts();
        let life = settled(oid)?;
        let above = above.max(life.passed);
        let token = Token::from_bigint(sequence::next(oid));
        // Drawing locks the sequence, so earlier changes of it are visible now, and none can follow.
        check_fit(oid)?;
        if token > above {
            LIFE.set(Life { passed: token, ..life });
            if moves::dump_lags(life.dumped, token) {
                set_dumped(token)?;
            }
            return Ok(token);
        }
        LIFE.set(Life { begun: Oid::INVALID, passed: above, ..life });
    }
}

/// The last token drawn, 0 if there is none. Writes nothing: right after a start of the server, it is the last token
/// that reached the disk before. `None` on a standby, where the value runs ahead of the primary's.
pub fn last() -> Result<Option<Token>, Refusal> {
    if server::in_recovery() {
        return Ok(None);
    }
    Ok(Some(last_of(sequence()?)))
}

fn last_of(oid: Oid) -> Token {
    token_of(&sequence::read(oid))
}

fn token_of(page: &sequence::Page) -> Token {
    page.last.map_or(Token::BEFORE_ALL, Token::from_bigint)
}

/// The sequence from which tokens are drawn.
pub fn sequence() -> Result<Oid, Refusal> {
    state_oid(c"token_seq")
}

/// Returns true if this token was ever drawn from that sequence. Tokens lost in a crash count as drawn, so the sequence
/// must have advanced since.
#[inline]
pub fn issued(oid: Oid, token: Token) -> bool {
    let life = LIFE.get();
    token > Token::BEFORE_ALL
        && ((life.sequence == oid && token <= life.passed) || issued_by_now(oid, token))
}

#[cold]
fn issued_by_now(oid: Oid, token: Token) -> bool {
    // A sequence that was altered has issued nothing.
    let Ok(life) = settled(oid) else { return false };
    let last = last_of(oid);
    LIFE.set(Life { passed: life.passed.max(last), ..life });
    token <= last
}

/// The present epoch, whose first number no grant may be older than to speak. Begins a new epoch first if this is
/// another database than the one that drew last, or a dump of one was loaded. Errors: 55000.
pub fn floor() -> Result<Floor, Refusal> {
    let oid = sequence()?;
    if let Some(floor) = settled_floor(oid)? {
        return Ok(floor);
    }
    begin(oid)?;
    recorded_floor()
}

/// Returns the epoch like `floor`, but writes nothing: if a new epoch is due, no token speaks.
pub fn floor_seen() -> Result<Floor, Refusal> {
    // A standby has the epoch that it has replayed. The new one begins after its promotion.
    if server::in_recovery() {
        return recorded_floor();
    }
    let oid = sequence()?;
    if let Some(floor) = settled_floor(oid)? {
        return Ok(floor);
    }
    match what_is_due(oid)? {
        (Due::Jump, _) => return Ok(Floor::ABOVE_ALL),
        // Remembered, so that a session that only checks tokens need not find it out each time.
        (Due::Nothing, seen) => LIFE.set(Life { begun: oid, ..seen }),
        (Due::Move, _) => (),
    }
    recorded_floor()
}

/// The epoch, if it has been determined and no dump was loaded since; otherwise `None`.
fn settled_floor(oid: Oid) -> Result<Option<Floor>, Refusal> {
    let life = Life::of(oid);
    // The page is read before the epoch. A new epoch is written before the page, so a stored epoch cannot be older than
    // the stored page state.
    let page = sequence::read(state_oid(c"dumped_token_seq")?);
    if !life.has_begun() || life.dumped != token_of(&page) {
        return Ok(None);
    }
    if let Some((_, floor)) = life.floor.filter(|(state, _)| page.state == Some(*state)) {
        return Ok(Some(floor));
    }
    let floor = recorded_floor()?;
    LIFE.set(Life { floor: page.state.map(|state| (state, floor)), ..life });
    Ok(Some(floor))
}

/// The number of epochs begun since the extension was created.
pub fn jumps() -> Result<i64, Refusal> {
    Ok(sequence::read(state_oid(c"jump_count_seq")?).last.unwrap_or(0))
}

fn recorded_floor() -> Result<Floor, Refusal> {
    Ok(Floor::at(last_of(state_oid(c"jump_token_seq")?)))
}

/// Errors with 55000 unless the sequence's values are fit to be tokens. Checks its definition once, and again after a
/// definition in the catalog has changed.
fn check_fit(oid: Oid) -> Result<(), Refusal> {
    thread_local! {
        static FIT: Cell<(Oid, u64)> = const { Cell::new((Oid::INVALID, 0)) };
    }
    if FIT.get() == (oid, relation::generation()) {
        return Ok(());
    }
    check_definition(oid)?;
    FIT.set((oid, relation::generation()));
    Ok(())
}

fn check_definition(oid: Oid) -> Result<(), Refusal> {
    let Some(definition) = sequence::definition(oid) else {
        return Err(errors::sequence_altered("is no sequence"));
    };
    let fault = [
        (!definition.logged, "is not logged"),
        (definition.increment < 1, "does not ascend"),
        (definition.cache != 1, "has a CACHE above 1"),
        (definition.cycle, "may CYCLE"),
        (definition.rewritten_here, "was altered in this transaction"),
    ];
    match fault.iter().find(|(bad, _)| *bad) {
        Some((_, what)) => Err(errors::sequence_altered(what)),
        None => Ok(()),
    }
}

/// What is known of the sequence, once the epoch is determined and no dump was loaded since. Checked before each draw
/// and decision, so that sessions older than a dump are as safe as newer ones.
fn settled(oid: Oid) -> Result<Life, Refusal> {
    let life = Life::of(oid);
    if !life.has_begun() || life.dumped != dumped()? {
        begin(oid)?;
    }
    Ok(Life::of(oid))
}

/// The number that a dump contains, which is not far behind the last token. Dumps do not contain the sequence itself,
/// so loading one does not set it back.
fn dumped() -> Result<Token, Refusal> {
    Ok(last_of(state_oid(c"dumped_token_seq")?))
}

fn set_dumped(token: Token) -> Result<(), Refusal> {
    sequence::set(state_oid(c"dumped_token_seq")?, token.bigint());
    LIFE.set(Life { dumped: token, ..LIFE.get() });
    Ok(())
}

/// Ensures that the sequence is beyond all tokens that this database may have drawn before a start, a failover, a
/// restore or a copy. The advance is durable before any token is drawn or checked; concurrent sessions make it once.
#[inline]
pub fn ensure_begun(oid: Oid) -> Result<(), Refusal> {
    if LIFE.get().begun == oid {
        return Ok(());
    }
    begin(oid)
}

#[cold]
fn begin(oid: Oid) -> Result<(), Refusal> {
    let (due, seen) = what_is_due(oid)?;
    let mut jumped = false;
    let life = match due {
        Due::Nothing => seen,
        _ => under_move_lock(|| match what_is_due(oid)? {
            (Due::Nothing, seen) => Ok(seen),
            (Due::Move, _) => {
                let identity = server::identity(oid)?;
                let target = move_on(oid)?;
                set_dumped(target)?;
                record(oid, &identity, target)
            }
            (Due::Jump, _) => {
                jumped = true;
                jump(oid)
            }
        })?,
    };
    LIFE.set(Life { begun: oid, ..life });
    if jumped {
        statistics::count(Counter::Jumps);
    }
    Ok(())
}

/// Runs `work` under the lock of the advance. The lock is released at once, so that no open transaction delays an
/// advance.
fn under_move_lock<T>(work: impl FnOnce() -> Result<T, Refusal>) -> Result<T, Refusal> {
    let lock = LockTag::token_move();
    lock.take(MOVE_ON.mode, MOVE_ON.waits)?;
    let result = work();
    lock.give(MOVE_ON.mode);
    result
}

/// The advance that is due, and the state of the sequence when that was decided.
fn what_is_due(oid: Oid) -> Result<(Due, Life), Refusal> {
    let life = Life::of(oid);
    // Read before the sequence. Every advance sets the sequence first, so it is behind this number only if a dump was
    // loaded.
    let dumped = dumped()?;
    let start = sequence::read_unlogged(state_oid(c"server_start_seq")?);
    let recorded = Recorded {
        identity: sequence::read(state_oid(c"database_identity_seq")?).last,
        start: start.and_then(|s| s.last),
        dumped,
        last: last_of(oid),
    };
    let expected = start.map(|s| server::start(oid, s.file));
    let due = moves::due(&recorded, || server::identity(oid), expected.as_ref(), life.passed)?;
    Ok((due, Life { passed: recorded.last.max(life.passed), dumped, ..life }))
}

/// Begins a new epoch on request, and returns the number to which the sequence advanced. Errors: 55000.
pub fn jump_now() -> Result<Token, Refusal> {
    let oid = sequence()?;
    let life = under_move_lock(|| jump(oid))?;
    LIFE.set(Life { begun: oid, ..life });
    statistics::count(Counter::Jumps);
    Ok(life.passed)
}

/// Called once, when the extension is created. No grant is older, so no token becomes invalid. But grants that a
/// restore loads are older, and stay invalid until the restore has loaded the rest.
pub fn record_creation() -> Result<(), Refusal> {
    let oid = sequence()?;
    let identity = server::identity(oid)?;
    let target = move_on(oid)?;
    set_floor(target)?;
    record(oid, &identity, target).map(drop)
}

fn jump(oid: Oid) -> Result<Life, Refusal> {
    let identity = server::identity(oid)?;
    let target = move_on(oid)?;
    set_floor(target)?;
    // Set rather than drawn: nextval logs a value 32 ahead, which would appear after a crash.
    sequence::set_durably(state_oid(c"jump_count_seq")?, jumps()? + 1);
    record(oid, &identity, target)
}

/// Begins an epoch: no grant without a greater token speaks from now on. The number in dumps is set right after, which
/// shows other sessions that their stored epoch is outdated.
fn set_floor(target: Token) -> Result<(), Refusal> {
    sequence::set_durably(state_oid(c"jump_token_seq")?, target.bigint());
    set_dumped(target)
}

fn move_on(oid: Oid) -> Result<Token, Refusal> {
    check_fit(oid)?;
    let last = last_of(oid).max(Life::of(oid).passed).max(dumped()?);
    // Waits once only: if the clock does not advance, the last value decides.
    wait::pause(moves::wait_for_clock(last, clock::now()));
    let target = moves::target(last, clock::now()).ok_or_else(errors::tokens_exhausted)?;
    sequence::set_durably(oid, target.bigint());
    Ok(target)
}

/// Records that the epoch began with this token, after everything else is on disk. After an earlier crash the sequence
/// advances once more, never once too few. The hash of the start is set last, because with it the other values are
/// believed.
fn record(oid: Oid, identity: &Identity, began_at: Token) -> Result<Life, Refusal> {
    sequence::set_durably(state_oid(c"database_identity_seq")?, identity.mark());
    let start = state_oid(c"server_start_seq")?;
    if let Some(found) = sequence::read_unlogged(start) {
        sequence::set(start, server::start(oid, found.file).mark(identity.mark()));
    }
    Ok(Life { passed: began_at, dumped: began_at, floor: None, ..Life::of(oid) })
}
