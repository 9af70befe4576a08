//! Guards: an open transaction relies on a grant, so nobody may replace it until that transaction ends.
//!
//! The lock does the work; what is kept here is which locks this transaction has, so that the check costs
//! once per lease and transaction. A verdict goes when its lock goes: with a rolled-back savepoint at once.

use super::change::{check_role, find, has_token};
use super::locks::Locks;
use super::{line, snapshot};
use crate::pg::call::errors::{self, Refusal, Shown};
use crate::pg::call::raise;
use crate::pg::encoding;
use crate::pg::hash::Quick;
use crate::pg::locks::relation_lock::Wait;
use crate::pg::session::role;
use crate::pg::session::scope::{
    self, BeforeCommit, Ending, OfSavepoint, OfTransaction, SavepointId,
};
use crate::pg::session::server;
use crate::pg::session::xact;
use crate::pg::state::guarded_commits;
use crate::pg::state::keyed::Access;
use crate::pg::state::lease_table::{AsOf, Glance, LeaseTable};
use crate::pg::state::relation;
use crate::pg::state::row::Row;
use crate::pg::state::row_version::Sighting;
use crate::statistics::{self, Counter};
use crate::{known_bugs, tokens};
use pg_fence_rules::grant::{Mode, Phase};
use pg_fence_rules::locks::{GUARD, GUARD_BESIDE_OTHERS};
use pg_fence_rules::{Floor, Instant, Span, Token};
use pgrx::pg_sys::Oid;
use std::cell::RefCell;
use std::collections::HashMap;

/// A grant that this transaction guards.
#[derive(Clone, Copy)]
struct Guard {
    slot: i32,
    token: Token,
    /// The grant's row as it was; mostly it still is.
    seen: Sighting,
    /// When the grant is over by that row.
    over_since: Instant,
    savepoint: SavepointId,
}

#[derive(Default)]
struct Guards {
    by_lease: HashMap<Vec<u8>, Vec<Guard>, Quick>,
    /// The verdict that was asked for last: most writes of a transaction are under one.
    last: Option<(Vec<u8>, Token)>,
    /// The lease of a `lease_guard` in a transaction of, so far, one statement, and when that statement began.
    outside_block: Option<(Vec<u8>, Instant)>,
    /// Tokens under which this transaction has written, by table: for the check behind BEFORE triggers.
    written: Vec<(Oid, Token)>,
}

thread_local! {
    static GUARDS: RefCell<Guards> = RefCell::default();
}

/// A session keeps room for so many leases that a transaction guards.
const MOST_KEPT: usize = 16;

/// Notes a `lease_guard`: where the transaction turns out to end with that statement, its caller is warned.
pub fn note_call(name: Vec<u8>) {
    if !xact::is_block() {
        let guarded = Some((name, xact::statement_started_at()));
        GUARDS.with_borrow_mut(|g| g.outside_block = guarded);
    }
}

/// The lease of a guard that ends with its own statement, in a transaction that has written nothing: it has
/// guarded nothing at all, and mostly the caller thinks that it has.
fn guarded_nothing() -> Option<Vec<u8>> {
    let (name, began) = GUARDS.with_borrow_mut(|g| g.outside_block.take())?;
    // Another statement in the same transaction: the client sends its messages in a pipeline.
    let alone = began == xact::statement_started_at();
    (alone && !xact::has_written()).then_some(name)
}

/// A guarded transaction that commits later than this before its grant's deadline is noted.
const NOTE_WITHIN: Span = Span::from_secs(5);

