//! Whether a transaction at REPEATABLE READ or above may have a lease: it reads the world of its snapshot, which may
//! be the predecessor's.

use super::request::Request;
use crate::pg::call::errors::{self, Refusal};
use crate::pg::hash::Quick;
use crate::pg::session::scope::{self, Ending, OfTransaction, SavepointId};
use crate::pg::session::snapshot_age;
use crate::pg::session::xact;
use crate::pg::state::guarded_commits;
use crate::pg::state::keyed::Access;
use crate::pg::state::lease_table::{AsOf, LeaseTable, Rows};
use crate::pg::state::row::Row;
use pg_fence_rules::grant::{self, Acquire, Phase};
use pg_fence_rules::{Instant, Token};
use std::cell::RefCell;
use std::collections::HashMap;

thread_local! {
    /// The grants that this transaction has made at REPEATABLE READ or above, by their first tokens.
    static MADE_HERE: RefCell<HashMap<Token, SavepointId, Quick>> = RefCell::default();
}

/// Follows transactions; called once, when the library is loaded.
pub fn register() {
    scope::keep(&MADE_HERE);
}

/// This transaction has made a grant, after `check_acquire`.
pub fn grant_made(first: Token) {
    if xact::keeps_snapshot() {
        MADE_HERE.with_borrow_mut(|all| all.insert(first, xact::savepoint()));
    }
}

fn is_made_here(row: &Row) -> bool {
    MADE_HERE.with_borrow(|all| all.contains_key(&row.grant.tokens.first()))
}

/// What is granted now must have been to be had when the snapshot was taken: the lease free then, every row still
/// the version that the snapshot sees, and no guarded transaction's commit noted that it does not see
/// (`pg::guarded_commits`).
///
/// A grant that the transaction has made itself does not count: nobody else has seen it, and what it replaced was
/// looked at then. Another live one that the transaction reclaims, or has ended itself, tells nothing of all that: a
/// transaction may have guarded it until a moment ago. Then nothing at all may have been committed since.
pub fn check_acquire(table: &LeaseTable, request: &Request) -> Result<(), Refusal> {
    if !xact::keeps_snapshot() || xact::sees_all_commits() {
        return Ok(());
    }
    let of_others = |rows: Rows| rows.into_iter().filter(|row| !is_made_here(row));
    let now: Vec<Row> = of_others(table.rows(&request.name, AsOf::Now)).collect();
    let mut then: Vec<Row> = of_others(table.rows(&request.name, AsOf::Transaction)).collect();
    // Nothing tells when a session ended: it may have been after the snapshot.
    then.iter_mut().for_each(|row| row.grant.abandoned = false);
    let known = |row: &Row, rows: &[Row]| rows.iter().any(|r| r.version() == row.version());
    let same = now.iter().all(|r| r.written_here() || known(r, &then))
        && then.iter().all(|r| r.written_here() || known(r, &now));
    let ends_own = now.iter().any(|r| r.grant.closed_here);
    let free = same
        && !ends_own
        && was_free(request, &then)
        && !guarded_commits::is_newer_than_snapshot(&request.name)?;
    if free {
        Ok(())
    } else {
        Err(errors::snapshot_too_early(Some(&request.name)))
    }
}

/// Was the lease to be had when the transaction's snapshot was taken, by the rows that it sees? Where the clock
/// alone has ended a grant among them, that takes a time that is certainly not later than the snapshot.
fn was_free(request: &Request, then: &[Row]) -> bool {
    let existing = request.existing(then, |_| false);
    let free_at = |time: Instant| {
        matches!(grant::acquire(&existing, &request.ask, time), Acquire::Grant { .. })
            && !existing.iter().any(|s| s.mine && s.grant.phase(time) == Phase::Held)
    };
    // As if no deadline had passed yet.
    free_at(Instant::EARLIEST) || snapshot_age::not_taken_before().is_some_and(free_at)
}

/// Was a grant that is to be guarded there when the snapshot was taken?
pub fn has_seen(name: &[u8], row: &Row) -> Result<bool, Refusal> {
    if !xact::keeps_snapshot() || row.written_here() {
        return Ok(true);
    }
    let first = row.grant.tokens.first();
    let seen = LeaseTable::open(Access::Read)?.rows(name, AsOf::Transaction);
    Ok(seen.iter().any(|r| r.grant.slot == row.grant.slot && r.grant.tokens.first() == first))
}

impl OfTransaction for HashMap<Token, SavepointId, Quick> {
    fn transaction_ended(&mut self, _: Ending) {
        if !self.is_empty() {
            *self = HashMap::default();
        }
    }
}
