//! When and how far the token sequence advances, and when a new epoch begins.
//!
//! After a crash a server may have lost the latest values of the sequence. A copy of a database (promoted standby,
//! restored dump, template) lacks all tokens drawn since the copy was made. Neither can know how many tokens clients
//! have seen. So each incarnation of the database begins by an advance of the sequence to a number computed from the
//! clock, which is ahead of any number reached by drawing (that would take 2^20 tokens a second). If the database may
//! also have lost that a lease changed hands, a new epoch begins, in which no earlier token is valid before a renewal.
//!
//! ```text
//!                     each draw, and each check of a token, asks `due`
//!                                          |
//!          +-------------------------------+-----------------------------+
//!          | the recorded start is         | the recorded identity is another (failover, restore, copy,
//!          | another, or was emptied       | backup); or the sequence is below the number in dumps, or
//!          | by a recovery                 | below the session's high-water mark; or fence_new_epoch()
//!          v                               v
//!    Due::Advance                    Due::NewEpoch
//!      1. sequence := target           1. sequence := target
//!                                      2. minimum  := target
//!      2. number in dumps := target    3. number in dumps := target, and one epoch more is counted
//!      3. record identity, start       4. record identity, start
//!          |                               |
//!          +-------------------------------+
//!                                          v
//!    Due::Nothing
//!      draw:  the next number; if the number in dumps lags by half a stride, it is set to this one
//!      check: a token is issued if the sequence has reached it; it speaks if its grant is current, and the grant's
//!             latest token is above the minimum
//! ```
//!
//! The advance is on disk before the next step, and the start is recorded last: a crash in between repeats an advance,
//! and never omits one. Concurrent sessions take a lock (`locks::ADVANCE`) and ask again.

use crate::{Instant, Span, Token};

/// Tokens per second of the clock, and the least by which the sequence advances.
pub const STRIDE: i64 = 1 << 20;

/// 2026-01-01 00:00 UTC, from which the clock's share of the sequence counts, to keep tokens short.
pub const CLOCK_ZERO: Instant = Instant::from_micros(820_540_800_000_000);

/// The identity of a database: distinguishes it from other databases, and from copies of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The WAL timeline, which a promotion or a point-in-time recovery changes.
    pub timeline: u32,
    /// The system identifier in the control file, which `initdb` and `pg_upgrade` change.
    pub system_identifier: u64,
    /// The database's oid, which `CREATE DATABASE … TEMPLATE` changes.
    pub database: u32,
    /// The oid of `fence.token_seq`, which restoring a dump changes.
    pub sequence: u32,
    /// The base backup from which the server was started, by `backup_label`; `None` if there was none. Starting a
    /// backup changes it, even if no recovery target creates a new timeline.
    pub backup: Option<u64>,
}

impl Identity {
    /// A hash of this identity that can be stored in a sequence.
    pub fn fingerprint(&self) -> i64 {
        let always = [
            u64::from(self.timeline),
            self.system_identifier,
            u64::from(self.database),
            u64::from(self.sequence),
        ];
        fingerprint(always.into_iter().chain(self.backup))
    }
}

/// A hash of a backup label, which identifies a base backup: the label has the backup's time and WAL position.
pub fn backup_label(content: &[u8]) -> u64 {
    hash(content.iter().copied())
}

/// A start of the server. Starts are distinguished only while no recovery lies between them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Start {
    /// The time at which the server started.
    pub server: Instant,
    /// The database's oid, since a file-by-file copy of a database has the original's recorded values.
    pub database: u32,
    /// The file of the sequence that stores the hash. ALTER SEQUENCE creates another one: while the sequence was
    /// logged, a crash did not empty it.
    pub file: u32,
    /// The oid of `fence.token_seq`, as in the identity.
    pub sequence: u32,
}

impl Start {
    /// A hash of this start and of the identity recorded in it, which can be stored in a sequence. A session that finds
    /// both need not read the identity again, part of which is in a file.
    pub fn fingerprint(&self, identity: i64) -> i64 {
        fingerprint([
            self.server.micros() as u64,
            u64::from(self.database),
            u64::from(self.file),
            u64::from(self.sequence),
            identity as u64,
        ])
    }
}

/// A positive hash of 63 bits.
fn fingerprint(parts: impl IntoIterator<Item = u64>) -> i64 {
    let hash = hash(parts.into_iter().flat_map(u64::to_le_bytes));
    ((hash >> 1) as i64).max(1)
}

/// FNV-1a (Fowler, Noll, Vo), which gives the same number on every platform and in every version.
fn hash(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// What the database has recorded about its epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recorded {
    /// The hash of the identity when the sequence was last advanced.
    pub identity: Option<i64>,
    /// The hash of the start; `None` after any recovery.
    pub start: Option<i64>,
    /// The number that a dump contains: the target of the last advance, or a token drawn since.
    pub dumped: Token,
    /// The sequence's last value; 0 if it has none.
    pub last: Token,
}

