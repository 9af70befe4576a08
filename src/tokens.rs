//! Where tokens come from, and what is known of those that were drawn.

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

/// This backend's knowledge of the life that its database is in.
///
/// Once it has seen that this life has begun it need not look again: no backend survives a recovery, so the start
/// of the server and the identity of the database stay what they are. Somebody may still
/// load a dump; the number that dumps carry tells.
#[derive(Clone, Copy)]
struct Life {
    /// The sequence that has been moved on in this life; invalid where that is still to be found out.
    begun: Oid,
    /// The sequence that the two numbers are of: a restore may put another one in its place.
    sequence: Oid,
    /// A token that the sequence is known to have passed.
    passed: Token,
    /// The number that a dump would have carried when this life was seen to have begun: another one is of a later move,
    /// or of a dump that was loaded.
    dumped: Token,
    /// The floor, and the state of that number's page before the floor was read. Each jump and each dump that is loaded
    /// changes the page, so the floor is the same for as long as the page is.
    floor: Option<(PageState, Floor)>,
}

thread_local! {
    static LIFE: Cell<Life> = const {
        Cell::new(Life::unknown(Oid::INVALID))
    };
}

impl Life {
    /// Nothing is known of this sequence yet.
    const fn unknown(sequence: Oid) -> Life {
        Life {
            begun: Oid::INVALID,
            sequence,
            passed: Token::BEFORE_ALL,
            dumped: Token::BEFORE_ALL,
            floor: None,
        }
    }

