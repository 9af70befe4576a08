//! The tokens under which this transaction has written rows, and the fences that it left in them. The check after the
//! other triggers recognizes rows by these.

use crate::pg::session::scope::TransactionEvent;
use pg_fence_rules::Token;
use pg_fence_rules::fence::Landing;
use pgrx::pg_sys::Oid;
use std::cell::RefCell;
use std::collections::BTreeSet;

/// A table, a fence left in one of its rows, and the token of the write, which is smaller if the row kept a greater
/// fence.
type Entry = (u32, Token, Token);

thread_local! {
    static WRITTEN: RefCell<BTreeSet<Entry>> = RefCell::default();
}

/// Forgets the written rows at the end of the transaction. (A row undone by a rollback is not checked again.)
pub fn on_transaction_event(event: TransactionEvent) {
    if matches!(event, TransactionEvent::Ended(_)) {
        WRITTEN.with_borrow_mut(BTreeSet::clear);
    }
}

/// Remembers the tokens of a write to the table.
pub fn note(table: Oid, landing: Landing) {
    WRITTEN.with_borrow_mut(|all| all.insert((table.to_u32(), landing.fence, landing.token)));
}

/// A token whose write left this fence in a row of the table, preferably one for which `prefer` returns true.
pub fn token_that_wrote(table: Oid, fence: Token, prefer: impl Fn(Token) -> bool) -> Option<Token> {
    WRITTEN.with_borrow(|all| {
        let least = Token::from_bigint(i64::MIN);
        let of_fence = (table.to_u32(), fence, least)..=(table.to_u32(), fence, fence);
        let tokens = all.range(of_fence).map(|(_, _, token)| *token);
        // The fence itself comes first, if it is among the tokens.
        tokens.clone().rev().find(|token| prefer(*token)).or_else(|| tokens.clone().next())
    })
}
