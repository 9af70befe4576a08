import type { Holding } from "./heartbeat.js";
import type { CallEffect, LeaseRequest } from "./lease_state.js";

/** A statement in autocommit, and its parameters: as text, with a cast beside each, whatever a
 * driver makes of numbers and lists. */
export type Statement = readonly [text: string, ...values: (string | null)[]];

/** A statement of a transaction, `SELECT FROM …`: its answer is the number of its rows, for a
 * driver may be set to make anything of a row. */
export type Counted = Readonly<{ from: string; values: readonly string[] }>;

/** A name and its token, and the holder of one that is adopted. */
export type Pair = Readonly<{ name: string; token: number | bigint; holder?: string }>;

const interval = (ms: number) => `${ms} milliseconds`;
const quoted = (name: string) => `"${name.replaceAll('"', '""')}"`;
const list = (all: readonly unknown[]) =>
  `{${all.map((one) => `"${String(one).replace(/["\\]/g, "\\$&")}"`).join()}}`;
/** How long a release waits for the lock of somebody's open transaction. */
const lockTimeout = ({ limit }: CallEffect) => String(Math.max(10, Math.floor(limit / 4)));

/** The wait is below the role's timeouts, whatever these are. */
const WAIT = `least($4::text::interval,
    nullif(current_setting('statement_timeout'), '0')::interval / 2,
    nullif(current_setting('lock_timeout'), '0')::interval / 2)`;
/** By whom a lease is taken, if that can be seen. */
const TAKEN = `AS granted LEFT JOIN LATERAL (
  SELECT i.holder, extract(epoch FROM i.remaining)::float8, i.state
  FROM unnest($1::text[]) AS n(name), lease_info(n.name) AS i
  WHERE granted IS NULL AND (i.state IN ('held', 'uncommitted') OR cardinality(i.blocking_pids) > 0)
  ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true`;
const OUTCOMES = `outcome, extract(epoch FROM remaining)::float8,
  extract(epoch FROM again_in)::float8, code`;
const PAIRS = "unnest($1::text[], $2::bigint[]) WITH ORDINALITY AS x(name, token, at)";
/** What calls for rows begin with, and end with. */
const [TABLE, COLUMNS] = [
  "$1::text::regclass, $2::text[]::name[]",
  "$3::text::name, $4::text::name",
];
const RELEASE_ROWS = `lease_release_rows(${TABLE}, $5::text[]::jsonb[], $6::bigint[], ${COLUMNS})`;

/** The columns of a row's key, and their values. */
export type Key = Readonly<Record<string, string | number | bigint>>;

/** A table whose rows are leases, as the parameters of its statements, in JSON. */
export const tableOf = (table: string, key: Key, fence = "fence", deadline = "held_until") =>
  JSON.stringify([table, list(Object.keys(key)), fence, deadline]);
const rowsOf = (table: string, keys: readonly string[], tokens: readonly number[]) =>
  [...(JSON.parse(table) as string[]), list(keys), list(tokens)] as const;
const rowOf = ({ request: { table = "", names }, token }: Holding) => rowsOf(table, names, [token]);

/** Statements that call the extension's functions, in its schema if that is named. */
export class Statements {
  readonly #prefix: string;

  constructor(schema?: string) {
    this.#prefix = schema === undefined ? "" : `${quoted(schema)}.`;
  }

