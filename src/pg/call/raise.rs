//! Raising a report as a Postgres error, and passing on errors of Postgres.
//!
//! pgrx turns a Postgres error into a panic that has only some of its fields, and loses some of these: it knows a
//! closed list of SQLSTATEs (any other becomes XX000) and takes texts for UTF-8. So each error is copied while it is
//! raised, and the copy is thrown at the end. `ereport` longjmps; no Rust destructor may be skipped, so errors are
//! thrown last.

use crate::encoding::{c_string, in_server_encoding, keeps_utf8};
use crate::errors::{Report, SqlState};
use crate::pg::call::reserve;
use crate::pg::raw;
use pgrx::pg_sys;
use pgrx::pg_sys::panic::{CaughtError, ErrorReportWithLevel};
use pgrx::{PgLogLevel, PgSqlErrorCode};
use std::any::Any;
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

/// An error in Postgres's format and memory, as small as a pointer and with nothing to drop, so that each call's answer
/// has room for it. It lives as long as the memory context that was current when the call began. Its texts are in the
/// server's encoding. `None` if there was no memory for it.
#[derive(Clone, Copy)]
pub struct RawError(Option<NonNull<pg_sys::ErrorData>>);

/// The errors raised during a piece of work.
struct RaisedErrors {
    /// The memory context of the copy.
    memory: pg_sys::MemoryContext,
    /// The copy of the latest error; NULL if there was none.
    latest: Cell<*mut pg_sys::ErrorData>,
}

/// Runs `work`. One of our errors, a Postgres error or a panic is returned as an error to be thrown when all Rust work
/// is done.
///
/// pgrx's own guard throws a Postgres error itself, but with a copy of its text domain that is never freed: a session
/// that catches errors in a loop would grow by 32 bytes with each.
pub fn caught<T>(work: impl FnOnce() -> Result<T, Report>) -> Result<T, RawError> {
    reserve::ensure();
    // SAFETY: reads a global of this thread.
    let memory = unsafe { pg_sys::CurrentMemoryContext };
    let raised = RaisedErrors { memory, latest: Cell::new(std::ptr::null_mut()) };
    // Converting an error may raise another one: not every character exists in every encoding.
    match raised.during(|| work().map_err(RawError::of)) {
        Ok(done) => done,
        Err(panic) => Err(raised.error_of(panic)),
    }
}

impl RaisedErrors {
    /// Runs `work`, and copies the latest error that is raised meanwhile.
    fn during<T>(&self, work: impl FnOnce() -> T) -> Result<T, Box<dyn Any + Send>> {
        // SAFETY: the callback is removed before it is dropped; if pgrx catches an error, it removes the callbacks
        // added later.
        unsafe {
            let mut callback = pg_sys::ErrorContextCallback {
                previous: pg_sys::error_context_stack,
                callback: Some(copy_error),
                arg: std::ptr::from_ref(self).cast_mut().cast(),
            };
            pg_sys::error_context_stack = &mut callback;
            let done = catch_unwind(AssertUnwindSafe(work));
            pg_sys::error_context_stack = callback.previous;
            done
        }
    }

    /// The error that caused a panic.
    fn error_of(&self, panic: Box<dyn Any + Send>) -> RawError {
        // SAFETY: the memory was the caller's when the call began.
        unsafe { pg_sys::CurrentMemoryContext = self.memory };
        let converted = catch_unwind(AssertUnwindSafe(|| {
            let copy = match panic.downcast_ref() {
                Some(CaughtError::PostgresError(report)) => self.copy_of(report),
                _ => None,
            };
            copy.unwrap_or_else(|| RawError::of_panic(panic))
        }));
        // Even converting takes a little memory.
        converted.unwrap_or(RawError(None))
    }

    /// The copy of the error of which pgrx made this report, unless another error was raised (and served) since.
    fn copy_of(&self, report: &ErrorReportWithLevel) -> Option<RawError> {
        // SAFETY: NULL or a copy, whose message is NUL-terminated, or NULL.
        let (copy, message) = unsafe {
            let copy = self.latest.get().as_ref()?;
            (copy, (!copy.message.is_null()).then(|| CStr::from_ptr(copy.message))?)
        };
        let is_it = message.to_string_lossy() == report.message()
            && PgSqlErrorCode::from(copy.sqlerrcode) == report.sql_error_code();
        is_it.then(|| RawError(Some(NonNull::from(copy))))
    }
}

/// Called by Postgres for each error and message, before it is raised or sent.
unsafe extern "C-unwind" fn copy_error(raised: *mut c_void) {
    // SAFETY: `during` has passed the argument; the error is on top of Postgres's error stack.
    unsafe {
        let raised = &*raised.cast::<RaisedErrors>();
        if raw::geterrcode() == encode(SqlState::OutOfMemory) && !reserve::use_up() {
            end_without_memory();
        }
        let before = pg_sys::CurrentMemoryContext;
        pg_sys::CurrentMemoryContext = raised.memory;
        let copy = raw::CopyErrorData();
        pg_sys::CurrentMemoryContext = before;
        let is_error = (*copy).elevel >= PgLogLevel::ERROR as c_int;
        let unwanted = if is_error { raised.latest.replace(copy) } else { copy };
        if !unwanted.is_null() {
            raw::FreeErrorData(unwanted);
        }
    }
}

