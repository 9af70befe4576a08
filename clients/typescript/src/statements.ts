import type { CallEffect } from "./lease_state.js";

/** A statement in autocommit, and its parameters: as text, with a cast beside each, whatever a
 * driver makes of numbers and lists. */
export type Statement = readonly [text: string, ...values: (string | null)[]];

/** A statement of a transaction, `WITH … SELECT FROM …`: its answer is the number of its rows, for
 * a driver may be set to make anything of a row. */
export type Counted = Readonly<{ before: string; from: string; values: readonly string[] }>;

/** How a lease is asked for, beside what the states of leases know. */
export type Asked = Readonly<{
  ttl: number;
  metadata: string | null;
  shared: boolean;
  slots: number;
  session: boolean;
}>;

/** A name and its token, and the holder of one that is adopted. */
export type Pair = Readonly<{ name: string; token: number | bigint; holder?: string }>;

const interval = (ms: number) => `${ms} milliseconds`;
const quoted = (name: string) => `"${name.replaceAll('"', '""')}"`;
const list = (all: readonly unknown[]) =>
  `{${all.map((one) => `"${String(one).replace(/["\\]/g, "\\$&")}"`).join()}}`;
/** How long a release waits for the lock of somebody's open transaction. */
const lockTimeout = ({ limit }: CallEffect) => String(Math.max(10, Math.floor(limit / 4)));

/** The wait is below the role's timeouts, whatever these are. */
const WAIT = `least($4::text::interval, nullif(current_setting('statement_timeout'), '0')::interval / 2,
    nullif(current_setting('lock_timeout'), '0')::interval / 2)`;
/** By whom a lease is taken, if that can be seen. */
const TAKEN = `AS granted LEFT JOIN LATERAL (
  SELECT i.holder, extract(epoch FROM i.remaining)::float8, i.state
  FROM unnest($1::text[]) AS n(name), lease_info(n.name) AS i
  WHERE granted IS NULL AND (i.state IN ('held', 'uncommitted') OR cardinality(i.blocking_pids) > 0)
  ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true`;
const PAIRS = "jsonb_to_recordset($1::text::jsonb) AS x(name text, token bigint, holder text)";

/** Statements that call the extension's functions, in its schema if that is named. */
export class Statements {
  readonly #prefix: string;

  constructor(schema?: string) {
    this.#prefix = schema === undefined ? "" : `${quoted(schema)}.`;
  }

