//! A lease in the row: on a table of work each row is its own lease. The fence column has the token of its latest claim,
//! the deadline column says until when nobody else may have the row.
//!
//! Who holds a row shows its token; a row that nobody holds anybody may write. No clock decides whether a holder's write
//! lands: the deadline says when others may come, the token whether they came.

use crate::{Instant, Span, Token};

/// Two deadlines that are less than this apart are the same: clients whose times have milliseconds write a deadline back
/// that they have not changed.
const SAME_DEADLINE: Span = Span::from_micros(1_000);

/// The two columns of a stored row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stored {
    /// The token of the latest claim; None for a NULL.
    pub fence: Option<Token>,
    /// Until when nobody else may have the row; None for a NULL.
    pub deadline: Option<Instant>,
    /// The present transaction has written this version of the row.
    pub is_own: bool,
}

/// The token that a statement presents to the row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presented {
    /// None: the statement does not name the fence column, or nothing is in the setting.
    Nothing,
    /// NULL, in a fence column that the statement names.
    Null,
    /// A token, in the fence column or in the setting.
    Token(Token),
    /// In `managed` mode, without a token in the setting: another value than the row's, from an old copy of the row.
    OldCopy,
}

/// An UPDATE or a DELETE of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Write {
    /// The row before it.
    pub old: Stored,
    /// The token that it presents.
    pub presented: Presented,
    /// The deadline that it gives the row, None inside for NULL; None for a DELETE.
    pub new_deadline: Option<Option<Instant>>,
}

/// What becomes of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It lands, the fence stays, and the row gets this deadline.
    Land(Option<Instant>),
    /// It claims the row until this deadline: a token is drawn and becomes the fence.
    Claim(Instant),
    /// It is refused.
    Refused(Reason),
}

/// Why a write is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// PF001: somebody has claimed the row since.
    Stale,
    /// PF002: NULL, where the row has a token.
    NoToken,
    /// PF003: no such token was issued.
    NeverIssued,
    /// PF004: the token is of another claim, which is not the row's latest.
    OtherClaim,
    /// PF004: the row was given up, evicted, or written by somebody when the deadline had passed.
    GivenUp,
    /// PF004: a renewal after the deadline.
    LateRenewal,
    /// PF004: the statement writes back an old copy of the row.
    OldCopy,
    /// PF006: another one holds the row.
    Held,
    /// 22023: a claim whose deadline has passed.
    PastDeadline,
}

impl Stored {
    /// Returns true if nobody may claim the row now. (A deadline without a token is from before the fence: it is nobody's.)
    pub fn is_held(&self, now: Instant) -> bool {
        self.fence.is_some() && self.deadline.is_some_and(|deadline| deadline > now)
    }

