//! Under which tokens this transaction has written rows, and which fences it left in them: what the check behind the other
//! triggers knows its rows by.

use crate::pg::session::scope::{Ending, Moment, OfSavepoint, OfTransaction};
use pg_fence_rules::fence::Landing;
use pg_fence_rules::Token;
use pgrx::pg_sys::Oid;
use std::cell::RefCell;
use std::collections::BTreeSet;

/// A table, a fence that was left in it, and the token: a smaller one where a row has kept a greater fence.
type Entry = (u32, Token, Token);

#[derive(Default)]
struct Written {
    all: BTreeSet<Entry>,
    /// The one of the latest row: most rows of a transaction have one and the same.
    last: Option<Entry>,
}

thread_local! {
    static WRITTEN: RefCell<Written> = RefCell::default();
}

/// Forgets the rows that this transaction has written when it ends.
pub fn follow(moment: Moment) {
    WRITTEN.with_borrow_mut(|written| written.follow(moment));
}

/// Remembers what a row of the table has landed with.
pub fn note(table: Oid, landing: Landing) {
    let entry = (table.to_u32(), landing.fence, landing.token);
    WRITTEN.with_borrow_mut(|written| {
        if written.last != Some(entry) {
            written.last = Some(entry);
            written.all.insert(entry);
        }
    });
}

/// A token under which a row of the table was left with this fence: one that is asked for, if there is one.
pub fn under(table: Oid, fence: Token, asked_for: impl Fn(Token) -> bool) -> Option<Token> {
    WRITTEN.with_borrow(|written| {
        let least = Token::from_bigint(i64::MIN);
        let of_fence = (table.to_u32(), fence, least)..=(table.to_u32(), fence, fence);
        let tokens = written.all.range(of_fence).map(|(_, _, token)| *token);
        // The fence itself, where it is one of them, comes first.
        tokens.clone().rev().find(|token| asked_for(*token)).or_else(|| tokens.clone().next())
    })
}

// A row that a rollback undoes is not looked at again.
impl OfSavepoint for Written {}

impl OfTransaction for Written {
    fn transaction_ended(&mut self, _: Ending) {
        if self.last.take().is_some() {
            self.all.clear();
        }
    }
}
