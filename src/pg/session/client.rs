//! The client of this session.

use crate::pg::call::args::c_bytes;
use pgrx::pg_sys;
use std::ffi::CStr;
use std::io::Write;

/// The client that sends this session's statements.
pub struct Client {
    /// The process id of this session.
    pub pid: i32,
    /// The role set by the session; within a SECURITY DEFINER function, the caller's role.
    pub role_oid: pg_sys::Oid,
    /// The name of the role; empty if it was dropped.
    pub role: Vec<u8>,
    /// `application_name`, in the server's encoding; empty if there is none.
    pub application_name: Vec<u8>,
    /// The client's address in the text form of inet; `None` for a Unix socket.
    pub address: Option<Vec<u8>>,
}

/// The client that sends this session's statements.
pub fn client() -> Client {
    // SAFETY: returns a NUL-terminated copy, or NULL for a dropped role.
    let (role_oid, role) = unsafe {
        let oid = pg_sys::GetOuterUserId();
        (oid, c_bytes(pg_sys::GetUserNameFromId(oid, true)))
    };
    let application_name = application_name().to_vec();
    Client { pid: pid(), role_oid, role, application_name, address: address() }
}

/// `application_name`, which may change after the call from SQL.
fn application_name<'a>() -> &'a [u8] {
    // SAFETY: NUL-terminated, or NULL.
    unsafe {
        let name = pg_sys::application_name;
        if name.is_null() { &[] } else { CStr::from_ptr(name).to_bytes() }
    }
}

fn pid() -> i32 {
    // SAFETY: set once when the process starts.
    unsafe { pg_sys::MyProcPid }
}

fn address() -> Option<Vec<u8>> {
    // SAFETY: functions of the server, with arguments of their declared types.
    unsafe {
        let address = pgrx::direct_function_call_as_datum(pg_sys::inet_client_addr, &[]);
        let text = pgrx::direct_function_call_as_datum(pg_sys::inet_out, &[Some(address?)]);
        Some(CStr::from_ptr(text?.cast_mut_ptr()).to_bytes().to_vec())
    }
}

/// `application[pid]`, which stands for the holder of sessions that name none.
pub fn label() -> Vec<u8> {
    let name = match application_name() {
        [] => b"session",
        name => name,
    };
    // The capacity includes the pid, so that one allocation is enough.
    let mut session = Vec::with_capacity(name.len() + 16);
    session.extend_from_slice(name);
    // Writing into memory cannot fail.
    let _ = write!(session, "[{}]", pid());
    session
}
