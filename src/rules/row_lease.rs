//! Row leases: in a table of work each row is its own lease. The fence column has the token of the latest claim, and
//! the deadline column the time until which nobody else may claim the row.
//!
//! The holder of a row presents its token; a row without a holder may be written by anybody. No clock decides whether a
//! holder's write lands: the deadline says from when others may claim the row, and the token whether they have.

use crate::{Instant, Span, Token};

/// Deadlines that differ by less than this are equal: clients with millisecond clocks round a deadline that they write
/// back unchanged.
const SAME_DEADLINE: Span = Span::from_micros(1_000);

/// The columns of a stored row that decide about a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stored {
    /// The token of the latest claim; `None` for NULL.
    pub fence: Option<Token>,
    /// The time until which nobody else may claim the row; `None` for NULL.
    pub deadline: Option<Instant>,
    /// True if the current transaction has written this version of the row.
    pub is_own: bool,
}

/// The token that a statement presents to the row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presented {
    /// No token: the statement does not name the fence column, and the setting is empty.
    Nothing,
    /// NULL in the fence column, which the statement names.
    Null,
    /// A token in the fence column or in the setting.
    Token(Token),
    /// In `managed` mode, without a token in the setting: a value in the fence column that differs from the row's, so
    /// from an old copy of the row.
    OldCopy,
}

/// An UPDATE or a DELETE of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Write {
    /// The row before the write.
    pub old: Stored,
    /// The token that the write presents.
    pub presented: Presented,
    /// The row's new deadline, `Some(None)` for NULL; `None` for a DELETE.
    pub new_deadline: Option<Option<Instant>>,
}

/// The decision about a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The write lands, the fence stays, and the row gets this deadline.
    Land(Option<Instant>),
    /// The write claims the row until this deadline: a token is drawn and becomes the fence.
    Claim(Instant),
    /// The write fails for this reason.
    Refused(Reason),
}

/// Why a write fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// PF001: the row has been claimed since.
    Stale,
    /// PF002: the write presents NULL, but the row has a token.
    NoToken,
    /// PF003: the token was never issued.
    NeverIssued,
    /// PF004: the token is not that of the row's latest claim.
    OtherClaim,
    /// PF004: the row was given up or evicted, or it was written after its deadline.
    GivenUp,
    /// PF004: the renewal came after the deadline.
    LateRenewal,
    /// PF004: the statement writes back an old copy of the row.
    OldCopy,
    /// PF006: another client holds the row.
    Held,
    /// 22023: the deadline of the claim has passed.
    PastDeadline,
}

impl Stored {
    /// Returns true if nobody may claim the row now. A deadline without a token dates from before the fence and
    /// protects no holder.
    pub fn is_held(&self, now: Instant) -> bool {
        self.fence.is_some() && self.deadline.is_some_and(|deadline| deadline > now)
    }

