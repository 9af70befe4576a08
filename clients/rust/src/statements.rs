//! What a caller asks for, and the statements that ask it of the server.

use crate::errors::Error;
use crate::lease_state::{About, Answer, Ask, Call, Id, NEVER, Outcome, Pairs};
use serde_json::{Value, json};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

/// A statement and its arguments. Their types are said, so that nothing is prepared: poolers do not
/// stand that.
pub(crate) struct Statement(pub String, pub Vec<(Box<dyn ToSql + Sync + Send>, Type)>);

macro_rules! statement {
    ($sql:expr $(, $value:expr => $kind:ident)*) => {
        Statement($sql.to_owned(), vec![$((Box::new($value) as _, Type::$kind)),*])
    };
}

/// A shorter ttl leaves no time for a renewal.
const SHORTEST: i64 = 100;

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

impl Ask {
    pub fn new(names: Vec<String>) -> Ask {
        Ask { names, ttl: 30_000, slots: 1, ..Ask::default() }
    }

    /// The names that the lease is told by.
    pub fn told(&self) -> Vec<String> {
        let table = self.table.iter().map(|table| table.name.clone());
        table.chain(self.names.clone()).collect()
    }

    /// Refuses what makes no sense, and names the holder, unless the caller has.
    pub fn checked(mut self) -> Result<Ask, Error> {
        let is_plain = !self.is_shared && self.slots == 1 && !self.reclaims;
        let is_bare = is_plain && !self.is_session && !self.is_named && self.metadata.is_none();
        if self.table.is_some() && !(is_bare && self.wait == 0) {
            return Err(Error::Invalid("a row takes no options but ttl, at_most and columns"));
        }
        if self.names.len() > 1 && !is_plain {
            let exclusive = "several names at once are exclusive: no shared, slots or reclaim";
            return Err(Error::Invalid(exclusive));
        }
        if self.ttl < SHORTEST {
            return Err(Error::Invalid("ttl is 100 ms or more, for it is renewed meanwhile"));
        }
        if self.at_most == Some(0) {
            return Err(Error::Invalid("at_most is 1 ms or more"));
        }
        if !self.is_named {
            self.holder = unique_holder();
        }
        Ok(self)
    }
}

impl Call {
    /// The acquire that it is for, also where it may confirm a row.
    pub fn acquire(&self) -> Option<Id> {
        match &self.about {
            About::Acquire { id, .. } => Some(*id),
            About::Leases(rows) if self.pairs.table.is_some() => rows.first().map(|(id, _)| *id),
            _ => None,
        }
    }
}

pub(crate) fn millis(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(NEVER).min(NEVER)
}

pub(crate) fn span(millis: i64) -> Duration {
    Duration::from_millis(millis.try_into().unwrap_or(0))
}

/// A text that every `IntervalStyle` reads alike: the driver has no type for it.
fn interval(millis: i64) -> String {
    format!("{millis} milliseconds")
}

/// The holder in the view of all leases, unless one is named.
pub(crate) fn unique_holder() -> String {
    let host = nix::sys::utsname::uname();
    let host = host.as_ref().map(|host| host.nodename().to_string_lossy()).unwrap_or_default();
    let random = RandomState::new().hash_one(()) as u32;
    format!("{host}/{}/{random:08x}", std::process::id())
}

/// The holder that adopts if none is named: all fences of this process are one holder. A forked
/// process has another.
pub(crate) fn holder_of_process() -> String {
    static HOLDER: Mutex<(u32, String)> = Mutex::new((0, String::new()));
    let mut holder = HOLDER.lock().unwrap_or_else(PoisonError::into_inner);
    if holder.0 != std::process::id() {
        *holder = (std::process::id(), unique_holder());
    }
    holder.1.clone()
}

/// The functions of the extension in its schema.
pub(crate) fn qualified(schema: &str, sql: &str) -> String {
    sql.replace("lease_", &format!("{schema}lease_"))
}

/// Who has a lease that was not granted, and for how long.
const TAKEN: &str = "AS granted LEFT JOIN LATERAL (
        SELECT i.holder, extract(epoch FROM i.remaining)::float8, i.state
        FROM unnest($1::text[]) AS n(name), lease_info(n.name) AS i
        WHERE granted IS NULL
            AND (i.state IN ('held', 'uncommitted') OR cardinality(i.blocking_pids) > 0)
        ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true";

