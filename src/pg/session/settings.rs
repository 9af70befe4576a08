//! The settings `pg_fence.token`, `pg_fence.max_ttl`, `pg_fence.statistics` and `pg_fence.refusals_kept`.

use crate::encoding::{c_string, push_number};
use crate::pg::call::args::texts_of;
use crate::pg::table_scan;
use pg_fence_rules::{Span, Token};
use pgrx::pg_sys::{self, Oid};
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};
use std::cell::Cell;
use std::ffi::{c_char, c_void, CStr, CString};

const MAX_TTL_NAME: &CStr = c"pg_fence.max_ttl";

static TOKEN: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));
static MAX_TTL: GucSetting<i32> = GucSetting::<i32>::new(0);
static STATISTICS: GucSetting<bool> = GucSetting::<bool>::new(true);
static REFUSALS_KEPT: GucSetting<i32> = GucSetting::<i32>::new(256);

/// The most refused writes that can be kept: about 10 MB.
const REFUSALS_MAX: i32 = 10_000;

/// Declares the settings; called once, when the library is loaded.
pub fn declare() {
    // SAFETY: the check neither raises nor panics.
    unsafe {
        GucRegistry::define_string_guc_with_hooks(
            c"pg_fence.token",
            c"The fencing token that writes of this session or transaction present.",
            c"A positive bigint, or empty for none. Use SET LOCAL behind a connection pooler: a session-level SET leaks to other clients.",
            &TOKEN,
            GucContext::Userset,
            // A token for the whole server would be everybody's.
            GucFlags::DISALLOW_IN_FILE,
            Some(check),
            None,
            None,
        );
    }
    // The others are for superusers: a role that is refused must not be able to hide that.
    GucRegistry::define_bool_guc(
        c"pg_fence.statistics",
        c"Counts for fence.stats and keeps refused writes for fence.refusals.",
        c"Where it is off, no shared memory is taken.",
        &STATISTICS,
        GucContext::Suset,
        GucFlags::default(),
    );
    // It binds those who may not lift it.
    GucRegistry::define_int_guc(
        MAX_TTL_NAME,
        c"The longest ttl that a call may ask for.",
        c"Zero sets no limit beyond that of the call. Meant for ALTER ROLE ... SET and ALTER DATABASE ... SET.",
        &MAX_TTL,
        0,
        i32::MAX,
        GucContext::Suset,
        GucFlags::UNIT_S,
    );
    // It takes memory of the whole server.
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

/// Is counting switched on?
#[inline]
pub fn statistics() -> bool {
    STATISTICS.get()
}

/// Is this session an apply worker or restoring (`session_replication_role = replica`)?
pub fn is_replica() -> bool {
    // SAFETY: reads a setting.
    unsafe { pg_sys::SessionReplicationRole as u32 == pg_sys::SESSION_REPLICATION_ROLE_REPLICA }
}

/// The longest ttl that may be asked for; None where the setting sets no limit.
pub fn max_ttl() -> Option<Span> {
    thread_local! {
        static SOUGHT: Cell<bool> = const { Cell::new(false) };
    }
    if MAX_TTL.get() == 0 && !SOUGHT.replace(true) {
        set_as_recorded();
    }
    let seconds = MAX_TTL.get();
    (seconds > 0).then(|| Span::from_secs(seconds.into()))
}

/// Sets pg_fence.max_ttl to what ALTER ROLE or ALTER DATABASE has recorded for this login.
///
/// Postgres has done so, unless the client named the setting when it connected. The library was not loaded then: any role
/// may name a setting that nobody knows, and a client's word is stronger than a recorded one, which is lost. The client's
/// is refused only when the library is loaded.
fn set_as_recorded() {
    use pg_sys::GucSource::{PGC_S_DATABASE, PGC_S_DATABASE_USER, PGC_S_GLOBAL, PGC_S_USER};
    // SAFETY: reads who has logged in, and where.
    let (role, database) = unsafe { (pg_sys::GetAuthenticatedUserId(), pg_sys::MyDatabaseId) };
    let any = pg_sys::InvalidOid;
    let strongest_first = [
        (database, role, PGC_S_DATABASE_USER),
        (any, role, PGC_S_USER),
        (database, any, PGC_S_DATABASE),
        (any, any, PGC_S_GLOBAL),
    ];
    let recorded = strongest_first.into_iter().find_map(|(database, role, source)| {
        Some((recorded(database, role, MAX_TTL_NAME)?, source))
    });
    let Some((value, source)) = recorded else { return };
    // SAFETY: both strings are NUL-terminated; a value that is none is told by a warning.
    unsafe {
        pg_sys::set_config_option(
            MAX_TTL_NAME.as_ptr(),
            c_string(&value),
            pg_sys::GucContext::PGC_SUSET,
            source,
            pg_sys::GucAction::GUC_ACTION_SET,
            true,
            0,
            false,
        );
    }
}

/// A setting as ALTER ROLE … SET and ALTER DATABASE … SET have recorded it (pg_db_role_setting) for a database and a
/// role, either of them InvalidOid for all.
fn recorded(database: Oid, role: Oid, name: &CStr) -> Option<Vec<u8>> {
    // catalog/pg_db_role_setting.h, which pgrx does not bind: the catalog, its index, and the numbers of its columns.
    const CATALOG: Oid = Oid::from_u32(2964);
    const INDEX: Oid = Oid::from_u32(2965);
    const SETDATABASE: i16 = 1;
    const SETROLE: i16 = 2;
    const SETCONFIG: i32 = 3;
    let equal = pg_sys::F_OIDEQ.into();
    let wanted = [(SETDATABASE, equal, database.into()), (SETROLE, equal, role.into())];
    let mut found = None;
    // SAFETY: the index is by the two columns; what is found is copied.
    unsafe {
        let none = std::ptr::null_mut();
        table_scan::each_catalog_row(CATALOG, Some(INDEX), wanted, none, |tuple, columns| {
            let mut null = false;
            let array = pg_sys::heap_getattr(tuple, SETCONFIG, columns, &mut null);
            if !null {
                let texts = texts_of(array);
                let value = |text: &[u8]| value_of(text, name.to_bytes());
                found = texts.into_iter().flatten().find_map(value);
            }
        });
    }
    found
}

/// The value of `name=value`, where that is the name; names of settings have no case.
fn value_of(text: &[u8], name: &[u8]) -> Option<Vec<u8>> {
    let (known, value) = text.split_at_checked(name.len())?;
    known.eq_ignore_ascii_case(name).then(|| value.strip_prefix(b"=")).flatten().map(<[u8]>::to_vec)
}

/// How many refused writes are to be kept.
pub fn refusals_kept() -> usize {
    usize::try_from(REFUSALS_KEPT.get()).unwrap_or(0)
}

/// The token that the session or the transaction has set.
pub fn token() -> Option<Token> {
    // SAFETY: Postgres keeps the value NUL-terminated; it is read where it is, for each row may ask.
    let text = unsafe { (*TOKEN.as_ptr()).as_ref().map(|text| CStr::from_ptr(text)) };
    text.and_then(|text| parse(text.to_bytes()))
}

/// Sets it until the transaction, or the savepoint, ends.
pub fn set_local(token: Token) {
    let mut digits = Vec::with_capacity(20);
    push_number(&mut digits, token.bigint());
    let value = c_string(&digits);
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
    if text.is_empty() || text.len() > 19 || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let value =
        text.iter().try_fold(0i64, |n, d| n.checked_mul(10)?.checked_add(i64::from(d - b'0')))?;
    (value > 0).then_some(Token::from_bigint(value))
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
