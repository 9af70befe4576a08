//! Rows that this transaction has written and that kept a greater fence than the token they were written with: what the check
//! behind the other triggers knows them by.

use crate::pg::session::scope::{Ending, Follower, OfSavepoint, OfTransaction, SavepointId};
use pg_fence_rules::fence::Landing;
use pg_fence_rules::Token;
use pgrx::pg_sys::Oid;
use std::cell::RefCell;
use std::collections::BTreeSet;

/// By table: the fence, and the token. In order, for each row may have kept another one.
#[derive(Default)]
struct Kept(BTreeSet<(u32, Token, Token)>);

thread_local! {
    static KEPT: RefCell<Kept> = RefCell::default();
}

/// Those of this transaction, which go with it.
pub const KEPT_FENCES: &dyn Follower = &KEPT;

/// Remembers what a row of the table has landed with.
pub fn note(table: Oid, landing: Landing) {
    KEPT.with_borrow_mut(|kept| kept.0.insert((table.to_u32(), landing.fence, landing.token)));
}

/// A token with which a row of the table has landed that kept this fence: one that is asked for, if there is one.
pub fn token(table: Oid, fence: Token, asked_for: impl Fn(Token) -> bool) -> Option<Token> {
    KEPT.with_borrow(|kept| {
        // A token is smaller than the fence that was kept.
        let least = Token::from_bigint(i64::MIN);
        let of_fence = (table.to_u32(), fence, least)..=(table.to_u32(), fence, fence);
        let mut tokens = kept.0.range(of_fence).map(|(_, _, token)| *token);
        let any = tokens.clone().next();
        tokens.find(|token| asked_for(*token)).or(any)
    })
}

impl OfSavepoint for Kept {
    fn savepoint_released(&mut self, _: SavepointId, _: SavepointId) {}

    /// What is undone is not looked at again.
    fn survives_rollback(&mut self, _: SavepointId) -> bool {
        true
    }
}

impl OfTransaction for Kept {
    fn transaction_ended(&mut self, _: Ending) {
        self.0.clear();
    }
}
