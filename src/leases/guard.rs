//! Guards: an open transaction relies on a grant, so nobody may replace the grant until that transaction ends.
//!
//! The lock of the lock manager protects the grant. This module remembers which grants the transaction guards, so that
//! a token is checked once per lease and transaction. A guard ends with its lock, so at the rollback of its savepoint,
//! too.

use super::locks::{Locked, Locks};
use super::lookup::{Caller, not_speaking, not_your_lease};
use super::queue;
use crate::errors::{self, Report};
use crate::pg::call::raise;
use crate::pg::session::scope::{SavepointId, TransactionEvent};
use crate::pg::session::xact;
use crate::pg::session::{clock, role};
use crate::pg::state::lease_table::{AsOf, LeaseTable};
use crate::pg::state::role_prefix;
use crate::pg::state::row::Row;
use crate::statistics::{self, Counter, RefusalFacts};
use crate::tokens;
use pg_fence_rules::locks::{AWAIT_ADOPTION, GUARD};
use pg_fence_rules::snapshot::{self, InSnapshot};
use pg_fence_rules::{Instant, Token};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// A grant that this transaction guards.
#[derive(Clone, Copy)]
struct Guard {
    slot: i32,
    token: Token,
    savepoint: SavepointId,
}

#[derive(Default)]
struct Guards {
    by_lease: BTreeMap<Vec<u8>, Vec<Guard>>,
    /// The lease of a `lease_guard` that is the only statement of its transaction so far, and when that statement
    /// began.
    outside_block: Option<(Vec<u8>, Instant)>,
}

thread_local! {
    static GUARDS: RefCell<Guards> = RefCell::default();
}

/// Forgets guards at the end of the transaction, and at the rollback of their savepoint.
pub fn on_transaction_event(event: TransactionEvent) {
    GUARDS.with_borrow_mut(|g| {
        g.by_lease.retain(|_, guards| {
            guards.retain(|guard| event.survives(guard.savepoint));
            !guards.is_empty()
        });
        g.outside_block = None;
    });
}

/// Returns true if this transaction guards any lease with this token.
pub fn is_guarding_with(token: Token) -> bool {
    GUARDS.with_borrow(|g| g.by_lease.values().flatten().any(|guard| guard.token == token))
}

/// Remembers a `lease_guard` that the client sent as a statement by itself. If the transaction ends with that
/// statement, the client is warned.
pub fn note_call(name: Vec<u8>) {
    if !xact::is_block() {
        let guarded = Some((name, xact::statement_started_at()));
        GUARDS.with_borrow_mut(|g| g.outside_block = guarded);
    }
}

/// Warns a client whose guard ends with its own statement without a write: outside of a transaction block the guard
/// protects nothing that follows. A call inside of a function is not warned, because the function may have read under
/// its guard, or written to other servers.
pub fn warn_if_in_vain() {
    let Some((name, began)) = GUARDS.with_borrow_mut(|g| g.outside_block.take()) else { return };
    // The transaction has more than one statement if the client sends them in a pipeline.
    if began == xact::statement_started_at() && !xact::has_written() {
        raise::warn(errors::guarded_nothing(&name));
    }
}

/// Makes this transaction guard the grant of this token. Errors: PF004 if the token does not speak for the lease.
pub fn require(name: &[u8], token: Token, caller: Caller) -> Result<(), Report> {
    if is_guarded_here(name, token) {
        return Ok(());
    }
    let table = LeaseTable::open_to_look()?;
    let Some((locked, acts)) = locked(&table, name, token, caller)? else {
        return Err(not_speaking(name, token, caller));
    };
    let row = &locked.row;
    let (slot, epoch) = (row.grant.slot, tokens::epoch()?);
    // Nobody can have replaced a grant that this transaction guards already, whatever the clock says.
    let held = guards_slot(name, slot)
        && row.grant.closing.is_none()
        && epoch.includes(row.grant.tokens.latest());
    if !held && !row.grant.speaks(token, clock::now(), epoch) {
        drop(locked);
        return Err(not_speaking(name, token, caller));
    }
    if !acts {
        return Err(not_your_lease(caller.visible(name, token).0, row));
    }
    check_snapshot(&table, name, row, || caller.visible(name, token).0)?;
    locked.hold_until_commit();
    queue::changed(name);
    let guard = Guard { slot, token, savepoint: xact::savepoint() };
    GUARDS.with_borrow_mut(|g| g.by_lease.entry(name.to_vec()).or_default().push(guard));
    statistics::count(Counter::Guards);
    Ok(())
}

