//! Raising a refusal as a Postgres error.
//!
//! pgrx knows a closed list of SQLSTATEs and turns any other into XX000, so the error is reported here by
//! Postgres's own calls, after all Rust work is done: they leave by longjmp, which no destructor may meet.

use super::compat;
use super::encoding::{c_string, in_server_encoding, keeps_utf8};
use super::errors::{Raised, Refusal};
use pgrx::pg_sys;
use pgrx::pg_sys::panic::{CaughtError, ErrorReportWithLevel};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_int, CStr, CString};
use std::panic::{catch_unwind, AssertUnwindSafe};

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
    /// Where in Postgres's source it was raised.
    file: *const c_char,
    line: c_int,
    function: *const c_char,
    /// Postgres's own error, which is raised instead.
    raised: *mut pg_sys::ErrorData,
}

impl Staged {
    /// Without a detail, a hint or a place.
    fn plain(sqlstate: c_int, message: *const c_char) -> Self {
        let none = std::ptr::null();
        Staged {
            sqlstate,
            message,
            detail: none,
            hint: none,
            schema: none,
            table: none,
            column: none,
            file: none,
            line: 0,
            function: none,
            raised: std::ptr::null_mut(),
        }
    }
}

thread_local! {
    /// Copies of errors go into this memory; NULL where none is wanted.
    static KEEP_IN: Cell<pg_sys::MemoryContext> = const { Cell::new(std::ptr::null_mut()) };
    /// The error that was raised last.
    static LAST: Cell<*mut pg_sys::ErrorData> = const { Cell::new(std::ptr::null_mut()) };
}