/// One try, or a portion of a wait, which ends before the limits that the role has for statements
/// and locks.
const ACQUIRE: &str = "SELECT granted, taken.* FROM lease_acquire(
        ($1::text[])[1], $2::text, $3::interval, least($6::interval,
            nullif(current_setting('statement_timeout'), '0')::interval / 2,
            nullif(current_setting('lock_timeout'), '0')::interval / 2),
        $4::jsonb, $7::boolean, $8::integer, $9::boolean, $5::boolean)";

const ACQUIRE_ALL: &str = "SELECT granted, taken.* FROM lease_acquire_all(
        $1::text[], $2::text, $3::interval, $4::jsonb, $5::boolean)";

const KEEP: &str = "SELECT outcome, extract(epoch FROM remaining)::float8,
        extract(epoch FROM again_in)::float8, code
    FROM lease_keep($1::text[], $2::bigint[])";

const KEEP_ROWS: &str = "SELECT outcome, extract(epoch FROM remaining)::float8,
        extract(epoch FROM again_in)::float8, code
    FROM lease_keep_rows($3::text::regclass, $4::text[]::name[], $1::text[]::jsonb[],
        $2::bigint[], $7::text[]::interval[], $5::name, $6::name)";

const RELEASE: &str = "SELECT lease_release(x.name, x.token) IS NOT NULL
    FROM set_config('lock_timeout', $3, true), unnest($1::text[], $2::bigint[]) AS x(name, token)";

const RELEASE_ROWS: &str = "SELECT lease_release_rows($3::text::regclass, $4::text[]::name[],
        $1::text[]::jsonb[], $2::bigint[], $5::name, $6::name) IS NOT NULL
    FROM set_config('lock_timeout', $7, true)";

/// Releases what a holder has of these names.
const UNDO: &str = "SELECT count(lease_release(n.name, i.first_token))
    FROM set_config('lock_timeout', $2, true), unnest($1::text[]) AS n(name),
        lease_info(n.name) AS i
    WHERE i.holder = $3::text AND i.state = 'held'";

/// The statement of a call.
pub(crate) fn of(schema: &str, call: &Call) -> Statement {
    let Pairs { names, tokens, ttls, table } = call.pairs.clone();
    // How long a release waits for the lock of somebody's open transaction.
    let lock_timeout = (call.limit / 4).max(10).to_string();
    let mut statement = match (&call.about, table) {
        (About::Acquire { ask, reclaims, wait, .. }, _) => {
            let Ask { holder, metadata, is_shared, slots, is_session, .. } = Ask::clone(ask);
            let metadata = metadata.as_ref().map(Value::to_string);
            let sql = if names.len() == 1 { ACQUIRE } else { ACQUIRE_ALL };
            statement!(
                format!("{sql} {TAKEN}"), names => TEXT_ARRAY, holder => TEXT,
                interval(ask.ttl) => TEXT, metadata => TEXT, is_session => BOOL,
                interval(*wait) => TEXT, is_shared => BOOL, slots => INT4, *reclaims => BOOL
            )
        }
        (About::Leases(_), Some(RowTable { name, keys, fence, deadline })) => {
            let ttls: Vec<_> = ttls.into_iter().map(interval).collect();
            statement!(
                KEEP_ROWS, names => TEXT_ARRAY, tokens => INT8_ARRAY, name => TEXT,
                keys => TEXT_ARRAY, fence => TEXT, deadline => TEXT, ttls => TEXT_ARRAY
            )
        }
        (About::Leases(_), None) => statement!(KEEP, names => TEXT_ARRAY, tokens => INT8_ARRAY),
        (About::Release(_), Some(RowTable { name, keys, fence, deadline })) => statement!(
            RELEASE_ROWS, names => TEXT_ARRAY, tokens => INT8_ARRAY, name => TEXT,
            keys => TEXT_ARRAY, fence => TEXT, deadline => TEXT, lock_timeout => TEXT
        ),
        (About::Release(_), None) => statement!(
            RELEASE, names => TEXT_ARRAY, tokens => INT8_ARRAY, lock_timeout => TEXT
        ),
        (About::Undo { ask, .. }, _) => {
            let holder = ask.holder.clone();
            statement!(UNDO, names => TEXT_ARRAY, lock_timeout => TEXT, holder => TEXT)
        }
    };
    statement.0 = qualified(schema, &statement.0);
    statement
}

