//! The calling role, by name, since the extension's rows have the names of roles.

use crate::encoding;
use crate::pg::call::args::c_bytes;
use crate::pg::compat;
use crate::pg::raw;
use pgrx::pg_sys;
use std::cell::{Cell, RefCell};

thread_local! {
    /// The role that called last, with its name. Kept until a role of the server changes.
    static CALLER: RefCell<Option<(pg_sys::Oid, Vec<u8>)>> = const { RefCell::new(None) };
    /// The number of changes of roles.
    static GENERATION: Cell<u64> = const { Cell::new(0) };
}

/// Registers for changes of roles and memberships. Called once, when the library is loaded.
pub fn register() {
    use pg_sys::SysCacheIdentifier::{AUTHMEMROLEMEM, AUTHOID, DATABASEOID};
    // The owner of the database is a member of pg_database_owner, so a change of the database counts.
    for cache in [AUTHOID, AUTHMEMROLEMEM, DATABASEOID] {
        // SAFETY: registered once; the function never raises.
        unsafe {
            let nothing = pg_sys::Datum::from(0);
            pg_sys::CacheRegisterSyscacheCallback(cache as i32, Some(roles_changed), nothing);
        }
    }
}

unsafe extern "C-unwind" fn roles_changed(_: pg_sys::Datum, _: i32, _: u32) {
    CALLER.take();
    GENERATION.set(GENERATION.get() + 1);
}

/// A counter that grows whenever a role or a membership may have changed.
pub fn generation() -> u64 {
    GENERATION.get()
}

/// The name of the current user.
pub fn current() -> Vec<u8> {
    // SAFETY: reads the oid of the current user.
    let user = unsafe { raw::GetUserId() };
    let known = |caller: &Option<(pg_sys::Oid, Vec<u8>)>| {
        caller.as_ref().filter(|(oid, _)| *oid == user).map(|(_, name)| name.clone())
    };
    CALLER.with_borrow(known).unwrap_or_else(|| {
        // SAFETY: returns a NUL-terminated copy.
        let name = unsafe { c_bytes(pg_sys::GetUserNameFromId(user, false)) };
        CALLER.set(Some((user, name.clone())));
        name
    })
}

/// Returns true if the caller may act for this role: it is the role, a role that may act as it, or a superuser. In a
/// trigger that runs as another user (a cascading key, a SECURITY DEFINER function) the session's role counts as well.
pub fn acts_for(role: &[u8], in_trigger: bool) -> bool {
    if current() == role {
        return true;
    }
    let name = encoding::c_string(role);
    // SAFETY: catalog look-ups by a NUL-terminated name.
    unsafe {
        let current = pg_sys::GetUserId();
        let outer = pg_sys::GetOuterUserId();
        let oid = pg_sys::get_role_oid(name, true);
        let acts = |user| {
            pg_sys::superuser_arg(user) || (oid != pg_sys::InvalidOid && compat::acts_as(user, oid))
        };
        acts(current) || (in_trigger && acts(outer))
    }
}

/// Returns true if this user may read all columns of the relation.
pub fn may_select(user: pg_sys::Oid, relation: pg_sys::Oid) -> bool {
    let select = pg_sys::ACL_SELECT as pg_sys::AclMode;
    // SAFETY: a catalog look-up.
    unsafe { pg_sys::pg_class_aclcheck(relation, user, select) == pg_sys::AclResult::ACLCHECK_OK }
}