/// The advance that must come before a token is drawn or checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Due {
    /// None: the database is in its recorded epoch, and the server has not been restarted.
    Nothing,
    /// The server has started: the sequence advances, and grants and their tokens stay valid.
    Advance,
    /// The database is another one than that which drew the last tokens, or older: the sequence advances and a new
    /// epoch begins, in which no earlier token speaks for a lease before its holder has renewed it.
    NewEpoch,
}

/// Compares the recorded values with those found now. `start` is `None` if it cannot be recorded; then every session
/// acts like the first after a start. `high_water` is a token that the sequence is known to have reached. `identity` is
/// called only if this start has not recorded the identity. Errors: those of `identity`.
pub fn due<E>(
    recorded: &Recorded,
    identity: impl FnOnce() -> Result<Identity, E>,
    start: Option<&Start>,
    high_water: Token,
) -> Result<Due, E> {
    let begun = recorded.identity.zip(start).is_some_and(|(identity, start)| {
        // Nothing in an identity changes between two starts.
        recorded.start == Some(start.fingerprint(identity))
    });
    if !begun && recorded.identity != Some(identity()?.fingerprint()) {
        return Ok(Due::NewEpoch);
    }
    if recorded.last < recorded.dumped.max(high_water) {
        // A dump of a database with greater tokens was loaded, or the sequence was set back.
        return Ok(Due::NewEpoch);
    }
    Ok(if begun { Due::Nothing } else { Due::Advance })
}

/// The number to which the sequence advances: the greater of its last value + 2^20 and the clock's microseconds × 2^20
/// / 10^6. `None` if that exceeds the positive bigints.
pub fn target(last: Token, now: Instant) -> Option<Token> {
    Some(next(last)?.max(by_clock(now)?))
}

/// Returns true if the number in a dump is so far behind this token that it must be updated. If it is not, an advance
/// from it by at least `STRIDE` exceeds every token drawn, whatever the clock says where the dump is loaded.
pub fn dump_lags(dumped: Token, drawn: Token) -> bool {
    drawn.bigint() - dumped.bigint() > STRIDE / 2
}

/// Time to wait until the clock determines `target`. Zero if it does already, or if the sequence is too far ahead (for
/// example because the clock was set back).
///
/// Without the wait, two advances within a second would take the sequence ahead of the clock. A copy made between them,
/// or a snapshot rolled back, would then continue with numbers that clients have seen.
pub fn wait_for_clock(last: Token, now: Instant) -> Span {
    let (Some(next), Some(by_clock)) = (next(last), by_clock(now)) else { return Span::ZERO };
    let lead = next.bigint() - by_clock.bigint();
    if (1..=2 * STRIDE).contains(&lead) {
        Span::from_micros(lead * 1_000_000 / STRIDE + 1)
    } else {
        Span::ZERO
    }
}

