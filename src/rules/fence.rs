//! The token that a fenced write presents, and whether the write may land.

use crate::Token;

/// How a presented token must compare with the stored one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// The presented token must be greater.
    Strict,
    /// The presented token must not be smaller.
    Monotonic,
}

impl Order {
    /// Returns true if a write that presents `presented` may replace a row that has `stored`. A row without a token
    /// accepts any.
    #[inline]
    pub fn accepts(self, presented: Token, stored: Option<Token>) -> bool {
        match (self, stored) {
            (_, None) => true,
            (Order::Strict, Some(stored)) => presented > stored,
            (Order::Monotonic, Some(stored)) => presented >= stored,
        }
    }
}

/// The write of one row, as the trigger sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Write {
    /// The fence column of the stored row, `Some(None)` for a NULL; `None` for an INSERT.
    pub old: Option<Option<Token>>,
    /// The fence column of the new row, `Some(None)` for a NULL; `None` for a DELETE.
    pub new: Option<Option<Token>>,
    /// True if the statement names the fence column, as an INSERT always does.
    pub named: bool,
    /// The token with which the transaction guards the row's lease, or else the token of `pg_fence.token`.
    pub ambient: Option<Token>,
}

impl Write {
    /// Returns true if the fence column itself presents a token or a NULL. Nothing else counts then.
    #[inline]
    pub fn column_presents(&self) -> bool {
        match (self.old, self.new) {
            (_, None) => false,
            (None, Some(new)) => new.is_some(),
            (Some(old), Some(new)) => new != old,
        }
    }

    /// Returns true if the new row has a fence already, as a restored or copied row does. An object mapper's 0 is not a
    /// fence.
    #[inline]
    pub fn brings_fence(&self) -> bool {
        self.new.flatten().is_some_and(|fence| fence > Token::BEFORE_ALL)
    }
}

/// The tokens of an accepted write.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Landing {
    /// The token that the write presented.
    pub token: Token,
    /// The row's fence after the write: the greater of the presented and the stored token.
    pub fence: Token,
}

impl Landing {
    /// Returns true if the row keeps a greater token than the presented one.
    #[inline]
    pub fn keeps_greater(&self) -> bool {
        self.fence > self.token
    }
}

/// The token that a write presents, if any.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presented {
    /// A token from the column, a guard or the setting.
    Token(Token),
    /// NULL, or no token at all: PF002.
    Nothing,
    /// In strict mode, the statement names the column but gives it the stored value: PF001.
    Same(Token),
}

/// Finds the presented token, by the first rule of the contract that fits.
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

/// The verdict on a write, apart from the lease that may guard the row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The write lands. On a table bound to a lease, the token must also speak for the leases of the old and the new
    /// row; otherwise the error is PF001 if the row keeps a greater token, and PF004 if not.
    Land(Landing),
    /// PF001: the row has the same token or a greater one.
    Stale {
        /// The token of the write.
        presented: Token,
        /// The fence of the row.
        stored: Token,
    },
    /// The write lands with a NULL fence: an INSERT without a fence into a managed table that is not bound to a lease.
    LandWithout,
    /// PF002: no token, or NULL.
    Unfenced,
    /// PF003: the token was never issued.
    NeverIssued {
        /// The token of the write.
        presented: Token,
    },
}

/// Decides about a write. `bound` is true if the table is bound to a lease. `issued` returns true if a token was ever
/// issued in this database.
#[inline(always)]
pub fn check(write: &Write, order: Order, bound: bool, issued: impl Fn(Token) -> bool) -> Verdict {
    match presented(write, order) {
        Presented::Token(token) => check_token(write, token, order, bound, issued),
        Presented::Nothing => Verdict::Unfenced,
        Presented::Same(stored) => Verdict::Stale { presented: stored, stored },
    }
}

/// Decides about a write of a managed table. Only the ambient token counts, whatever the statement puts into the
/// column.
#[inline]
pub fn check_managed(write: &Write, bound: bool, issued: impl Fn(Token) -> bool) -> Verdict {
    let Some(token) = write.ambient else {
        // A new row takes nothing from anybody, unless a lease guards it. A fence must never become NULL unnoticed.
        let creates = write.old.is_none() && !bound && !write.brings_fence();
        return if creates { Verdict::LandWithout } else { Verdict::Unfenced };
    };
    check_token(write, token, Order::Monotonic, bound, issued)
}

#[inline(always)]
fn check_token(
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
            // The token must also speak for the lease, and then no conflicting grant has been made since it was issued.
            // So a greater token in the row is of the same grant, of a shared one, or of none here. Strict mode
            // compares all the same.
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

    /// The same write with an ambient token.
    fn by(number: i64, write: Write) -> Write {
        Write { ambient: Some(token(number)), ..write }
    }

    /// Pretends that tokens 1 to 99 were issued.
    fn issued(token: Token) -> bool {
        (1..=99).contains(&token.bigint())
    }

    fn land(number: i64) -> Verdict {
        land_behind(number, number)
    }

    /// The write lands, and the row keeps its stored fence.
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
            // A token in the column takes precedence.
            (update(Some(33), Some(34), true), Strict, land(34)),
            (update(Some(34), Some(33), true), Strict, stale(33, 34)),
            (update(None, Some(1), true), Strict, land(1)),
            (update(Some(3), Some(100), true), Strict, never_issued(100)),
            (update(Some(3), Some(0), true), Strict, never_issued(0)),
            (update(Some(3), None, true), Monotonic, unfenced),
            (by(50, update(Some(3), Some(40), true)), Strict, land(40)),
            // The stored value presents nothing, except if the column is named in monotonic mode.
            (update(Some(34), Some(34), true), Strict, stale(34, 34)),
            (update(Some(34), Some(34), false), Strict, unfenced),
            (update(Some(34), Some(34), true), Monotonic, land(34)),
            (update(Some(34), Some(34), false), Monotonic, unfenced),
            (update(None, None, true), Monotonic, unfenced),
            // The ambient token is compared, and becomes the fence.
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
            assert_eq!(check(&write, order, false, issued), expected, "line {line}");
        }
    }

    #[test]
    fn behind_a_bound_row_it_depends_on_the_lease_but_in_strict_mode() {
        for stored in [34, 99, 100, HUGE] {
            let beside = |number| by(number, update(Some(stored), Some(stored), false));
            for write in [update(Some(stored), Some(33), true), beside(33)] {
                assert_eq!(check(&write, Monotonic, true, issued), land_behind(33, stored));
                assert_eq!(check(&write, Strict, true, issued), stale(33, stored));
                assert_eq!(check(&write, Monotonic, false, issued), stale(33, stored));
            }
        }
        for (line, (write, expected)) in [
            (update(Some(HUGE), Some(100), true), never_issued(100)),
            (by(100, update(Some(HUGE), Some(HUGE), false)), never_issued(100)),
            (update(Some(34), Some(40), true), land(40)),
            (by(33, delete(Some(HUGE))), land_behind(33, HUGE)),
            // A stored number that was never issued is no valid token either.
            (update(Some(HUGE), Some(HUGE), true), never_issued(HUGE)),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(check(&write, Monotonic, true, issued), expected, "line {line}");
        }
    }

    #[test]
    fn a_managed_write_presents_the_ambient_token_and_nothing_else() {
        let managed = |write: Write, bound| check_managed(&write, bound, issued);
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
        // A row without a lease may be created without a token, but a fence must not become NULL unnoticed.
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
