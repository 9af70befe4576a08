//! The heartbeat of a process: many leases renewed in one call, each with an answer of its own, and none waited for.
//!
//! One pass locks, in the order of names, what can be locked at once; then the clock is read, one token is drawn, and
//! what is locked is written. So one lease that is in somebody's hands, lost or refused spoils none of the others.

use super::change::{self, check_role, greatest, refuse_adopted};
use super::locks::{Locked, Locks};
use crate::errors::{Refusal, SqlState};
use crate::known_bugs;
use crate::pg::session::server;
use crate::pg::state::lease_table::{Access, AsOf, LeaseTable};
use crate::pg::state::opened::IfLocked;
use crate::pg::state::row::Row;
use crate::statistics::{self, Counter};
use crate::tokens;
use pg_fence_rules::grant::Phase;
use pg_fence_rules::keep::{after_renewal, while_in_the_way};
use pg_fence_rules::locks::KEEP;
use pg_fence_rules::{Span, Token};

/// A lease's name and a token; None for what cannot be either.
pub type Pair = Option<(Vec<u8>, Token)>;

/// What became of a pair.
#[derive(Clone, Copy)]
pub struct Answer {
    /// 'kept', 'lost', 'later' or 'refused'.
    pub outcome: &'static str,
    /// The token of the renewal.
    pub renewed: Option<Token>,
    /// How long the grant lives from the decision on, where that is known.
    pub remaining: Option<Span>,
    /// When to send it again; None for never.
    pub again_in: Option<Span>,
    /// Why it was not kept.
    pub code: Option<SqlState>,
}

impl Answer {
    const LOST: Answer =
        Answer { outcome: "lost", renewed: None, remaining: None, again_in: None, code: None };

    fn kept(renewed: Token, ttl: Span) -> Answer {
        let (renewed, remaining, again_in) = (Some(renewed), Some(ttl), Some(after_renewal(ttl)));
        Answer { outcome: "kept", renewed, remaining, again_in, code: None }
    }

    fn later(code: SqlState, remaining: Option<Span>, again_in: Span) -> Answer {
        let (again_in, code) = (Some(again_in), Some(code));
        Answer { outcome: "later", renewed: None, remaining, again_in, code }
    }

    /// Maintenance holds the table: what remains cannot be read.
    fn maintenance() -> Answer {
        Answer::later(SqlState::ObjectInUse, None, while_in_the_way(Span::ZERO))
    }

    fn refused(code: SqlState) -> Answer {
        Answer { outcome: "refused", code: Some(code), ..Answer::LOST }
    }
}

/// What the first pass has found of a pair.
enum Found {
    /// The grant that is locked under this number.
    Grant(usize),
    /// None that can be renewed now.
    None(Answer),
}

/// Renews what can be renewed at once. The answers are in the order of the pairs; with them, whether a crash may lose
/// what was written: then all that was kept ends with its session. Errors: 55000.
pub fn keep(pairs: &[Pair]) -> Result<(Vec<Answer>, bool), Refusal> {
    let Some(table) = LeaseTable::try_open(Access::Write, IfLocked::GiveUp)? else {
        let answer = |pair: &Pair| pair.as_ref().map_or_else(unfit, |_| Answer::maintenance());
        return Ok((pairs.iter().map(answer).collect(), false));
    };
    let mut order: Vec<usize> = (0..pairs.len()).collect();
    order.sort_unstable_by_key(|n| &pairs[*n]);
    let mut grants: Vec<Option<Locked>> = Vec::new();
    let mut found: Vec<(usize, Found)> = Vec::with_capacity(pairs.len());
    for n in order {
        server::serve_interrupts();
        let of_pair = match &pairs[n] {
            Some((name, token)) => lock(&table, name, *token, &mut grants)?,
            None => Found::None(unfit()),
        };
        found.push((n, of_pair));
    }
    let (renewals, losable) = write(&table, grants)?;
    let mut answers = vec![Answer::LOST; pairs.len()];
    for (n, of_pair) in found {
        answers[n] = match of_pair {
            Found::Grant(grant) => {
                renewals[grant].map_or(Answer::LOST, |(t, ttl)| Answer::kept(t, ttl))
            }
            Found::None(answer) => answer,
        };
    }
    let lost = answers.iter().filter(|answer| answer.outcome == Answer::LOST.outcome).count();
    if lost > 0 {
        statistics::add(Counter::RenewalsLost, lost);
    }
    Ok((answers, losable))
}

/// A name or a token that no grant can have.
fn unfit() -> Answer {
    Answer::refused(SqlState::InvalidParameterValue)
}

