//! Where tokens come from, and what is known of those that were drawn.

use crate::errors::{self, Refusal};
use crate::pg::lock::{Mode, Tag};
use crate::pg::relation::state_oid;
use crate::pg::{sequence, server};
use crate::plant;
use crate::protocol::ahead::{self, Logged};
use crate::protocol::epoch::{self, Epoch};
use crate::protocol::Token;
use pgrx::pg_sys::Oid;
use std::cell::Cell;

thread_local! {
    /// Mark of the identity that this backend has found recorded last, so that all later calls compare two
    /// numbers.
    static KNOWN: Cell<i64> = const { Cell::new(0) };
    /// A sequence and a token that it is known to have passed.
    static PASSED: Cell<(Oid, Token)> = const { Cell::new((Oid::INVALID, 0)) };
    /// The file of the sequence that this backend has drawn from.
    static FILE: Cell<u32> = const { Cell::new(0) };
    /// A file and a log record of the sequence in it that is known to be on disk.
    static ON_DISK: Cell<(u32, Logged)> = const { Cell::new((0, Logged { up_to: 0, at: 0 })) };
}

/// Draws a token. The caller holds the lock of the lease that it is for.
///
/// The token is durable before it is returned, whoever has logged it, and whether that transaction is still
/// open or not.
///
/// `above` is the greatest token that the lease is known to have had. A sequence that is not above it, nor
/// above what this backend drew before, was set back by hand (a data-only restore does that): it jumps.
pub fn draw(above: Token) -> Result<Token, Refusal> {
    loop {
        let oid = sequence()?;
        let file = checked_file(oid)?;
        settle(oid)?;
        if FILE.replace(file) != file {
            // A copy (of an ALTER SEQUENCE) promises what its page says was logged, but no record of it does.
            sequence::log_next(oid);
        }
        let token = next_above(oid, above)?;
        if plant::NO_FLUSH || make_durable(oid, file, token)? {
            PASSED.set((oid, token));
            return Ok(token);
        }
    }
}

fn next_above(oid: Oid, above: Token) -> Result<Token, Refusal> {
    let (known, passed) = PASSED.get();
    let above = if known == oid { above.max(passed) } else { above };
    let token = sequence::next(oid);
    if token > above || plant::NO_JUMP || plant::TOKEN_BEFORE_LOCK {
        return Ok(token);
    }
    let lock = Tag::jump();
    lock.take(Mode::Own, true);
    jump(oid, above)?;
    lock.give(Mode::Own);
    Ok(sequence::next(oid))
}

/// Waits until a log record that covers a token just drawn is on disk; it mostly is. Where the last one
/// begins to run out, the next draw is to be logged, so that somebody's commit has it on disk in time. False
/// when no such record may be there, so that another token is to be drawn.
fn make_durable(oid: Oid, file: u32, token: Token) -> Result<bool, Refusal> {
    let state = sequence::read(oid);
    if state.rewritten_here {
        return Err(errors::sequence_altered("was altered in this transaction"));
    }
    if state.file != file {
        return Ok(false);
    }
    if !state.logs {
        // It goes with the transaction that has created it, or is on disk with its commit as it is then.
        sequence::log_next(oid);
        return Ok(true);
    }
    let redo = sequence::redo();
    if !state.logged.is_read(redo) {
        // Drawn while a checkpoint began, too late to be in it and too early to be logged anew.
        return Ok(false);
    }
    let (of, known) = ON_DISK.get();
    let known = if of == file { known } else { Logged::default() };
    if sequence::is_flushed(&state.logged) {
        ON_DISK.set((file, known.and(state.logged)));
    } else if !known.covers(token, redo) {
        sequence::flush(&state.logged);
        ON_DISK.set((file, known.and(state.logged)));
    }
    if ahead::log_early(state.left, sequence::AHEAD) {
        sequence::log_next(oid);
    }
    Ok(true)
}

/// The last token drawn, 0 when none was.
pub fn last() -> Result<Token, Refusal> {
    Ok(sequence::read(sequence()?).last.unwrap_or(0))
}

/// The sequence that tokens come from.
pub fn sequence() -> Result<Oid, Refusal> {
    state_oid(c"token_seq")
}

/// Was this token ever drawn from that sequence?
#[inline]
pub fn issued(oid: Oid, token: Token) -> bool {
    let (known, passed) = PASSED.get();
    token >= 1 && ((known == oid && token <= passed) || look_up(oid, token))
}