    /// Returns true if the row was claimed, its deadline has passed, and nobody has written it since.
    pub fn is_over(&self, now: Instant) -> bool {
        self.fence.is_some() && self.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Returns true if this is the row's deadline; NULL equals NULL.
    fn has_deadline(&self, other: Option<Instant>) -> bool {
        match (self.deadline, other) {
            (Some(one), Some(other)) => {
                one.since(other) < SAME_DEADLINE && other.since(one) < SAME_DEADLINE
            }
            (one, other) => one == other,
        }
    }
}

/// Decides about an UPDATE or a DELETE of a locked row, at the time `now`. `issued` returns true if a token was ever
/// issued in this database; it is called only for a token that is not the row's.
pub fn check(write: &Write, now: Instant, issued: impl FnOnce(Token) -> bool) -> Verdict {
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

/// Returns true for a write of the row's holder, false for a write to a row without a holder.
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
        // The same transaction gave the row up, and may go on writing it like anybody. A given-up token never becomes
        // valid again.
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

/// The deadline after a write of the holder. A write can extend it, or give the row up with NULL, but not shorten it.
fn holders_deadline(
    old: &Stored,
    new: Option<Instant>,
    now: Instant,
) -> Result<Option<Instant>, Reason> {
    match new {
        None => Ok(None),
        Some(_) if new <= old.deadline || old.has_deadline(new) => Ok(old.deadline),
        Some(_) if old.is_held(now) => Ok(new),
        // The save of an object mapper writes back the fence that it read: it would otherwise revive a dead worker's
        // token.
        Some(_) => Err(Reason::LateRenewal),
    }
}

/// Returns true for a time in whole milliseconds, as clients write it back. Any other time near the stored deadline is
/// a new claim's, which has waited for the row since both were computed.
fn is_of_milliseconds(time: Option<Instant>) -> bool {
    time.is_some_and(|time| time.micros() % 1_000 == 0)
}

/// Decides about the deadline in a write to a row without a holder.
fn anybodys_deadline(old: &Stored, new: Option<Instant>, now: Instant) -> Result<Verdict, Reason> {
    let is_from_before = old.fence.is_none() && old.deadline.is_some();
    match new {
        // Any write ends an expired claim.
        _ if old.deadline == new || old.has_deadline(new) && is_of_milliseconds(new) => {
            Ok(match is_from_before {
                true => Verdict::Land(new),
                false => Verdict::Land(None),
            })
        }
        None => Ok(Verdict::Land(None)),
        Some(deadline) if deadline > now => Ok(Verdict::Claim(deadline)),
        // A client that began before the table was fenced may finish with a deadline that has passed.
        Some(_) if is_from_before => Ok(Verdict::Land(new)),
        Some(_) => Err(Reason::PastDeadline),
    }
}

/// Decides about the INSERT of a row: with a deadline in the future the row is claimed at once.
pub fn check_insert(deadline: Option<Instant>, now: Instant) -> Verdict {
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

    /// Pretends that tokens 1 to 99 were issued.
    fn checked(old: Stored, presented: Presented, new: Option<Instant>) -> Verdict {
        let write = Write { old, presented, new_deadline: Some(new) };
        check(&write, NOW, |token| (1..=99).contains(&token.bigint()))
    }

    fn deleted(old: Stored, presented: Presented) -> Verdict {
        let write = Write { old, presented, new_deadline: None };
        check(&write, NOW, |token| (1..=99).contains(&token.bigint()))
    }

    #[test]
    fn who_holds_a_row_shows_its_token() {
        let (held, over, free) = (row(Some(7), at(5)), row(Some(7), at(-5)), row(Some(7), None));
        let (ends_now, later) = (row(Some(7), at(0)), at(9).unwrap());
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
            // The holder's writes land whatever the clock says, except for a late renewal.
            (held, shows(7), at(5), Verdict::Land(at(5))),
            (held, shows(7), at(2), Verdict::Land(at(5))),
            (held, shows(7), at(9), Verdict::Land(Some(later))),
            (held, shows(7), None, Verdict::Land(None)),
            (over, shows(7), at(-5), Verdict::Land(at(-5))),
            (over, shows(7), at(-9), Verdict::Land(at(-5))),
            (over, shows(7), None, Verdict::Land(None)),
            (over, shows(7), at(9), refused(Reason::LateRenewal)),
            (ends_now, shows(7), at(9), refused(Reason::LateRenewal)),
            (free, shows(7), None, refused(Reason::GivenUp)),
            (free, shows(7), at(9), refused(Reason::GivenUp)),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(checked(old, presented, new), expected, "line {line}");
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
            (row(Some(7), at(0)), at(9), claim),
            (free, at(9), claim),
            (fresh, at(9), claim),
            (before, at(9), claim),
            (row(None, at(5)), at(9), claim),
            (over, at(-2), past),
            (free, at(-2), past),
            (fresh, at(-2), past),
            // Any write ends an expired claim, and leaves a deadline from before the fence alone.
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
            assert_eq!(checked(old, Nothing, new), expected, "line {line}");
            // NULL presents nothing to a row without a token.
            if old.fence.is_none() {
                assert_eq!(checked(old, Null, new), expected, "line {line}");
            }
        }
    }

    #[test]
    fn a_transaction_that_has_written_the_row_goes_on_writing_it() {
        let (held, over, free) = (own(Some(7), at(5)), own(Some(7), at(-5)), own(Some(7), None));
        let claim = Verdict::Claim(at(9).unwrap());
        for presented in [Nothing, shows(7)] {
            assert_eq!(checked(held, presented, at(5)), Verdict::Land(at(5)));
            assert_eq!(checked(held, presented, at(9)), Verdict::Land(at(9)));
            assert_eq!(checked(held, presented, at(-2)), Verdict::Land(at(5)));
            assert_eq!(checked(over, presented, at(-5)), Verdict::Land(at(-5)));
            assert_eq!(checked(over, presented, at(9)), refused(Reason::LateRenewal));
            assert_eq!(checked(free, presented, None), Verdict::Land(None));
            // A given-up token does not become valid again: another one is drawn.
            assert_eq!(checked(free, presented, at(9)), claim);
            for old in [held, over, free] {
                assert_eq!(deleted(old, presented), Verdict::Land(None));
                assert_eq!(checked(old, presented, None), Verdict::Land(None));
            }
        }
        assert_eq!(checked(own(None, at(5)), Nothing, at(9)), claim);
        assert_eq!(checked(held, shows(6), None), refused(Reason::Stale));
        assert_eq!(checked(held, Null, None), refused(Reason::NoToken));
    }

    #[test]
    fn a_delete_is_checked_as_an_update_that_leaves_the_deadline() {
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
                assert_eq!(checked(old, shows(7), new), Verdict::Land(old.deadline));
                if old_us < 0 {
                    assert_eq!(checked(old, Nothing, new), Verdict::Land(None));
                }
            }
        }
    }

    #[test]
    fn a_claim_that_waited_until_both_deadlines_had_passed_is_none() {
        let old = row(Some(7), Some(NOW + Span::from_micros(-5_400)));
        for new_us in [-5_401, -5_399, -5_900] {
            let new = Some(NOW + Span::from_micros(new_us));
            assert_eq!(checked(old, Nothing, new), refused(Reason::PastDeadline));
        }
    }

    #[test]
    fn a_row_is_born_held_by_a_deadline_ahead() {
        assert_eq!(check_insert(None, NOW), Verdict::Land(None));
        assert_eq!(check_insert(at(5), NOW), Verdict::Claim(at(5).unwrap()));
        let past = Reason::PastDeadline;
        assert_eq!(check_insert(Some(NOW), NOW), refused(past));
    }
}
