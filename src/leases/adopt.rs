//! Adopting: a lease that somebody else grants (another lock service, another database) is made known here, under the
//! number that it has there.
//!
//! A greater number ends the older grant for good. It is answered once no open transaction relies on the older grant: the
//! lock that it takes excludes guards, and who would guard meanwhile waits behind it. Where that takes too long, the older
//! grant is ended all the same and the answer is "not yet": from that commit on nobody guards it again, so that even guards
//! that overlap without end are over soon.

use super::free_slot::{is_being_loaded, settled_rows};
use super::guard;
use super::known::{check_role, of_another_holder};
use super::locks::{Locked, Locks};
use crate::errors::{self, Refusal};
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
use pg_fence_rules::locks::{ADOPT, CHANGE, END_OLDER};
use pg_fence_rules::names::Level;
use pg_fence_rules::{Floor, Token};
use std::time::Duration;

/// How soon to look again where an open transaction is forgetting the row, or loading one.
const LOOK_AFTER: Duration = Duration::from_millis(20);

/// A lease that somebody else has granted.
pub struct Adoption {
    /// The lease, in the database's encoding.
    pub name: Vec<u8>,
    /// Its number there.
    pub token: Token,
    /// The holder, where it is said.
    pub holder: Option<Vec<u8>>,
    /// A jsonb that the caller wishes to be shown with the lease.
    pub metadata: Option<pgrx::pg_sys::Datum>,
}

impl Adoption {
    /// Its holder, beside the holder that a row records.
    fn holders<'a>(&'a self, row: Option<&'a Row>) -> Holders<'a> {
        Holders { recorded: row.and_then(Row::holder), adopting: self.holder.as_deref() }
    }
}

/// Is any lease adopted in this database? Reads all of them. No, where that cannot be told without waiting.
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

/// The state of the name, as its rows say, and what that means for the adoption.
struct Found {
    adopt: Adopt,
    row: Option<Row>,
    floor: Floor,
}

/// Makes it known; false where an open transaction has relied on an older grant, or has been adopting, for all of `wait`.
/// Errors: PF001, PF004, 42501, 53200, 55000.
pub fn adopt(adoption: &Adoption, wait: Duration) -> Result<bool, Refusal> {
    let found = judged(&LeaseTable::open(Access::Read)?, adoption)?;
    match found.adopt {
        Adopt::Current => return Ok(true),
        Adopt::AfterJump => return adopt_again(adoption),
        _ => {}
    }
    let waiting = Waiting::since_now(wait);
    loop {
        if let Some(answered) = replace(adoption, &waiting)? {
            return Ok(answered);
        }
        wait::reset();
        if !waiting.sleep(LOOK_AFTER)? {
            return Ok(false);
        }
    }
}

/// Puts the number in the place of an older one, or ends that; whether it was adopted. None where an open transaction is
/// forgetting the row, or loading one: there is no lock to wait for.
fn replace(adoption: &Adoption, waiting: &Waiting) -> Result<Option<bool>, Refusal> {
    let mut locks = Locks::of(&adoption.name);
    // A transaction does not exclude itself: one that relies on the older grant must not have the lock.
    let relies = guard::guards_slot(&adoption.name, 0);
    // The table is closed meanwhile: maintenance waits for nobody who waits.
    let alone = !relies && locks.take_within(ADOPT, 0, waiting)?;
    let table = LeaseTable::open(Access::Write)?;
    if !alone {
        end_older(&table, adoption)?;
        return Ok(Some(false));
    }
    if settled_rows(&table, &adoption.name).is_none() {
        return Ok(None);
    }
    let Found { adopt, row, floor } = judged(&table, adoption)?;
    if row.is_none() && is_being_loaded(&table, &adoption.name, |grant| grant.slot == 0) {
        return Ok(None);
    }
    match adopt {
        Adopt::Current => return Ok(Some(true)),
        Adopt::AfterJump => return adopt_again(adoption).map(Some),
        _ => {}
    }
    locks.keep();
    write(&table, adoption, row.as_ref(), floor)?;
    Ok(Some(true))
}

