//! Adopting a lease: another lock service or another database grants it, and its number becomes the token here.
//!
//! A greater number ends the older grant for good. The call answers true once no open transaction relies on the older
//! grant: its lock excludes guards, and later guards queue behind it. If that takes longer than `wait`, the older grant
//! is ended all the same and the answer is false, "not yet". Guards that come in the meantime wait for the commit, after
//! which nobody can guard the older grant again. So even an endless chain of overlapping guards ends soon.

use super::free_slot::{is_being_loaded, settled_rows};
use super::guard;
use super::locks::{Locked, Locks};
use super::lookup::{check_role, of_another_holder};
use crate::errors::{self, Report};
use crate::pg::locks::wait::{self, Waiting};
use crate::pg::session::clock;
use crate::pg::session::commit;
use crate::pg::state::lease_table::{Access, AsOf, LeaseTable};
use crate::pg::state::opened::IfLocked;
use crate::pg::state::role_prefix;
use crate::pg::state::row::{Deleter, Lifetime, NewGrant, Row};
use crate::statistics::{self, Counter};
use crate::tokens;
use pg_fence_rules::grant::{self, Adopt, Grant, Holders, Mode};
use pg_fence_rules::locks::{ADOPT, ANNOUNCE_ADOPTION, CHANGE, END_OLDER};
use pg_fence_rules::names::Level;
use pg_fence_rules::{Epoch, Token};
use std::time::Duration;

/// Time until the next attempt while an open transaction deletes or loads the row.
const ADOPT_RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// A lease that another service has granted.
pub struct Adoption {
    /// The lease, in the database's encoding.
    pub name: Vec<u8>,
    /// The number under which the other service granted the lease.
    pub token: Token,
    /// The holder's name, if the caller gave one.
    pub holder: Option<Vec<u8>>,
    /// A jsonb value that the caller wants shown with the lease.
    pub metadata: Option<pgrx::pg_sys::Datum>,
}

impl Adoption {
    /// The adopting holder, beside the holder that a row records.
    fn holders<'a>(&'a self, row: Option<&'a Row>) -> Holders<'a> {
        Holders { recorded: row.and_then(Row::holder), adopting: self.holder.as_deref() }
    }
}

/// Returns true if any lease of this database is adopted. Reads the whole table. Returns false if the table is locked,
/// because the call never waits.
pub fn is_used_here() -> bool {
    let Ok(Some(table)) = LeaseTable::try_open(Access::Read, IfLocked::GiveUp) else {
        return false;
    };
    let mut found = false;
    let looked = table.each(|row| {
        found |= row.grant.adopted.is_some();
        Ok(())
    });
    looked.is_ok() && found
}

/// The decision about the adoption, by the row of the name.
struct Checked {
    adopt: Adopt,
    row: Option<Row>,
    epoch: Epoch,
}

/// Adopts the lease. Returns false if an open transaction relied on an older grant, or was adopting it, for all of
/// `wait`. Errors: PF001, PF004, 42501, 53200, 55000.
pub fn adopt(adoption: &Adoption, wait: Duration) -> Result<bool, Report> {
    match checked(&LeaseTable::open(Access::Read)?, adoption)?.adopt {
        Adopt::Current => return Ok(true),
        Adopt::OfEarlierEpoch => return adopt_again(adoption),
        _ => {}
    }
    let waiting = Waiting::since_now(wait);
    loop {
        if let Some(answered) = replace(adoption, &waiting)? {
            return Ok(answered);
        }
        wait::reset();
        if !waiting.sleep(ADOPT_RETRY_INTERVAL)? {
            return Ok(false);
        }
    }
}

/// Replaces the older grant, or ends it if its guards stay for too long. Returns whether the number was adopted; `None`
/// if an open transaction is deleting or loading the row, for which there is no lock to wait for.
fn replace(adoption: &Adoption, waiting: &Waiting) -> Result<Option<bool>, Report> {
    // When the wait for the grant ends in vain, the guards that have queued behind it find this lock.
    let mut announcement = Locks::of(&adoption.name);
    announcement.take_within(ANNOUNCE_ADOPTION, 0, waiting)?;
    let mut locks = Locks::of(&adoption.name);
    // A transaction's own guard does not conflict with its own lock, so it is checked separately.
    let relies = guard::guards_slot(&adoption.name, 0);
    // The table stays closed during the wait, so that maintenance does not wait for this session.
    let alone = !relies && locks.take_within(ADOPT, 0, waiting)?;
    let table = LeaseTable::open(Access::Write)?;
    if !alone {
        if end_older(&table, adoption)? {
            announcement.hold_until_commit();
        }
        return Ok(Some(false));
    }
    if settled_rows(&table, &adoption.name).is_none() {
        return Ok(None);
    }
    let Checked { adopt, row, epoch } = checked(&table, adoption)?;
    if row.is_none() && is_being_loaded(&table, &adoption.name) {
        return Ok(None);
    }
    match adopt {
        Adopt::Current => return Ok(Some(true)),
        Adopt::OfEarlierEpoch => return adopt_again(adoption).map(Some),
        _ => {}
    }
    locks.hold_until_commit();
    write(&table, adoption, row.as_ref(), epoch)?;
    Ok(Some(true))
}

