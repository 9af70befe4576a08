//! A lease's grants as they are known, and how much a caller may learn of them.

use crate::encoding;
use crate::errors::{self, Refusal, Shown};
use crate::pg::session::{clock, role};
use crate::pg::state::lease_table::{Access, AsOf, LeaseTable};
use crate::pg::state::opened::IfLocked;
use crate::pg::state::role_prefix;
use crate::pg::state::row::Row;
use crate::tokens;
use pg_fence_rules::grant::Phase;
use pg_fence_rules::{Floor, Instant, Token};

/// The greatest token that any of these grants is known to have had.
pub fn greatest<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Token {
    rows.into_iter().map(|r| r.grant.greatest()).max().unwrap_or(Token::BEFORE_ALL)
}

/// Does the token speak for the lease at this instant? No, where the caller may not see the lease.
pub fn speaks(name: &[u8], token: Token) -> Result<bool, Refusal> {
    let floor = tokens::floor_seen()?;
    let row = LeaseTable::open_to_look()?.row_with(name, token);
    let now = clock::now();
    Ok(role_prefix::shows(name) && row.is_some_and(|row| row.grant.speaks(token, now, floor)))
}

/// The grant that this token is of.
pub fn of_token(rows: &[Row], token: Token) -> Option<&Row> {
    rows.iter().find(|r| r.grant.has(token))
}

/// May the caller learn that there is such a grant? A caller that may not is answered as if the token were any number.
pub fn may_know_of(row: &Row, in_trigger: bool) -> bool {
    role::acts_for(row.role(), in_trigger) || role_prefix::may_be_told(row.name())
}

/// 42501 unless the caller of a function may act for the role that was granted the lease. `lease` gives its name, where
/// the error may show it.
pub fn check_role<'a>(lease: impl FnOnce() -> Option<&'a [u8]>, row: &Row) -> Result<(), Refusal> {
    match role::acts_for(row.role(), false) {
        true => Ok(()),
        false => Err(not_your_lease(lease(), row)),
    }
}

/// 42501: the lease was granted to a role that the caller may not act for. `lease` is its name, where the error may show it.
pub fn not_your_lease(lease: Option<&[u8]>, row: &Row) -> Refusal {
    errors::not_your_lease(lease, role_prefix::may_be_told(row.name()).then_some(row.role()))
}

/// 55000 where somebody else has made the grant, and the caller may know of it.
pub fn refuse_adopted(row: &Row) -> Result<(), Refusal> {
    match row.grant.adopted.is_some() && may_know_of(row, false) {
        true => Err(errors::adopted_name(row.name())),
        false => Ok(()),
    }
}

/// The one that asks about a token: it decides what an error may show.
#[derive(Clone, Copy)]
pub enum Caller<'a> {
    /// A call, which has named the lease and the token itself.
    Function,
    /// The trigger, for a row. The session's role may stand in for the current one; what the writer may know is found
    /// out only where there is an error.
    Trigger(&'a dyn Fn() -> MaySee),
}

/// How much the writer of a row may know.
#[derive(Clone, Copy)]
pub struct MaySee {
    /// The name of the row's lease.
    pub lease: bool,
    /// The token that is judged.
    pub token: bool,
}

impl Caller<'_> {
    /// The trigger asks.
    pub fn in_trigger(&self) -> bool {
        matches!(self, Caller::Trigger(_))
    }

    /// The part of lease and token that an error may show to it.
    pub fn shown<'n>(&self, name: &'n [u8], token: Token) -> Shown<'n> {
        let may_see = match self {
            Caller::Function => MaySee { lease: true, token: true },
            Caller::Trigger(may_see) => may_see(),
        };
        Shown { lease: may_see.lease.then_some(name), token: may_see.token.then_some(token) }
    }
}

/// Does somebody else grant the lease, so that its tokens are none of the sequence?
pub fn is_adopted(name: &[u8]) -> bool {
    let Ok(table) = LeaseTable::open(Access::Read) else { return false };
    table.rows(name, AsOf::Now).iter().any(|row| row.grant.adopted.is_some())
}

/// The name of a lease's holder now; None also where that cannot be told without waiting.
pub fn holder(name: &[u8]) -> Option<Vec<u8>> {
    let table = LeaseTable::try_open(Access::Read, IfLocked::GiveUp).ok()??;
    let now = clock::now();
    let rows = table.rows(name, AsOf::Now);
    let held = rows.iter().find(|row| row.grant.phase(now) == Phase::Held)?;
    Some(held.holder().unwrap_or_else(|| held.session()).to_vec())
}

/// PF004: the adopted number is of the row's holder, and another holder presents it. With all that the caller may know.
pub fn of_another_holder(row: &Row, token: Token) -> Refusal {
    let refusal = errors::of_another_holder(row.name(), token);
    if !role_prefix::may_be_told(row.name()) {
        return refusal;
    }
    refusal.detailed(|d| d.holder = Some(encoding::to_utf8(row.holder().unwrap_or(row.session()))))
}

/// PF004, with all that the caller may know.
pub fn not_speaking(name: &[u8], token: Token, caller: Caller) -> Refusal {
    let mut refusal = errors::not_speaking(caller.shown(name, token));
    let Ok(table) = LeaseTable::open(Access::Read) else { return refusal };
    let rows = table.rows(name, AsOf::Now);
    let (now, floor) = (clock::now(), tokens::floor().unwrap_or(Floor::NONE));
    let awaits_renewal = |row: &Row| row.grant.awaits_renewal(token, now, floor);
    let may_be_told = |row: &Row| may_know_of(row, caller.in_trigger());
    if of_token(&rows, token).is_some_and(|row| awaits_renewal(row) && may_be_told(row)) {
        refusal = errors::renew_first(refusal);
    }
    if !role_prefix::may_be_told(name) {
        return refusal;
    }
    let Some(row) = of_token(&rows, token).or(rows.first()) else { return refusal };
    refusal.detailed(|d| {
        d.holder = Some(encoding::to_utf8(row.holder().unwrap_or(row.session())));
        let deadline = Some(row.grant.expires_at).filter(|at| *at < Instant::LATEST);
        d.expires_at = deadline.map(clock::iso);
    })
}
