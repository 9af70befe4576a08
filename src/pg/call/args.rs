//! The arguments of an SQL call, and values as Postgres passes them.

use pg_fence_rules::{Instant, Span, Token};
use pgrx::{FromDatum, pg_sys};
use std::ffi::{CStr, c_char, c_int};

/// The call that Postgres made, valid until it returns.
#[derive(Clone, Copy)]
pub struct Args(pg_sys::FunctionCallInfo);

/// A text of an argument or of a catalog, not copied. It is valid until the call returns.
#[derive(Clone, Copy)]
pub struct Text(pub(in crate::pg) pg_sys::Datum);

impl Text {
    /// The text as a value to return.
    pub fn datum(&self) -> pg_sys::Datum {
        self.0
    }

    /// The bytes of the text, in the database's encoding.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: a `Text` is only made of texts that Postgres keeps until the call returns.
        unsafe { bytes_of(self.0) }
    }
}

/// The return value of a function.
#[derive(Clone, Copy)]
pub enum Answer {
    /// NULL; also returned after the call has put rows into its result set.
    Null,
    /// A value of the type that the SQL declares for the function's result.
    Value(pg_sys::Datum),
}

impl From<i64> for Answer {
    fn from(value: i64) -> Self {
        Answer::Value(pg_sys::Datum::from(value))
    }
}

impl From<bool> for Answer {
    fn from(value: bool) -> Self {
        Answer::Value(pg_sys::Datum::from(value))
    }
}

impl From<Token> for Answer {
    fn from(token: Token) -> Self {
        token.bigint().into()
    }
}

impl<T: Into<Answer>> From<Option<T>> for Answer {
    fn from(value: Option<T>) -> Self {
        value.map_or(Answer::Null, T::into)
    }
}

impl Args {
    /// # Safety
    /// `fcinfo` must be the call being served, with the argument types that the SQL declares.
    pub unsafe fn new(fcinfo: pg_sys::FunctionCallInfo) -> Self {
        Args(fcinfo)
    }

    /// The call in the form that Postgres's own functions take.
    pub fn raw(&self) -> pg_sys::FunctionCallInfo {
        self.0
    }

    /// An argument as passed; `None` for NULL.
    pub fn datum(&self, n: usize) -> Option<pg_sys::Datum> {
        // SAFETY: the call has as many arguments as it says.
        unsafe {
            if n >= (*self.0).nargs as usize {
                return None;
            }
            let arg = &*(*self.0).args.as_ptr().add(n);
            (!arg.isnull).then_some(arg.value)
        }
    }

    /// An argument that the SQL declares as integer, boolean, "char" or oid; `None` for NULL, as in all functions below.
    pub fn value<T: FromDatum>(&self, n: usize) -> Option<T> {
        // SAFETY: a value of that type.
        self.datum(n).and_then(|datum| unsafe { T::from_datum(datum, false) })
    }

    /// The bytes of a text argument, in the database's encoding. A text of more than `most` bytes is refused without
    /// being read.
    pub fn text(&self, n: usize, most: usize) -> Result<Option<Vec<u8>>, ArgumentError> {
        // SAFETY: the SQL declares it as text.
        let text =
            |d| unsafe { bytes_within(d, most) }.map(<[u8]>::to_vec).ok_or(ArgumentError::TooLong);
        self.datum(n).map(text).transpose()
    }

    /// The uncompressed size of a value of variable length, in bytes; 0 for NULL.
    pub fn raw_size(&self, n: usize) -> usize {
        // SAFETY: the SQL declares such a type; reads the value's header, or its TOAST pointer.
        self.datum(n).map_or(0, |d| unsafe { pg_sys::toast_raw_datum_size(d) })
    }

    /// A bigint argument as a token, not checked to be positive.
    pub fn token(&self, n: usize) -> Option<Token> {
        self.datum(n).map(|d| Token::from_bigint(d.value() as i64))
    }

    /// An argument that the SQL declares as timestamptz.
    pub fn instant(&self, n: usize) -> Option<Instant> {
        self.datum(n).map(|d| Instant::from_micros(d.value() as i64))
    }

    /// An interval argument in microseconds. A day has 24 hours and a month 30 days. Infinite and overflowing intervals
    /// are i64::MAX or MIN.
    pub fn interval_us(&self, n: usize) -> Option<i64> {
        self.datum(n).map(|d| {
            // SAFETY: the SQL declares it as interval, which is passed by reference.
            let interval = unsafe { &*d.cast_mut_ptr::<pg_sys::Interval>() };
            let days = i128::from(interval.day) + 30 * i128::from(interval.month);
            let us = i128::from(interval.time) + days * 86_400_000_000;
            us.clamp(i128::from(i64::MIN), i128::from(i64::MAX)) as i64
        })
    }

