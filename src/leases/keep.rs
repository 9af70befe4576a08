//! The heartbeat of a process: many leases are renewed in one call, each with an answer of its own, without waiting.
//!
//! A lease that is locked, lost or not permitted does not affect the others.

use super::change::NotLocked;
use super::locks::Locked;
use super::renew::{self, renewable};
use crate::errors::{Report, SqlState};
use crate::pg::session::clock;
use crate::pg::session::xact;
use crate::pg::state::lease_table::{Access, LeaseTable};
use crate::pg::state::opened::IfLocked;
use crate::pg::state::row::Row;
use crate::statistics::{self, Counter};
use pg_fence_rules::grant::Phase;
use pg_fence_rules::keep::{after_renewal, while_locked};
use pg_fence_rules::locks::KEEP;
use pg_fence_rules::{Span, Token};

/// The name of a lease and a token; `None` if the arguments cannot be a name and a token.
pub type Pair = Option<(Vec<u8>, Token)>;

/// The answer for one pair.
#[derive(Clone, Copy)]
pub enum Answer {
    /// Renewed under this token, for this ttl.
    Kept(Token, Span),
    /// The token can no longer renew the lease.
    Lost,
    /// Nothing changed, for this reason, and the pair is to be sent again. The span is the remaining life of the grant,
    /// if known.
    Later(SqlState, Option<Span>),
    /// The caller is not permitted to renew the lease, for this reason.
    Refused(SqlState),
}

impl Answer {
    /// Time until the pair should be sent again; `None` for never. A pair for which the lock table had no room may be
    /// sent at once, in another transaction.
    pub fn again_in(&self) -> Option<Span> {
        match self {
            Answer::Kept(_, ttl) => Some(after_renewal(*ttl)),
            Answer::Later(SqlState::OutOfMemory, _) => Some(Span::ZERO),
            Answer::Later(_, left) => Some(while_locked(left.unwrap_or(Span::ZERO))),
            Answer::Lost | Answer::Refused(_) => None,
        }
    }
}

/// Renews all leases whose lock is free. Returns the answers in the order of the pairs, and whether all renewed grants
/// end with their sessions. Errors: 55000.
pub fn keep(pairs: &[Pair]) -> Result<(Vec<Answer>, bool), Report> {
    let unfit = Answer::Refused(SqlState::InvalidParameterValue);
    let Some(table) = LeaseTable::try_open(Access::Write, IfLocked::GiveUp)? else {
        let maintenance = Answer::Later(SqlState::ObjectInUse, None);
        let answer = |pair: &Pair| pair.as_ref().map_or(unfit, |_| maintenance);
        return Ok((pairs.iter().map(answer).collect(), false));
    };
    let mut order: Vec<usize> = (0..pairs.len()).collect();
    order.sort_unstable_by_key(|n| &pairs[*n]);
    let mut answers = vec![Answer::Lost; pairs.len()];
    // Each grant with the pairs that ask for it.
    let mut grants: Vec<(Locked, Vec<usize>)> = Vec::new();
    for n in order {
        xact::serve_interrupts();
        let Some((name, token)) = &pairs[n] else {
            answers[n] = unfit;
            continue;
        };
        // Pairs are sorted by name, so the search goes back through one name.
        let mut of_name = grants.iter_mut().rev().take_while(|(one, _)| one.row.name() == name);
        if let Some((_, of_grant)) = of_name.find(|(one, _)| one.row.grant.tokens.contains(*token))
        {
            of_grant.push(n);
            continue;
        }
        match lock(&table, name, *token) {
            Ok(locked) => grants.push((locked, vec![n])),
            Err(answer) => answers[n] = answer,
        }
    }
    // The locks were taken one by one, so the clock is read after the last. Dropping a grant that is over releases its
    // lock.
    let now = clock::now();
    grants.retain(|(locked, _)| locked.row.grant.phase(now) == Phase::Held);
    let (grants, of_grants): (Vec<Locked>, Vec<Vec<usize>>) = grants.into_iter().unzip();
    let renewed = renew::renew(&table, grants, now, None)?;
    let end_with_session = renewed.iter().all(|one| one.ends_with_session);
    for (one, of_grant) in renewed.iter().zip(of_grants) {
        of_grant.into_iter().for_each(|n| answers[n] = Answer::Kept(one.token, one.ttl));
    }
    let lost = answers.iter().filter(|answer| matches!(answer, Answer::Lost)).count();
    statistics::add(Counter::RenewalsLost, lost);
    Ok((answers, end_with_session))
}

/// Locks the grant that this token may renew, or returns the answer that says why not.
fn lock<'a>(table: &LeaseTable, name: &'a [u8], token: Token) -> Result<Locked<'a>, Answer> {
    let left = |row: &Row| Some(row.grant.expires_at.since(clock::now()).max(Span::ZERO));
    let found = renewable(table, name, token, KEEP);
    found.map_err(|report| Answer::Refused(report.sqlstate))?.map_err(|not_locked| match not_locked
    {
        NotLocked::Lost => Answer::Lost,
        NotLocked::Held(seen) => Answer::Later(SqlState::LockNotAvailable, left(&seen)),
        NotLocked::NoRoom(seen, report) => Answer::Later(report.sqlstate, left(&seen)),
    })
}