/// Reads the rows of the name and decides. Errors if the caller may not adopt this token, or this name: prefixes are
/// checked at each attempt, because one may be revoked while its role waits.
fn checked(table: &LeaseTable, adoption: &Adoption) -> Result<Checked, Report> {
    role_prefix::require(&adoption.name, Level::Adopter)?;
    let epoch = tokens::epoch()?;
    let rows = table.rows(&adoption.name, AsOf::Now);
    let grants: Vec<Grant> = rows.iter().map(|row| row.grant).collect();
    let row = rows.first().copied();
    let holders = adoption.holders(row.as_ref());
    let adopt = grant::adopt(&grants, adoption.token, epoch, holders);
    match (adopt, &row) {
        (Adopt::GrantedHere, _) => Err(errors::granted_name(&adoption.name)),
        (Adopt::Stale, Some(row)) => {
            Err(errors::stale_adoption(&adoption.name, adoption.token, row.grant.greatest()))
        }
        (Adopt::Current | Adopt::OfEarlierEpoch | Adopt::OtherHolder, Some(row)) => {
            // A caller that may not act for the grant's role must not learn its holder.
            check_role(row)?;
            match adopt {
                Adopt::OtherHolder => Err(of_another_holder(row, adoption.token)),
                _ => Ok(Checked { adopt, row: Some(*row), epoch }),
            }
        }
        _ => Ok(Checked { adopt, row, epoch }),
    }
}

/// Makes the current token valid again after a new epoch has invalidated it.
fn adopt_again(adoption: &Adoption) -> Result<bool, Report> {
    let table = LeaseTable::open(Access::Write)?;
    let epoch = tokens::epoch()?;
    let is_current = |row: &Row| {
        let holders = adoption.holders(Some(row));
        let found = grant::adopt(&[row.grant], adoption.token, epoch, holders);
        matches!(found, Adopt::Current | Adopt::OfEarlierEpoch)
    };
    let Some(locked) = Locked::grant(&table, &adoption.name, 0, CHANGE, is_current)? else {
        // The grant has ended meanwhile or belongs to another holder, so `checked` returns the error.
        return checked(&table, adoption).map(|_| false);
    };
    check_role(&locked.row)?;
    let holders = adoption.holders(Some(&locked.row));
    if grant::adopt(&[locked.row.grant], adoption.token, epoch, holders) == Adopt::Current {
        // A concurrent adoption of the same number came first. Releasing the lock spares others a wait.
        return Ok(true);
    }
    let row = locked.hold_until_commit();
    commit::flush_at_commit();
    table.replace(&row, &row.adopted_again(epoch, clock::now()))?;
    Ok(true)
}

/// Ends the older grant. Returns false if another transaction is changing it, or if it has ended already.
fn end_older(table: &LeaseTable, adoption: &Adoption) -> Result<bool, Report> {
    let is_there = |row: &Row| row.deleter() == Deleter::None;
    let Some(locked) = Locked::grant(table, &adoption.name, 0, END_OLDER, is_there)? else {
        return Ok(false);
    };
    checked(table, adoption)?;
    let row = locked.row;
    let is_older = row.grant.closing.is_none_or(|closing| closing < adoption.token);
    if is_older {
        locked.hold_until_commit();
        commit::flush_at_commit();
        table.replace(&row, &row.closed(adoption.token, clock::now()))?;
    }
    Ok(is_older)
}

fn write(
    table: &LeaseTable,
    adoption: &Adoption,
    over: Option<&Row>,
    epoch: Epoch,
) -> Result<(), Report> {
    let new = NewGrant {
        name: &adoption.name,
        slot: 0,
        mode: Mode::Exclusive,
        holder: adoption.holder.as_deref(),
        token: adoption.token,
        now: clock::now(),
        lifetime: Lifetime::Adopted(epoch),
        metadata: adoption.metadata,
    };
    // After this call the caller may write to another server, so the grant must survive a crash here.
    commit::flush_at_commit();
    table.grant(&new, over)?;
    guard::warn_of_older_reads(&adoption.name);
    statistics::count(Counter::Grants);
    Ok(())
}