/// The commit of a guarded transaction that has written something and may outlive its grant is noted: a
/// REPEATABLE READ transaction whose snapshot does not see what was written is then refused the lease.
///
/// `prepares`: the transaction ends nobody knows when, and may outlive any grant.
fn before_commit(prepares: bool) -> Result<(), Refusal> {
    if let Some(name) = guarded_nothing() {
        raise::warn(errors::guarded_nothing(&name));
    }
    if GUARDS.with_borrow(|g| g.by_lease.is_empty()) || !xact::has_written() {
        return Ok(());
    }
    // A standby may keep a commit waiting for as long as it likes, too.
    let any_time = prepares || server::commits_wait_for_standbys();
    let mut noted: Vec<Vec<u8>> = Vec::new();
    // Writing a note may wait for maintenance. What was certain is asked again then.
    loop {
        let mut doubtful = doubtful(any_time);
        doubtful.retain(|(name, _)| !noted.contains(name));
        if doubtful.is_empty() {
            return Ok(());
        }
        let noted_before = noted.len();
        xact::at_the_end(|| {
            // None of the extension is left: it is being dropped.
            if !relation::state_exists() {
                return Ok(());
            }
            doubtful.into_iter().try_for_each(|(name, slot)| {
                if !noted.contains(&name) && may_outlive(&name, slot, any_time)? {
                    guarded_commits::note(&name)?;
                    noted.push(name);
                }
                Ok(())
            })
        })?;
        if noted.len() == noted_before {
            return Ok(());
        }
    }
}

/// What this transaction guards, but for the grants of which it is certain that it commits before they are over: their
/// rows are as they were.
fn doubtful(any_time: bool) -> Vec<(Vec<u8>, i32)> {
    let horizon = server::now() + NOTE_WITHIN;
    let is_certain = |v: &Guard| !any_time && v.over_since >= horizon && v.seen.is_latest();
    GUARDS.with_borrow(|g| {
        let each = g.by_lease.iter().flat_map(|(name, all)| all.iter().map(move |v| (name, v)));
        each.filter(|(_, v)| !is_certain(v)).map(|(name, v)| (name.clone(), v.slot)).collect()
    })
}

/// May the transaction commit after the grant that it guards is over? (What it has changed itself tells as
/// much as a note would.) Maintenance must not hold up a commit: where it waits for the table, or works on it,
/// the answer is yes.
fn may_outlive(name: &[u8], slot: i32, any_time: bool) -> Result<bool, Refusal> {
    let horizon = server::now() + NOTE_WITHIN;
    let table = LeaseTable::try_open(Access::Read, Wait::Never)?;
    let Some(table) = table.filter(|table| table.can_search(Wait::Never)) else { return Ok(true) };
    let rows = table.rows(name, AsOf::Now);
    let row = rows.iter().find(|r| r.grant.slot == slot);
    Ok(row.is_some_and(|r| (any_time || r.over_since() < horizon) && !r.written_here()))
}

/// Who asks for a guard, and what an error may show to it.
#[derive(Clone, Copy)]
pub enum Caller<'a> {
    /// A call, which has named the lease and the token itself.
    Function,
    /// The trigger, for a row. The session's role may stand in for the current one; what the writer may know is found
    /// out only where there is an error.
    Trigger(&'a dyn Fn() -> MaySee),
}

/// What the writer of a row may know.
#[derive(Clone, Copy)]
pub struct MaySee {
    /// The name of the row's lease.
    pub lease: bool,
    /// The token that is judged.
    pub token: bool,
}

impl Caller<'_> {
    fn in_trigger(&self) -> bool {
        matches!(self, Caller::Trigger(_))
    }

    /// May an error tell whether a token is one of the lease's at all? Anybody may bind a table of its own to any lease.
    fn may_know_tokens(&self) -> bool {
        !self.in_trigger() || relation::may_see_leases()
    }

    fn shown<'n>(&self, name: &'n [u8], token: Token) -> Shown<'n> {
        let may_see = match self {
            Caller::Function => MaySee { lease: true, token: true },
            Caller::Trigger(may_see) => may_see(),
        };
        Shown { lease: may_see.lease.then_some(name), token: may_see.token.then_some(token) }
    }
}

