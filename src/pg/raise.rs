//! Raising a refusal as a Postgres error.
//!
//! pgrx knows a closed list of SQLSTATEs and turns any other into XX000, so the error is reported here by
//! Postgres's own calls, after all Rust work is done: they leave by longjmp, which no destructor may meet.

use super::compat;
use crate::errors::Refusal;
use pgrx::pg_sys;
use pgrx::pg_sys::panic::CaughtError;
use std::cell::Cell;
use std::ffi::{c_char, c_int, CStr};

/// A refusal laid out as C strings in the current memory context; nothing to drop.
#[derive(Clone, Copy)]
pub struct Staged {
    sqlstate: c_int,
    message: *const c_char,
    detail: *const c_char,
    hint: *const c_char,
    schema: *const c_char,
    table: *const c_char,
    column: *const c_char,
    /// Postgres's own error, which is raised instead.
    raised: *mut pg_sys::ErrorData,
}

/// An error of Postgres, or of a trigger or constraint of a user's, as it was raised: with whatever SQLSTATE
/// and fields, of which pgrx keeps a few. The transaction cannot go on.
#[derive(Clone, Copy)]
pub struct Raised(*mut pg_sys::ErrorData);

thread_local! {
    /// Copies of errors go into this memory; NULL where none is wanted.
    static KEEP_IN: Cell<pg_sys::MemoryContext> = const { Cell::new(std::ptr::null_mut()) };
    /// The error that was raised last.
    static LAST: Cell<*mut pg_sys::ErrorData> = const { Cell::new(std::ptr::null_mut()) };
}

