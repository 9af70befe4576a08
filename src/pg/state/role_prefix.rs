//! fence.role_prefix: the prefixes of the names that each role may see and take.
//!
//! The prefixes are cached until the table, the privileges on fence.leases, a role or a membership changes, as Postgres
//! caches privileges. A trigger on the table (`role_prefix_changed`) tells every session that its rows have changed.

use crate::encoding;
use crate::errors::{self, Report};
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
/// The view whose privileges show which roles were granted access by `fence_grant`.
const VIEW: &CStr = c"leases";
/// The types of the first columns: role, prefix, level.
const COLUMN_TYPES: [Oid; 3] = [pg_sys::NAMEOID, pg_sys::TEXTOID, pg_sys::TEXTOID];

/// The cached names of each user, with the state of the relations and of the roles when they were read.
#[derive(Default)]
struct Cached {
    read_at: Option<Generations>,
    by_user: Vec<(Oid, Rc<Names>)>,
}

/// The number of changes of the table and the view, and of roles.
type Generations = (u64, u64);

thread_local! {
    static CACHED: RefCell<Cached> = RefCell::default();
}

/// Counts changes of these two relations only: with many rows, a temporary table that is created or dropped must not make
/// sessions read them again.
fn generations() -> Generations {
    let watched = [TABLE, VIEW].map(|name| state_oid(name).unwrap_or(pg_sys::InvalidOid));
    (relation::changes_of(watched), role::generation())
}

/// Errors with 42501 unless the current user has this right to the lease.
pub fn require(name: &[u8], level: Level) -> Result<(), Report> {
    require_each([name], level, IfLocked::Queue).map(drop)
}

/// Checks the right to each of these leases, as `require` does. Returns false if the table is locked and `if_locked`
/// forbids waiting.
pub fn require_each<'n>(
    leases: impl IntoIterator<Item = &'n [u8]>,
    level: Level,
    if_locked: IfLocked,
) -> Result<bool, Report> {
    // SAFETY: reads the oid of the current user.
    let Some(names) = names_of(unsafe { raw::GetUserId() }, if_locked)? else { return Ok(false) };
    match leases.into_iter().find(|name| !names.allow(name, level)) {
        None => Ok(true),
        Some(name) => Err(errors::name_not_given(name, &role::current(), names.prefixes(level))),
    }
}

/// Returns true if the current user may see this lease, whatever functions it may call.
pub fn may_see(name: &[u8]) -> bool {
    // SAFETY: reads the oid of the current user.
    user_may_see(unsafe { raw::GetUserId() }, name)
}

/// Returns true if the current user may see every lease.
pub fn may_see_all() -> bool {
    may_see(b"")
}

/// Returns true if an error on a fenced table may name this lease. Both the current user and the session's role must be
/// allowed to see it: a cascading key runs as the table's owner, but its error goes to the client.
pub fn may_be_named_in_errors(name: &[u8]) -> bool {
    let Ok(view) = state_oid(VIEW) else { return false };
    // SAFETY: catalog look-ups.
    let users = unsafe { [pg_sys::GetUserId(), pg_sys::GetOuterUserId()] };
    users.into_iter().all(|user| role::may_select(user, view) && user_may_see(user, name))
}

fn user_may_see(user: Oid, name: &[u8]) -> bool {
    let names = names_of(user, IfLocked::Queue).ok().flatten();
    names.is_some_and(|names| names.allow(name, Level::Monitor))
}

/// The names that a user may use. Returns `None` if the table is locked and `if_locked` forbids waiting. Errors: 55000
/// if the table is missing or has another shape than expected.
fn names_of(user: Oid, if_locked: IfLocked) -> Result<Option<Rc<Names>>, Report> {
    // Without this, a transaction that already holds all locks that it needs would not notice changes by other sessions
    // before its end.
    // SAFETY: within a transaction, in which opening any relation does the same.
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
        // If something changed during the read, the result is used for this call only.
        if cached.read_at == after {
            cached.by_user.push((user, names.clone()));
        }
    });
    Ok(Some(names))
}

/// Reads the rows of the user, and of each role whose rights it has.
fn read(user: Oid, if_locked: IfLocked) -> Result<Option<Names>, Report> {
    // SAFETY: a catalog look-up.
    if unsafe { pg_sys::superuser_arg(user) } {
        return Ok(Some(Names::all()));
    }
    let table = Opened::open(state_oid(TABLE)?, pg_sys::AccessShareLock, if_locked);
    let Some(table) = table else { return Ok(None) };
    let given = roles_in_acl(state_oid(VIEW)?);
    let mut names = Names::default();
    // Rows of the same role usually follow each other.
    let mut last: Option<(Vec<u8>, bool)> = None;
    // SAFETY: the table is open, and its columns are checked before they are read.
    unsafe {
        let columns = (*table.relation).rd_att;
        if !table.is_heap_with(&COLUMN_TYPES) {
            return Err(errors::state_differs("role_prefix"));
        }
        table_scan::each_row(table.relation, |tuple| -> Result<(), Report> {
            let value = |n| -> Option<Datum> {
                let mut null = false;
                let value = pg_sys::heap_getattr(tuple, n, columns, &mut null);
                (!null).then_some(value)
            };
            // A role that may alter the table may allow NULL. A row with a NULL gives no right.
            let (Some(role), Some(prefix), Some(level)) = (value(1), value(2), value(3)) else {
                return Ok(());
            };
            let role = CStr::from_ptr(role.cast_mut_ptr()).to_bytes();
            if last.as_ref().is_none_or(|(known, _)| known != role) {
                last = Some((role.to_vec(), counts(user, role, &given)));
            }
            if last.as_ref().is_some_and(|(_, counts)| *counts) {
                // An unknown level gives no right.
                if let Some(level) = Level::parse(bytes_of(level)) {
                    names.add(bytes_of(prefix), level);
                }
            }
            Ok(())
        })?;
    }
    Ok(Some(names))
}

/// Returns true if a role's rows count for the user: the user has the role's rights, and the role itself was granted
/// access by `fence_grant`. A role created later under the name of an earlier one was not.
fn counts(user: Oid, role: &[u8], given: &[Oid]) -> bool {
    // SAFETY: catalog look-ups by a NUL-terminated name.
    unsafe {
        let oid = pg_sys::get_role_oid(encoding::c_string(role), true);
        given.contains(&oid) && pg_sys::has_privs_of_role(user, oid)
    }
}

/// The roles in a relation's privileges.
fn roles_in_acl(relation: Oid) -> Vec<Oid> {
    const CACHE: i32 = pg_sys::SysCacheIdentifier::RELOID as i32;
    // SAFETY: a row of pg_class, read before it is released; aclmembers returns the number of roles.
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

/// Returns true if the current user may read the table itself. Errors: 55000.
pub fn may_be_read() -> Result<bool, Report> {
    // SAFETY: reads the oid of the current user.
    Ok(role::may_select(unsafe { raw::GetUserId() }, state_oid(TABLE)?))
}

/// Tells every session at commit that the table's rows have changed. Errors: 55000.
pub fn changed() -> Result<(), Report> {
    let table = state_oid(TABLE)?;
    // SAFETY: the oid of a relation.
    unsafe { pg_sys::CacheInvalidateRelcacheByRelid(table) };
    Ok(())
}