/// Refuses a grant that the transaction's snapshot does not show, at REPEATABLE READ and above
/// (`pg_fence_rules::snapshot` says why that suffices). `visible` returns the name of the lease if the error may show it.
/// Errors: 40001 if the grant was committed after the snapshot, 55000 if this transaction made it.
fn check_snapshot<'a>(
    table: &LeaseTable,
    name: &[u8],
    row: &Row,
    visible: impl FnOnce() -> Option<&'a [u8]>,
) -> Result<(), Report> {
    if !xact::keeps_snapshot() {
        return Ok(());
    }
    let shows = |as_of| table.rows(name, as_of).iter().any(|r| r.is_of_same_grant(row));
    match snapshot::in_snapshot(shows(AsOf::Snapshot), || shows(AsOf::Committed)) {
        InSnapshot::Visible => Ok(()),
        InSnapshot::Later => Err(errors::snapshot_too_early(visible())),
        InSnapshot::Own => Err(errors::own_grant_after_snapshot(visible())),
    }
}

/// Warns after a grant at REPEATABLE READ and above, because this transaction cannot rely on it.
pub fn warn_of_older_reads(name: &[u8]) {
    if xact::keeps_snapshot() {
        raise::warn(errors::reads_are_older(name));
    }
}

/// Guards as `require` does, for an SQL call: an error is counted in the statistics.
pub fn require_in_call(name: &[u8], token: Token) -> Result<(), Report> {
    require(name, token, Caller::Function).inspect_err(|report| {
        statistics::refused(report, || RefusalFacts {
            lease: Some(name.to_vec()),
            ..RefusalFacts::default()
        });
    })
}

/// Locks the grant of this token for a guard; the second value is true if the caller acts for the grant's role. Returns
/// `None` also if the caller may not know of the grant: anybody may bind a table to any lease, and could otherwise find
/// the lease's tokens by trying.
fn locked<'a>(
    table: &LeaseTable,
    name: &'a [u8],
    token: Token,
    caller: Caller,
) -> Result<Option<(Locked<'a>, bool)>, Report> {
    loop {
        let Some(seen) = table.row_with(name, token) else { return Ok(None) };
        let acts = role::acts_for(seen.role(), caller.in_trigger());
        if !acts && !role_prefix::may_be_named_in_errors(seen.name()) {
            return Ok(None);
        }
        let has_token = |row: &Row| row.grant.has(token);
        let Some(locked) = Locked::seen(table, name, &seen, GUARD, has_token)? else {
            return Ok(None);
        };
        // No adoption changes a grant that is closed. If this transaction has written the row, an adoption waits for it,
        // so it must not wait for that adoption. An adopted lease has no queue but of adoptions.
        let Row { grant, .. } = &locked.row;
        let is_settled = grant.adopted.is_none() || grant.closing.is_some() || locked.row.is_own();
        if is_settled || !queue::somebody_waits(name) {
            return Ok(Some((locked, acts)));
        }
        // The adoption may have ended this grant and not have committed that yet, or may wait for the lock of the grant.
        drop(locked);
        Locks::of(name).take(AWAIT_ADOPTION, 0)?;
    }
}

/// Returns true if this transaction guards the lease with exactly this token.
#[inline]
pub fn is_guarded_here(name: &[u8], token: Token) -> bool {
    GUARDS.with_borrow(|g| g.by_lease.get(name).is_some_and(|v| v.iter().any(|v| v.token == token)))
}

/// The token with which this transaction guards the lease; the latest if there are several.
#[inline]
pub fn token_for(name: &[u8]) -> Option<Token> {
    GUARDS.with_borrow(|g| g.by_lease.get(name).and_then(|v| v.last()).map(|v| v.token))
}

/// Returns true if this transaction guards the grant in that slot.
pub fn guards_slot(name: &[u8], slot: i32) -> bool {
    GUARDS.with_borrow(|g| g.by_lease.get(name).is_some_and(|v| v.iter().any(|v| v.slot == slot)))
}
