//! The statements that the client sends to the server.

use crate::lease_state::{Answer, Call, NEVER, Operation, Options, Outcome, Pairs, RowTable};
use serde_json::{Value, json};
use std::time::Duration;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

/// A statement and its arguments with their types. A statement without types would have to be
/// prepared, which poolers do not support.
pub(crate) struct Statement(pub String, pub Vec<(Box<dyn ToSql + Sync + Send>, Type)>);

macro_rules! statement {
    ($sql:expr $(, $value:expr => $kind:ident)*) => {
        Statement($sql.to_owned(), vec![$((Box::new($value) as _, Type::$kind)),*])
    };
}

pub(crate) fn millis(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(NEVER).min(NEVER)
}

pub(crate) fn span(millis: i64) -> Duration {
    Duration::from_millis(millis.try_into().unwrap_or(0))
}

/// Returns an interval as a text, as the driver has no type for it. Every `IntervalStyle` reads it
/// in the same way.
fn interval(millis: i64) -> String {
    format!("{millis} milliseconds")
}

/// Returns a name as an SQL identifier.
pub(crate) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Adds the schema to the extension's functions in a statement. Only the beginning of a word is the
/// beginning of a name: `lease_release_rows` contains `lease_` twice.
pub(crate) fn qualified(schema: &str, sql: &str) -> String {
    let words = sql.split_inclusive(|end: char| !end.is_alphanumeric() && end != '_');
    words.flat_map(|word| [if word.starts_with("lease_") { schema } else { "" }, word]).collect()
}

/// Adds the holder of a lease that was not granted, the time that remains, and the state.
const TAKEN: &str = "AS granted LEFT JOIN LATERAL (
        SELECT i.holder, extract(epoch FROM i.remaining)::float8, i.state
        FROM unnest($1::text[]) AS n(name), lease_info(n.name) AS i
        WHERE granted IS NULL
            AND (i.state IN ('held', 'uncommitted') OR cardinality(i.blocking_pids) > 0)
        ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true";

/// A try, or a portion of a wait. The portion ends before the role's `statement_timeout` and
/// `lock_timeout`.
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

/// Releases the leases of these names that a holder has.
const UNDO: &str = "SELECT count(lease_release(n.name, i.first_token))
    FROM set_config('lock_timeout', $2, true), unnest($1::text[]) AS n(name),
        lease_info(n.name) AS i
    WHERE i.holder = $3::text AND i.state = 'held'";

/// The statement of a call.
pub(crate) fn of(schema: &str, call: &Call) -> Statement {
    let Pairs { names, tokens, ttls, table } = call.pairs.clone();
    // How long a release waits for a lock that an open transaction holds.
    let lock_timeout = (call.limit / 4).max(10).to_string();
    let mut statement = match (&call.operation, table) {
        (Operation::Acquire { options, reclaim, wait, .. }, _) => {
            let Options { holder, metadata, is_shared, slots, is_session, .. } =
                Options::clone(options);
            let metadata = metadata.as_ref().map(Value::to_string);
            let sql = if names.len() == 1 { ACQUIRE } else { ACQUIRE_ALL };
            statement!(
                format!("{sql} {TAKEN}"), names => TEXT_ARRAY, holder => TEXT,
                interval(options.ttl) => TEXT, metadata => TEXT, is_session => BOOL,
                interval(*wait) => TEXT, is_shared => BOOL, slots => INT4, *reclaim => BOOL
            )
        }
        (Operation::Keep(_), Some(RowTable { name, keys, fence, deadline })) => {
            let ttls: Vec<_> = ttls.into_iter().map(interval).collect();
            statement!(
                KEEP_ROWS, names => TEXT_ARRAY, tokens => INT8_ARRAY, name => TEXT,
                keys => TEXT_ARRAY, fence => TEXT, deadline => TEXT, ttls => TEXT_ARRAY
            )
        }
        (Operation::Keep(_), None) => statement!(KEEP, names => TEXT_ARRAY, tokens => INT8_ARRAY),
        (Operation::Release(_), Some(RowTable { name, keys, fence, deadline })) => statement!(
            RELEASE_ROWS, names => TEXT_ARRAY, tokens => INT8_ARRAY, name => TEXT,
            keys => TEXT_ARRAY, fence => TEXT, deadline => TEXT, lock_timeout => TEXT
        ),
        (Operation::Release(_), None) => statement!(
            RELEASE, names => TEXT_ARRAY, tokens => INT8_ARRAY, lock_timeout => TEXT
        ),
        (Operation::Undo { options, .. }, _) => {
            let holder = options.holder.clone();
            statement!(UNDO, names => TEXT_ARRAY, lock_timeout => TEXT, holder => TEXT)
        }
    };
    statement.0 = qualified(schema, &statement.0);
    statement
}

