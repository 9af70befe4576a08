//! The settings `pg_fence.token`, `pg_fence.max_ttl`, `pg_fence.statistics` and `pg_fence.refusals_kept`.

use crate::encoding::c_string;
use crate::errors::{self, Report};
use crate::pg::compat;
use pg_fence_rules::{Span, Token};
use pgrx::pg_sys::{self, GucSource};
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_void};

const MAX_TTL_NAME: &CStr = c"pg_fence.max_ttl";
/// The value of pg_fence.max_ttl if it was not set.
const NOT_SET: i32 = -1;

static TOKEN: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));
static MAX_TTL: GucSetting<i32> = GucSetting::<i32>::new(NOT_SET);
static STATISTICS: GucSetting<bool> = GucSetting::<bool>::new(true);
static REFUSALS_KEPT: GucSetting<i32> = GucSetting::<i32>::new(256);

/// Why the limit recorded for the session's role or database is unknown in this session.
#[derive(Clone, Copy)]
enum Unknown {
    /// The client set the limit when it connected, which takes precedence over ALTER ROLE and ALTER DATABASE. Before
    /// the library is loaded any role may do that. Loading the library refuses the value, but the one that it has
    /// hidden is lost.
    Named,
    /// ALTER ROLE or ALTER DATABASE has recorded an invalid value, before the library was loaded there.
    Invalid,
}

thread_local! {
    static UNKNOWN: Cell<Option<Unknown>> = const { Cell::new(None) };
}

/// The largest number of refused writes to store, which takes about 10 MB.
const REFUSALS_MAX: i32 = 10_000;

/// Declares the settings. Called once, when the library is loaded.
pub fn declare() {
    // SAFETY: the check neither raises nor panics.
    unsafe {
        GucRegistry::define_string_guc_with_hooks(
            c"pg_fence.token",
            c"The fencing token that writes of this session or transaction present.",
            c"A positive bigint, or empty for none. Use SET LOCAL behind a connection pooler: a session-level SET leaks to other clients.",
            &TOKEN,
            GucContext::Userset,
            // A token in the configuration file would be presented by all sessions.
            GucFlags::DISALLOW_IN_FILE,
            Some(check),
            None,
            None,
        );
    }
    // The other settings are for superusers: a refused role must not be able to hide that it was refused.
    GucRegistry::define_bool_guc(
        c"pg_fence.statistics",
        c"Counts for fence.stats and keeps refused writes for fence.refusals.",
        c"Where it is off, no shared memory is taken.",
        &STATISTICS,
        GucContext::Suset,
        GucFlags::default(),
    );
    declare_max_ttl();
    // Only superusers may set it, because it uses memory of the whole server.
    GucRegistry::define_int_guc(
        c"pg_fence.refusals_kept",
        c"How many refused writes fence.refusals keeps.",
        c"Read when the first session of a database counts something after a start of the server; each takes 1 kB of shared memory.",
        &REFUSALS_KEPT,
        0,
        REFUSALS_MAX,
        GucContext::Suset,
        GucFlags::default(),
    );
    // SAFETY: a name that outlives the process.
    unsafe { pg_sys::MarkGUCPrefixReserved(c"pg_fence".as_ptr()) };
}

/// Declares the limit on ttls, which only superusers may set.
fn declare_max_ttl() {
    // A value that the session has SET hides nothing: loading refuses it, and the earlier value is in force.
    let earlier = compat::reset_source(MAX_TTL_NAME);
    GucRegistry::define_int_guc(
        MAX_TTL_NAME,
        c"The longest ttl that a call may ask for.",
        c"Zero sets no limit beyond that of the call. Meant for ALTER ROLE ... SET and ALTER DATABASE ... SET.",
        &MAX_TTL,
        NOT_SET,
        i32::MAX,
        GucContext::Suset,
        GucFlags::UNIT_S,
    );
    let was_refused = |_: &GucSource::Type| compat::reset_source(MAX_TTL_NAME) != earlier;
    UNKNOWN.set(match earlier.filter(was_refused) {
        Some(source) if source >= GucSource::PGC_S_CLIENT => Some(Unknown::Named),
        Some(source) if source >= GucSource::PGC_S_GLOBAL => Some(Unknown::Invalid),
        // The server has logged a wrong value in the configuration file, as for any setting, and uses the default.
        _ => None,
    });
}

/// Returns true if statistics are switched on.
pub fn statistics() -> bool {
    STATISTICS.get()
}

/// Returns true if this session is an apply worker or restores a dump (`session_replication_role = replica`).
pub fn is_replica() -> bool {
    // SAFETY: reads a setting.
    unsafe { pg_sys::SessionReplicationRole as u32 == pg_sys::SESSION_REPLICATION_ROLE_REPLICA }
}

/// Checks a ttl, or the time until a deadline, against the longest that may be asked for. Errors: 22023 if it is longer or
/// the recorded value is invalid, 42501 if the client has set the limit and may not.
pub fn check_ttl(argument: &'static str, ttl: Span) -> Result<(), Report> {
    // The present value does not matter here: a reload may have set that of the configuration file, but the one
    // recorded for the role is still unknown.
    match (UNKNOWN.get(), Span::from_secs(MAX_TTL.get().into())) {
        (Some(Unknown::Named), _) => Err(errors::limit_was_named()),
        (Some(Unknown::Invalid), _) => Err(errors::limit_is_invalid()),
        (None, most) if most > Span::ZERO && ttl > most => {
            Err(errors::above_setting(argument, most))
        }
        (None, _) => Ok(()),
    }
}

/// The number of refused writes to store.
pub fn refusals_kept() -> usize {
    usize::try_from(REFUSALS_KEPT.get()).unwrap_or(0)
}

/// The token that the session or the transaction has set.
pub fn token() -> Option<Token> {
    // SAFETY: Postgres keeps the value NUL-terminated. It is not copied, because this is called for each row.
    let text = unsafe { (*TOKEN.as_ptr()).as_ref().map(|text| CStr::from_ptr(text)) };
    text.and_then(|text| parse(text.to_bytes()))
}

/// Sets the token until the transaction ends, or the savepoint is rolled back.
pub fn set_local(token: Token) {
    let value = c_string(token.to_string().as_bytes());
    // SAFETY: both strings are NUL-terminated; the value passes the check.
    unsafe {
        pg_sys::set_config_option(
            c"pg_fence.token".as_ptr(),
            value,
            pg_sys::GucContext::PGC_USERSET,
            pg_sys::GucSource::PGC_S_SESSION,
            pg_sys::GucAction::GUC_ACTION_LOCAL,
            true,
            0,
            false,
        );
    }
}

fn parse(text: &[u8]) -> Option<Token> {
    // A token has at most 19 digits and no sign, which `parse` would take.
    let digits = std::str::from_utf8(text).ok().filter(|_| text.len() <= 19);
    let digits = digits.filter(|digits| !digits.starts_with('+'))?;
    digits.parse().ok().filter(|number| *number > 0).map(Token::from_bigint)
}

unsafe extern "C-unwind" fn check(
    value: *mut *mut c_char,
    _extra: *mut *mut c_void,
    _source: pg_sys::GucSource::Type,
) -> bool {
    // SAFETY: Postgres passes a NUL-terminated value, or NULL; the detail is static text.
    unsafe {
        if (*value).is_null() || **value == 0 || parse(CStr::from_ptr(*value).to_bytes()).is_some()
        {
            return true;
        }
        pg_sys::GUC_check_errdetail_string = pg_sys::pstrdup(
            c"A fencing token is a positive bigint, as lease_acquire returns it; empty means none."
                .as_ptr(),
        );
        false
    }
}