/// Makes this transaction guard the grant that the token is of; PF004 when it does not speak for the lease.
pub fn require(name: &[u8], token: Token, caller: Caller) -> Result<(), Refusal> {
    if is_guarded_here(name, token) {
        return Ok(());
    }
    let found = match at_its_place(name, token)? {
        Some(found) => Some(found),
        None => searched(name, token)?,
    };
    let Some((row, locks, seen)) = found else { return Err(not_speaking(name, token, caller)) };
    let (slot, floor) = (row.grant.slot, tokens::floor()?);
    // A grant that this transaction guards already cannot have been replaced, whatever the clock says.
    let held = guards_slot(name, slot)
        && row.grant.closing.is_none()
        && floor.is_below(row.grant.tokens.latest());
    if !held && !row.grant.speaks(token, server::now(), floor) {
        drop(locks);
        return Err(not_speaking(name, token, caller));
    }
    if let Err(refusal) = check_role(|| caller.shown(name, token).lease, &row, caller.in_trigger())
    {
        drop(locks);
        // That it speaks for another role's grant tells that it is a token of the lease.
        let told = caller.may_know_tokens();
        return Err(if told { refusal } else { not_speaking(name, token, caller) });
    }
    if !snapshot::has_seen(name, &row)? {
        return Err(errors::snapshot_too_early(caller.shown(name, token).lease));
    }
    locks.keep();
    line::changed(name);
    let over_since = row.over_since();
    let verdict = Guard { slot, token, seen, over_since, savepoint: xact::savepoint() };
    GUARDS.with_borrow_mut(|g| g.by_lease.entry(name.to_vec()).or_default().push(verdict));
    statistics::count(Counter::Guards);
    Ok(())
}

/// A grant's row, read under the locks that a guard takes, and what it is to be known again by.
type Found<'a> = (Row, Locks<'a>, Sighting);

/// The grant that the token is of, where this session remembers its row. That takes no lock on the table: its own keep
/// the grant from being changed.
fn at_its_place(name: &[u8], token: Token) -> Result<Option<Found<'_>>, Refusal> {
    let Some((table, old)) = Glance::old_row(name, |row| has_token(row, token)) else {
        return Ok(None);
    };
    let locks = lock(name, &old)?;
    let row = table.again(&old);
    Ok(row.map(|row| (row, locks, table.sighting(&row))))
}

/// The grant that the token is of.
fn searched(name: &[u8], token: Token) -> Result<Option<Found<'_>>, Refusal> {
    let table = LeaseTable::open(Access::Read)?;
    let rows = table.rows(name, AsOf::Now);
    let Some(seen) = find(&rows, token) else { return Ok(None) };
    let locks = lock(name, seen)?;
    let row = locks.read_again(&table, seen.grant.slot, Some(seen), |row| has_token(row, token));
    if let Some(row) = &row {
        table.remember(name, row);
    }
    Ok(row.map(|row| (row, locks, table.sighting(&row))))
}

/// The locks of a guard of that grant. (Its mode and slot stay what they are.)
fn lock<'a>(name: &'a [u8], row: &Row) -> Result<Locks<'a>, Refusal> {
    let mut locks = Locks::of(name);
    if !known_bugs::NO_GUARD_LOCK {
        locks.take(GUARD, row.grant.slot)?;
        if row.grant.mode != Mode::Exclusive {
            locks.take(GUARD_BESIDE_OTHERS, row.grant.slot)?;
        }
    }
    Ok(locks)
}

/// Has this transaction a verdict on exactly this?
#[inline]
pub fn is_guarded_here(name: &[u8], token: Token) -> bool {
    GUARDS.with_borrow_mut(|g| {
        if g.last.as_ref().is_some_and(|(n, t)| *t == token && n == name) {
            return true;
        }
        let stands = g.by_lease.get(name).is_some_and(|v| v.iter().any(|v| v.token == token));
        if stands {
            g.last = Some((name.to_vec(), token));
        }
        stands
    })
}

/// The token by which this transaction guards the lease; the latest where there are several.
#[inline]
pub fn token_for(name: &[u8]) -> Option<Token> {
    GUARDS.with_borrow(|g| g.by_lease.get(name).and_then(|v| v.last()).map(|v| v.token))
}

