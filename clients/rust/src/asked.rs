//! A caller's request, looked over before anything is sent; and the statements that ask it of the server.

use crate::error::Error;
use crate::lease::lock;
use serde_json::Value;
use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::time::Duration;
use tokio_postgres::types::{ToSql, Type};

/// A statement and its arguments, whose types are said: so nothing is prepared, which poolers do not stand.
pub(crate) struct Call(pub String, pub Vec<(Box<dyn ToSql + Sync + Send>, Type)>);

macro_rules! call {
    ($sql:expr $(, $value:expr => $kind:ident)*) => {
        Call($sql, vec![$((Box::new($value) as _, Type::$kind)),*])
    };
}

/// A shorter ttl leaves no time for a renewal.
const SHORTEST: Duration = Duration::from_millis(100);

/// One name, or several: whatever is taken where a lease is asked for.
#[derive(Debug, Clone)]
pub struct Names(pub(crate) Vec<String>);

macro_rules! names {
    ($(($($of:tt)*) $kind:ty: $given:ident => $all:expr;)*) => {$(
        impl<$($of)*> From<$kind> for Names {
            fn from($given: $kind) -> Names {
                Names($all)
            }
        }
    )*};
}

names! {
    () &str: name => vec![name.to_owned()];
    () &String: name => vec![name.clone()];
    () String: name => vec![name];
    (N: Into<String>, const COUNT: usize) [N; COUNT]: names => names.into_iter().map(Into::into).collect();
    (N: Into<String>) Vec<N>: names => names.into_iter().map(Into::into).collect();
    (N: Into<String> + Clone) &[N]: names => names.iter().cloned().map(Into::into).collect();
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Asked {
    pub names: Vec<String>,
    pub ttl: Duration,
    pub wait: Duration,
    pub holder: Option<String>,
    pub metadata: Option<Value>,
    pub shared: bool,
    pub slots: i32,
    pub reclaim: bool,
    pub session: bool,
}

impl Asked {
    pub fn new(names: impl Into<Names>) -> Asked {
        let ttl = Duration::from_secs(30);
        Asked { names: names.into().0, ttl, slots: 1, ..Asked::default() }
    }

    /// With a holder, and nothing that makes no sense.
    pub fn checked(mut self) -> Result<Asked, Error> {
        let is_plain = !self.shared && self.slots == 1 && !self.reclaim;
        if self.names.len() > 1 && !is_plain {
            let exclusive = "several names at once are exclusive: no shared, slots or reclaim";
            return Err(Error::Invalid(exclusive));
        }
        if self.ttl < SHORTEST {
            return Err(Error::Invalid("ttl is 100 ms or more, for it is renewed meanwhile"));
        }
        self.holder.get_or_insert_with(unique_holder);
        Ok(self)
    }

    /// One try, or a portion of the wait. Where the role has a limit for statements or locks, it ends before that.
    pub fn call(&self, schema: &str, portion: Duration) -> Call {
        let Asked { names, holder, shared, slots, reclaim, session, .. } = self.clone();
        let (ttl, metadata) = (span(self.ttl), self.metadata.as_ref().map(Value::to_string));
        // By whom it is taken, where that can be seen.
        let taken_by = format!(
            "AS granted LEFT JOIN LATERAL (SELECT i.holder, extract(epoch FROM i.remaining)::float8 \
             FROM unnest($1::text[]) AS n(name), {schema}lease_info(n.name) AS i \
             WHERE granted IS NULL AND i.state IN ('held', 'uncommitted') \
             ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true"
        );
        if names.len() != 1 {
            let sql = format!(
                "SELECT granted, taken.* FROM {schema}lease_acquire_all($1::text[], $2::text, $3::interval, \
                 $4::jsonb, $5::boolean) {taken_by}"
            );
            return call!(sql, names => TEXT_ARRAY, holder => TEXT, ttl => TEXT, metadata => TEXT, session => BOOL);
        }
        let sql = format!(
            "SELECT granted, taken.* FROM {schema}lease_acquire(($1::text[])[1], $2::text, $3::interval, \
             least($4::interval, nullif(current_setting('statement_timeout'), '0')::interval / 2, \
             nullif(current_setting('lock_timeout'), '0')::interval / 2), \
             $5::jsonb, $6::boolean, $7::integer, $8::boolean, $9::boolean) {taken_by}"
        );
        call!(
            sql, names => TEXT_ARRAY, holder => TEXT, ttl => TEXT, span(portion) => TEXT,
            metadata => TEXT, shared => BOOL, slots => INT4, reclaim => BOOL, session => BOOL
        )
    }
}

/// As a text: the driver has no type for it.
fn span(time: Duration) -> String {
    format!("{} microseconds", time.as_micros())
}

/// The server's answer, which is never negative.
pub(crate) fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

/// The holder in the view of all leases, unless one is named.
pub(crate) fn unique_holder() -> String {
    let host = nix::sys::utsname::uname();
    let host = host.as_ref().map(|host| host.nodename().to_string_lossy()).unwrap_or_default();
    let random = RandomState::new().hash_one(()) as u32;
    format!("{host}/{}/{random:08x}", std::process::id())
}

/// The holder that adopts where none is named: all fences of this process are one holder. A forked process has another.
pub(crate) fn holder_of_process() -> String {
    static HOLDER: Mutex<(u32, String)> = Mutex::new((0, String::new()));
    let (mut holder, process) = (lock(&HOLDER), std::process::id());
    if holder.0 != process {
        *holder = (process, unique_holder());
    }
    holder.1.clone()
}

/// Names, and a token for each.
pub(crate) type Pairs = Vec<(String, i64)>;

pub(crate) fn keep(schema: &str, pairs: Pairs) -> Call {
    let (names, tokens): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    let sql = format!(
        "SELECT outcome, extract(epoch FROM remaining)::float8, extract(epoch FROM again_in)::float8 \
         FROM {schema}lease_keep($1::text[], $2::bigint[])"
    );
    call!(sql, names => TEXT_ARRAY, tokens => INT8_ARRAY)
}

/// It waits no longer than that for the lock of somebody's open transaction.
pub(crate) fn release(schema: &str, pairs: Pairs, lock: Duration) -> Call {
    let (names, tokens): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    let sql = format!(
        "SELECT {schema}lease_release(x.name, x.token) FROM set_config('lock_timeout', $3, true), \
         unnest($1::text[], $2::bigint[]) AS x(name, token)"
    );
    let lock = lock.as_millis().max(10).to_string();
    call!(sql, names => TEXT_ARRAY, tokens => INT8_ARRAY, lock => TEXT)
}

pub(crate) fn whoami() -> Call {
    call!("SELECT current_user::text".to_owned())
}

/// Where a transaction can be found: the process of the server, and when it began, which no other one of it has.
pub(crate) type Place = (i32, f64);

/// Ends what hangs in these transactions, and not the ROLLBACK that comes after it. A row for each; false where this role
/// may not see it.
pub(crate) fn cancel(places: Vec<Place>) -> Call {
    let (processes, began): (Vec<_>, Vec<_>) = places.into_iter().unzip();
    let sql = "SELECT CASE WHEN is_seen THEN pg_cancel_backend(pid) ELSE false END \
               FROM unnest($1::integer[], $2::float8[]) AS x(process, began) JOIN pg_stat_activity ON pid = process, \
               coalesce(state <> 'disabled', false) AS is_seen \
               WHERE NOT is_seen OR state = 'active' AND query NOT LIKE 'ROLLBACK%' \
               AND extract(epoch FROM xact_start)::float8 = began";
    call!(sql.to_owned(), processes => INT4_ARRAY, began => FLOAT8_ARRAY)
}
