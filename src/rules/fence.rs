//! The token that a fenced write presents, and whether the write may land.

use crate::Token;

/// How a presented token compares with the stored one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// It must be greater.
    Strict,
    /// It must not be smaller.
    Monotonic,
}

impl Order {
    /// May a write that presents `presented` replace a row that has `stored`? A row that no token has
    /// touched accepts any.
    #[inline]
    pub fn accepts(self, presented: Token, stored: Option<Token>) -> bool {
        match (self, stored) {
            (_, None) => true,
            (Order::Strict, Some(stored)) => presented > stored,
            (Order::Monotonic, Some(stored)) => presented >= stored,
        }
    }
}

/// A row write, as the trigger sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Write {
    /// The fence column of the stored row; None inside for a NULL.
    pub old: Option<Option<Token>>,
    /// The fence column of the new row; None for a DELETE.
    pub new: Option<Option<Token>>,
    /// The statement names the fence column (an INSERT always does).
    pub named: bool,
    /// The token by which the transaction guards the row's lease, else the session's.
    pub ambient: Option<Token>,
}

impl Write {
    /// Does the fence column itself present the token (or a NULL)? Then nothing else is looked at.
    #[inline]
    pub fn column_presents(&self) -> bool {
        match (self.old, self.new) {
            (_, None) => false,
            (None, Some(new)) => new.is_some(),
            (Some(old), Some(new)) => new != old,
        }
    }

    /// Does the new row bring a fence along, as one that is restored or copied does? (An object mapper's 0 is none.)
    #[inline]
    pub fn brings_fence(&self) -> bool {
        self.new.flatten().is_some_and(|fence| fence > Token::BEFORE_ALL)
    }
}

/// The fences that an accepted write lands with.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Landing {
    /// The token that it has presented.
    pub token: Token,
    /// The row's fence after the write: the token, or the stored one where that is greater.
    pub fence: Token,
}

impl Landing {
    /// Does the row keep a greater token than the one that was presented?
    #[inline]
    pub fn keeps_greater(&self) -> bool {
        self.fence > self.token
    }
}

/// The token that a write presents, if any.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presented {
    /// A token, in the column or beside it.
    Token(Token),
    /// NULL, or nothing at all: PF002.
    Nothing,
    /// The column is named, with the value that is stored: PF001.
    Same(Token),
}

/// Finds the presented token (contract: the first rule that fits).
#[inline(always)]
pub fn presented(write: &Write, order: Order) -> Presented {
    let old = write.old.flatten();
    if write.column_presents() {
        return write.new.flatten().map_or(Presented::Nothing, Presented::Token);
    }
    if let Some(token) = write.ambient {
        return Presented::Token(token);
    }
    match old {
        Some(stored) if write.named && write.new.is_some() => match order {
            Order::Monotonic => Presented::Token(stored),
            Order::Strict => Presented::Same(stored),
        },
        _ => Presented::Nothing,
    }
}

/// The verdict on a write, but for the lease that may guard the row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It lands. On a table that is bound to a lease, only if the token speaks for the leases of the old and the new row:
    /// it is refused else, with PF001 where the row keeps a greater one, with PF004 where it does not.
    Land(Landing),
    /// PF001: the row has seen the same or a greater token.
    Stale {
        /// The token of the write.
        presented: Token,
        /// The fence of the row.
        stored: Token,
    },
    /// An INSERT into a managed table that is not bound to a lease, of a row without a fence: it lands, and stores NULL.
    LandWithout,
    /// PF002: no token, or NULL.
    Unfenced,
    /// PF003: no such token was issued.
    NeverIssued {
        /// The token of the write.
        presented: Token,
    },
}

/// Judges a write. `bound`: the table is bound to a lease. `issued` tells whether a token was ever drawn here.
#[inline(always)]
pub fn judge(write: &Write, order: Order, bound: bool, issued: impl Fn(Token) -> bool) -> Verdict {
    match presented(write, order) {
        Presented::Token(token) => judge_token(write, token, order, bound, issued),
        Presented::Nothing => Verdict::Unfenced,
        Presented::Same(stored) => Verdict::Stale { presented: stored, stored },
    }
}

/// Judges a write of a managed table: only the ambient token counts, whatever the statement has put into
/// the column.
#[inline]
pub fn judge_managed(write: &Write, bound: bool, issued: impl Fn(Token) -> bool) -> Verdict {
    let Some(token) = write.ambient else {
        // A new row is taken from nobody; a lease, though, is somebody's, and a fence is never blanked in silence.
        let creates = write.old.is_none() && !bound && !write.brings_fence();
        return if creates { Verdict::LandWithout } else { Verdict::Unfenced };
    };
    judge_token(write, token, Order::Monotonic, bound, issued)
}