/// Does this transaction guard the grant in that slot?
pub fn guards_slot(name: &[u8], slot: i32) -> bool {
    GUARDS.with_borrow(|g| g.by_lease.get(name).is_some_and(|v| v.iter().any(|v| v.slot == slot)))
}

/// Remembers that this transaction writes a table under this token.
pub fn note_write(table: Oid, token: Token) {
    GUARDS.with_borrow_mut(|g| {
        if !g.written.contains(&(table, token)) {
            g.written.push((table, token));
        }
    });
}

/// Has this transaction written the table under this token?
pub fn has_written_under(table: Oid, token: Token) -> bool {
    GUARDS.with_borrow(|g| g.written.contains(&(table, token)))
}

impl OfSavepoint for Guard {
    fn savepoint_released(&mut self, savepoint: SavepointId, parent: SavepointId) {
        self.savepoint.savepoint_released(savepoint, parent);
    }

    fn survives_rollback(&mut self, savepoint: SavepointId) -> bool {
        self.savepoint.survives_rollback(savepoint)
    }
}

impl OfSavepoint for Guards {
    fn savepoint_released(&mut self, savepoint: SavepointId, parent: SavepointId) {
        self.by_lease.savepoint_released(savepoint, parent);
    }

    fn survives_rollback(&mut self, savepoint: SavepointId) -> bool {
        self.last = None;
        self.outside_block = None;
        self.by_lease.survives_rollback(savepoint)
    }
}

impl OfTransaction for Guards {
    fn transaction_ended(&mut self, _: Ending) {
        // Cleared, not replaced: the next transaction needs the room again.
        if !self.by_lease.is_empty() {
            self.by_lease.clear();
            self.by_lease.shrink_to(MOST_KEPT);
            self.last = None;
        }
        if !self.written.is_empty() {
            self.written = Vec::new();
        }
        self.outside_block = None;
    }
}

/// Follows transactions; called once, when the library is loaded.
pub fn register() {
    scope::keep(&GUARDS);
    let is_due = || GUARDS.with_borrow(|g| !g.by_lease.is_empty() || g.outside_block.is_some());
    scope::before_commit(BeforeCommit { is_due, work: before_commit });
}

/// Who holds a lease now, in words; None also where that cannot be told without waiting.
pub fn holder(name: &[u8]) -> Option<Vec<u8>> {
    let table = LeaseTable::try_open(Access::Read, Wait::Never).ok()??;
    let now = server::now();
    let rows = table.rows(name, AsOf::Now);
    let held = rows.iter().find(|row| row.grant.phase(now) == Phase::Held)?;
    Some(held.holder().unwrap_or_else(|| held.session()).to_vec())
}

/// PF004, with all that the caller may know.
pub fn not_speaking(name: &[u8], token: Token, caller: Caller) -> Refusal {
    let mut refusal = errors::not_speaking(caller.shown(name, token));
    let Ok(table) = LeaseTable::open(Access::Read) else { return refusal };
    let rows = table.rows(name, AsOf::Now);
    let (now, floor) = (server::now(), tokens::floor().unwrap_or(Floor::NONE));
    let awaits_renewal = |row: &Row| row.grant.awaits_renewal(token, now, floor);
    let may_be_told =
        |row: &Row| caller.may_know_tokens() || role::acts_for(row.role(), caller.in_trigger());
    if find(&rows, token).is_some_and(|row| awaits_renewal(row) && may_be_told(row)) {
        refusal.hint = errors::RENEW_FIRST.into();
        refusal = refusal.detailed(|d| d.renew_first = Some(true));
    }
    if !relation::may_see_leases() {
        return refusal;
    }
    let Some(row) = find(&rows, token).or(rows.first()) else { return refusal };
    refusal.detailed(|d| {
        d.holder = Some(encoding::to_utf8(row.holder().unwrap_or(row.session())));
        d.expires_at = Some(errors::iso(row.grant.expires_at));
    })
}
