//! Answers made of several values.

use super::args::{Answer, Args};
use pgrx::pg_sys;
use std::ffi::c_int;

/// A row of the function's declared type.
pub fn row(args: Args, columns: &[Option<pg_sys::Datum>]) -> Answer {
    let mut values: Vec<pg_sys::Datum> =
        columns.iter().map(|c| c.unwrap_or(pg_sys::Datum::from(0))).collect();
    let mut nulls: Vec<bool> = columns.iter().map(Option::is_none).collect();
    // SAFETY: the SQL declares as many columns of these types.
    unsafe {
        let mut desc = std::ptr::null_mut();
        pg_sys::get_call_result_type(args.raw(), std::ptr::null_mut(), &mut desc);
        let desc = pg_sys::BlessTupleDesc(desc);
        let tuple = pg_sys::heap_form_tuple(desc, values.as_mut_ptr(), nulls.as_mut_ptr());
        Answer::Value(pg_sys::HeapTupleHeaderGetDatum((*tuple).t_data))
    }
}

/// An integer[].
pub fn int4_array(values: &[i32]) -> Answer {
    let mut values: Vec<pg_sys::Datum> = values.iter().map(|v| (*v).into()).collect();
    // SAFETY: an array of int4 from as many values.
    unsafe {
        Answer::Value(pg_sys::Datum::from(pg_sys::construct_array(
            values.as_mut_ptr(),
            values.len() as c_int,
            pg_sys::INT4OID,
            4,
            true,
            b'i' as std::ffi::c_char,
        )))
    }
}
