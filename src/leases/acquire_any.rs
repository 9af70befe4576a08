//! Claiming from a list: the first names of it that are to be had, each under a token of its own. Nothing is waited for.
//!
//! Names mostly come from a table of work that the same statement reads. So a name is passed over whose last grant ended
//! after the statement's snapshot: that one's holder may have finished the work, which the statement has read as it was
//! before (`pg_fence_rules::snapshot`).

use super::free_slot::{self, LockedSlot};
use super::queue;
use super::request::{NotGranted, Request, BY_ANOTHER};
use super::try_acquire::grant;
use crate::errors::{Refusal, SqlState};
use crate::pg::memory::Scratch;
use crate::pg::session::clock;
use crate::pg::session::xact;
use crate::pg::state::lease_table::{Access, AsOf, LeaseTable};
use crate::pg::state::opened::IfLocked;
use crate::pg::state::role_prefix;
use pg_fence_rules::grant::Phase;
use pg_fence_rules::names::Level;
use pg_fence_rules::snapshot::{self, LastGrant};
use pg_fence_rules::Token;
use std::collections::HashSet;

/// A name that was claimed: which of the list, from 0, and its token.
pub type Claim = (usize, Token);

/// Acquires the first `most` of these names that are to be had, each as `request` asks. Where there is room in the lock
/// table for some only, it gives those. Errors: 42501, 53200.
pub fn acquire_any(
    names: &[&[u8]],
    most: usize,
    request: &mut Request,
) -> Result<Vec<Claim>, Refusal> {
    let mut claims = Vec::new();
    if !role_prefix::require_each(names.iter().copied(), Level::Worker, IfLocked::GiveUp)? {
        return Ok(claims);
    }
    let Some(table) = LeaseTable::try_open(Access::Write, IfLocked::GiveUp)? else {
        return Ok(claims);
    };
    let (mut scratch, mut seen) = (Scratch::new(), HashSet::new());
    for (n, name) in names.iter().enumerate() {
        if claims.len() == most {
            break;
        }
        if !seen.insert(*name) {
            continue;
        }
        xact::serve_interrupts();
        request.name.clear();
        request.name.extend_from_slice(name);
        match scratch.turn(|| claim(&table, request)) {
            Ok(Some(token)) => claims.push((n, token)),
            Ok(None) => {}
            Err(refusal) if is_short_of_locks(&refusal) && !claims.is_empty() => break,
            Err(refusal) => return Err(refusal),
        }
    }
    Ok(claims)
}

fn is_short_of_locks(refusal: &Refusal) -> bool {
    refusal.sqlstate == SqlState::OutOfMemory
}

/// Acquires one name, if it is to be had. None for one that is taken, adopted (55000) or in use with slots (22023).
fn claim(table: &LeaseTable, request: &Request) -> Result<Option<Token>, Refusal> {
    use SqlState::{InvalidParameterValue, ObjectNotInPrerequisiteState};
    let chosen = match lock(table, request) {
        Ok(chosen) => chosen,
        Err(NotGranted::Taken { .. }) => return Ok(None),
        Err(NotGranted::Refused(refusal)) => match refusal.sqlstate {
            ObjectNotInPrerequisiteState | InvalidParameterValue => return Ok(None),
            _ => return Err(refusal),
        },
    };
    grant(table, std::slice::from_ref(request), vec![chosen]).map(Some)
}

/// Locks the slot for one name, if it is to be had.
fn lock<'a>(table: &LeaseTable, request: &'a Request) -> Result<LockedSlot<'a>, NotGranted> {
    free_slot::looks_free(table, request)?;
    // Asked before the lock, too: who wants it by a later snapshot must not find it in the hands of one who passes it over.
    if queue::somebody_waits(&request.name) || !had_ended(table, &request.name) {
        return Err(BY_ANOTHER);
    }
    let chosen = free_slot::lock_one(table, request)?;
    had_ended(table, &request.name).then_some(chosen).ok_or(BY_ANOTHER)
}

/// Had the lease's last grant ended when this statement took its snapshot?
fn had_ended(table: &LeaseTable, name: &[u8]) -> bool {
    let (now, shown) = (table.rows(name, AsOf::Now), table.rows(name, AsOf::Statement));
    let taken_after = xact::snapshot_taken_after();
    // A row that was pruned since is as good as one that was changed.
    now.len() == shown.len()
        && now.iter().all(|row| {
            let last = LastGrant {
                shown: shown.iter().any(|shown| shown.version() == row.version()),
                ended_by_clock: (row.grant.phase(clock::now()) == Phase::Expired)
                    .then_some(row.grant.expires_at),
            };
            snapshot::had_ended(&last, taken_after)
        })
}