  #named(text: string): string {
    return text.replaceAll(/\blease_/g, () => `${this.#prefix}lease_`);
  }

  /** What a call sends; an acquire, what is asked for. */
  of(call: CallEffect, request: LeaseRequest | undefined): Statement {
    if (call.do === "acquire") return this.#acquire(call, request as LeaseRequest);
    if (call.do === "undo") return this.#undo(call);
    return call.do === "release" ? this.#release(call) : this.#keep(call);
  }

  /** One try, or a portion of a wait. */
  #acquire({ names, holder, wait, reclaim }: CallEffect, request: LeaseRequest): Statement {
    const { metadata = null, shared = false, slots = 1, session = false } = request;
    const [all, ttl] = [[list(names), String(holder)] as const, interval(request.ttl)];
    if (names.length !== 1) {
      const text = `SELECT granted, taken.* FROM lease_acquire_all($1::text[], $2::text,
        $3::text::interval, $4::text::jsonb, $5::text::boolean) ${TAKEN}`;
      return [this.#named(text), ...all, ttl, metadata, String(session)];
    }
    const text = `SELECT granted, taken.* FROM lease_acquire(($1::text[])[1], $2::text,
      $3::text::interval, ${WAIT}, $5::text::jsonb, $6::text::boolean, $7::text::integer,
      $8::text::boolean, $9::text::boolean) ${TAKEN}`;
    const kind = [shared, slots, reclaim, session].map(String);
    return [this.#named(text), ...all, ttl, interval(wait ?? 0), metadata, ...kind];
  }

  #keep({ names, tokens, ttls, table }: CallEffect): Statement {
    if (table === undefined) {
      const text = `SELECT ${OUTCOMES} FROM lease_keep($1::text[], $2::bigint[])`;
      return [this.#named(text), list(names), list(tokens)];
    }
    const text = `SELECT ${OUTCOMES} FROM lease_keep_rows(${TABLE}, $5::text[]::jsonb[],
      $6::bigint[], $7::text[]::interval[], ${COLUMNS})`;
    return [this.#named(text), ...rowsOf(table, names, tokens), list(ttls.map(interval))];
  }

  #release(call: CallEffect): Statement {
    const { names, tokens, table } = call;
    if (table === undefined) {
      const text = `SELECT lease_release(x.name, x.token)
        FROM set_config('lock_timeout', $3::text, true), ${PAIRS}`;
      return [this.#named(text), list(names), list(tokens), lockTimeout(call)];
    }
    const text = `SELECT ${RELEASE_ROWS} FROM set_config('lock_timeout', $7::text, true)`;
    return [this.#named(text), ...rowsOf(table, names, tokens), lockTimeout(call)];
  }

  /** Releases what a holder has of these names. */
  #undo(call: CallEffect): Statement {
    const text = `SELECT count(lease_release(n.name, i.first_token))
      FROM set_config('lock_timeout', $1::text, true), unnest($2::text[]) AS n(name),
        lease_info(n.name) AS i
      WHERE i.holder = $3::text AND i.state = 'held'`;
    return [this.#named(text), lockTimeout(call), list(call.names), String(call.holder)];
  }

  /** In the same order everywhere, so that no two transactions wait for each other. Each
   * transaction makes an adopted number known, and whose it is. */
  guard(pairs: readonly Pair[]): Counted {
    const holders = pairs.flatMap(({ holder }) => holder ?? []);
    const adopted = "(SELECT lease_adopt(x.name, x.token, $3::text))";
    const token = holders.length > 0 ? adopted : "x.token";
    const from = `FROM (SELECT count(lease_guard(x.name, ${token})) AS n
      FROM (SELECT * FROM ${PAIRS} ORDER BY name COLLATE "C") AS x) AS guarded WHERE n > 0`;
    return { from: this.#named(from), values: [...valuesOf(pairs), ...holders] };
  }

  /** Writes a row under its token. No row, if it is not there under that. */
  guardRow(holding: Holding): Counted {
    const from = `FROM lease_guard_row(${TABLE}, ($5::text[]::jsonb[])[1], ($6::bigint[])[1],
      ${COLUMNS}) AS t WHERE t IS NOT NULL`;
    return { from: this.#named(from), values: rowOf(holding) };
  }

  /** Gives a row up, unless the work has. */
  lastOfRow(holding: Holding): Counted {
    return { from: this.#named(`FROM ${RELEASE_ROWS}`), values: rowOf(holding) };
  }

  /** As many rows as the number of the first pair under which there is nothing to be released. */
  last(pairs: readonly Pair[]): Counted {
    const ended = "min(x.at) FILTER (WHERE lease_release(x.name, x.token) IS NULL)";
    const from = `FROM generate_series(1, (SELECT ${ended} FROM ${PAIRS}))`;
    return { from: this.#named(from), values: valuesOf(pairs) };
  }
}

const valuesOf = (pairs: readonly Pair[]) => [
  list(pairs.map(({ name }) => name)),
  list(pairs.map(({ token }) => token)),
];

/** The end of a transaction ends the setting, too, that its guard has made. */
export const isOpen: Counted = {
  from: "WHERE current_setting('pg_fence.token', true) <> ''",
  values: [],
};
