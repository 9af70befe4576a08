//! Values of jsonb, in which the library and its SQL functions exchange data that has no type of its own.

use crate::encoding::{c_string, in_server_encoding, to_utf8};
use crate::pg::call::args::{bytes_of, text_datum};
use pgrx::{direct_function_call_as_datum, pg_sys};
use serde_json::Value;

/// Converts a value to jsonb.
pub fn datum(value: &Value) -> pg_sys::Datum {
    let text = c_string(&in_server_encoding(value.to_string()));
    // SAFETY: a function of the server, with the argument that it declares.
    let jsonb = unsafe { direct_function_call_as_datum(pg_sys::jsonb_in, &[Some(text.into())]) };
    jsonb.unwrap_or(pg_sys::Datum::null())
}

/// Concatenates two objects or two arrays: `one || other` in SQL.
pub fn merged(one: pg_sys::Datum, other: pg_sys::Datum) -> pg_sys::Datum {
    // SAFETY: as above; both are jsonb.
    let both =
        unsafe { direct_function_call_as_datum(pg_sys::jsonb_concat, &[Some(one), Some(other)]) };
    both.unwrap_or(one)
}

/// The text of a member of an object; `None` if it is missing or null.
pub fn field(object: pg_sys::Datum, key: &str) -> Option<String> {
    let arguments = [Some(object), Some(text_datum(key.as_bytes()))];
    // SAFETY: as above; the function returns a text.
    unsafe {
        let text = direct_function_call_as_datum(pg_sys::jsonb_object_field_text, &arguments)?;
        Some(to_utf8(bytes_of(text)))
    }
}

/// Returns true if a member of an object is true.
pub fn is_true(object: pg_sys::Datum, key: &str) -> bool {
    field(object, key).as_deref() == Some("true")
}