  #of(text: string): string {
    return text.replaceAll("lease_", () => `${this.#prefix}lease_`);
  }

  /** One try, or a portion of a wait. */
  acquire({ names, holder, wait, reclaim }: CallEffect, asked: Asked): Statement {
    const { metadata, shared, slots, session } = asked;
    const [all, ttl] = [[list(names), String(holder)] as const, interval(asked.ttl)];
    if (names.length !== 1) {
      const text = `SELECT granted, taken.* FROM lease_acquire_all($1::text[], $2::text,
        $3::text::interval, $4::text::jsonb, $5::text::boolean) ${TAKEN}`;
      return [this.#of(text), ...all, ttl, metadata, String(session)];
    }
    const text = `SELECT granted, taken.* FROM lease_acquire(($1::text[])[1], $2::text,
      $3::text::interval, ${WAIT}, $5::text::jsonb, $6::text::boolean, $7::text::integer,
      $8::text::boolean, $9::text::boolean) ${TAKEN}`;
    const kind = [shared, slots, reclaim, session].map(String);
    return [this.#of(text), ...all, ttl, interval(wait ?? 0), metadata, ...kind];
  }

  keep({ names, tokens }: CallEffect): Statement {
    const text = `SELECT outcome, extract(epoch FROM remaining)::float8,
      extract(epoch FROM again_in)::float8, code FROM lease_keep($1::text[], $2::bigint[])`;
    return [this.#of(text), list(names), list(tokens)];
  }

  release(call: CallEffect): Statement {
    const text = `SELECT lease_release(x.name, x.token) FROM set_config('lock_timeout', $1::text, true),
      unnest($2::text[], $3::bigint[]) AS x(name, token)`;
    return [this.#of(text), lockTimeout(call), list(call.names), list(call.tokens)];
  }

  /** Releases what a holder has of these names. */
  undo(call: CallEffect): Statement {
    const text = `SELECT count(lease_release(n.name, i.first_token))
      FROM set_config('lock_timeout', $1::text, true), unnest($2::text[]) AS n(name),
        lease_info(n.name) AS i
      WHERE i.holder = $3::text AND i.state = 'held'`;
    return [this.#of(text), lockTimeout(call), list(call.names), String(call.holder)];
  }

  /** In the same order everywhere, so that no two transactions wait for each other. Each
   * transaction makes an adopted number known, and whose it is. */
  guard(pairs: readonly Pair[]): Counted {
    const isAdopted = pairs[0]?.holder !== undefined;
    const token = isAdopted ? "(SELECT lease_adopt(x.name, x.token, x.holder))" : "x.token";
    const from = `FROM (SELECT count(lease_guard(x.name, ${token})) AS n
      FROM (SELECT * FROM ${PAIRS} ORDER BY name COLLATE "C") AS x) AS guarded WHERE n > 0`;
    return { before: "", from: this.#of(from), values: [jsonOf(pairs)] };
  }

  /** As many rows as the number of the first pair under which there is nothing to be released. */
  last(pairs: readonly Pair[]): Counted {
    const ended = "min(x.at) FILTER (WHERE lease_release(x.name, x.token) IS NULL)";
    const from = `FROM generate_series(1, (SELECT ${ended}
      FROM (SELECT *, row_number() OVER () AS at FROM ${PAIRS}) AS x))`;
    return { before: "", from: this.#of(from), values: [jsonOf(pairs)] };
  }
}

function jsonOf(pairs: readonly Pair[]): string {
  // Tokens above 2^53 have no number in JSON.
  return JSON.stringify(pairs.map((pair) => ({ ...pair, token: String(pair.token) })));
}

/** The end of a transaction ends the setting, too, that its guard has made. */
export const isOpen: Counted = {
  before: "",
  from: "WHERE current_setting('pg_fence.token', true) <> ''",
  values: [],
};

/** A column of a row's key. */
export type Column = string | number | bigint;

const COLUMNS = `FROM pg_index AS i, unnest(i.indkey) WITH ORDINALITY AS k(attnum, at), pg_attribute AS a
  WHERE i.indrelid = c.oid AND i.indisprimary AND a.attrelid = c.oid AND a.attnum = k.attnum`;

/** A table whose rows are leases of their own. */
export class RowTable {
  readonly name: string;
  readonly isManaged: boolean;
  readonly #fence: string;
  readonly #deadline: string;
  readonly #keys: readonly string[];
  readonly #types: readonly string[];

  /** Asks what is known of such a table. */
  static describe(table: string): Statement {
    const text = `SELECT format('%I.%I', n.nspname, c.relname), encode(t.tgargs, 'hex'),
        (SELECT json_agg(quote_ident(a.attname) ORDER BY k.at) ${COLUMNS})::text,
        (SELECT json_agg(format_type(a.atttypid, a.atttypmod) ORDER BY k.at) ${COLUMNS})::text
      FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
      JOIN pg_trigger AS t ON t.tgrelid = c.oid AND t.tgnargs > 3
      JOIN pg_proc AS p ON p.oid = t.tgfoid AND p.proname = 'fenced'
      WHERE c.oid = $1::text::regclass`;
    return [text, table];
  }

  /** Reads what was found. */
  constructor(table: string, rows: readonly (readonly (string | null)[])[]) {
    const argumentsOf = (hex = "") => Buffer.from(hex, "hex").toString().split("\0");
    const isRowTable = ([, hex, keys]: readonly (string | null)[]) =>
      keys && argumentsOf(hex ?? "")[3];
    const [name, hex, keys, types] = rows.find(isRowTable) ?? [];
    if (!name || !hex || !keys || !types) {
      const how = "fence_protect(…, deadline => …)";
      throw new TypeError(`the rows of ${table} are no leases, or have no primary key: ${how}`);
    }
    const [fence = "", mode, , deadline = ""] = argumentsOf(hex);
    [this.name, this.isManaged] = [name, mode === "managed"];
    [this.#fence, this.#deadline] = [quoted(fence), quoted(deadline)];
    [this.#keys, this.#types] = [JSON.parse(keys), JSON.parse(types)];
  }

  /** The text of a key, by the primary key's columns in their order. */
  key(key: Column | readonly Column[]): string {
    const columns = [key].flat().map(String);
    if (columns.length === this.#keys.length) return JSON.stringify(columns);
    throw new TypeError(`the key of ${this.name} has the columns ${this.#keys.join()}`);
  }

  /** The rows of a call, as the query that all its statements begin with. The setting is what a
   * managed table is presented, and what tells a guard its own transaction. */
  #asked(
    {
      names,
      tokens,
      ttls = [],
    }: Pick<CallEffect, "names" | "tokens"> & { ttls?: readonly number[] },
    setsToken: boolean,
  ) {
    const rows = names.map((key, i) => ({
      key: JSON.parse(key),
      token: tokens[i],
      ttl: ttls[i] ?? 0,
    }));
    const keys = this.#types.map((type, i) => `, (x->'key'->>${i})::${type} AS k${i}`).join("");
    const setting = setsToken ? ", set_config('pg_fence.token', x->>'token', true)" : "";
    const query = `WITH asked AS MATERIALIZED (SELECT n, (x->>'token')::bigint AS token,
        (x->>'ttl')::bigint * interval '1 millisecond' AS ttl${keys}${setting}
      FROM jsonb_array_elements($1::text::jsonb) WITH ORDINALITY AS all_rows(x, n))`;
    return [query, JSON.stringify(rows)] as const;
  }

  #is(asked: string): string {
    const keys = this.#keys.map((key, i) => ` AND r.${key} = ${asked}.k${i}`);
    return `r.${this.#fence} = ${asked}.token${keys.join("")}`;
  }

  /** Waits for no lock, and renews what is not over. */
  keep(call: CallEffect): Statement {
    const [query, rows] = this.#asked(call, this.isManaged);
    const [name, fence, deadline] = [this.name, this.#fence, this.#deadline];
    const text = `${query}, free AS MATERIALIZED (SELECT asked.* FROM asked
        JOIN ${name} AS r ON ${this.#is("asked")}
        WHERE r.${deadline} > clock_timestamp() FOR NO KEY UPDATE OF r SKIP LOCKED)
      UPDATE ${name} AS r SET ${deadline} = clock_timestamp() + free.ttl, ${fence} = free.token
      FROM free WHERE ${this.#is("free")}
      RETURNING free.n, extract(epoch FROM r.${deadline} - clock_timestamp())::float8`;
    return [text, rows];
  }

  /** Tells, without a lock, which rows have their token still, and whether they were given up. */
  look(call: CallEffect): Statement {
    const [query, rows] = this.#asked(call, false);
    const is = `CASE WHEN r.${this.#deadline} IS NULL THEN 'ended' ELSE 'held' END`;
    return [
      `${query} SELECT n, ${is} FROM asked JOIN ${this.name} AS r ON ${this.#is("asked")}`,
      rows,
    ];
  }

  /** The guard of a row, or its last write, which gives it up: of so many rows. */
  touch(key: string, token: number, givesUp: boolean): Counted {
    const [query, rows] = this.#asked({ names: [key], tokens: [token] }, true);
    const set = `${this.#fence} = asked.token${givesUp ? `, ${this.#deadline} = NULL` : ""}`;
    const before = `${query}, touched AS (UPDATE ${this.name} AS r SET ${set} FROM asked
      WHERE ${this.#is("asked")} AND r.${this.#deadline} IS NOT NULL RETURNING 1)`;
    return { before, from: "FROM touched", values: [rows] };
  }

  release(call: CallEffect): Statement {
    const [query, rows] = this.#asked(call, this.isManaged);
    const text = `${query}, given_up AS (UPDATE ${this.name} AS r
        SET ${this.#fence} = asked.token, ${this.#deadline} = NULL
        FROM asked, set_config('lock_timeout', $2::text, true)
        WHERE ${this.#is("asked")} AND r.${this.#deadline} IS NOT NULL RETURNING asked.n)
      SELECT (SELECT g.n FROM given_up AS g WHERE g.n = asked.n) FROM asked ORDER BY n`;
    return [text, rows, lockTimeout(call)];
  }
}
