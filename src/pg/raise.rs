//! Raising a refusal as a Postgres error.
//!
//! pgrx knows a closed list of SQLSTATEs and turns any other into XX000, so the error is reported here by
//! Postgres's own calls, after all Rust work is done: they leave by longjmp, which no destructor may meet.

use super::compat;
use crate::errors::Refusal;
use pgrx::pg_sys;
use std::ffi::{c_char, c_int};

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
}

/// Lays a refusal out, in the server's encoding.
pub fn stage(refusal: Refusal) -> Staged {
    let optional = |text: &[u8]| if text.is_empty() { std::ptr::null() } else { c_string(text) };
    let place = refusal.place.as_deref();
    Staged {
        sqlstate: encode(refusal.sqlstate),
        detail: optional(&in_server_encoding(refusal.detail())),
        message: c_string(&in_server_encoding(refusal.message)),
        // It may name a column.
        hint: optional(&in_server_encoding(refusal.hint.into_owned())),
        schema: place.map_or(std::ptr::null(), |p| optional(&p.schema)),
        table: place.map_or(std::ptr::null(), |p| optional(&p.table)),
        column: place.map_or(std::ptr::null(), |p| optional(&p.column)),
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
        std::ffi::CStr::from_ptr(converted).to_bytes().to_vec()
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
        std::ffi::CStr::from_ptr(converted).to_string_lossy().into_owned()
    }
}
