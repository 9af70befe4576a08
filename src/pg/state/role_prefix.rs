//! fence.role_prefix: which names of leases a role may see and take.
//!
//! The prefixes are cached until the table, a role or a membership changes, as Postgres caches privileges. A
//! trigger on the table (`role_prefix_changed`) tells every session of a change of its rows.

use crate::encoding;
use crate::errors::{self, Refusal};
use crate::pg::call::args::bytes_of;
use crate::pg::raw;
use crate::pg::session::role;
use crate::pg::state::opened::{IfLocked, Opened};
use crate::pg::state::relation::{self, state_oid};
use crate::pg::table_scan;
use pg_fence_rules::names::{Level, Names};
use pgrx::pg_sys::{self, Datum, Oid};
use std::cell::RefCell;
use std::ffi::CStr;
use std::rc::Rc;

const TABLE: &CStr = c"role_prefix";
/// Its first columns: role, prefix, level.
const COLUMNS: [Oid; 3] = [pg_sys::NAMEOID, pg_sys::TEXTOID, pg_sys::TEXTOID];

/// The names that were read at one state of the table and of roles, by user.
#[derive(Default)]
struct Cached {
    read_at: Option<Generations>,
    by_user: Vec<(Oid, Rc<Names>)>,
}

/// How often the table has changed, and how often roles have.
type Generations = (u64, u64);

thread_local! {
    static CACHED: RefCell<Cached> = RefCell::default();
}

/// Not the changes of all relations: with many rows, a temporary table that comes or goes must not have them read again.
fn generations() -> Generations {
    let table = state_oid(TABLE).unwrap_or(pg_sys::InvalidOid);
    (relation::changes_of(table), role::generation())
}

/// 42501 unless the current user may do this with the lease.
pub fn require(name: &[u8], level: Level) -> Result<(), Refusal> {
    require_each([name], level, IfLocked::Queue).map(drop)
}

/// As `require`, for each of these leases; false where that cannot be told now, for the table's lock is not to be had that
/// way.
pub fn require_each<'n>(
    leases: impl IntoIterator<Item = &'n [u8]>,
    level: Level,
    if_locked: IfLocked,
) -> Result<bool, Refusal> {
    // SAFETY: reads who the current user is.
    let Some(names) = names_of(unsafe { raw::GetUserId() }, if_locked)? else { return Ok(false) };
    match leases.into_iter().find(|name| !names.allow(name, level)) {
        None => Ok(true),
        Some(name) => Err(errors::name_not_given(name, &role::current(), names.prefixes(level))),
    }
}

/// May the current user see this lease? Not whether it may call anything.
pub fn shows(name: &[u8]) -> bool {
    // SAFETY: reads who the current user is.
    shows_to(unsafe { raw::GetUserId() }, name)
}

/// May the current user see every lease?
pub fn shows_all() -> bool {
    shows(b"")
}

/// May errors on tables of its own tell the caller of this lease? Both the current user and the session's role must be
/// allowed to see it: a cascading key runs as the table's owner, but its error goes to the client.
pub fn may_be_told(name: &[u8]) -> bool {
    let Ok(view) = state_oid(c"leases") else { return false };
    // SAFETY: catalog look-ups.
    let users = unsafe { [pg_sys::GetUserId(), pg_sys::GetOuterUserId()] };
    users.into_iter().all(|user| {
        let select = pg_sys::ACL_SELECT as pg_sys::AclMode;
        // SAFETY: a catalog look-up.
        let reads = unsafe { pg_sys::pg_class_aclcheck(view, user, select) };
        reads == pg_sys::AclResult::ACLCHECK_OK && shows_to(user, name)
    })
}

fn shows_to(user: Oid, name: &[u8]) -> bool {
    let names = names_of(user, IfLocked::Queue).ok().flatten();
    names.is_some_and(|names| names.allow(name, Level::Monitor))
}

/// The names of a user; None where the table's lock is not to be had that way. Error: 55000 where the table is not there, or
/// not as this library knows it.
fn names_of(user: Oid, if_locked: IfLocked) -> Result<Option<Rc<Names>>, Refusal> {
    // A transaction that holds the locks of all that it looks at would not hear of other sessions until it ends.
    // SAFETY: within a transaction, where any opening of a relation does the same.
    unsafe { pg_sys::AcceptInvalidationMessages() };
    let before = Some(generations());
    let cached = CACHED.with_borrow_mut(|cached| {
        if cached.read_at != before {
            *cached = Cached { read_at: before, by_user: Vec::new() };
        }
        cached.by_user.iter().find(|(who, _)| *who == user).map(|(_, names)| names.clone())
    });
    if let Some(names) = cached {
        return Ok(Some(names));
    }
    let Some(names) = read(user, if_locked)?.map(Rc::new) else { return Ok(None) };
    let after = Some(generations());
    CACHED.with_borrow_mut(|cached| {
        // Where something changed while it was read, it is good for this call only.
        if cached.read_at == after {
            cached.by_user.push((user, names.clone()));
        }
    });
    Ok(Some(names))
}