#[inline(always)]
fn judge_token(
    write: &Write,
    token: Token,
    order: Order,
    bound: bool,
    issued: impl Fn(Token) -> bool,
) -> Verdict {
    if !issued(token) {
        return Verdict::NeverIssued { presented: token };
    }
    match write.old.flatten() {
        Some(stored) if !order.accepts(token, Some(stored)) => {
            // Nobody who excludes a token that speaks was granted the lease since it was drawn: a greater one in the row
            // is of the same grant, of a fellow's, or of no grant here. Strict compares all the same.
            if bound && order == Order::Monotonic {
                Verdict::Land(Landing { token, fence: stored })
            } else {
                Verdict::Stale { presented: token, stored }
            }
        }
        _ => Verdict::Land(Landing { token, fence: token }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Order::{Monotonic, Strict};

    const HUGE: i64 = i64::MAX;

    fn token(number: i64) -> Token {
        Token::from_bigint(number)
    }

    fn update(old: Option<i64>, new: Option<i64>, named: bool) -> Write {
        let column = |number: Option<i64>| Some(number.map(token));
        Write { old: column(old), new: column(new), named, ambient: None }
    }

    fn insert(new: Option<i64>) -> Write {
        Write { old: None, ..update(None, new, true) }
    }

    fn delete(old: Option<i64>) -> Write {
        Write { new: None, ..update(old, None, false) }
    }

    /// The same, with a token beside the column.
    fn by(number: i64, write: Write) -> Write {
        Write { ambient: Some(token(number)), ..write }
    }

    /// All tokens from 1 to 99 were drawn.
    fn issued(token: Token) -> bool {
        (1..=99).contains(&token.bigint())
    }

    fn land(number: i64) -> Verdict {
        land_behind(number, number)
    }

    /// It lands, and the row keeps what is stored.
    fn land_behind(number: i64, stored: i64) -> Verdict {
        Verdict::Land(Landing { token: token(number), fence: token(stored) })
    }

    fn stale(presented: i64, stored: i64) -> Verdict {
        Verdict::Stale { presented: token(presented), stored: token(stored) }
    }

    fn never_issued(presented: i64) -> Verdict {
        Verdict::NeverIssued { presented: token(presented) }
    }

    #[test]
    fn what_a_write_presents_and_whether_it_lands() {
        let unfenced = Verdict::Unfenced;
        for (line, (write, order, expected)) in [
            // The column comes first.
            (update(Some(33), Some(34), true), Strict, land(34)),
            (update(Some(34), Some(33), true), Strict, stale(33, 34)),
            (update(None, Some(1), true), Strict, land(1)),
            (update(Some(3), Some(100), true), Strict, never_issued(100)),
            (update(Some(3), Some(0), true), Strict, never_issued(0)),
            (update(Some(3), None, true), Monotonic, unfenced),
            (by(50, update(Some(3), Some(40), true)), Strict, land(40)),
            // An equal value presents nothing, but in monotonic where it is named.
            (update(Some(34), Some(34), true), Strict, stale(34, 34)),
            (update(Some(34), Some(34), false), Strict, unfenced),
            (update(Some(34), Some(34), true), Monotonic, land(34)),
            (update(Some(34), Some(34), false), Monotonic, unfenced),
            (update(None, None, true), Monotonic, unfenced),
            // The ambient token is stamped and judged.
            (by(35, update(Some(34), Some(34), false)), Strict, land(35)),
            (by(34, update(Some(34), Some(34), false)), Strict, stale(34, 34)),
            (by(34, update(Some(34), Some(34), false)), Monotonic, land(34)),
            (by(4, delete(Some(3))), Strict, land(4)),
            (delete(Some(3)), Strict, unfenced),
            (by(4, insert(None)), Strict, land(4)),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(judge(&write, order, false, issued), expected, "line {line}");
        }
    }

    #[test]
    fn behind_a_bound_row_it_depends_on_the_lease_but_in_strict_mode() {
        for stored in [34, 99, 100, HUGE] {
            let beside = |number| by(number, update(Some(stored), Some(stored), false));
            for write in [update(Some(stored), Some(33), true), beside(33)] {
                assert_eq!(judge(&write, Monotonic, true, issued), land_behind(33, stored));
                assert_eq!(judge(&write, Strict, true, issued), stale(33, stored));
                assert_eq!(judge(&write, Monotonic, false, issued), stale(33, stored));
            }
        }
        for (line, (write, expected)) in [
            (update(Some(HUGE), Some(100), true), never_issued(100)),
            (by(100, update(Some(HUGE), Some(HUGE), false)), never_issued(100)),
            (update(Some(34), Some(40), true), land(40)),
            (by(33, delete(Some(HUGE))), land_behind(33, HUGE)),
            // A stored number that was never drawn here is no token to show either.
            (update(Some(HUGE), Some(HUGE), true), never_issued(HUGE)),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(judge(&write, Monotonic, true, issued), expected, "line {line}");
        }
    }

    #[test]
    fn a_managed_write_presents_the_ambient_token_and_nothing_else() {
        let managed = |write: Write, bound| judge_managed(&write, bound, issued);
        for bound in [false, true] {
            for new in [None, Some(3), Some(33), Some(34), Some(50), Some(100), Some(-1)] {
                let bare = update(Some(34), new, true);
                let behind = if bound { land_behind(33, 34) } else { stale(33, 34) };
                assert_eq!(managed(bare, bound), Verdict::Unfenced);
                for (number, expected) in
                    [(34, land(34)), (50, land(50)), (33, behind), (100, never_issued(100))]
                {
                    assert_eq!(managed(by(number, bare), bound), expected);
                }
                assert_eq!(managed(by(7, insert(new)), bound), land(7));
            }
            assert_eq!(managed(delete(None), bound), Verdict::Unfenced);
            assert_eq!(managed(by(7, delete(None)), bound), land(7));
        }
        // A row may be created without a token where no lease guards it; but a fence is not blanked in silence.
        for (new, without) in [
            (None, Verdict::LandWithout),
            (Some(0), Verdict::LandWithout),
            (Some(-1), Verdict::LandWithout),
            (Some(7), Verdict::Unfenced),
        ] {
            assert_eq!(managed(insert(new), false), without);
            assert_eq!(managed(insert(new), true), Verdict::Unfenced);
        }
    }
}
