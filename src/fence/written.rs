//! Under which tokens this transaction has written rows, and which fences it left in them: what the check behind the other
//! triggers knows its rows by.

use crate::pg::session::scope::Moment;
use pg_fence_rules::fence::Landing;
use pg_fence_rules::Token;
use pgrx::pg_sys::Oid;
use std::cell::RefCell;
use std::collections::BTreeSet;

/// A table, a fence that was left in it, and the token: a smaller one where a row has kept a greater fence.
type Entry = (u32, Token, Token);

thread_local! {
    static WRITTEN: RefCell<BTreeSet<Entry>> = RefCell::default();
}

/// Forgets the rows that this transaction has written when it ends. (A row that a rollback undoes is not looked at again.)
pub fn follow(moment: Moment) {
    if matches!(moment, Moment::Ended(_)) {
        WRITTEN.with_borrow_mut(BTreeSet::clear);
    }
}

/// Remembers what a row of the table has landed with.
pub fn note(table: Oid, landing: Landing) {
    WRITTEN.with_borrow_mut(|all| all.insert((table.to_u32(), landing.fence, landing.token)));
}

/// A token under which a row of the table was left with this fence: one that is asked for, if there is one.
pub fn under(table: Oid, fence: Token, asked_for: impl Fn(Token) -> bool) -> Option<Token> {
    WRITTEN.with_borrow(|all| {
        let least = Token::from_bigint(i64::MIN);
        let of_fence = (table.to_u32(), fence, least)..=(table.to_u32(), fence, fence);
        let tokens = all.range(of_fence).map(|(_, _, token)| *token);
        // The fence itself, where it is one of them, comes first.
        tokens.clone().rev().find(|token| asked_for(*token)).or_else(|| tokens.clone().next())
    })
}