    /// Returns true if the row was claimed, its deadline has passed, and nobody has written it since.
    pub fn is_over(&self, now: Instant) -> bool {
        self.fence.is_some() && self.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Returns true if this is the row's deadline, or NULL where it has none.
    fn has_deadline(&self, other: Option<Instant>) -> bool {
        match (self.deadline, other) {
            (Some(one), Some(other)) => {
                one.since(other) < SAME_DEADLINE && other.since(one) < SAME_DEADLINE
            }
            (one, other) => one == other,
        }
    }
}

/// Judges an UPDATE or a DELETE of a row that is locked, at the time of the decision. `issued` tells whether a token was ever
/// drawn here; it is asked only about one that is not the row's own.
pub fn judge(write: &Write, now: Instant, issued: impl FnOnce(Token) -> bool) -> Verdict {
    let old = &write.old;
    let is_holder = match is_holders(write, now, issued) {
        Ok(is_holder) => is_holder,
        Err(reason) => return Verdict::Refused(reason),
    };
    let outcome = match write.new_deadline {
        None => Ok(Verdict::Land(None)),
        Some(new) if is_holder => holders_deadline(old, new, now).map(Verdict::Land),
        Some(new) => anybodys_deadline(old, new, now),
    };
    outcome.unwrap_or_else(Verdict::Refused)
}

/// Returns true for a write of the row's holder, false for one of anybody to a row that nobody holds.
fn is_holders(
    write: &Write,
    now: Instant,
    issued: impl FnOnce(Token) -> bool,
) -> Result<bool, Reason> {
    let old = &write.old;
    match (write.presented, old.fence) {
        (Presented::OldCopy, _) => Err(Reason::OldCopy),
        (Presented::Null, Some(_)) => Err(Reason::NoToken),
        (Presented::Token(token), Some(fence)) if token < fence => Err(Reason::Stale),
        (Presented::Token(token), fence) if fence != Some(token) => Err(match issued(token) {
            true => Reason::OtherClaim,
            false => Reason::NeverIssued,
        }),
        // Given up by this very transaction: it goes on writing a row that is nobody's. No token is opened again.
        (Presented::Token(_), _) if old.deadline.is_none() => match old.is_own {
            true => Ok(false),
            false => Err(Reason::GivenUp),
        },
        (Presented::Token(_), _) => Ok(true),
        (Presented::Nothing | Presented::Null, _) if old.is_own => {
            Ok(old.fence.is_some() && old.deadline.is_some())
        }
        (Presented::Nothing | Presented::Null, _) if old.is_held(now) => Err(Reason::Held),
        (Presented::Nothing | Presented::Null, _) => Ok(false),
    }
}

/// The deadline that the row gets by a write of its holder. It is never brought forward, but for NULL, which gives the row up.
fn holders_deadline(
    old: &Stored,
    new: Option<Instant>,
    now: Instant,
) -> Result<Option<Instant>, Reason> {
    match new {
        None => Ok(None),
        Some(_) if new <= old.deadline || old.has_deadline(new) => Ok(old.deadline),
        Some(_) if old.is_held(now) => Ok(new),
        // One that copies the fence, as an object mapper's save does, would live on with the token of a worker that is dead.
        Some(_) => Err(Reason::LateRenewal),
    }
}

/// Returns true for a time without microseconds of its own, as clients write back. Any other that is near the stored one is a
/// claim's, which has waited for the row since both were computed.
fn is_of_milliseconds(time: Option<Instant>) -> bool {
    time.is_some_and(|time| time.micros() % 1_000 == 0)
}

/// What a write does to a row that nobody holds.
fn anybodys_deadline(old: &Stored, new: Option<Instant>, now: Instant) -> Result<Verdict, Reason> {
    let is_from_before = old.fence.is_none() && old.deadline.is_some();
    match new {
        // Any write ends what was over.
        _ if old.deadline == new || old.has_deadline(new) && is_of_milliseconds(new) => {
            Ok(match is_from_before {
                true => Verdict::Land(new),
                false => Verdict::Land(None),
            })
        }
        None => Ok(Verdict::Land(None)),
        Some(deadline) if deadline > now => Ok(Verdict::Claim(deadline)),
        // Who began before the table was fenced may finish by a deadline that has passed.
        Some(_) if is_from_before => Ok(Verdict::Land(new)),
        Some(_) => Err(Reason::PastDeadline),
    }
}

/// Judges the INSERT of a row: with a deadline ahead it is born held.
pub fn judge_insert(deadline: Option<Instant>, now: Instant) -> Verdict {
    match deadline {
        None => Verdict::Land(None),
        Some(deadline) if deadline > now => Verdict::Claim(deadline),
        Some(_) => Verdict::Refused(Reason::PastDeadline),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Presented::{Nothing, Null, OldCopy};

    const NOW: Instant = Instant::from_micros(1_000_000_000);

    fn at(milliseconds: i64) -> Option<Instant> {
        Some(NOW + Span::from_micros(milliseconds * 1_000))
    }

    fn token(number: i64) -> Token {
        Token::from_bigint(number)
    }

    fn shows(number: i64) -> Presented {
        Presented::Token(token(number))
    }

    fn row(fence: Option<i64>, deadline: Option<Instant>) -> Stored {
        Stored { fence: fence.map(token), deadline, is_own: false }
    }

    fn own(fence: Option<i64>, deadline: Option<Instant>) -> Stored {
        Stored { is_own: true, ..row(fence, deadline) }
    }

    fn refused(reason: Reason) -> Verdict {
        Verdict::Refused(reason)
    }

    /// All tokens from 1 to 99 were drawn.
    fn judged(old: Stored, presented: Presented, new: Option<Instant>) -> Verdict {
        let write = Write { old, presented, new_deadline: Some(new) };
        judge(&write, NOW, |token| (1..=99).contains(&token.bigint()))
    }

    fn deleted(old: Stored, presented: Presented) -> Verdict {
        let write = Write { old, presented, new_deadline: None };
        judge(&write, NOW, |token| (1..=99).contains(&token.bigint()))
    }

    #[test]
    fn who_holds_a_row_shows_its_token() {
        let (held, over, free) = (row(Some(7), at(5)), row(Some(7), at(-5)), row(Some(7), None));
        let later = at(9).unwrap();
        for (line, (old, presented, new, expected)) in [
            (held, Nothing, at(5), refused(Reason::Held)),
            (held, Nothing, at(9), refused(Reason::Held)),
            (held, Null, at(5), refused(Reason::NoToken)),
            (over, Null, at(9), refused(Reason::NoToken)),
            (held, shows(6), at(9), refused(Reason::Stale)),
            (over, shows(0), None, refused(Reason::Stale)),
            (held, shows(8), None, refused(Reason::OtherClaim)),
            (free, shows(100), None, refused(Reason::NeverIssued)),
            (row(None, None), shows(0), None, refused(Reason::NeverIssued)),
            (row(None, None), shows(7), None, refused(Reason::OtherClaim)),
            (held, OldCopy, at(5), refused(Reason::OldCopy)),
            // Its holder's, whatever the clock says; but a renewal must come in time.
            (held, shows(7), at(5), Verdict::Land(at(5))),
            (held, shows(7), at(2), Verdict::Land(at(5))),
            (held, shows(7), at(9), Verdict::Land(Some(later))),
            (held, shows(7), None, Verdict::Land(None)),
            (over, shows(7), at(-5), Verdict::Land(at(-5))),
            (over, shows(7), at(-9), Verdict::Land(at(-5))),
            (over, shows(7), None, Verdict::Land(None)),
            (over, shows(7), at(9), refused(Reason::LateRenewal)),
            (free, shows(7), None, refused(Reason::GivenUp)),
            (free, shows(7), at(9), refused(Reason::GivenUp)),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(judged(old, presented, new), expected, "line {line}");
        }
    }

    #[test]
    fn a_row_that_nobody_holds_anybody_may_write() {
        let (over, free) = (row(Some(7), at(-5)), row(Some(7), None));
        let (fresh, before) = (row(None, None), row(None, at(-5)));
        let claim = Verdict::Claim(at(9).unwrap());
        let past = refused(Reason::PastDeadline);
        for (line, (old, new, expected)) in [
            (over, at(9), claim),
            (free, at(9), claim),
            (fresh, at(9), claim),
            (before, at(9), claim),
            (row(None, at(5)), at(9), claim),
            (over, at(-2), past),
            (free, at(-2), past),
            (fresh, at(-2), past),
            // Any write ends what was over, and leaves alone what was there before the fence.
            (over, at(-5), Verdict::Land(None)),
            (over, None, Verdict::Land(None)),
            (free, None, Verdict::Land(None)),
            (before, at(-5), Verdict::Land(at(-5))),
            (before, at(-2), Verdict::Land(at(-2))),
            (before, None, Verdict::Land(None)),
            (row(None, at(5)), at(5), Verdict::Land(at(5))),
            (row(None, at(5)), at(-2), Verdict::Land(at(-2))),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(judged(old, Nothing, new), expected, "line {line}");
            // A NULL presents nothing to a row without a token.
            if old.fence.is_none() {
                assert_eq!(judged(old, Null, new), expected, "line {line}");
            }
        }
    }

    #[test]
    fn a_transaction_that_has_written_the_row_goes_on_writing_it() {
        let (held, over, free) = (own(Some(7), at(5)), own(Some(7), at(-5)), own(Some(7), None));
        let claim = Verdict::Claim(at(9).unwrap());
        for presented in [Nothing, shows(7)] {
            assert_eq!(judged(held, presented, at(5)), Verdict::Land(at(5)));
            assert_eq!(judged(held, presented, at(9)), Verdict::Land(at(9)));
            assert_eq!(judged(held, presented, at(-2)), Verdict::Land(at(5)));
            assert_eq!(judged(over, presented, at(-5)), Verdict::Land(at(-5)));
            assert_eq!(judged(over, presented, at(9)), refused(Reason::LateRenewal));
            assert_eq!(judged(free, presented, None), Verdict::Land(None));
            // No token is opened again: another one is drawn.
            assert_eq!(judged(free, presented, at(9)), claim);
            for old in [held, over, free] {
                assert_eq!(deleted(old, presented), Verdict::Land(None));
                assert_eq!(judged(old, presented, None), Verdict::Land(None));
            }
        }
        assert_eq!(judged(own(None, at(5)), Nothing, at(9)), claim);
        assert_eq!(judged(held, shows(6), None), refused(Reason::Stale));
        assert_eq!(judged(held, Null, None), refused(Reason::NoToken));
    }

    #[test]
    fn a_delete_is_judged_as_an_update_that_leaves_the_deadline() {
        let (held, over, free) = (row(Some(7), at(5)), row(Some(7), at(-5)), row(Some(7), None));
        assert_eq!(deleted(held, Nothing), refused(Reason::Held));
        assert_eq!(deleted(held, shows(7)), Verdict::Land(None));
        assert_eq!(deleted(over, shows(7)), Verdict::Land(None));
        assert_eq!(deleted(over, Nothing), Verdict::Land(None));
        assert_eq!(deleted(free, Nothing), Verdict::Land(None));
        assert_eq!(deleted(free, shows(7)), refused(Reason::GivenUp));
        assert_eq!(deleted(held, shows(6)), refused(Reason::Stale));
        assert_eq!(deleted(held, shows(100)), refused(Reason::NeverIssued));
    }

    #[test]
    fn a_deadline_that_is_written_back_in_milliseconds_is_unchanged() {
        for (old_us, as_written) in [(5_400, [5_000, 6_000]), (-5_400, [-6_000, -5_000])] {
            let old = row(Some(7), Some(NOW + Span::from_micros(old_us)));
            for new_us in as_written {
                let new = Some(NOW + Span::from_micros(new_us));
                assert_eq!(judged(old, shows(7), new), Verdict::Land(old.deadline));
                if old_us < 0 {
                    assert_eq!(judged(old, Nothing, new), Verdict::Land(None));
                }
            }
        }
    }

    #[test]
    fn a_claim_that_waited_until_both_deadlines_had_passed_is_none() {
        let old = row(Some(7), Some(NOW + Span::from_micros(-5_400)));
        for new_us in [-5_401, -5_399, -5_900] {
            let new = Some(NOW + Span::from_micros(new_us));
            assert_eq!(judged(old, Nothing, new), refused(Reason::PastDeadline));
        }
    }

    #[test]
    fn a_row_is_born_held_by_a_deadline_ahead() {
        assert_eq!(judge_insert(None, NOW), Verdict::Land(None));
        assert_eq!(judge_insert(at(5), NOW), Verdict::Claim(at(5).unwrap()));
        let past = Reason::PastDeadline;
        assert_eq!(judge_insert(Some(NOW), NOW), refused(past));
    }
}
