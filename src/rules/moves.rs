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
}

impl Identity {
    /// A mark of this identity, fit to be kept as a sequence's value.
    pub fn mark(&self) -> i64 {
        mark(&[
            u64::from(self.timeline),
            self.system_identifier,
            u64::from(self.database),
            u64::from(self.sequence),
        ])
    }
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
}

impl Start {
    /// A mark of this start, fit to be kept as a sequence's value.
    pub fn mark(&self) -> i64 {
        mark(&[self.server.micros() as u64, u64::from(self.database), u64::from(self.file)])
    }
}

/// A positive 63-bit hash: FNV-1a (Fowler, Noll, Vo), which is the same wherever and whenever it is computed.
fn mark(parts: &[u64]) -> i64 {
    let bytes = parts.iter().flat_map(|part| part.to_le_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    ((hash >> 1) as i64).max(1)
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
/// session takes itself for the first. `passed` is a token that the sequence is known to have passed.
pub fn due(recorded: &Recorded, identity: &Identity, start: Option<&Start>, passed: Token) -> Due {
    if recorded.identity != Some(identity.mark()) {
        return Due::Jump;
    }
    if recorded.last < recorded.dumped.max(passed) {
        // Somebody has loaded a dump of a database that is ahead, or set the sequence back.
        return Due::Jump;
    }
    if start.is_some_and(|start| recorded.start == Some(start.mark())) {
        Due::Nothing
    } else {
        Due::Move
    }
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

    const IDENTITY: Identity =
        Identity { timeline: 1, system_identifier: 7, database: 5, sequence: 9 };
    const START: Start = Start { server: Instant::from_micros(1_000), database: 5, file: 16_400 };

    const fn token(number: i64) -> Token {
        Token::from_bigint(number)
    }

    /// Where the sequence moves on to from there.
    fn target(last: i64, now: Instant) -> Option<i64> {
        super::target(token(last), now).map(Token::bigint)
    }

    fn wait_for_clock(last: i64, now: Instant) -> Span {
        super::wait_for_clock(token(last), now)
    }

    fn due(recorded: &Recorded, identity: &Identity, start: Option<&Start>, passed: i64) -> Due {
        super::due(recorded, identity, start, token(passed))
    }

    fn recorded() -> Recorded {
        Recorded {
            identity: Some(IDENTITY.mark()),
            start: Some(START.mark()),
            dumped: token(100),
            last: token(120),
        }
    }

    #[test]
    fn a_move_outruns_the_last_token_and_the_clock() {
        assert_eq!(target(0, LONG_AGO), Some(STRIDE));
        assert_eq!(target(STRIDE, LONG_AGO), Some(2 * STRIDE));
        assert_eq!(target(7, CLOCK_ZERO - Span::from_micros(1)), Some(STRIDE + 7));
        let hour = CLOCK_ZERO + Span::from_secs(3_600);
        assert_eq!(target(5, hour), Some(3600 * STRIDE));
        assert_eq!(target(3600 * STRIDE, hour), Some(3601 * STRIDE));
        assert_eq!(target(i64::MAX, hour), None);
    }

    #[test]
    fn a_second_move_within_a_second_waits_for_the_clock() {
        let hour = CLOCK_ZERO + Span::from_secs(3_600);
        let first = target(0, hour).expect("far from the end");
        assert_eq!(wait_for_clock(0, hour), Span::ZERO, "nothing was drawn yet");
        // At once, and after a tenth of a second with some tokens drawn.
        for (drawn, later) in [(0, 0), (50, 100_000), (STRIDE / 10, 100_000)] {
            let now = hour + Span::from_micros(later);
            let then = now + wait_for_clock(first + drawn, now);
            assert!(then > now && then <= now + Span::from_secs(2));
            assert_eq!(
                target(first + drawn, then),
                by_clock(then).map(Token::bigint),
                "the clock decides"
            );
        }
        assert_eq!(wait_for_clock(first, hour + Span::from_secs(1)), Span::ZERO);
        // Far ahead of the clock, waiting is of no use.
        assert_eq!(wait_for_clock(first + 10 * STRIDE, hour), Span::ZERO);
        assert_eq!(wait_for_clock(i64::MAX, hour), Span::ZERO);
    }

    #[test]
    fn a_move_is_as_fine_as_the_clock() {
        let hour = CLOCK_ZERO + Span::from_secs(3_600);
        let next = |us: i64| target(0, hour + Span::from_micros(us)).expect("far from the end");
        assert!((0..100).all(|us| next(us) < next(us + 1)), "two copies made within 2 µs");
    }

    #[test]
    fn a_clock_set_back_between_two_starts_goes_on_above_the_last() {
        let hour = CLOCK_ZERO + Span::from_secs(3_600);
        let first = target(5, hour).expect("far from the end");
        assert_eq!(target(first + 3, hour - Span::from_secs(1_800)), Some(first + 3 + STRIDE));
        assert_eq!(target(first + 3, LONG_AGO), Some(first + 3 + STRIDE));
    }

    #[test]
    fn tokens_stay_exact_in_javascript_for_270_years() {
        let year = |n: i64| Span::from_secs(n * 365 * 86_400);
        let then = target(0, CLOCK_ZERO + year(270)).expect("far from the end");
        assert!(then < 1 << 53, "{then}");
        assert_eq!(target(0, CLOCK_ZERO + year(1)).map(|t| t.to_string().len()), Some(14));
    }

    #[test]
    fn a_sequence_more_than_a_day_ahead_of_the_clock_is_told_of() {
        let day = Span::from_secs(86_400);
        let now = CLOCK_ZERO + Span::from_secs(3_600);
        let far_ahead = |last| super::far_ahead(token(last), now);
        let tomorrow = target(0, now + day).expect("far from the end");
        assert_eq!(far_ahead(0), None);
        assert_eq!(far_ahead(tomorrow), None);
        assert_eq!(far_ahead(tomorrow + STRIDE), Some(now + day + Span::from_secs(1)));
        let end = far_ahead(i64::MAX).expect("277 thousand years");
        assert!(end < Instant::LATEST);
    }

    #[test]
    fn each_part_of_the_identity_counts() {
        assert_eq!(due(&recorded(), &IDENTITY, Some(&START), 0), Due::Nothing);
        let none = Recorded { identity: None, ..recorded() };
        assert_eq!(due(&none, &IDENTITY, Some(&START), 0), Due::Jump);
        for other in [
            Identity { timeline: 2, ..IDENTITY },
            Identity { system_identifier: 8, ..IDENTITY },
            Identity { database: 6, ..IDENTITY },
            Identity { sequence: 10, ..IDENTITY },
        ] {
            assert_eq!(due(&recorded(), &other, Some(&START), 0), Due::Jump);
        }
    }

    #[test]
    fn each_part_of_the_start_counts() {
        let emptied = Recorded { start: None, ..recorded() };
        assert_eq!(due(&emptied, &IDENTITY, Some(&START), 0), Due::Move);
        for other in [
            Start { server: Instant::from_micros(1_001), ..START },
            Start { database: 6, ..START },
            Start { file: 16_401, ..START },
        ] {
            assert_eq!(due(&recorded(), &IDENTITY, Some(&other), 0), Due::Move);
        }
        assert_eq!(due(&recorded(), &IDENTITY, None, 0), Due::Move, "no mark can be kept");
    }

    #[test]
    fn a_sequence_below_what_a_dump_has_loaded_jumps() {
        let at = |last| Recorded { last: token(last), ..recorded() };
        assert_eq!(due(&at(100), &IDENTITY, Some(&START), 0), Due::Nothing);
        assert_eq!(due(&at(99), &IDENTITY, Some(&START), 0), Due::Jump);
        assert_eq!(due(&at(110), &IDENTITY, Some(&START), 111), Due::Jump);
        // Also where the server has started since.
        assert_eq!(
            due(&Recorded { start: Some(1), ..at(99) }, &IDENTITY, Some(&START), 0),
            Due::Jump
        );
    }

    #[test]
    fn a_move_from_what_a_dump_carries_outruns_what_was_drawn() {
        let (dumped, most) = (token(7), STRIDE / 2 + 7);
        assert!(
            !super::dump_lags(dumped, token(most)) && super::dump_lags(dumped, token(most + 1))
        );
        // Sessions that race draw some more before they see that it has followed.
        assert!(target(7, LONG_AGO).is_some_and(|target| target > most + STRIDE / 4));
    }
}
