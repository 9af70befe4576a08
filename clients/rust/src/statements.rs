//! What a caller asks for, and the statements that ask it of the server.

use crate::clock::Moment;
use crate::errors::Error;
use crate::lease_state::{Ask, Call, NEVER};
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
        Statement($sql, vec![$((Box::new($value) as _, Type::$kind)),*])
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

/// How a lease is asked for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    pub names: Vec<String>,
    pub ttl: Duration,
    pub wait: Duration,
    pub holder: Option<String>,
    pub metadata: Option<Value>,
    pub shared: bool,
    pub slots: i32,
    pub reclaim: bool,
    pub session: bool,
    pub at_most: Option<Duration>,
    /// The lease is a row, which has that token, and not a name.
    pub row: Option<i64>,
    /// The time before the row was claimed.
    pub claimed: Option<Moment>,
}

impl Options {
    pub fn new(names: Vec<String>) -> Options {
        let ttl = Duration::from_secs(30);
        Options { names, ttl, slots: 1, ..Options::default() }
    }

    /// Refuses what makes no sense, and says what is asked of the machine.
    pub fn checked(&self) -> Result<Ask, Error> {
        let is_plain = !self.shared && self.slots == 1 && !self.reclaim;
        let is_bare = is_plain && !self.session && self.holder.is_none() && self.metadata.is_none();
        if self.row.is_some() && !(is_bare && self.wait.is_zero()) {
            return Err(Error::Invalid("a row takes no options but ttl, at_most and claimed"));
        }
        if self.row.is_none() && self.names.len() > 1 && !is_plain {
            let exclusive = "several names at once are exclusive: no shared, slots or reclaim";
            return Err(Error::Invalid(exclusive));
        }
        if self.ttl < SHORTEST {
            return Err(Error::Invalid("ttl is 100 ms or more, for it is renewed meanwhile"));
        }
        if self.at_most.is_some_and(|span| span < Duration::from_millis(1)) {
            return Err(Error::Invalid("at_most is 1 ms or more"));
        }
        Ok(Ask {
            names: self.names.clone(),
            ttl: millis(self.ttl),
            wait: millis(self.wait),
            holder: self.holder.clone().unwrap_or_else(unique_holder),
            is_named: self.holder.is_some(),
            reclaims: self.reclaim,
            is_session: self.session,
            is_shared: self.shared || self.slots > 1,
            at_most: self.at_most.map(millis),
        })
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

/// One try, or a portion of a wait, which ends before the limits that the role has for statements
/// and locks.
pub(crate) fn acquire(schema: &str, call: &Call, options: &Options) -> Statement {
    let Options { metadata, shared, slots, session, ttl, .. } = options.clone();
    let (names, holder, ttl) = (call.names.clone(), call.holder.clone(), interval(millis(ttl)));
    let metadata = metadata.as_ref().map(Value::to_string);
    let taken = format!(
        "AS granted LEFT JOIN LATERAL (
            SELECT i.holder, extract(epoch FROM i.remaining)::float8, i.state
            FROM unnest($1::text[]) AS n(name), {schema}lease_info(n.name) AS i
            WHERE granted IS NULL
                AND (i.state IN ('held', 'uncommitted') OR cardinality(i.blocking_pids) > 0)
            ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true"
    );
    if names.len() != 1 {
        let sql = format!(
            "SELECT granted, taken.* FROM {schema}lease_acquire_all(
                $1::text[], $2::text, $3::interval, $4::jsonb, $5::boolean) {taken}"
        );
        return statement!(
            sql, names => TEXT_ARRAY, holder => TEXT, ttl => TEXT, metadata => TEXT, session => BOOL
        );
    }
    let sql = format!(
        "SELECT granted, taken.* FROM {schema}lease_acquire(
            ($1::text[])[1], $2::text, $3::interval, least($4::interval,
                nullif(current_setting('statement_timeout'), '0')::interval / 2,
                nullif(current_setting('lock_timeout'), '0')::interval / 2),
            $5::jsonb, $6::boolean, $7::integer, $8::boolean, $9::boolean) {taken}"
    );
    statement!(
        sql, names => TEXT_ARRAY, holder => TEXT, ttl => TEXT, interval(call.wait) => TEXT,
        metadata => TEXT, shared => BOOL, slots => INT4, call.reclaims => BOOL, session => BOOL
    )
}

pub(crate) fn keep(schema: &str, call: &Call) -> Statement {
    let sql = format!(
        "SELECT outcome, extract(epoch FROM remaining)::float8,
            extract(epoch FROM again_in)::float8, code
        FROM {schema}lease_keep($1::text[], $2::bigint[])"
    );
    statement!(sql, call.names.clone() => TEXT_ARRAY, call.tokens.clone() => INT8_ARRAY)
}

