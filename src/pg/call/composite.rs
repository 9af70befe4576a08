//! Values with several parts: rows and arrays.

use crate::pg::call::args::{Answer, Args, Elements, TEXTS, array, text_datum};
use pgrx::pg_sys;

/// A row of the function's declared type.
pub fn row(args: Args, columns: &[Option<pg_sys::Datum>]) -> Answer {
    let mut desc = std::ptr::null_mut();
    let mut values: Vec<_> = columns.iter().map(|c| c.unwrap_or(pg_sys::Datum::from(0))).collect();
    let mut nulls: Vec<bool> = columns.iter().map(Option::is_none).collect();
    // SAFETY: the call being served; the SQL declares a row of these columns.
    unsafe {
        pg_sys::get_call_result_type(args.raw(), std::ptr::null_mut(), &mut desc);
        let desc = pg_sys::BlessTupleDesc(desc);
        assert_eq!((*desc).natts as usize, columns.len());
        let tuple = pg_sys::heap_form_tuple(desc, values.as_mut_ptr(), nulls.as_mut_ptr());
        Answer::Value(pg_sys::HeapTupleHeaderGetDatum((*tuple).t_data))
    }
}

/// Returns rows of the table whose type the function returns a set of.
pub fn rows(args: Args, tuples: impl Iterator<Item = pg_sys::HeapTuple>) -> Answer {
    let answer = RowAnswer::begin(args);
    for tuple in tuples {
        // SAFETY: the SQL declares a set of that type; the tuple is copied.
        unsafe { pg_sys::tuplestore_puttuple((*answer.0).setResult, tuple) };
    }
    Answer::Null
}

/// The rows of a set-returning function, added one by one.
pub struct RowAnswer(*mut pg_sys::ReturnSetInfo);

impl RowAnswer {
    pub fn begin(args: Args) -> Self {
        // SAFETY: the SQL declares a set.
        unsafe {
            pg_sys::InitMaterializedSRF(args.raw(), 0);
            RowAnswer((*args.raw()).resultinfo.cast())
        }
    }

    pub fn put<const N: usize>(&self, row: [Option<pg_sys::Datum>; N]) {
        let mut values = row.map(|value| value.unwrap_or(pg_sys::Datum::from(0)));
        let mut nulls = row.map(|value| value.is_none());
        let (values, nulls) = (values.as_mut_ptr(), nulls.as_mut_ptr());
        // SAFETY: the SQL declares these columns; the values are copied.
        unsafe {
            pg_sys::tuplestore_putvalues((*self.0).setResult, (*self.0).setDesc, values, nulls);
        }
    }
}

/// An integer[] of these numbers.
pub fn int4_array(values: &[i32]) -> Answer {
    let values = values.iter().map(|v| (*v).into()).collect();
    Answer::Value(array(values, Elements(pg_sys::INT4OID, 4, true, b'i')))
}

/// A text[], in the database's encoding.
pub fn text_array(texts: &[Vec<u8>]) -> pg_sys::Datum {
    let values = texts.iter().map(|text| text_datum(text)).collect();
    array(values, TEXTS)
}

/// A regtype[] of these oids.
pub fn type_array(types: &[pg_sys::Oid]) -> pg_sys::Datum {
    let values = types.iter().map(|oid| (*oid).into()).collect();
    array(values, Elements(pg_sys::REGTYPEOID, 4, true, b'i'))
}

/// An array of rows. `array_type` must be an array type of rows with these columns.
pub fn row_array<const N: usize>(
    array_type: pg_sys::Oid,
    rows: impl Iterator<Item = [Option<pg_sys::Datum>; N]>,
) -> pg_sys::Datum {
    // SAFETY: the SQL declares such a type; it is looked up, so each row has its type's oid.
    unsafe {
        let row_type = pg_sys::get_element_type(array_type);
        let columns = pg_sys::lookup_rowtype_tupdesc_copy(row_type, -1);
        assert_eq!((*columns).natts as usize, N);
        let values = rows
            .map(|row| {
                let mut values = row.map(|value| value.unwrap_or(pg_sys::Datum::from(0)));
                let mut nulls = row.map(|value| value.is_none());
                let tuple =
                    pg_sys::heap_form_tuple(columns, values.as_mut_ptr(), nulls.as_mut_ptr());
                pg_sys::heap_copy_tuple_as_datum(tuple, columns)
            })
            .collect();
        array(values, Elements(row_type, -1, false, b'd'))
    }
}
