//! The client of this session.

use crate::encoding::push_number;
use pgrx::pg_sys;
use std::ffi::CStr;

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
        let name = pg_sys::GetUserNameFromId(oid, true);
        (oid, if name.is_null() { Vec::new() } else { CStr::from_ptr(name).to_bytes().to_vec() })
    };
    let application_name = with_application_name(<[u8]>::to_vec);
    Client { pid: pid(), role_oid, role, application_name, address: address() }
}

fn with_application_name<T>(show: impl FnOnce(&[u8]) -> T) -> T {
    // SAFETY: NUL-terminated, or NULL; the setting does not change while `show` runs.
    unsafe {
        if pg_sys::application_name.is_null() {
            return show(&[]);
        }
        show(CStr::from_ptr(pg_sys::application_name).to_bytes())
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
    let mut session = with_application_name(|name| {
        let name = if name.is_empty() { b"session" } else { name };
        // The capacity includes the pid, so that one allocation is enough.
        let mut session = Vec::with_capacity(name.len() + 16);
        session.extend_from_slice(name);
        session
    });
    session.push(b'[');
    push_number(&mut session, pid().into());
    session.push(b']');
    session
}