impl RawError {
    /// Moves an error into Postgres's memory.
    fn allocated(error: pg_sys::ErrorData) -> Self {
        // SAFETY: new memory of that size, aligned for anything.
        unsafe {
            let place = pg_sys::palloc(size_of::<pg_sys::ErrorData>()).cast::<pg_sys::ErrorData>();
            place.write(error);
            RawError(NonNull::new(place))
        }
    }

    /// Converts one of our errors.
    fn of(report: Report) -> Self {
        RawError::allocated(error_data_of(report))
    }

    /// Converts a Rust panic, or an error without a copy.
    fn of_panic(panic: Box<dyn Any + Send>) -> Self {
        if let Some(report) = panic.downcast_ref().map(report_of).or(panic.downcast_ref()) {
            return Self::of_report(report);
        }
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        let text = c_string(text.unwrap_or("a panic without a message").as_bytes());
        RawError::allocated(error_data(SqlState::InternalError, text))
    }

    fn of_report(report: &ErrorReportWithLevel) -> Self {
        let text_of =
            |text: Option<&str>| text.map_or(std::ptr::null(), |t| c_string(&of_server(t)));
        let mut error = error_data(SqlState::InternalError, text_of(Some(report.message())));
        error.sqlerrcode = report.sql_error_code() as c_int;
        error.detail = text_of(report.detail()).cast_mut();
        error.hint = text_of(report.hint()).cast_mut();
        RawError::allocated(error)
    }
}

/// An error with a SQLSTATE and a message only.
fn error_data(sqlstate: SqlState, message: *const c_char) -> pg_sys::ErrorData {
    pg_sys::ErrorData {
        elevel: PgLogLevel::ERROR as c_int,
        sqlerrcode: encode(sqlstate),
        message: message.cast_mut(),
        ..Default::default()
    }
}

/// Converts one of our errors to Postgres's format.
fn error_data_of(report: Report) -> pg_sys::ErrorData {
    let optional = |text: &[u8]| {
        let text = if text.is_empty() { std::ptr::null() } else { c_string(text) };
        text.cast_mut()
    };
    let detail = optional(&in_server_encoding(report.detail()));
    let message = c_string(&in_server_encoding(report.message));
    let mut error = error_data(report.sqlstate, message);
    error.detail = detail;
    // The hint may name a column, so it may have characters outside of ASCII.
    error.hint = optional(&in_server_encoding(report.hint.into_owned()));
    if let Some(location) = report.location {
        error.schema_name = optional(&location.schema);
        error.table_name = optional(&location.table);
        error.column_name = optional(&location.column);
    }
    error
}

/// Converts a text of pgrx, which takes an error's text for UTF-8. In a database of another encoding, characters
/// outside of ASCII are lost by then.
fn of_server(text: &str) -> Vec<u8> {
    if text.is_ascii() || keeps_utf8() {
        return text.as_bytes().to_vec();
    }
    text.chars().map(|c| if c.is_ascii() { c as u8 } else { b'?' }).collect()
}

/// Raises an error; does not return.
///
/// # Safety
/// No frame between here and Postgres may hold a value that needs dropping.
pub unsafe fn throw(error: RawError) -> ! {
    let mut no_memory = error_data(SqlState::OutOfMemory, c"out of memory".as_ptr());
    let error = error.0.map_or(&raw mut no_memory, NonNull::as_ptr);
    // SAFETY: the caller's promise; Postgres copies the error.
    unsafe { raw::ThrowErrorData(error) };
    unreachable!("an ERROR was thrown and came back");
}

/// Raises an error in the middle of Rust work, as a function of the server would, for errors that no caller expects.
pub fn error(error: Report) -> ! {
    report(error, PgLogLevel::ERROR);
    unreachable!("an ERROR was reported and came back");
}

/// Ends the session because memory is exhausted and its work cannot continue.
#[cfg_attr(test, allow(dead_code))]
pub fn end_without_memory() -> ! {
    let mut no_memory = error_data(SqlState::OutOfMemory, c"out of memory".as_ptr());
    no_memory.elevel = PgLogLevel::FATAL as c_int;
    // SAFETY: the process exits in there, and no frame is left; Postgres reserves memory for this.
    unsafe { raw::ThrowErrorData(&raw mut no_memory) };
    std::process::abort();
}

/// Sends the client a warning.
pub fn warn(warning: Report) {
    report(warning, PgLogLevel::WARNING);
}

/// Writes a line to the server's log.
pub fn log(line: Report) {
    report(line, PgLogLevel::LOG_SERVER_ONLY);
}

fn report(what: Report, level: PgLogLevel) {
    let mut report = error_data_of(what);
    report.elevel = level as c_int;
    // SAFETY: a message below ERROR returns.
    unsafe { pg_sys::ThrowErrorData(&mut report) };
}

/// The message of a caught error.
pub fn message_of(error: &CaughtError) -> String {
    report_of(error).message().to_owned()
}

fn report_of(error: &CaughtError) -> &ErrorReportWithLevel {
    match error {
        CaughtError::PostgresError(report)
        | CaughtError::ErrorReport(report)
        | CaughtError::RustPanic { ereport: report, .. } => report,
    }
}

/// Packs the five characters of a SQLSTATE as Postgres does (MAKE_SQLSTATE).
fn encode(sqlstate: SqlState) -> c_int {
    sqlstate
        .code()
        .bytes()
        .enumerate()
        .map(|(i, byte)| c_int::from(byte.wrapping_sub(b'0') & 0x3f) << (6 * i))
        .sum()
}