/// Does work in which functions of users may run, and gives back their errors whole.
pub fn catch(work: impl FnOnce()) -> Result<(), Raised> {
    let (outer, last) = (KEEP_IN.get(), LAST.replace(std::ptr::null_mut()));
    // SAFETY: the transaction's memory outlives the error, which the current one may not (a prune has some for each
    // row); the callback is taken off again below. (An error takes pgrx's own calls back to the stack of callbacks
    // that they have found.)
    unsafe {
        let context = pg_sys::CurrentMemoryContext;
        KEEP_IN.set(pg_sys::TopTransactionContext);
        let mut keeping = pg_sys::ErrorContextCallback {
            previous: pg_sys::error_context_stack,
            callback: Some(keep_error),
            arg: std::ptr::null_mut(),
        };
        pg_sys::error_context_stack = &mut keeping;
        let owner = pg_sys::CurrentResourceOwner;
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        pg_sys::error_context_stack = keeping.previous;
        // What the caller has opened is the owner's, wherever the work was when it failed.
        pg_sys::CurrentResourceOwner = owner;
        KEEP_IN.set(outer);
        pg_sys::MemoryContextSwitchTo(context);
        let raised = LAST.replace(last);
        match done {
            Ok(()) => Ok(()),
            Err(panic) if is_of(raised, panic.as_ref()) => Err(Raised(raised)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// Does the work. A server's error or a panic in it comes back laid out, to be thrown when no Rust work is left.
///
/// pgrx's own guard reports such an error itself, but with a copy of its text domain that nobody frees: a
/// session that catches errors in a loop would grow by 32 bytes with each.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, Staged> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|payload| {
        let laid_out = catch_unwind(AssertUnwindSafe(|| stage_panic(payload)));
        // Laying it out takes a little memory.
        laid_out.unwrap_or(Staged::plain(encode("53200"), c"out of memory".as_ptr()))
    })
}

fn stage_panic(payload: Box<dyn Any + Send>) -> Staged {
    let report = match payload.downcast::<CaughtError>() {
        Ok(caught) => match *caught {
            CaughtError::PostgresError(report) => {
                return Staged {
                    file: for_good(Some(report.file())),
                    line: report.line_number() as c_int,
                    function: for_good(report.function_name()),
                    ..stage_report(&report)
                }
            }
            CaughtError::ErrorReport(report) | CaughtError::RustPanic { ereport: report, .. } => {
                report
            }
        },
        Err(payload) => match payload.downcast::<ErrorReportWithLevel>() {
            Ok(report) => *report,
            Err(payload) => {
                let text = payload.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
                let message = c_string(text.unwrap_or("a panic without a message").as_bytes());
                return Staged::plain(encode("XX000"), message);
            }
        },
    };
    stage_report(&report)
}

fn stage_report(report: &ErrorReportWithLevel) -> Staged {
    let shown =
        |text: Option<&str>| text.map_or(std::ptr::null(), |text| c_string(&of_server(text)));
    Staged {
        detail: shown(report.detail()),
        hint: shown(report.hint()),
        ..Staged::plain(report.sql_error_code() as c_int, shown(Some(report.message())))
    }
}

/// pgrx takes an error's text for UTF-8. In a database of another encoding what is not ASCII is lost by then.
fn of_server(text: &str) -> Vec<u8> {
    if text.is_ascii() || keeps_utf8() {
        return text.as_bytes().to_vec();
    }
    text.chars().map(|c| if c.is_ascii() { c as u8 } else { b'?' }).collect()
}

/// The name of a file or function of Postgres's, which an error keeps a pointer to for as long as somebody has it.
/// There are only so many.
fn for_good(name: Option<&str>) -> *const c_char {
    thread_local! {
        static NAMES: RefCell<Vec<&'static CStr>> = const { RefCell::new(Vec::new()) };
    }
    let Some(name) = name.and_then(|name| CString::new(name).ok()) else { return std::ptr::null() };
    NAMES
        .with_borrow_mut(|names| {
            let known = names.iter().find(|known| ***known == *name).copied();
            known.unwrap_or_else(|| {
                names.push(Box::leak(name.into_boxed_c_str()));
                names[names.len() - 1]
            })
        })
        .as_ptr()
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
    let detail = optional(&in_server_encoding(refusal.detail()));
    let message = c_string(&in_server_encoding(refusal.message));
    Staged {
        detail,
        // It may name a column.
        hint: optional(&in_server_encoding(refusal.hint.into_owned())),
        schema: place.map_or(std::ptr::null(), |p| optional(&p.schema)),
        table: place.map_or(std::ptr::null(), |p| optional(&p.table)),
        column: place.map_or(std::ptr::null(), |p| optional(&p.column)),
        raised: refusal.raised.map_or(std::ptr::null_mut(), |raised| raised.0),
        ..Staged::plain(encode(refusal.sqlstate), message)
    }
}

/// Reports it; does not return.
///
/// # Safety
/// No frame between here and Postgres may hold anything that needs dropping.
pub unsafe fn throw(staged: Staged) -> ! {
    // SAFETY: the caller's promise.
    unsafe { report(pgrx::PgLogLevel::ERROR, staged) }
    unreachable!("errfinish returned from an ERROR")
}

/// Sends the client a warning, and goes on.
pub fn warn(warning: Refusal) {
    // SAFETY: a warning returns.
    unsafe { report(pgrx::PgLogLevel::WARNING, stage(warning)) }
}

/// # Safety
/// As for `throw`, where the level is an error's.
unsafe fn report(level: pgrx::PgLogLevel, staged: Staged) {
    let text = c"%s".as_ptr();
    // SAFETY: the strings are NUL-terminated and live as long as the current context; errfinish leaves where the
    // level is an error's.
    unsafe {
        if !staged.raised.is_null() {
            compat::ThrowErrorData(staged.raised);
        }
        if !compat::errstart(level as c_int, std::ptr::null()) {
            return;
        }
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
        compat::errfinish(staged.file, staged.line, staged.function);
    }
}

/// Five characters as Postgres packs them (MAKE_SQLSTATE).
fn encode(sqlstate: &str) -> c_int {
    sqlstate
        .bytes()
        .enumerate()
        .map(|(i, byte)| c_int::from(byte.wrapping_sub(b'0') & 0x3f) << (6 * i))
        .sum()
}
