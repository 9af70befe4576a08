//! Conversion of texts between the database's encoding and UTF-8, for both `errors` and `pg`.
#![allow(unsafe_code)]

use pgrx::pg_sys;
use std::ffi::{CStr, c_char, c_int};

/// A palloc'ed, NUL-terminated copy of the bytes, up to the first NUL among them.
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

/// Returns true if the database stores UTF-8, or bytes of unknown encoding.
pub fn keeps_utf8() -> bool {
    // SAFETY: reads a value set when the backend connected.
    let encoding = unsafe { pg_sys::GetDatabaseEncoding() } as pg_sys::pg_enc::Type;
    [pg_sys::pg_enc::PG_UTF8, pg_sys::pg_enc::PG_SQL_ASCII].contains(&encoding)
}

/// Converts UTF-8 to the database's encoding.
pub fn in_server_encoding(text: String) -> Vec<u8> {
    if text.is_ascii() || keeps_utf8() {
        return text.into_bytes();
    }
    // SAFETY: the conversion gets the length and a NUL-terminated copy, and returns that copy or another one.
    unsafe {
        let copy = c_string(text.as_bytes());
        let converted =
            pg_sys::pg_any_to_server(copy, text.len() as c_int, pg_sys::pg_enc::PG_UTF8 as c_int);
        CStr::from_ptr(converted).to_bytes().to_vec()
    }
}

/// Truncates to at most `most` bytes at a character boundary.
pub fn within(text: &[u8], most: usize) -> &[u8] {
    if text.len() <= most {
        return text;
    }
    // SAFETY: reads no more than the text.
    let length =
        unsafe { pg_sys::pg_mbcliplen(text.as_ptr().cast(), text.len() as c_int, most as c_int) };
    &text[..usize::try_from(length).unwrap_or(0)]
}

/// Converts from the database's encoding to UTF-8.
pub fn to_utf8(bytes: &[u8]) -> String {
    if let (true, Ok(text)) = (bytes.is_ascii(), std::str::from_utf8(bytes)) {
        return text.to_owned();
    }
    // SAFETY: as above.
    unsafe {
        if pg_sys::GetDatabaseEncoding() == pg_sys::pg_enc::PG_SQL_ASCII as c_int {
            // The encoding is unknown, so bytes that are not UTF-8 are replaced.
            return String::from_utf8_lossy(bytes).into_owned();
        }
        let copy = c_string(bytes);
        let converted =
            pg_sys::pg_server_to_any(copy, bytes.len() as c_int, pg_sys::pg_enc::PG_UTF8 as c_int);
        CStr::from_ptr(converted).to_string_lossy().into_owned()
    }
}