/// How long a release waits for the lock of somebody's open transaction.
fn lock_timeout(call: &Call) -> String {
    (call.limit / 4).max(10).to_string()
}

pub(crate) fn release(schema: &str, call: &Call) -> Statement {
    let sql = format!(
        "SELECT {schema}lease_release(x.name, x.token) IS NOT NULL
        FROM set_config('lock_timeout', $3, true),
            unnest($1::text[], $2::bigint[]) AS x(name, token)"
    );
    let (names, tokens) = (call.names.clone(), call.tokens.clone());
    statement!(sql, names => TEXT_ARRAY, tokens => INT8_ARRAY, lock_timeout(call) => TEXT)
}

/// Releases what a holder has of these names.
pub(crate) fn undo(schema: &str, call: &Call) -> Statement {
    let sql = format!(
        "SELECT count({schema}lease_release(n.name, i.first_token))
        FROM set_config('lock_timeout', $3, true), unnest($1::text[]) AS n(name),
            {schema}lease_info(n.name) AS i
        WHERE i.holder = $2::text AND i.state = 'held'"
    );
    let (names, holder) = (call.names.clone(), call.holder.clone());
    statement!(sql, names => TEXT_ARRAY, holder => TEXT, lock_timeout(call) => TEXT)
}

/// The process of the server, and when its transaction began, which no other one of it has.
pub(crate) type Place = (i32, f64);

/// The columns by which a transaction can be found again.
const PLACE: &str = "pg_backend_pid(), extract(epoch FROM now())::float8";

/// A statement of a transaction counts the rows for which this is not NULL. `$1` are its pairs, as
/// JSON, which every driver can send. Their order is the same everywhere, so that no two
/// transactions wait for each other.
pub(crate) fn counted(schema: &str, function: &str) -> String {
    let function = function.replace("lease_", &format!("{schema}lease_"));
    format!(
        "SELECT count({function}), {PLACE} FROM (
            SELECT * FROM jsonb_to_recordset($1::text::jsonb) AS x(name text, token bigint, holder text)
            ORDER BY name COLLATE \"C\") AS x"
    )
}

/// A table whose rows are leases of their own. Its names are quoted.
#[derive(Debug)]
pub(crate) struct RowTable {
    pub name: String,
    fence: String,
    deadline: String,
    keys: Vec<String>,
    types: Vec<String>,
    pub is_managed: bool,
}

/// Asks what is known of such a table.
pub(crate) fn describe(table: &str) -> Statement {
    let columns =
        "FROM pg_index AS i, unnest(i.indkey) WITH ORDINALITY AS k(attnum, at), pg_attribute AS a
        WHERE i.indrelid = c.oid AND i.indisprimary AND a.attrelid = c.oid AND a.attnum = k.attnum
        ORDER BY k.at";
    let sql = format!(
        "SELECT DISTINCT format('%I.%I', n.nspname, c.relname), t.tgargs,
            ARRAY(SELECT a.attname::text {columns}),
            ARRAY(SELECT format_type(a.atttypid, a.atttypmod) {columns})
        FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        JOIN pg_trigger AS t ON t.tgrelid = c.oid AND t.tgnargs > 3
        JOIN pg_proc AS p ON p.oid = t.tgfoid AND p.proname = 'fenced'
        WHERE c.oid = $1::text::regclass"
    );
    statement!(sql, table.to_owned() => TEXT)
}

impl RowTable {
    /// Reads what `describe` has found.
    pub fn described(rows: &[Row]) -> Option<RowTable> {
        rows.iter().find_map(|row| {
            let arguments: Vec<u8> = row.try_get(1).ok()?;
            let parts = arguments.split(|byte| *byte == 0).map(String::from_utf8_lossy);
            let parts: Vec<_> = parts.collect();
            let keys: Vec<String> = row.try_get(2).ok()?;
            let deadline = parts.get(3).filter(|column| !column.is_empty() && !keys.is_empty())?;
            Some(RowTable {
                name: row.try_get(0).ok()?,
                fence: quoted(&parts[0]),
                deadline: quoted(deadline),
                keys: keys.iter().map(|key| quoted(key)).collect(),
                types: row.try_get(3).ok()?,
                is_managed: parts[1] == "managed",
            })
        })
    }

    pub fn has_key(&self, columns: &[String]) -> bool {
        columns.len() == self.keys.len()
    }

