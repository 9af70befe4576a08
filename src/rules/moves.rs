//! When and how far the token sequence moves on.
//!
//! A server that starts may have lost the latest of the sequence, and a copy of a database (promoted standby,
//! restored dump, template) all that was drawn since it was made. Neither can know how many tokens clients have
//! seen, so each new life goes on at a number made from the clock, which is ahead of anything drawn one by one
//! (2^20 tokens a second would be needed to catch up).

use crate::{Instant, Span, Token};

/// Tokens per second of the clock, and the least that every move skips.
pub const STRIDE: i64 = 1 << 20;

/// 2026-01-01 00:00 UTC: where the clock's share of the sequence begins, so that tokens are not longer than they need
/// be.
pub const CLOCK_ZERO: Instant = Instant::from_micros(820_540_800_000_000);

/// The identity of a database, which tells it from another, and from a copy of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// WAL timeline; a promotion or a point-in-time recovery changes it.
    pub timeline: u32,
    /// The cluster's, of its control file; `initdb` and `pg_upgrade` change it.
    pub system_identifier: u64,
    /// `CREATE DATABASE … TEMPLATE` changes it.
    pub database: u32,
    /// Oid of `fence.token_seq`; restoring a dump changes it.
    pub sequence: u32,
    /// The base backup that the server was once started from, by `backup_label`; None if it never was. Starting another
    /// one changes it, also where no recovery target makes a new timeline.
    pub backup: Option<u64>,
}

impl Identity {
    /// A mark of this identity, fit to be kept as a sequence's value.
    pub fn mark(&self) -> i64 {
        let always = [
            u64::from(self.timeline),
            self.system_identifier,
            u64::from(self.database),
            u64::from(self.sequence),
        ];
        mark(always.into_iter().chain(self.backup))
    }
}

/// The number of a base backup, from its label as the server keeps it. Each label has the backup's time and place in
/// the log.
pub fn backup_label(content: &[u8]) -> u64 {
    hash(content.iter().copied())
}

/// A start of the server, told from any other as long as no recovery lies between.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Start {
    /// When the server started.
    pub server: Instant,
    /// A file-by-file copy of a database has its marks, too.
    pub database: u32,
    /// The file of the sequence that keeps the mark: another one after each ALTER SEQUENCE, for while it was
    /// logged a crash did not empty it.
    pub file: u32,
    /// Oid of `fence.token_seq`, as in the identity.
    pub sequence: u32,
}

impl Start {
    /// A mark of this start, fit to be kept as a sequence's value: of the start in which this identity's mark was
    /// recorded. So what finds both marks need not ask for the identity again, part of which is in a file.
    pub fn mark(&self, identity: i64) -> i64 {
        mark([
            self.server.micros() as u64,
            u64::from(self.database),
            u64::from(self.file),
            u64::from(self.sequence),
            identity as u64,
        ])
    }
}

/// A positive 63-bit hash.
fn mark(parts: impl IntoIterator<Item = u64>) -> i64 {
    let hash = hash(parts.into_iter().flat_map(u64::to_le_bytes));
    ((hash >> 1) as i64).max(1)
}

/// FNV-1a (Fowler, Noll, Vo), which is the same wherever and whenever it is computed.
fn hash(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The database's own record of the life that it is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recorded {
    /// Mark of the identity at the last move.
    pub identity: Option<i64>,
    /// Mark of the start; none after any recovery.
    pub start: Option<i64>,
    /// The number that a dump carries: where the last move went to, or a token that was drawn since.
    pub dumped: Token,
    /// The sequence's last value; 0 when it has none.
    pub last: Token,
}

/// The move that must happen before anything is drawn or judged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Due {
    /// Nothing: this life has begun.
    Nothing,
    /// The server has started: the sequence moves on. Grants live on, and their tokens speak.
    Move,
    /// The database is another, or older, than the one that drew last: the sequence moves on, and no earlier
    /// token speaks for a lease until its holder has renewed it.
    Jump,
}

