//! The heartbeat of a process: many leases are renewed in one call, each with an answer of its own, without waiting.
//!
//! A lease that is locked, lost or not permitted does not affect the others.

use super::change::Found;
use super::locks::Locked;
use super::renew::{self, renewable};
use crate::errors::{Refusal, SqlState};
use crate::pg::session::clock;
use crate::pg::session::xact;
use crate::pg::state::lease_table::{Access, LeaseTable};
use crate::pg::state::opened::IfLocked;
use crate::pg::state::row::Row;
use crate::statistics::{self, Counter};
use pg_fence_rules::grant::Phase;
use pg_fence_rules::keep::{after_renewal, while_in_the_way};
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
            Answer::Later(_, left) => Some(while_in_the_way(left.unwrap_or(Span::ZERO))),
            Answer::Lost | Answer::Refused(_) => None,
        }
    }
}

/// Renews all leases whose lock is free. Returns the answers in the order of the pairs, and whether a crash may lose
/// the renewals: true if all renewed grants end with their sessions. Errors: 55000.
pub fn keep(pairs: &[Pair]) -> Result<(Vec<Answer>, bool), Refusal> {
    let unfit = Answer::Refused(SqlState::InvalidParameterValue);
    let Some(table) = LeaseTable::try_open(Access::Write, IfLocked::GiveUp)? else {
        let maintenance = Answer::Later(SqlState::ObjectInUse, None);
        let answer = |pair: &Pair| pair.as_ref().map_or(unfit, |_| maintenance);
        return Ok((pairs.iter().map(answer).collect(), false));
    };
    let mut order: Vec<usize> = (0..pairs.len()).collect();
    order.sort_unstable_by_key(|n| &pairs[*n]);
    let mut grants: Vec<Locked> = Vec::new();
    // For each pair the index of its grant, or the answer if it has none.
    let mut found = Vec::with_capacity(pairs.len());
    for n in order {
        xact::serve_interrupts();
        let Some((name, token)) = &pairs[n] else {
            found.push((n, Err(unfit)));
            continue;
        };
        let grant = match locked_before(&grants, name, *token) {
            Some(grant) => Ok(grant),
            None => lock(&table, name, *token)?.map(|locked| {
                grants.push(locked);
                grants.len() - 1
            }),
        };
        found.push((n, grant));
    }
    // The locks were taken one by one, so the clock is read after the last. Dropping a grant that is over releases its
    // lock.
    let now = clock::now();
    let lives = |locked: &Locked| locked.row.grant.phase(now) == Phase::Held;
    let alive: Vec<bool> = grants.iter().map(lives).collect();
    grants.retain(lives);
    let renewed = renew::renew(&table, grants, now, None)?;
    let losable = !renewed.is_empty() && renewed.iter().all(|one| one.ends_with_session);
    let mut renewed = renewed.into_iter();
    let renewed: Vec<_> = alive.into_iter().map(|a| a.then(|| renewed.next()).flatten()).collect();
    let mut answers = vec![Answer::Lost; pairs.len()];
    for (n, grant) in found {
        let kept =
            |n: usize| renewed[n].map_or(Answer::Lost, |one| Answer::Kept(one.token, one.ttl));
        answers[n] = grant.map_or_else(|answer| answer, kept);
    }
    let lost = answers.iter().filter(|answer| matches!(answer, Answer::Lost)).count();
    statistics::add(Counter::RenewalsLost, lost);
    Ok((answers, losable))
}

/// The index of a locked grant that has this token. Pairs are sorted by name, so the search goes back through one name.
fn locked_before(grants: &[Locked], name: &[u8], token: Token) -> Option<usize> {
    let of_name = grants.iter().rev().take_while(|locked| locked.row.name() == name);
    let same = of_name.enumerate().find(|(_, locked)| locked.row.grant.tokens.contains(token));
    same.map(|(back, _)| grants.len() - 1 - back)
}

/// Locks the grant that this token may renew, or returns the answer that says why not.
fn lock<'a>(
    table: &LeaseTable,
    name: &'a [u8],
    token: Token,
) -> Result<Result<Locked<'a>, Answer>, Refusal> {
    let found = renewable(table, name, token, KEEP)?;
    if let Err(refusal) = renew::check(table, name, &found) {
        return Ok(Err(Answer::Refused(refusal.sqlstate)));
    }
    let left = |row: &Row| Some(row.grant.expires_at.since(clock::now()).max(Span::ZERO));
    Ok(match found {
        Found::Locked(locked, ()) => Ok(locked),
        Found::Lost => Err(Answer::Lost),
        Found::InTheWay(seen) => Err(Answer::Later(SqlState::LockNotAvailable, left(&seen))),
        Found::NoRoom(seen, refusal) => Err(Answer::Later(refusal.sqlstate, left(&seen))),
    })
}
