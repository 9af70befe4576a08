import type { CallEffect, LeaseRequest } from "./lease_state.js";

/** A statement in autocommit, and its parameters. Each parameter is a text with a cast beside it,
 * as drivers differ in how they send numbers and lists. */
export type Statement = readonly [text: string, ...values: (string | null)[]];

/** A statement of a transaction, `SELECT FROM …`. Its answer is the number of its rows, as the
 * program may have set its driver to turn rows into anything. */
export type Counted = Readonly<{ from: string; values: readonly string[] }>;

/** The name and the token of a lease, and the holder of an adopted lease. */
export type Pair = Readonly<{ name: string; token: number | bigint; holder?: string }>;

const interval = (ms: number) => `${ms} milliseconds`;
const list = (values: readonly unknown[]) =>
  `{${values.map((value) => `"${String(value).replace(/["\\]/g, "\\$&")}"`).join()}}`;
/** The wait is at most half of the role's timeouts, so that these do not end it. */
const WAIT = `least($4::text::interval,
    nullif(current_setting('statement_timeout'), '0')::interval / 2,
    nullif(current_setting('lock_timeout'), '0')::interval / 2)`;
/** Adds the holder of a lease that is taken, if it is visible. */
const TAKEN = `AS granted LEFT JOIN LATERAL (
  SELECT i.holder, extract(epoch FROM i.remaining)::float8, i.state
  FROM unnest($1::text[]) AS n(name), lease_info(n.name) AS i
  WHERE granted IS NULL AND (i.state IN ('held', 'uncommitted') OR cardinality(i.blocking_pids) > 0)
  ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true`;
/** Each text calls the functions without their schema, which `Heartbeat.qualified` adds. */
const ACQUIRE = `SELECT granted, taken.* FROM lease_acquire(($1::text[])[1], $2::text,
  $3::text::interval, ${WAIT}, $5::text::jsonb, $6::text::boolean, $7::text::integer,
  $8::text::boolean, $9::text::boolean) ${TAKEN}`;
const ACQUIRE_ALL = `SELECT granted, taken.* FROM lease_acquire_all($1::text[], $2::text,
  $3::text::interval, $4::text::jsonb, $5::text::boolean) ${TAKEN}`;
const OUTCOMES = `SELECT outcome, extract(epoch FROM remaining)::float8,
  extract(epoch FROM again_in)::float8, code FROM`;
const PAIRS = "unnest($1::text[], $2::bigint[]) WITH ORDINALITY AS x(name, token, at)";
const RELEASE = `SELECT lease_release(x.name, x.token)
  FROM set_config('lock_timeout', $3::text, true), ${PAIRS}`;
/** Releases those of the names that the holder has. */
const UNDO = `SELECT count(lease_release(n.name, i.first_token))
  FROM set_config('lock_timeout', $1::text, true), unnest($2::text[]) AS n(name),
    lease_info(n.name) AS i
  WHERE i.holder = $3::text AND i.state = 'held'`;
/** The first and the last arguments of the functions for rows. */
const [TABLE, COLUMNS] = [
  "$1::text::regclass, $2::text[]::name[]",
  "$3::text::name, $4::text::name",
];
const KEEP_ROWS = `${OUTCOMES} lease_keep_rows(${TABLE}, $5::text[]::jsonb[],
  $6::bigint[], $7::text[]::interval[], ${COLUMNS})`;
const RELEASE_ROWS = `lease_release_rows(${TABLE}, $5::text[]::jsonb[], $6::bigint[], ${COLUMNS})`;

/** Returns a name as an SQL identifier. */
export const quoted = (name: string) => `"${name.replaceAll('"', '""')}"`;

/** The columns of a row's key and their values. */
export type Key = Readonly<Record<string, string | number | bigint>>;

/** Returns the table of a row lease: the parameters of its statements as a JSON text. */
export const tableOf = (table: string, key: Key, fence = "fence", deadline = "held_until") =>
  JSON.stringify([table, list(Object.keys(key)), fence, deadline]);
const rowsOf = (table: string, keys: readonly string[], tokens: readonly number[]) =>
  [...(JSON.parse(table) as string[]), list(keys), list(tokens)] as const;
const rowOf = ({ table = "", names, token = 0 }: LeaseRequest) => rowsOf(table, names, [token]);