/// Compares what is recorded with what is found. `start` is None where no mark of it can be kept: then every
/// session takes itself for the first. `passed` is a token that the sequence is known to have passed. `identity` is
/// asked for only where this start has not recorded the mark that is there. Errors: those of `identity`.
pub fn due<E>(
    recorded: &Recorded,
    identity: impl FnOnce() -> Result<Identity, E>,
    start: Option<&Start>,
    passed: Token,
) -> Result<Due, E> {
    let begun = recorded.identity.zip(start).is_some_and(|(identity, start)| {
        // Nothing that makes an identity changes within one start.
        recorded.start == Some(start.mark(identity))
    });
    if !begun && recorded.identity != Some(identity()?.mark()) {
        return Ok(Due::Jump);
    }
    if recorded.last < recorded.dumped.max(passed) {
        // Somebody has loaded a dump of a database that is ahead, or set the sequence back.
        return Ok(Due::Jump);
    }
    Ok(if begun { Due::Nothing } else { Due::Move })
}

/// Where the sequence moves on to: the greater of its last value + 2^20 and the clock's microseconds
/// × 2^20 / 10^6. None when that would leave the positive bigints.
pub fn target(last: Token, now: Instant) -> Option<Token> {
    Some(next(last)?.max(by_clock(now)?))
}

/// Is what a dump carries so far behind this token that it has to follow? Where it does, a move from it, which skips
/// `STRIDE` at least, outruns all that was drawn, whatever the clock of the database that loads it says.
pub fn dump_lags(dumped: Token, drawn: Token) -> bool {
    drawn.bigint() - dumped.bigint() > STRIDE / 2
}

/// How long to wait until the clock is what decides `target`. Zero where it does already, and where the sequence
/// is so far ahead that waiting is of no use (the clock was set back, say).
///
/// Without it, two moves within a second would take the sequence ahead of the clock. A copy made between them, or
/// a snapshot rolled back, would then go on at numbers that have been seen.
pub fn wait_for_clock(last: Token, now: Instant) -> Span {
    let (Some(next), Some(by_clock)) = (next(last), by_clock(now)) else { return Span::ZERO };
    let lead = next.bigint() - by_clock.bigint();
    if (1..=2 * STRIDE).contains(&lead) {
        Span::from_micros(lead * 1_000_000 / STRIDE + 1)
    } else {
        Span::ZERO
    }
}

/// When the clock will be where the sequence is. None where that is less than a day ahead: then the next moves are the
/// clock's again soon. Further ahead, the clock must once have stood wrong, or somebody has set the sequence.
pub fn far_ahead(last: Token, now: Instant) -> Option<Instant> {
    let elapsed = i128::from(last.bigint()) * 1_000_000 / i128::from(STRIDE);
    let then = CLOCK_ZERO + Span::from_micros(i64::try_from(elapsed).ok()?);
    Some(then).filter(|then| *then > now + Span::from_secs(86_400))
}

fn next(last: Token) -> Option<Token> {
    last.max(Token::BEFORE_ALL).bigint().checked_add(STRIDE).map(Token::from_bigint)
}

