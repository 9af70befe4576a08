//! What the rows say about a lease, and how much of that a caller may learn.

use crate::encoding;
use crate::errors::{self, Report};
use crate::pg::session::{clock, role};
use crate::pg::state::lease_table::{Access, AsOf, LeaseTable};
use crate::pg::state::opened::IfLocked;
use crate::pg::state::role_prefix;
use crate::pg::state::row::Row;
use crate::tokens;
use pg_fence_rules::grant::Phase;
use pg_fence_rules::{Epoch, Instant, Token};

/// The greatest token known of any of these grants.
pub fn greatest<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Token {
    rows.into_iter().map(|r| r.grant.greatest()).max().unwrap_or(Token::BEFORE_ALL)
}

/// Returns true if the token speaks for the lease now. Returns false if the caller may not see the lease.
pub fn speaks(name: &[u8], token: Token) -> Result<bool, Report> {
    let epoch = tokens::epoch_seen()?;
    let row = LeaseTable::open_to_look()?.row_with(name, token);
    let now = clock::now();
    Ok(role_prefix::may_see(name) && row.is_some_and(|row| row.grant.speaks(token, now, epoch)))
}

/// The grant to which this token belongs.
pub fn of_token(rows: &[Row], token: Token) -> Option<&Row> {
    rows.iter().find(|r| r.grant.has(token))
}

/// Returns true if the caller may learn that the grant exists. To another caller the token is answered like any unused
/// number.
pub fn may_know_of(row: &Row, in_trigger: bool) -> bool {
    role::acts_for(row.role(), in_trigger) || role_prefix::may_be_named_in_errors(row.name())
}

/// Errors with 42501 unless the caller of a function may act for the role of the grant.
pub fn check_role(row: &Row) -> Result<(), Report> {
    match role::acts_for(row.role(), false) {
        true => Ok(()),
        false => Err(not_your_lease(Some(row.name()), row)),
    }
}

/// The error 42501: the caller may not act for the role of the grant. `lease` is the name, if the error may show it.
pub fn not_your_lease(lease: Option<&[u8]>, row: &Row) -> Report {
    errors::not_your_lease(
        lease,
        role_prefix::may_be_named_in_errors(row.name()).then_some(row.role()),
    )
}

/// Errors with 55000 if the grant is adopted and the caller may know of it.
pub fn refuse_adopted(row: &Row) -> Result<(), Report> {
    match row.grant.adopted.is_some() && may_know_of(row, false) {
        true => Err(errors::adopted_name(row.name())),
        false => Ok(()),
    }
}

/// Who asks about a token. This decides what an error may show.
#[derive(Clone, Copy)]
pub enum Caller<'a> {
    /// An SQL call, which has named the lease and the token itself.
    Function,
    /// The trigger, for a row. The session's role may act in place of the current one. The closure is called only if
    /// there is an error: finding out what the writer may see is expensive.
    Trigger(&'a dyn Fn() -> Disclosure),
}

/// What an error may show to the writer of a row.
#[derive(Clone, Copy)]
pub struct Disclosure {
    /// True if the name of the row's lease may be shown.
    pub lease: bool,
    /// True if the token in question may be shown.
    pub token: bool,
}

impl Caller<'_> {
    /// Returns true for the trigger.
    pub fn in_trigger(&self) -> bool {
        matches!(self, Caller::Trigger(_))
    }

    /// The lease and the token, as far as an error may show them.
    pub fn visible<'n>(&self, name: &'n [u8], token: Token) -> (Option<&'n [u8]>, Option<Token>) {
        let disclosure = match self {
            Caller::Function => Disclosure { lease: true, token: true },
            Caller::Trigger(disclosure) => disclosure(),
        };
        (disclosure.lease.then_some(name), disclosure.token.then_some(token))
    }
}

/// Returns true if the lease is adopted, so that its tokens do not come from the sequence.
pub fn is_adopted(name: &[u8]) -> bool {
    let Ok(table) = LeaseTable::open(Access::Read) else { return false };
    table.rows(name, AsOf::Now).iter().any(|row| row.grant.adopted.is_some())
}

/// The name of the lease's current holder; `None` also if the table is locked, because the call never waits.
pub fn holder(name: &[u8]) -> Option<Vec<u8>> {
    let table = LeaseTable::try_open(Access::Read, IfLocked::GiveUp).ok()??;
    let now = clock::now();
    let rows = table.rows(name, AsOf::Now);
    let held = rows.iter().find(|row| row.grant.phase(now) == Phase::Held)?;
    Some(held.holder().unwrap_or_else(|| held.session()).to_vec())
}

/// The error PF004 for an adopted number that another holder presents, with all details that the caller may know.
pub fn of_another_holder(row: &Row, token: Token) -> Report {
    let report = errors::of_another_holder(row.name(), token);
    if !role_prefix::may_be_named_in_errors(row.name()) {
        return report;
    }
    report.detailed(|d| d.holder = Some(encoding::to_utf8(row.holder().unwrap_or(row.session()))))
}

/// The error PF004, with all details that the caller may know.
pub fn not_speaking(name: &[u8], token: Token, caller: Caller) -> Report {
    let (lease, presented) = caller.visible(name, token);
    let mut report = errors::not_speaking(lease, presented);
    let Ok(table) = LeaseTable::open(Access::Read) else { return report };
    let rows = table.rows(name, AsOf::Now);
    let (now, epoch) = (clock::now(), tokens::epoch().unwrap_or(Epoch::FIRST));
    let awaits_renewal = |row: &Row| row.grant.awaits_renewal(token, now, epoch);
    let is_visible = |row: &Row| may_know_of(row, caller.in_trigger());
    match of_token(&rows, token).filter(|row| awaits_renewal(row) && is_visible(row)) {
        // lease_renew refuses an adopted lease.
        Some(row) if row.grant.adopted.is_some() => report = errors::adopt_again(report),
        Some(_) => report = errors::renew_first(report),
        None => {}
    }
    if !role_prefix::may_be_named_in_errors(name) {
        return report;
    }
    let Some(row) = of_token(&rows, token).or(rows.first()) else { return report };
    report.detailed(|d| {
        d.holder = Some(encoding::to_utf8(row.holder().unwrap_or(row.session())));
        let deadline = Some(row.grant.expires_at).filter(|at| *at < Instant::LATEST);
        d.expires_at = deadline.map(clock::iso);
    })
}