/// The time at which the clock will reach the sequence; `None` if that is less than a day ahead, when the clock soon
/// determines the advances again. If it is further ahead, the clock was wrong once, or the sequence was set by hand.
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

    /// The number to which the sequence advances from `last`, `us` microseconds after the hour.
    fn moved(last: i64, us: i64) -> Option<i64> {
        target(token(last), HOUR + Span::from_micros(us)).map(Token::bigint)
    }

    #[test]
    fn an_advance_outruns_the_last_token_and_the_clock() {
        let first = 3600 * STRIDE;
        for (last, us, expected) in [
            (0, LONG_AGO.since(HOUR).micros(), STRIDE),
            (STRIDE, LONG_AGO.since(HOUR).micros(), 2 * STRIDE),
            (7, -3_600 * SECOND - 1, STRIDE + 7),
            (5, 0, first),
            (first, 0, first + STRIDE),
            // The clock was set back between two starts.
            (first + 3, -1_800 * SECOND, first + 3 + STRIDE),
        ] {
            assert_eq!(moved(last, us), Some(expected), "{last} at {us}");
        }
        assert_eq!(moved(i64::MAX, 0), None);
        // The target is as fine as the clock, for two copies made within 2 µs.
        assert!((0..100).all(|us| moved(0, us) < moved(0, us + 1)));
    }

    #[test]
    fn a_second_advance_within_a_second_waits_for_the_clock() {
        let first = 3600 * STRIDE;
        let wait = |last, us| wait_for_clock(token(last), HOUR + Span::from_micros(us)).micros();
        // The second advance comes at once, or after a tenth of a second with some tokens drawn.
        for (drawn, us) in [(0, 0), (50, 100_000), (STRIDE / 10, 100_000)] {
            let then = us + wait(first + drawn, us);
            assert!(then > us && then <= us + 2 * SECOND);
            let clock = by_clock(HOUR + Span::from_micros(then)).map(Token::bigint);
            assert_eq!(moved(first + drawn, then), clock, "the clock decides");
        }
        // There is no wait if no token was drawn yet, a second has passed, or the sequence is far ahead of the clock.
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
    fn a_sequence_more_than_a_day_ahead_of_the_clock_is_reported() {
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
            identity: Some(IDENTITY.fingerprint()),
            start: Some(START.fingerprint(IDENTITY.fingerprint())),
            dumped: token(100),
            last: token(120),
        };
        let at = |last| Recorded { last: token(last), ..recorded };
        let no_identity = Recorded { identity: None, ..recorded };
        let emptied = Recorded { start: None, ..recorded };
        let restored = Identity { backup: Some(backup_label(b"LABEL: nightly")), ..IDENTITY };
        let of_restored = Recorded { identity: Some(restored.fingerprint()), ..emptied };
        for (line, (recorded, identity, start, high_water, expected)) in [
            (recorded, IDENTITY, Some(START), 0, Due::Nothing),
            // Another database is noticed after a start of the server, or if its values were loaded.
            (no_identity, IDENTITY, Some(START), 0, Due::NewEpoch),
            (emptied, Identity { timeline: 2, ..IDENTITY }, Some(START), 0, Due::NewEpoch),
            (emptied, Identity { system_identifier: 8, ..IDENTITY }, Some(START), 0, Due::NewEpoch),
            (emptied, Identity { database: 6, ..IDENTITY }, Some(START), 0, Due::NewEpoch),
            (emptied, Identity { sequence: 10, ..IDENTITY }, Some(START), 0, Due::NewEpoch),
            (recorded, IDENTITY, Some(Start { sequence: 10, ..START }), 0, Due::Advance),
            (
                Recorded { start: recorded.start, ..of_restored },
                IDENTITY,
                Some(START),
                0,
                Due::NewEpoch,
            ),
            // The server was started from a base backup, from another one, or from an unknown one.
            (emptied, restored, Some(START), 0, Due::NewEpoch),
            (of_restored, Identity { backup: Some(0), ..IDENTITY }, Some(START), 0, Due::NewEpoch),
            (of_restored, IDENTITY, Some(START), 0, Due::NewEpoch),
            (of_restored, restored, Some(START), 0, Due::Advance),
            // The server was started again, or its start cannot be recorded.
            (emptied, IDENTITY, Some(START), 0, Due::Advance),
            (recorded, IDENTITY, Some(Start { server: LONG_AGO, ..START }), 0, Due::Advance),
            (recorded, IDENTITY, Some(Start { database: 6, ..START }), 0, Due::Advance),
            (recorded, IDENTITY, Some(Start { file: 16_401, ..START }), 0, Due::Advance),
            (recorded, IDENTITY, None, 0, Due::Advance),
            (recorded, restored, None, 0, Due::NewEpoch),
            // The sequence is below a loaded dump's number, or below a token that a session has seen, also after a
            // start.
            (at(100), IDENTITY, Some(START), 0, Due::Nothing),
            (at(99), IDENTITY, Some(START), 0, Due::NewEpoch),
            (at(110), IDENTITY, Some(START), 111, Due::NewEpoch),
            (Recorded { start: None, ..at(99) }, IDENTITY, Some(START), 0, Due::NewEpoch),
        ]
        .into_iter()
        .enumerate()
        {
            let found = due(&recorded, || Ok::<_, ()>(identity), start.as_ref(), token(high_water));
            assert_eq!(found, Ok(expected), "line {line}");
            // An identity that cannot be read stops the call, unless this start has recorded it already.
            let unknown = due(&recorded, || Err(()), start.as_ref(), token(high_water));
            let begun = start == Some(START) && recorded.start.is_some();
            let begun = begun && recorded.identity == Some(IDENTITY.fingerprint());
            assert_eq!(unknown, if begun { Ok(expected) } else { Err(()) }, "line {line}");
        }
    }

    #[test]
    fn one_backup_is_distinguished_from_another_and_from_none() {
        let labels: [Option<&[u8]>; 4] = [None, Some(b""), Some(b"LABEL: a"), Some(b"LABEL: b")];
        let of = |label: Option<&[u8]>| Identity { backup: label.map(backup_label), ..IDENTITY };
        for (i, one) in labels.into_iter().enumerate() {
            for (j, other) in labels.into_iter().enumerate() {
                assert_eq!(of(one).fingerprint() == of(other).fingerprint(), i == j, "{i} {j}");
            }
        }
    }

    #[test]
    fn an_advance_from_what_a_dump_carries_outruns_what_was_drawn() {
        let (dumped, most) = (token(7), STRIDE / 2 + 7);
        assert!(!dump_lags(dumped, token(most)) && dump_lags(dumped, token(most + 1)));
        // Concurrent sessions draw some more tokens before they see the updated number.
        let moved = target(dumped, LONG_AGO).map(Token::bigint);
        assert!(moved.is_some_and(|target| target > most + STRIDE / 4));
    }
}