fn by_clock(now: Instant) -> Option<Token> {
    let elapsed = i128::from(now.since(CLOCK_ZERO).micros().max(0));
    i64::try_from(elapsed * i128::from(STRIDE) / 1_000_000).ok().map(Token::from_bigint)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG_AGO: Instant = Instant::from_micros(0);
    const HOUR: Instant = Instant::from_micros(CLOCK_ZERO.micros() + 3_600_000_000);
    const SECOND: i64 = 1_000_000;

    const IDENTITY: Identity =
        Identity { timeline: 1, system_identifier: 7, database: 5, sequence: 9, backup: None };
    const START: Start =
        Start { server: Instant::from_micros(1_000), database: 5, file: 16_400, sequence: 9 };

    const fn token(number: i64) -> Token {
        Token::from_bigint(number)
    }

    /// Where the sequence moves on to from there, so many microseconds after the hour.
    fn moved(last: i64, us: i64) -> Option<i64> {
        target(token(last), HOUR + Span::from_micros(us)).map(Token::bigint)
    }

    #[test]
    fn a_move_outruns_the_last_token_and_the_clock() {
        let first = 3600 * STRIDE;
        for (last, us, expected) in [
            (0, LONG_AGO.since(HOUR).micros(), STRIDE),
            (STRIDE, LONG_AGO.since(HOUR).micros(), 2 * STRIDE),
            (7, -3_600 * SECOND - 1, STRIDE + 7),
            (5, 0, first),
            (first, 0, first + STRIDE),
            // A clock that was set back between two starts.
            (first + 3, -1_800 * SECOND, first + 3 + STRIDE),
        ] {
            assert_eq!(moved(last, us), Some(expected), "{last} at {us}");
        }
        assert_eq!(moved(i64::MAX, 0), None);
        // It is as fine as the clock: two copies made within 2 µs.
        assert!((0..100).all(|us| moved(0, us) < moved(0, us + 1)));
    }

    #[test]
    fn a_second_move_within_a_second_waits_for_the_clock() {
        let first = 3600 * STRIDE;
        let wait = |last, us| wait_for_clock(token(last), HOUR + Span::from_micros(us)).micros();
        // At once, and after a tenth of a second with some tokens drawn.
        for (drawn, us) in [(0, 0), (50, 100_000), (STRIDE / 10, 100_000)] {
            let then = us + wait(first + drawn, us);
            assert!(then > us && then <= us + 2 * SECOND);
            let clock = by_clock(HOUR + Span::from_micros(then)).map(Token::bigint);
            assert_eq!(moved(first + drawn, then), clock, "the clock decides");
        }
        // Nothing was drawn yet; a second is over; far ahead of the clock, waiting is of no use.
        for (last, us) in [(0, 0), (first, SECOND), (first + 10 * STRIDE, 0), (i64::MAX, 0)] {
            assert_eq!(wait(last, us), 0, "{last} at {us}");
        }
    }

    #[test]
    fn tokens_stay_exact_in_javascript_for_270_years() {
        let after = |years: i64| moved(0, (years * 365 * 24 - 1) * 3_600 * SECOND);
        assert!(after(270).is_some_and(|then| then < 1 << 53));
        assert_eq!(after(1).map(|t| t.to_string().len()), Some(14));
    }

    #[test]
    fn a_sequence_more_than_a_day_ahead_of_the_clock_is_told_of() {
        let day = Span::from_secs(86_400);
        let ahead = |last| far_ahead(token(last), HOUR);
        let tomorrow = moved(0, day.micros()).expect("far from the end");
        assert_eq!((ahead(0), ahead(tomorrow)), (None, None));
        assert_eq!(ahead(tomorrow + STRIDE), Some(HOUR + day + Span::from_secs(1)));
        assert!(ahead(i64::MAX).is_some_and(|end| end < Instant::LATEST), "277 thousand years");
    }

    #[test]
    fn what_is_due_by_each_part_of_what_is_recorded() {
        let recorded = Recorded {
            identity: Some(IDENTITY.mark()),
            start: Some(START.mark(IDENTITY.mark())),
            dumped: token(100),
            last: token(120),
        };
        let at = |last| Recorded { last: token(last), ..recorded };
        let no_identity = Recorded { identity: None, ..recorded };
        let emptied = Recorded { start: None, ..recorded };
        let restored = Identity { backup: Some(backup_label(b"LABEL: nightly")), ..IDENTITY };
        let of_restored = Recorded { identity: Some(restored.mark()), ..emptied };
        for (line, (recorded, identity, start, passed, expected)) in [
            (recorded, IDENTITY, Some(START), 0, Due::Nothing),
            // Another database, which is seen when the server has started, or another's mark was loaded.
            (no_identity, IDENTITY, Some(START), 0, Due::Jump),
            (emptied, Identity { timeline: 2, ..IDENTITY }, Some(START), 0, Due::Jump),
            (emptied, Identity { system_identifier: 8, ..IDENTITY }, Some(START), 0, Due::Jump),
            (emptied, Identity { database: 6, ..IDENTITY }, Some(START), 0, Due::Jump),
            (emptied, Identity { sequence: 10, ..IDENTITY }, Some(START), 0, Due::Jump),
            (recorded, IDENTITY, Some(Start { sequence: 10, ..START }), 0, Due::Move),
            (
                Recorded { start: recorded.start, ..of_restored },
                IDENTITY,
                Some(START),
                0,
                Due::Jump,
            ),
            // A base backup was started, another one, or none that is known of.
            (emptied, restored, Some(START), 0, Due::Jump),
            (of_restored, Identity { backup: Some(0), ..IDENTITY }, Some(START), 0, Due::Jump),
            (of_restored, IDENTITY, Some(START), 0, Due::Jump),
            (of_restored, restored, Some(START), 0, Due::Move),
            // Another start; or no mark of one can be kept.
            (emptied, IDENTITY, Some(START), 0, Due::Move),
            (recorded, IDENTITY, Some(Start { server: LONG_AGO, ..START }), 0, Due::Move),
            (recorded, IDENTITY, Some(Start { database: 6, ..START }), 0, Due::Move),
            (recorded, IDENTITY, Some(Start { file: 16_401, ..START }), 0, Due::Move),
            (recorded, IDENTITY, None, 0, Due::Move),
            (recorded, restored, None, 0, Due::Jump),
            // A sequence below what a dump has loaded, or what a session has seen; also where the server has started since.
            (at(100), IDENTITY, Some(START), 0, Due::Nothing),
            (at(99), IDENTITY, Some(START), 0, Due::Jump),
            (at(110), IDENTITY, Some(START), 111, Due::Jump),
            (Recorded { start: None, ..at(99) }, IDENTITY, Some(START), 0, Due::Jump),
        ]
        .into_iter()
        .enumerate()
        {
            let found = due(&recorded, || Ok::<_, ()>(identity), start.as_ref(), token(passed));
            assert_eq!(found, Ok(expected), "line {line}");
            // What cannot be known is no reason to go on, unless this start has seen it already.
            let unknown = due(&recorded, || Err(()), start.as_ref(), token(passed));
            let begun = start == Some(START) && recorded.start.is_some();
            let begun = begun && recorded.identity == Some(IDENTITY.mark());
            assert_eq!(unknown, if begun { Ok(expected) } else { Err(()) }, "line {line}");
        }
    }

    #[test]
    fn one_backup_is_told_from_another_and_from_none() {
        let labels: [Option<&[u8]>; 4] = [None, Some(b""), Some(b"LABEL: a"), Some(b"LABEL: b")];
        let of = |label: Option<&[u8]>| Identity { backup: label.map(backup_label), ..IDENTITY };
        for (i, one) in labels.into_iter().enumerate() {
            for (j, other) in labels.into_iter().enumerate() {
                assert_eq!(of(one).mark() == of(other).mark(), i == j, "{i} {j}");
            }
        }
    }

    #[test]
    fn a_move_from_what_a_dump_carries_outruns_what_was_drawn() {
        let (dumped, most) = (token(7), STRIDE / 2 + 7);
        assert!(!dump_lags(dumped, token(most)) && dump_lags(dumped, token(most + 1)));
        // Sessions that race draw some more before they see that it has followed.
        let moved = target(dumped, LONG_AGO).map(Token::bigint);
        assert!(moved.is_some_and(|target| target > most + STRIDE / 4));
    }
}