/// Reads the rows of a call; None if they have another form than is known.
pub(crate) fn read(call: &Call, rows: &[Row]) -> Option<Answer> {
    match &call.about {
        About::Acquire { .. } => {
            let row = rows.first()?;
            Some(match row.try_get::<_, Option<i64>>(0).ok()? {
                Some(token) => Answer::Granted(token),
                None => Answer::Taken {
                    holder: row.try_get::<_, Option<String>>(1).ok()?.unwrap_or_default(),
                    remaining: milliseconds(row, 2)?.unwrap_or(0),
                    state: row.try_get::<_, Option<String>>(3).ok()?.unwrap_or_default(),
                },
            })
        }
        About::Leases(_) => {
            let outcome = |row: &Row| {
                Some(Outcome {
                    is: row.try_get(0).ok()?,
                    remaining: milliseconds(row, 1)?,
                    again_in: milliseconds(row, 2)?,
                    code: row.try_get::<_, Option<String>>(3).ok()?.unwrap_or_default(),
                })
            };
            Some(Answer::Kept(all(call, rows, outcome)?))
        }
        About::Release(_) => Some(Answer::Released(all(call, rows, |row| row.try_get(0).ok())?)),
        About::Undo { .. } => Some(Answer::Undone(rows.first()?.try_get(0).ok()?)),
    }
}

/// A row for each name of the call.
fn all<T>(call: &Call, rows: &[Row], read: impl Fn(&Row) -> Option<T>) -> Option<Vec<T>> {
    let all: Vec<T> = rows.iter().map(read).collect::<Option<_>>()?;
    Some(all).filter(|all| all.len() == call.pairs.names.len())
}

/// A column with seconds, in milliseconds that are rounded down. The outer None: it is no number.
fn milliseconds(row: &Row, at: usize) -> Option<Option<i64>> {
    let seconds: Option<f64> = row.try_get(at).ok()?;
    Some(seconds.map(|seconds| ((seconds.max(0.0) * 1000.0) as i64).min(NEVER)))
}

/// The process of the server, and when its transaction began, which no other one of it has.
pub(crate) type Place = (i32, f64);

/// A statement of a transaction counts the rows for which this is not NULL, and tells its place.
/// `$1` are its pairs, as JSON, which every driver can send. Their order is the same everywhere, so
/// that no two transactions wait for each other.
pub(crate) fn counted(function: &str) -> String {
    format!(
        "SELECT count({function}), pg_backend_pid(), extract(epoch FROM now())::float8 FROM (
            SELECT * FROM jsonb_to_recordset($1::text::jsonb) AS x(name text, token bigint,
                holder text, relation regclass, keys name[], fence name, deadline name)
            ORDER BY relation, name COLLATE \"C\") AS x"
    )
}

/// A table whose rows are leases of their own, as its user names it and its columns.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct RowTable {
    pub name: String,
    pub keys: Vec<String>,
    pub fence: String,
    pub deadline: String,
}

impl RowTable {
    /// A row of it, for the statements of a transaction.
    pub fn row(&self, key: &str, token: i64) -> Value {
        let RowTable { name, keys, fence, deadline } = self;
        json!({
            "relation": name, "keys": keys, "name": key, "token": token, "fence": fence,
            "deadline": deadline,
        })
    }
}

/// Ends what hangs in these transactions, and not the ROLLBACK that comes after it. It returns a
/// row for each, which is false if this role may not see it.
pub(crate) fn cancel(places: Vec<Place>) -> Statement {
    let (processes, began): (Vec<_>, Vec<_>) = places.into_iter().unzip();
    let sql = "SELECT CASE WHEN is_seen THEN pg_cancel_backend(pid) ELSE false END
        FROM unnest($1::integer[], $2::float8[]) AS x(process, began)
        JOIN pg_stat_activity ON pid = process, coalesce(state <> 'disabled', false) AS is_seen
        WHERE NOT is_seen OR state = 'active' AND query NOT LIKE 'ROLLBACK%'
            AND extract(epoch FROM xact_start)::float8 = began";
    statement!(sql, processes => INT4_ARRAY, began => FLOAT8_ARRAY)
}