    /// The number of elements of an array argument, in all dimensions; 0 for NULL. Reads only the array's header.
    pub fn count(&self, n: usize) -> usize {
        const HEADER: i32 = (size_of::<pg_sys::ArrayType>() + 2 * 4 * 6) as i32;
        self.datum(n).map_or(0, |array| {
            // SAFETY: the SQL declares an array; its header is followed by the lengths of its dimensions, six at most.
            let count = unsafe {
                let header = pg_sys::pg_detoast_datum_slice(array.cast_mut_ptr(), 0, HEADER)
                    .cast::<pg_sys::ArrayType>();
                pg_sys::ArrayGetNItems((*header).ndim, header.add(1).cast())
            };
            usize::try_from(count).unwrap_or(0)
        })
    }

    /// The elements of a bigint[] argument; `None` for a NULL array, and for each NULL element.
    pub fn bigints(&self, n: usize) -> Option<Vec<Option<i64>>> {
        // SAFETY: the SQL declares it as bigint[].
        let elements = self.datum(n).map(|array| unsafe { elements_of(array, BIGINTS) })?;
        Some(elements.into_iter().map(|element| element.map(|d| d.value() as i64)).collect())
    }

    /// The elements of a text[] argument, not copied; `None` for a NULL array, and for each NULL element. An array with
    /// more or longer elements than allowed is refused without being read.
    pub fn texts(
        &self,
        n: usize,
        most: usize,
        longest: usize,
    ) -> Result<Option<Vec<Option<Text>>>, ArgumentError> {
        // The most bytes that an element takes besides its text: its length word and padding.
        const BESIDE: usize = 7;
        let Some(array) = self.datum(n) else { return Ok(None) };
        let count = self.count(n);
        if count > most {
            return Err(ArgumentError::TooMany);
        }
        let header = ARRAY_HEADER + 8 * pg_sys::MAXDIM as usize + count / 8 + 8;
        // SAFETY: the SQL declares it as text[].
        let texts: Vec<Option<Text>> = unsafe {
            if raw_len(array) > header + count * (longest + BESIDE) {
                return Err(ArgumentError::TooLong);
            }
            elements_of(array, TEXTS).into_iter().map(|text| text.map(Text)).collect()
        };
        match texts.iter().flatten().any(|text| text.bytes().len() > longest) {
            true => Err(ArgumentError::TooLong),
            false => Ok(Some(texts)),
        }
    }
}

/// Why an argument is not read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ArgumentError {
    /// The array has too many elements.
    TooMany,
    /// The text, or an element, has too many bytes.
    TooLong,
}

/// The size of the header of a one-dimensional array without NULLs.
const ARRAY_HEADER: usize = 24;

/// The elements of an array, not copied; `None` for NULL.
///
/// # Safety
/// The datum must be an array of such elements.
unsafe fn elements_of(array: pg_sys::Datum, elements: Elements) -> Vec<Option<pg_sys::Datum>> {
    let Elements(type_oid, length, by_value, align) = elements;
    // SAFETY: the caller's promise; deconstruct_array allocates both arrays.
    unsafe {
        let array = pg_sys::pg_detoast_datum(array.cast_mut_ptr()).cast::<pg_sys::ArrayType>();
        let (mut values, mut nulls, mut count) =
            (std::ptr::null_mut(), std::ptr::null_mut(), 0 as c_int);
        pg_sys::deconstruct_array(
            array,
            type_oid,
            length,
            by_value,
            align as c_char,
            &mut values,
            &mut nulls,
            &mut count,
        );
        (0..count as usize).map(|i| (!*nulls.add(i)).then(|| *values.add(i))).collect()
    }
}

/// Returns true if a value of variable length is neither compressed nor toasted.
///
/// # Safety
/// It must be such a value.
unsafe fn is_plain(value: *const pg_sys::varlena) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        pgrx::varlena::varatt_is_4b_u(value)
            || (pgrx::varlena::varatt_is_1b(value) && !pgrx::varlena::varatt_is_1b_e(value))
    }
}

/// The bytes of a value of variable length. Only a compressed or toasted value is copied.
///
/// # Safety
/// The datum must be such a value, and live as long as the bytes are used.
pub unsafe fn bytes_of<'a>(datum: pg_sys::Datum) -> &'a [u8] {
    let value = datum.cast_mut_ptr::<pg_sys::varlena>();
    // SAFETY: the caller's promise; the packed form is read with its own length.
    unsafe {
        let packed = if is_plain(value) { value } else { pg_sys::pg_detoast_datum_packed(value) };
        pgrx::varlena::varlena_to_byte_slice(packed)
    }
}