/** Returns the statement of a call. That of an acquire, which is one attempt or one portion of a
 * wait, has its `request`. */
export function statementOf(call: CallEffect, request: LeaseRequest | undefined): Statement {
  const { names, tokens, ttls, table, limit } = call;
  // A release waits so long for a lock that an open transaction holds.
  const lockTimeout = String(Math.max(10, Math.floor(limit / 4)));
  if (call.do === "acquire") return acquire(call, request as LeaseRequest);
  if (call.do === "undo") return [UNDO, lockTimeout, list(names), String(call.holder)];
  const isRelease = call.do === "release";
  if (table === undefined) {
    const pairs = [list(names), list(tokens)] as const;
    if (isRelease) return [RELEASE, ...pairs, lockTimeout];
    return [`${OUTCOMES} lease_keep($1::text[], $2::bigint[])`, ...pairs];
  }
  const rows = rowsOf(table, names, tokens);
  if (!isRelease) return [KEEP_ROWS, ...rows, list(ttls.map(interval))];
  const text = `SELECT ${RELEASE_ROWS} FROM set_config('lock_timeout', $7::text, true)`;
  return [text, ...rows, lockTimeout];
}

function acquire({ names, holder, wait, reclaim }: CallEffect, request: LeaseRequest): Statement {
  const { metadata = null, shared = false, slots = 1, session = false } = request;
  const first = [list(names), String(holder), interval(request.ttl)] as const;
  if (names.length !== 1) return [ACQUIRE_ALL, ...first, metadata, String(session)];
  const options = [shared, slots, reclaim, session].map(String);
  return [ACQUIRE, ...first, interval(wait ?? 0), metadata, ...options];
}

/** Guards the leases. They are sorted, so that two transactions cannot deadlock. Each transaction
 * registers the number and the holder of an adopted lease. */
export function guard(pairs: readonly Pair[], isInner: boolean): Counted {
  const holders = pairs.flatMap(({ holder }) => holder ?? []);
  const adopted = "(SELECT lease_adopt(x.name, x.token, $3::text))";
  const token = holders.length > 0 ? adopted : "x.token";
  const from = `FROM ${makesSetting(isInner)}, (SELECT count(lease_guard(x.name, ${token})) AS n
    FROM (SELECT * FROM ${PAIRS} ORDER BY name COLLATE "C") AS x) AS guarded WHERE n > 0`;
  return { from, values: [...valuesOf(pairs), ...holders] };
}

/** Writes the row and presents its token. Returns no row if the lease is lost. */
export function guardRow(row: LeaseRequest, isInner: boolean): Counted {
  const from = `FROM ${makesSetting(isInner)}, lease_guard_row(${TABLE}, ($5::text[]::jsonb[])[1],
    ($6::bigint[])[1], ${COLUMNS}) AS t WHERE t IS NOT NULL`;
  return { from, values: rowOf(row) };
}

/** Releases the row, unless the work has done so. */
export const lastRow = (row: LeaseRequest): Counted => ({
  from: `FROM ${RELEASE_ROWS}`,
  values: rowOf(row),
});

/** Releases the leases. If one of them could not be released, it returns as many rows as the
 * number of the first such pair, counted from 1. */
export function last(pairs: readonly Pair[]): Counted {
  const gone = "min(x.at) FILTER (WHERE lease_release(x.name, x.token) IS NULL)";
  const from = `FROM generate_series(1, (SELECT ${gone} FROM ${PAIRS}))`;
  return { from, values: valuesOf(pairs) };
}

const valuesOf = (pairs: readonly Pair[]) => [
  list(pairs.map(({ name }) => name)),
  list(pairs.map(({ token }) => token)),
];

/** A guard makes a setting that ends with its transaction. The session may have the token before and
 * after that. An inner guard has another setting, as the work may have begun the transaction of that
 * guard itself. */
const setting = (isInner: boolean) => `'pg_fence_client.${isInner ? "savepoint" : "transaction"}'`;
const makesSetting = (isInner: boolean) => `set_config(${setting(isInner)}, 'on', true)`;

/** Returns a row while the transaction is the guard's. */
export const isOpen = (isInner: boolean): Counted => ({
  from: `WHERE current_setting(${setting(isInner)}, true) = 'on'`,
  values: [],
});
