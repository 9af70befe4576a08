//! Finding the objects of the extension's own schema.

use crate::errors::{self, Refusal};
use pgrx::pg_sys;
use std::ffi::CStr;

/// The oid of a table, index, sequence or view of the schema `fence`.
pub fn state_oid(name: &CStr) -> Result<pg_sys::Oid, Refusal> {
    // SAFETY: catalog look-ups by NUL-terminated names.
    let oid = unsafe {
        let schema = pg_sys::get_namespace_oid(c"fence".as_ptr(), true);
        if schema == pg_sys::InvalidOid {
            pg_sys::InvalidOid
        } else {
            pg_sys::get_relname_relid(name.as_ptr(), schema)
        }
    };
    if oid == pg_sys::InvalidOid {
        return Err(errors::state_missing(&name.to_string_lossy()));
    }
    Ok(oid)
}

/// May the current user read it (SELECT on the whole)?
pub fn readable(oid: pg_sys::Oid) -> bool {
    // SAFETY: catalog look-up.
    unsafe {
        pg_sys::pg_class_aclcheck(oid, pg_sys::GetUserId(), pg_sys::ACL_SELECT as pg_sys::AclMode)
            == pg_sys::AclResult::ACLCHECK_OK
    }
}

/// May the current user see the state of leases?
pub fn may_see_leases() -> bool {
    state_oid(c"leases").is_ok_and(readable)
}