/// Reads what the name has. Refuses a token that is no longer, or not, to be adopted by this caller; and a name that is not
/// the caller's: it is asked at each look, for a prefix may be taken away while its role waits.
fn judged(table: &LeaseTable, adoption: &Adoption) -> Result<Found, Refusal> {
    role_prefix::require(&adoption.name, Level::Adopter)?;
    let floor = tokens::floor()?;
    let rows = table.rows(&adoption.name, AsOf::Now);
    let grants: Vec<Grant> = rows.iter().map(|row| row.grant).collect();
    let row = rows.first().copied();
    let holders = adoption.holders(row.as_ref());
    let adopt = grant::adopt(&grants, adoption.token, floor, holders);
    match (adopt, &row) {
        (Adopt::GrantedHere, _) => Err(errors::granted_name(&adoption.name)),
        (Adopt::Stale, Some(row)) => {
            Err(errors::stale_adoption(&adoption.name, adoption.token, row.grant.greatest()))
        }
        (Adopt::Current | Adopt::AfterJump, Some(row)) => {
            check_role(|| Some(&adoption.name), row)?;
            Ok(Found { adopt, row: Some(*row), floor })
        }
        (Adopt::OtherHolder, Some(row)) => {
            // Who may not act for the role of the grant does not learn who its holder is.
            check_role(|| Some(&adoption.name), row)?;
            Err(of_another_holder(row, adoption.token))
        }
        _ => Ok(Found { adopt, row, floor }),
    }
}

/// Makes the current token known again, which a jump has silenced.
fn adopt_again(adoption: &Adoption) -> Result<bool, Refusal> {
    let table = LeaseTable::open(Access::Write)?;
    let floor = tokens::floor()?;
    let is_current = |row: &Row| {
        let holders = adoption.holders(Some(row));
        let found = grant::adopt(&[row.grant], adoption.token, floor, holders);
        matches!(found, Adopt::Current | Adopt::AfterJump)
    };
    let Some(locked) = Locked::grant(&table, &adoption.name, 0, CHANGE, is_current)? else {
        // It has ended meanwhile, or is another holder's, so `judged` refuses the token.
        return judged(&table, adoption).map(|_| false);
    };
    check_role(|| Some(&adoption.name), &locked.row)?;
    let holders = adoption.holders(Some(&locked.row));
    if grant::adopt(&[locked.row.grant], adoption.token, floor, holders) == Adopt::Current {
        // A fellow has done so meanwhile. The lock is given back: others need not wait for this transaction.
        return Ok(true);
    }
    let row = locked.keep();
    commit::force();
    table.replace(&row, &row.adopted_again(floor, clock::now()))?;
    Ok(true)
}

/// Ends the older grant, where nobody else is changing it: from the commit on nobody guards it again.
fn end_older(table: &LeaseTable, adoption: &Adoption) -> Result<(), Refusal> {
    let is_there = |row: &Row| row.deleter() == Deleter::None;
    let Some(locked) = Locked::grant(table, &adoption.name, 0, END_OLDER, is_there)? else {
        return Ok(());
    };
    judged(table, adoption)?;
    let row = locked.row;
    if row.grant.closing.is_none_or(|closing| closing < adoption.token) {
        locked.keep();
        commit::force();
        table.replace(&row, &row.closed(adoption.token, clock::now()))?;
    }
    Ok(())
}

fn write(
    table: &LeaseTable,
    adoption: &Adoption,
    over: Option<&Row>,
    floor: Floor,
) -> Result<(), Refusal> {
    let new = NewGrant {
        name: &adoption.name,
        slot: 0,
        mode: Mode::Exclusive,
        holder: adoption.holder.as_deref(),
        token: adoption.token,
        now: clock::now(),
        lifetime: Lifetime::Adopted(floor),
        metadata: adoption.metadata,
    };
    // The caller may then write on another server, or tell another that does.
    commit::force();
    table.grant(&new, over)?;
    guard::warn_of_older_reads(&adoption.name);
    statistics::count(Counter::Grants);
    Ok(())
}