/// Reads the table: what is recorded for the user, and for each role whose rights it has.
fn read(user: Oid, if_locked: IfLocked) -> Result<Option<Names>, Refusal> {
    // SAFETY: a catalog look-up.
    if unsafe { pg_sys::superuser_arg(user) } {
        return Ok(Some(Names::all()));
    }
    let table = Opened::open(state_oid(TABLE)?, pg_sys::AccessShareLock, if_locked);
    let Some(table) = table else { return Ok(None) };
    let given = roles_in_acl(state_oid(c"leases")?);
    let mut names = Names::default();
    // Rows of one role mostly follow each other.
    let mut last: Option<(Vec<u8>, bool)> = None;
    // SAFETY: the table is open, and its columns are as they are read.
    unsafe {
        let columns = (*table.relation).rd_att;
        if !table.is_heap_with(&COLUMNS) {
            return Err(errors::state_differs("role_prefix"));
        }
        table_scan::each_row(table.relation, |tuple| -> Result<(), Refusal> {
            let value = |n| -> Option<Datum> {
                let mut null = false;
                let value = pg_sys::heap_getattr(tuple, n, columns, &mut null);
                (!null).then_some(value)
            };
            // A role that may alter the table may let in a NULL: such a row gives nobody anything.
            let (Some(role), Some(prefix), Some(level)) = (value(1), value(2), value(3)) else {
                return Ok(());
            };
            let role = CStr::from_ptr(role.cast_mut_ptr()).to_bytes();
            if last.as_ref().is_none_or(|(known, _)| known != role) {
                last = Some((role.to_vec(), counts(user, role, &given)));
            }
            if last.as_ref().is_some_and(|(_, counts)| *counts) {
                // A word that is no level of ours lets nobody do anything.
                if let Some(level) = Level::parse(bytes_of(level)) {
                    names.add(bytes_of(prefix), level);
                }
            }
            Ok(())
        })?;
    }
    Ok(Some(names))
}

/// Does what is recorded for a role count for the user: has the user its rights, as Postgres asks it of a privilege? And
/// was the role itself given what `fence_grant` gives? One that was made later under the name of another was not.
fn counts(user: Oid, role: &[u8], given: &[Oid]) -> bool {
    // SAFETY: catalog look-ups by a NUL-terminated name.
    unsafe {
        let oid = pg_sys::get_role_oid(encoding::c_string(role), true);
        given.contains(&oid) && pg_sys::has_privs_of_role(user, oid)
    }
}

/// The roles that the privileges of a relation name.
fn roles_in_acl(relation: Oid) -> Vec<Oid> {
    const CACHE: i32 = pg_sys::SysCacheIdentifier::RELOID as i32;
    // SAFETY: a row of pg_class, read before it is given back; the roles are counted by who lists them.
    unsafe {
        let tuple = pg_sys::SearchSysCache1(CACHE, relation.into());
        if tuple.is_null() {
            return Vec::new();
        }
        let column = pg_sys::Anum_pg_class_relacl as pg_sys::AttrNumber;
        let mut null = false;
        let acl = pg_sys::SysCacheGetAttr(CACHE, tuple, column, &mut null);
        let mut roles = Vec::new();
        if !null {
            let acl = pg_sys::pg_detoast_datum(acl.cast_mut_ptr());
            let mut members = std::ptr::null_mut();
            let count = pg_sys::aclmembers(acl.cast(), &mut members);
            roles.extend((0..count as usize).map(|n| *members.add(n)));
        }
        pg_sys::ReleaseSysCache(tuple);
        roles
    }
}

/// May the current user read the table itself? Error: 55000.
pub fn may_be_read() -> Result<bool, Refusal> {
    let table = state_oid(TABLE)?;
    // SAFETY: catalog look-ups.
    unsafe {
        let select = pg_sys::ACL_SELECT as pg_sys::AclMode;
        let reads = pg_sys::pg_class_aclcheck(table, pg_sys::GetUserId(), select);
        Ok(reads == pg_sys::AclResult::ACLCHECK_OK)
    }
}

/// Tells every session, when this transaction commits, that the table's rows have changed. Error: 55000.
pub fn changed() -> Result<(), Refusal> {
    let table = state_oid(TABLE)?;
    // SAFETY: the oid of a relation.
    unsafe { pg_sys::CacheInvalidateRelcacheByRelid(table) };
    Ok(())
}