/// Locks the grant that this token may renew. The pairs come in the order of names, so one that a token before has
/// locked is among the last.
fn lock<'a>(
    table: &LeaseTable,
    name: &'a [u8],
    token: Token,
    grants: &mut Vec<Option<Locked<'a>>>,
) -> Result<Found, Refusal> {
    let of_name = |grant: &&Option<Locked>| grant.as_ref().is_some_and(|g| g.row.name() == name);
    let before = grants.iter().rev().take_while(of_name);
    if let Some(n) = before.flatten().position(|g| g.row.grant.tokens.contains(token)) {
        return Ok(Found::Grant(grants.len() - 1 - n));
    }
    let renewable = |row: &Row| row.grant.renewable(token, server::now()).then_some(());
    loop {
        let Some(seen) = change::look(table, name, token, renewable) else {
            // It may have another token, or none.
            let adopted =
                table.rows(name, AsOf::Now).iter().find_map(|row| refuse_adopted(row).err());
            let answer = adopted.map_or(Answer::LOST, |refusal| Answer::refused(refusal.sqlstate));
            return Ok(Found::None(answer));
        };
        let judged = check_role(|| None, &seen, false).and_then(|()| refuse_adopted(&seen));
        if let Err(refusal) = judged {
            return Ok(Found::None(Answer::refused(refusal.sqlstate)));
        }
        let mut locks = Locks::of(name);
        if !known_bugs::KEEP_WITHOUT_LOCK {
            match locks.take_at_once(KEEP, seen.grant.slot) {
                Ok(true) => {}
                Ok(false) => return Ok(Found::None(in_the_way(&seen))),
                Err(_) => return Ok(Found::None(no_room(&seen))),
            }
        }
        match Locked::under(locks, table, seen.grant.slot, |row| row.grant.has(token)) {
            Some(locked) if renewable(&locked.row).is_none() => {
                return Ok(Found::None(Answer::LOST))
            }
            Some(locked) if locked.row.open_writer().is_none() => {
                grants.push(Some(locked));
                return Ok(Found::Grant(grants.len() - 1));
            }
            None if change::unlocked_writer(table, name, token).is_none() => {
                // Another one may have the token by now.
                server::serve_interrupts();
            }
            _ => return Ok(Found::None(in_the_way(&seen))),
        }
    }
}

/// So long the grant lives if nobody renews it.
fn remaining(row: &Row) -> Span {
    row.grant.expires_at.since(server::now()).max(Span::ZERO)
}

/// An open transaction is changing the lease.
fn in_the_way(seen: &Row) -> Answer {
    let remaining = remaining(seen);
    Answer::later(SqlState::LockNotAvailable, Some(remaining), while_in_the_way(remaining))
}

/// This transaction has its share of the lock table, or there is no room in it.
fn no_room(seen: &Row) -> Answer {
    Answer::later(SqlState::OutOfMemory, Some(remaining(seen)), Span::ZERO)
}

/// The token and the ttl of each renewal, None for a grant that has ended before its turn came; and whether all that was
/// written ends with its session.
type Renewals = (Vec<Option<(Token, Span)>>, bool);

/// Draws one token and renews the grants, whose locks stay until the transaction ends.
fn write(table: &LeaseTable, mut grants: Vec<Option<Locked>>) -> Result<Renewals, Refusal> {
    // The locks were taken one by one: the time of the decision is after the last.
    let now = server::now();
    let is_over = |locked: &Locked| locked.row.grant.phase(now) != Phase::Held;
    for grant in &mut grants {
        // What is over is given back.
        grant.take_if(|locked| is_over(locked));
    }
    if grants.iter().all(Option::is_none) {
        return Ok((vec![None; grants.len()], false));
    }
    let fresh = tokens::draw(greatest(grants.iter().flatten().map(|locked| &locked.row)))?;
    // All before the first is written: an error must find no lock that is still to be given back.
    let rows: Vec<Option<Row>> = grants.into_iter().map(|grant| grant.map(Locked::keep)).collect();
    let losable = rows.iter().flatten().all(Row::ends_with_session);
    let mut renewals = Vec::with_capacity(rows.len());
    let mut last: &[u8] = &[];
    for row in &rows {
        let Some(row) = row else {
            renewals.push(None);
            continue;
        };
        // A token is of one grant: another of the same lease gets its own.
        let is_further = row.name() == last;
        let token = if is_further { tokens::draw(row.grant.greatest())? } else { fresh };
        change::renew(table, row, token, now, None)?;
        last = row.name();
        renewals.push(Some((token, row.ttl)));
    }
    Ok((renewals, losable))
}