/// Does work in which functions of users may run, and gives back their errors whole.
pub fn catch(work: impl FnOnce()) -> Result<(), Raised> {
    let (outer, last) = (KEEP_IN.get(), LAST.replace(std::ptr::null_mut()));
    // SAFETY: the current memory outlives the call; the callback is taken off again below. (An error takes
    // pgrx's own calls back to the stack of callbacks that they have found.)
    unsafe {
        KEEP_IN.set(pg_sys::CurrentMemoryContext);
        let mut keeping = pg_sys::ErrorContextCallback {
            previous: pg_sys::error_context_stack,
            callback: Some(keep_error),
            arg: std::ptr::null_mut(),
        };
        pg_sys::error_context_stack = &mut keeping;
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        pg_sys::error_context_stack = keeping.previous;
        pg_sys::MemoryContextSwitchTo(KEEP_IN.replace(outer));
        let raised = LAST.replace(last);
        match done {
            Ok(()) => Ok(()),
            Err(panic) if is_of(raised, panic.as_ref()) => Err(Raised(raised)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// Is it the error that pgrx has made a panic of? An exception handler may have raised an older one again.
///
/// # Safety
/// NULL, or a copy of an error.
unsafe fn is_of(raised: *mut pg_sys::ErrorData, panic: &(dyn std::any::Any + Send)) -> bool {
    let Some(CaughtError::PostgresError(report)) = panic.downcast_ref() else { return false };
    // SAFETY: the caller's promise; a message is NUL-terminated.
    !raised.is_null()
        && unsafe { CStr::from_ptr((*raised).message) }.to_string_lossy() == report.message()
}

/// Called by Postgres for each error and each message, before it goes on its way.
unsafe extern "C-unwind" fn keep_error(_: *mut std::ffi::c_void) {
    // SAFETY: the error is the topmost on Postgres's stack of errors; the copy goes to memory of the caller.
    unsafe {
        let before = pg_sys::CurrentMemoryContext;
        pg_sys::CurrentMemoryContext = KEEP_IN.get();
        let error = compat::CopyErrorData();
        pg_sys::CurrentMemoryContext = before;
        if (*error).elevel >= pgrx::PgLogLevel::ERROR as c_int {
            LAST.set(error);
        } else {
            compat::FreeErrorData(error);
        }
    }
}

/// Lays a refusal out, in the server's encoding.
pub fn stage(refusal: Refusal) -> Staged {
    let optional = |text: &[u8]| if text.is_empty() { std::ptr::null() } else { c_string(text) };
    let place = refusal.place.as_deref();
    Staged {
        sqlstate: encode(refusal.sqlstate),
        message: c_string(&in_server_encoding(refusal.message.clone())),
        detail: optional(&in_server_encoding(refusal.detail())),
        hint: optional(refusal.hint.as_bytes()),
        schema: place.map_or(std::ptr::null(), |p| optional(&p.schema)),
        table: place.map_or(std::ptr::null(), |p| optional(&p.table)),
        column: place.map_or(std::ptr::null(), |p| optional(&p.column)),
        raised: refusal.raised.map_or(std::ptr::null_mut(), |raised| raised.0),
    }
}

/// Reports it; does not return.
///
/// # Safety
/// No frame between here and Postgres may hold anything that needs dropping.
pub unsafe fn throw(staged: Staged) -> ! {
    let text = c"%s".as_ptr();
    // SAFETY: the strings are NUL-terminated and live as long as the current context; errfinish leaves.
    unsafe {
        if !staged.raised.is_null() {
            compat::ThrowErrorData(staged.raised);
        }
        compat::errstart(pgrx::PgLogLevel::ERROR as c_int, std::ptr::null());
        compat::errcode(staged.sqlstate);
        compat::errmsg_internal(text, staged.message);
        if !staged.detail.is_null() {
            compat::errdetail_internal(text, staged.detail);
        }
        if !staged.hint.is_null() {
            compat::errhint(text, staged.hint);
        }
        for (field, value) in [
            (pg_sys::PG_DIAG_SCHEMA_NAME, staged.schema),
            (pg_sys::PG_DIAG_TABLE_NAME, staged.table),
            (pg_sys::PG_DIAG_COLUMN_NAME, staged.column),
        ] {
            if !value.is_null() {
                compat::err_generic_string(c_int::from(field), value);
            }
        }
        compat::errfinish(std::ptr::null(), 0, std::ptr::null());
    }
    unreachable!("errfinish returned from an ERROR")
}

/// Five characters as Postgres packs them (MAKE_SQLSTATE).
fn encode(sqlstate: &str) -> c_int {
    sqlstate
        .bytes()
        .enumerate()
        .map(|(i, byte)| c_int::from(byte.wrapping_sub(b'0') & 0x3f) << (6 * i))
        .sum()
}

/// A palloc'ed, NUL-terminated copy; a NUL inside ends it.
pub fn c_string(bytes: &[u8]) -> *const c_char {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    // SAFETY: the new block has room for the bytes and the NUL.
    unsafe {
        let copy = pg_sys::palloc(end + 1).cast::<u8>();
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), copy, end);
        *copy.add(end) = 0;
        copy.cast()
    }
}

/// UTF-8 text in the database's encoding.
fn in_server_encoding(text: String) -> Vec<u8> {
    if text.is_ascii() {
        return text.into_bytes();
    }
    // SAFETY: the conversion gets a length and a NUL-terminated copy, and gives back one or the other.
    unsafe {
        if [pg_sys::pg_enc::PG_UTF8, pg_sys::pg_enc::PG_SQL_ASCII]
            .contains(&(pg_sys::GetDatabaseEncoding() as pg_sys::pg_enc::Type))
        {
            return text.into_bytes();
        }
        let copy = c_string(text.as_bytes());
        let converted =
            pg_sys::pg_any_to_server(copy, text.len() as c_int, pg_sys::pg_enc::PG_UTF8 as c_int);
        CStr::from_ptr(converted).to_bytes().to_vec()
    }
}

/// Text of the database as UTF-8.
pub fn to_utf8(bytes: &[u8]) -> String {
    if let (true, Ok(text)) = (bytes.is_ascii(), std::str::from_utf8(bytes)) {
        return text.to_owned();
    }
    // SAFETY: as above.
    unsafe {
        if pg_sys::GetDatabaseEncoding() == pg_sys::pg_enc::PG_SQL_ASCII as c_int {
            // No encoding is known: what is not UTF-8 cannot be shown.
            return String::from_utf8_lossy(bytes).into_owned();
        }
        let copy = c_string(bytes);
        let converted =
            pg_sys::pg_server_to_any(copy, bytes.len() as c_int, pg_sys::pg_enc::PG_UTF8 as c_int);
        CStr::from_ptr(converted).to_string_lossy().into_owned()
    }
}