/// Reads the rows that answer a call. Returns None if their form is not known.
pub(crate) fn read(call: &Call, rows: &[Row]) -> Option<Answer> {
    match &call.operation {
        Operation::Acquire { .. } => {
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
        Operation::Keep(_) => {
            let outcome = |row: &Row| {
                Some(Outcome {
                    kind: row.try_get(0).ok()?,
                    remaining: milliseconds(row, 1)?,
                    again_in: milliseconds(row, 2)?,
                    code: row.try_get::<_, Option<String>>(3).ok()?.unwrap_or_default(),
                })
            };
            Some(Answer::Kept(read_each(call, rows, outcome)?))
        }
        Operation::Release(_) => {
            Some(Answer::Released(read_each(call, rows, |row| row.try_get(0).ok())?))
        }
        Operation::Undo { .. } => Some(Answer::Undone(rows.first()?.try_get(0).ok()?)),
    }
}

/// Reads one row for each name of the call. Returns None if their number differs.
fn read_each<T>(call: &Call, rows: &[Row], read: impl Fn(&Row) -> Option<T>) -> Option<Vec<T>> {
    let values: Vec<T> = rows.iter().map(read).collect::<Option<_>>()?;
    Some(values).filter(|values| values.len() == call.pairs.names.len())
}

/// Returns a column of seconds in milliseconds, rounded down, or Some(None) if it is NULL. Returns
/// None if it is not a number.
fn milliseconds(row: &Row, column: usize) -> Option<Option<i64>> {
    let seconds: Option<f64> = row.try_get(column).ok()?;
    Some(seconds.map(|seconds| ((seconds.max(0.0) * 1000.0) as i64).min(NEVER)))
}

/// A transaction in the server: its backend's process, and its start, which no other transaction of
/// that process has.
pub(crate) type ServerTransaction = (i32, f64);

/// Returns the transaction in which it runs.
pub(crate) const THIS_TRANSACTION: &str =
    "SELECT pg_backend_pid(), extract(epoch FROM now())::float8";

/// Returns a statement that calls the function for each pair, and counts the results that are not
/// NULL. `$1` are the pairs, as JSON, which every driver can send. All transactions lock them in the
/// same order, so that no two wait for each other.
pub(crate) fn counted(function: &str) -> String {
    format!(
        "SELECT count({function}) FROM (
            SELECT * FROM jsonb_to_recordset($1::text::jsonb) AS x(name text, token bigint,
                holder text, relation regclass, keys name[], fence name, deadline name)
            ORDER BY relation, name COLLATE \"C\") AS x"
    )
}

impl RowTable {
    /// Returns a row of the table as an argument of a guard's statements.
    pub fn row(&self, key: &str, token: i64) -> Value {
        let RowTable { name, keys, fence, deadline } = self;
        json!({
            "relation": name, "keys": keys, "name": key, "token": token, "fence": fence,
            "deadline": deadline,
        })
    }
}

/// Cancels the statements that run in these transactions, but not the ROLLBACK that comes after
/// them. It returns a row for each transaction, which is false if this role may not see it.
pub(crate) fn cancel(transactions: Vec<ServerTransaction>) -> Statement {
    let (processes, began): (Vec<_>, Vec<_>) = transactions.into_iter().unzip();
    let sql = "SELECT CASE WHEN is_seen THEN pg_cancel_backend(pid) ELSE false END
        FROM unnest($1::integer[], $2::float8[]) AS x(process, began)
        JOIN pg_stat_activity ON pid = process, coalesce(state <> 'disabled', false) AS is_seen
        WHERE NOT is_seen OR state = 'active' AND query NOT LIKE 'ROLLBACK%'
            AND extract(epoch FROM xact_start)::float8 = began";
    statement!(sql, processes => INT4_ARRAY, began => FLOAT8_ARRAY)
}