    /// The rows of a call, as the query that its statement begins with. The setting is what a
    /// managed table is presented, and what tells a guard its own transaction.
    fn asked(&self, sets_token: bool) -> String {
        let keys = self.types.iter().enumerate();
        let keys = keys.map(|(at, of)| format!(", (x->'key'->>{at})::{of} AS k{at}"));
        let keys: String = keys.collect();
        let setting = ", set_config('pg_fence.token', x->>'token', true)";
        let setting = if sets_token { setting } else { "" };
        format!(
            "WITH asked AS MATERIALIZED (SELECT n, (x->>'token')::bigint AS token,
                (x->>'ttl')::bigint * interval '1 millisecond' AS ttl{keys}{setting}
            FROM jsonb_array_elements($1::text::jsonb) WITH ORDINALITY AS all_rows(x, n))"
        )
    }

    /// Compares a row with what is asked for.
    fn is(&self, asked: &str) -> String {
        let keys = self.keys.iter().enumerate();
        let keys = keys.map(|(at, key)| format!(" AND r.{key} = {asked}.k{at}"));
        format!("r.{} = {asked}.token{}", self.fence, keys.collect::<String>())
    }

    /// Waits for no lock, and renews what is not over.
    pub fn keep(&self, call: &Call) -> Statement {
        let RowTable { name, fence, deadline, is_managed, .. } = self;
        let sql = format!(
            "{}, free AS MATERIALIZED (SELECT asked.* FROM asked JOIN {name} AS r ON {}
                WHERE r.{deadline} > clock_timestamp() FOR UPDATE OF r SKIP LOCKED)
            UPDATE {name} AS r SET {deadline} = clock_timestamp() + free.ttl, {fence} = free.token
            FROM free WHERE {}
            RETURNING free.n, extract(epoch FROM r.{deadline} - clock_timestamp())::float8",
            self.asked(*is_managed),
            self.is("asked"),
            self.is("free"),
        );
        statement!(sql, rows(&call.names, &call.tokens, &call.ttls) => TEXT)
    }

    /// Tells, without a lock, which rows have their token still, and whether they were given up.
    pub fn look(&self, call: &Call) -> Statement {
        let RowTable { name, deadline, .. } = self;
        let (asked, is) = (self.asked(false), self.is("asked"));
        let sql = format!(
            "{asked} SELECT asked.n, r.{deadline} IS NULL FROM asked JOIN {name} AS r ON {is}"
        );
        statement!(sql, rows(&call.names, &call.tokens, &call.ttls) => TEXT)
    }

    /// The guard of a row, or its last write, as a statement of a transaction.
    pub fn touch(&self, gives_up: bool) -> String {
        let RowTable { name, fence, deadline, .. } = self;
        let ends = if gives_up { format!(", {deadline} = NULL") } else { String::new() };
        format!(
            "{}, touched AS (UPDATE {name} AS r SET {fence} = asked.token{ends} FROM asked
                WHERE {} AND r.{deadline} IS NOT NULL RETURNING 1)
            SELECT count(*), {PLACE} FROM touched",
            self.asked(true),
            self.is("asked"),
        )
    }

    /// Gives rows up.
    pub fn release(&self, call: &Call) -> Statement {
        let RowTable { name, fence, deadline, is_managed, .. } = self;
        let sql = format!(
            "{}, given_up AS (UPDATE {name} AS r SET {fence} = asked.token, {deadline} = NULL
                FROM asked, set_config('lock_timeout', $2, true)
                WHERE {} AND r.{deadline} IS NOT NULL RETURNING asked.n)
            SELECT EXISTS (SELECT FROM given_up WHERE given_up.n = asked.n)
            FROM asked ORDER BY asked.n",
            self.asked(*is_managed),
            self.is("asked"),
        );
        let ttls = vec![0; call.names.len()];
        let rows = rows(&call.names, &call.tokens, &ttls);
        statement!(sql, rows => TEXT, lock_timeout(call) => TEXT)
    }
}

/// The text of a key, by the columns of the primary key in their order.
pub(crate) fn key(columns: &[String]) -> String {
    json!(columns).to_string()
}

/// Rows as the argument of their statements. A key is JSON already.
pub(crate) fn rows(keys: &[String], tokens: &[i64], ttls: &[i64]) -> String {
    let rows = keys.iter().zip(tokens).zip(ttls);
    let rows = rows.map(|((key, token), ttl)| {
        let key: Value = serde_json::from_str(key).unwrap_or_default();
        json!({ "key": key, "token": token, "ttl": ttl })
    });
    Value::from_iter(rows).to_string()
}

pub(crate) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
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
    statement!(sql.to_owned(), processes => INT4_ARRAY, began => FLOAT8_ARRAY)
}