    /// The knowledge of this sequence.
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

/// Draws a token. The caller holds the lock of the lease that it is for.
///
/// It need not be on disk when it is returned: a crash makes the sequence move on beyond it.
///
/// `above` is the greatest token that the lease is known to have had. A sequence that is not above it, nor
/// above what this backend drew before, was set back by hand: it jumps.
/// Errors: 55000 where the sequence is altered or exhausted, 2200H where Postgres finds that.
pub fn draw(above: Token) -> Result<Token, Refusal> {
    let oid = sequence()?;
    check_fit(oid)?;
    loop {
        xact::serve_interrupts();
        let life = settled(oid)?;
        let above = above.max(life.passed);
        let token = Token::from_bigint(sequence::next(oid));
        // The draw has locked the sequence: what was changed until then is known now, and no more will be.
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

/// The last token drawn, 0 when none was. It writes nothing: right after a start of the server, that is the last
/// one that the earlier life has left on disk. None on a standby, where the value runs ahead of the primary's.
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

/// The sequence that tokens come from.
pub fn sequence() -> Result<Oid, Refusal> {
    state_oid(c"token_seq")
}

/// Was this token ever drawn from that sequence? It must be settled: what was lost in a crash was drawn, too.
#[inline]
pub fn issued(oid: Oid, token: Token) -> bool {
    let life = LIFE.get();
    token > Token::BEFORE_ALL
        && ((life.sequence == oid && token <= life.passed) || issued_by_now(oid, token))
}

#[cold]
fn issued_by_now(oid: Oid, token: Token) -> bool {
    // No sequence that is altered has issued anything.
    let Ok(life) = settled(oid) else { return false };
    let last = last_of(oid);
    LIFE.set(Life { passed: life.passed.max(last), ..life });
    token <= last
}

/// Where the latest jump went to; tokens up to it speak for no lease until renewed. Jumps first where this
/// is another database than the one that drew last, or a dump of one was loaded. Errors: 55000.
pub fn floor() -> Result<Floor, Refusal> {
    let oid = sequence()?;
    if let Some(floor) = settled_floor(oid)? {
        return Ok(floor);
    }
    begin(oid)?;
    recorded_floor()
}

/// As `floor`, but writes nothing: where a jump is due, no token speaks.
pub fn floor_seen() -> Result<Floor, Refusal> {
    // A standby is as good as what it has replayed: the jump comes with its promotion.
    if server::in_recovery() {
        return recorded_floor();
    }
    let oid = sequence()?;
    if let Some(floor) = settled_floor(oid)? {
        return Ok(floor);
    }
    match what_is_due(oid)? {
        (Due::Jump, _) => return Ok(Floor::ABOVE_ALL),
        // A session that only checks need not find that out each time.
        (Due::Nothing, seen) => LIFE.set(Life { begun: oid, ..seen }),
        (Due::Move, _) => (),
    }
    recorded_floor()
}

/// The floor, if this life has begun and no dump was loaded since; else None.
fn settled_floor(oid: Oid) -> Result<Option<Floor>, Refusal> {
    let life = Life::of(oid);
    // Read before the floor, for a jump writes it after the floor: what is kept cannot be older than the page.
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

/// The number of jumps.
pub fn jumps() -> Result<i64, Refusal> {
    Ok(sequence::read(state_oid(c"jump_count_seq")?).last.unwrap_or(0))
}

fn recorded_floor() -> Result<Floor, Refusal> {
    Ok(Floor::at(last_of(state_oid(c"jump_token_seq")?)))
}

/// 55000 unless the sequence's values are fit to be tokens. Looks at its definition once, and again when some
/// definition has changed.
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

/// The life once it has begun and no dump was loaded since: read before each draw and verdict, so that a
/// session that was there before the dump is as safe as one that comes later.
fn settled(oid: Oid) -> Result<Life, Refusal> {
    let life = Life::of(oid);
    if !life.has_begun() || life.dumped != dumped()? {
        begin(oid)?;
    }
    Ok(Life::of(oid))
}

/// The number that a dump carries, not far behind the last token. The sequence itself is in no dump,
/// so none that is loaded sets it back.
fn dumped() -> Result<Token, Refusal> {
    Ok(last_of(state_oid(c"dumped_token_seq")?))
}

fn set_dumped(token: Token) -> Result<(), Refusal> {
    sequence::set(state_oid(c"dumped_token_seq")?, token.bigint());
    LIFE.set(Life { dumped: token, ..LIFE.get() });
    Ok(())
}

/// Makes sure that the sequence has outrun whatever an earlier life of this database may have drawn: durably,
/// before anything is drawn or judged, at least once for each change and once for any number of racing sessions.
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

/// Does work under the jump's lock, which is given back at once, so that no open transaction holds up a jump.
fn under_move_lock<T>(work: impl FnOnce() -> Result<T, Refusal>) -> Result<T, Refusal> {
    let lock = LockTag::token_move();
    lock.take(MOVE_ON.mode, MOVE_ON.waits)?;
    let result = work();
    lock.give(MOVE_ON.mode);
    result
}

/// The move that is due, and the sequence as it was when that was decided.
fn what_is_due(oid: Oid) -> Result<(Due, Life), Refusal> {
    let life = Life::of(oid);
    // Before the sequence, which every move sets first: so it is behind this one only where a dump was loaded.
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

/// Jumps by hand; gives back where to. Errors: 55000.
pub fn jump_now() -> Result<Token, Refusal> {
    let oid = sequence()?;
    let life = under_move_lock(|| jump(oid))?;
    LIFE.set(Life { begun: oid, ..life });
    statistics::count(Counter::Jumps);
    Ok(life.passed)
}

/// Called once, by the script that creates the extension. No grant is older, so nothing is silenced; but the
/// floor keeps silent what a restore loads before it has loaded the rest.
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
    // Set, not drawn: what nextval logs is 32 ahead, which a crash would show.
    sequence::set_durably(state_oid(c"jump_count_seq")?, jumps()? + 1);
    record(oid, &identity, target)
}

/// No grant whose latest token is not above this one speaks from now on. The number that dumps carry is set right behind
/// it: by that sessions see that the floor they keep is an old one.
fn set_floor(target: Token) -> Result<(), Refusal> {
    sequence::set_durably(state_oid(c"jump_token_seq")?, target.bigint());
    set_dumped(target)
}

fn move_on(oid: Oid) -> Result<Token, Refusal> {
    check_fit(oid)?;
    let last = last_of(oid).max(Life::of(oid).passed).max(dumped()?);
    // Once: where the clock does not go on, the last value decides.
    wait::pause(moves::wait_for_clock(last, clock::now()));
    let target = moves::target(last, clock::now()).ok_or_else(errors::tokens_exhausted)?;
    sequence::set_durably(oid, target.bigint());
    Ok(target)
}

/// Records, when all else is on disk, that this life has begun at this token: after a crash before this, the sequence
/// moves on once more, never once too few. The mark of the start comes last, for with it the rest is believed.
fn record(oid: Oid, identity: &Identity, began_at: Token) -> Result<Life, Refusal> {
    sequence::set_durably(state_oid(c"database_identity_seq")?, identity.mark());
    let start = state_oid(c"server_start_seq")?;
    if let Some(found) = sequence::read_unlogged(start) {
        sequence::set(start, server::start(oid, found.file).mark(identity.mark()));
    }
    Ok(Life { passed: began_at, dumped: began_at, floor: None, ..Life::of(oid) })
}