#[cold]
fn look_up(oid: Oid, token: Token) -> bool {
    let last = sequence::read(oid).last.unwrap_or(0);
    PASSED.set((oid, last));
    token <= last
}

/// Where the latest jump went to; tokens up to it speak for no lease until renewed. Jumps first where this
/// is another database than the one that drew last.
pub fn floor() -> Result<Token, Refusal> {
    settle(sequence()?)?;
    recorded_floor()
}

/// As `floor`, but writes nothing: where a jump is due, no token speaks.
pub fn floor_seen() -> Result<Token, Refusal> {
    // A standby is as good as what it has replayed: the jump comes with its promotion.
    if !server::in_recovery() {
        let oid = sequence()?;
        if seen(oid)? == Epoch::Changed {
            return Ok(Token::MAX);
        }
    }
    recorded_floor()
}

/// The number of jumps.
pub fn jumps() -> Result<i64, Refusal> {
    Ok(sequence::read(state_oid(c"epoch_seq")?).last.unwrap_or(0))
}

/// Jumps by hand; gives back where to.
pub fn new_epoch() -> Result<Token, Refusal> {
    let oid = sequence()?;
    checked_file(oid)?;
    let lock = Tag::jump();
    lock.take(Mode::Own, true);
    let target = jump(oid, 0)?;
    lock.give(Mode::Own);
    Ok(target)
}

fn recorded_floor() -> Result<Token, Refusal> {
    Ok(sequence::read(state_oid(c"floor_seq")?).last.unwrap_or(0))
}

/// The file that the sequence is in; refused unless its values are fit to be tokens.
fn checked_file(oid: Oid) -> Result<u32, Refusal> {
    let Some(definition) = sequence::definition(oid) else {
        return Err(errors::sequence_altered("is no sequence"));
    };
    let fault = [
        (!definition.logged, "is not logged"),
        (definition.increment < 1, "does not ascend"),
        (definition.cache != 1, "has a CACHE above 1"),
        (definition.cycle, "may CYCLE"),
    ];
    match fault.iter().find(|(bad, _)| *bad) {
        Some((_, what)) => Err(errors::sequence_altered(what)),
        None => Ok(definition.file),
    }
}

fn seen(oid: Oid) -> Result<Epoch, Refusal> {
    let now = server::identity(oid);
    if KNOWN.get() == now.mark() || plant::NO_JUMP {
        return Ok(Epoch::Same);
    }
    let kept = sequence::read(state_oid(c"identity_seq")?).last;
    Ok(epoch::compare(kept, &now))
}

/// Makes sure that the sequence has outrun whatever an earlier life of this database may have drawn: durably,
/// before anything is drawn, at least once for each change and once for any number of racing sessions. The
/// lock is given back at once, so that no open transaction holds up a jump.
fn settle(oid: Oid) -> Result<(), Refusal> {
    let mark = server::identity(oid).mark();
    if KNOWN.get() == mark {
        return Ok(());
    }
    if seen(oid)? != Epoch::Same {
        let lock = Tag::jump();
        lock.take(Mode::Own, true);
        if seen(oid)? == Epoch::Changed {
            checked_file(oid)?;
            jump(oid, 0)?;
            // Recorded last: a crash before this jumps once more, never once too few.
            record(mark)?;
        }
        lock.give(Mode::Own);
    }
    KNOWN.set(mark);
    Ok(())
}

/// Records which database this is. The extension's creation does so too: a copy made before the first draw
/// must know that it is a copy.
fn record(mark: i64) -> Result<(), Refusal> {
    let identity = state_oid(c"identity_seq")?;
    sequence::set(identity, mark);
    sequence::flush(&sequence::read(identity).logged);
    Ok(())
}

/// Called once, by the script that creates the extension.
pub fn begin() -> Result<(), Refusal> {
    record(server::identity(sequence()?).mark())
}

fn jump(oid: Oid, above: Token) -> Result<Token, Refusal> {
    let last = sequence::read(oid).last.unwrap_or(0).max(above);
    let target = epoch::jump_target(last, server::now()).ok_or_else(errors::tokens_exhausted)?;
    let (floor, count) = (state_oid(c"floor_seq")?, state_oid(c"epoch_seq")?);
    sequence::set(oid, target);
    sequence::flush(&sequence::read(oid).logged);
    sequence::set(floor, target);
    sequence::flush(&sequence::read(floor).logged);
    // Set, not drawn: what nextval logs is 32 ahead, which a crash would show.
    sequence::set(count, jumps()? + 1);
    sequence::flush(&sequence::read(count).logged);
    Ok(target)
}