/// A copy of the bytes of a C string; empty for NULL.
///
/// # Safety
/// The text must be NUL-terminated, or NULL.
pub(in crate::pg) unsafe fn c_bytes(text: *const c_char) -> Vec<u8> {
    // SAFETY: the caller's promise.
    if text.is_null() { Vec::new() } else { unsafe { CStr::from_ptr(text).to_bytes().to_vec() } }
}

/// The bytes as from `bytes_of`; `None` if there are more than `most`. Nothing is copied to find that out.
///
/// # Safety
/// As for `bytes_of`.
pub unsafe fn bytes_within<'a>(datum: pg_sys::Datum, most: usize) -> Option<&'a [u8]> {
    // SAFETY: the caller's promise.
    unsafe {
        let fits = is_plain(datum.cast_mut_ptr()) || raw_len(datum) <= most;
        fits.then(|| bytes_of(datum)).filter(|bytes| bytes.len() <= most)
    }
}

/// The size in bytes of a value of variable length, uncompressed and without its length word.
///
/// # Safety
/// The datum must be such a value.
unsafe fn raw_len(datum: pg_sys::Datum) -> usize {
    // SAFETY: the caller's promise; reads the value's header, or its TOAST pointer.
    unsafe { pg_sys::toast_raw_datum_size(datum).saturating_sub(pg_sys::VARHDRSZ) }
}

/// A span as an interval of days and less, as the difference of two timestamps is.
pub fn interval_datum(span: Span) -> pg_sys::Datum {
    const DAY: i64 = 86_400_000_000;
    let us = span.micros();
    // SAFETY: new memory of that size, aligned for anything.
    unsafe {
        let interval = pg_sys::palloc(size_of::<pg_sys::Interval>()).cast::<pg_sys::Interval>();
        interval.write(pg_sys::Interval { time: us % DAY, day: (us / DAY) as i32, month: 0 });
        pg_sys::Datum::from(interval)
    }
}

/// Bytes as a text value, or as the content of another value of variable length.
pub fn text_datum(bytes: &[u8]) -> pg_sys::Datum {
    // SAFETY: copies the bytes by their length.
    unsafe {
        pg_sys::Datum::from(pg_sys::cstring_to_text_with_len(
            bytes.as_ptr().cast(),
            bytes.len() as c_int,
        ))
    }
}

/// How Postgres describes an array's elements: their type, its length (-1 if variable), whether values are passed by
/// value, and the alignment (`pg_type.typalign`).
pub(in crate::pg) struct Elements(pub pg_sys::Oid, pub i32, pub bool, pub u8);

/// The elements of a text[].
pub(in crate::pg) const TEXTS: Elements = Elements(pg_sys::TEXTOID, -1, false, b'i');
/// The elements of a bigint[].
const BIGINTS: Elements = Elements(pg_sys::INT8OID, 8, true, b'd');

/// An array of these values.
pub(in crate::pg) fn array(mut values: Vec<pg_sys::Datum>, elements: Elements) -> pg_sys::Datum {
    let (count, Elements(type_oid, length, by_value, align)) = (values.len() as c_int, elements);
    let (first, align) = (values.as_mut_ptr(), align as c_char);
    // SAFETY: there are as many values, of that type.
    unsafe {
        let array = pg_sys::construct_array(first, count, type_oid, length, by_value, align);
        pg_sys::Datum::from(array)
    }
}

/// A bigint[] of tokens.
pub fn token_array(tokens: &[Token]) -> pg_sys::Datum {
    let values = tokens.iter().map(|token| token.bigint().into()).collect();
    array(values, BIGINTS)
}

/// The elements of a one-dimensional array without NULLs; of any other array, none.
///
/// # Safety
/// The datum must be an array of such elements, stored by value.
pub(in crate::pg) unsafe fn read_array<T: Copy>(datum: pg_sys::Datum) -> Vec<T> {
    // SAFETY: a detoasted array has its header and dimensions before its elements; one dimension without
    // NULLs puts the first element behind the 16 + 8 bytes of both.
    unsafe {
        let array = pg_sys::pg_detoast_datum(datum.cast_mut_ptr()).cast::<pg_sys::ArrayType>();
        if (*array).ndim != 1 || (*array).dataoffset != 0 {
            return Vec::new();
        }
        let bytes = array.cast::<u8>();
        let count = (*bytes.add(16).cast::<i32>()).max(0) as usize;
        // A damaged page may contain any number.
        let room = pgrx::varlena::varsize_any(array.cast()).saturating_sub(ARRAY_HEADER);
        if count > room / size_of::<T>() {
            return Vec::new();
        }
        let first = bytes.add(ARRAY_HEADER).cast::<T>();
        (0..count).map(|i| *first.add(i)).collect()
    }
}
