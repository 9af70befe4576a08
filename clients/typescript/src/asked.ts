import { randomUUID } from "node:crypto";
import { hostname } from "node:os";
import { msOf, type Span } from "./span.js";

/** A statement, and its parameters: as text, with a cast beside each, whatever a driver makes of numbers and lists. */
export type Call = readonly [text: string, ...values: (string | null)[]];
export type Names = string | readonly string[];
export type Pair = readonly [name: string, token: number];

/** The options of an acquire. */
export interface LeaseOptions {
  /** How long it is ours without a renewal: 30 s. */
  readonly ttl?: Span | undefined;
  /** How long to wait for it, when it is taken. */
  readonly wait?: Span | undefined;
  /** The holder, as others see it; by default a text that is unique for each call. */
  readonly holder?: string | undefined;
  /** Takes it over from a holder of the same name. */
  readonly reclaim?: boolean | undefined;
  /** It ends with the fence's connection, too. Not through a pooler in transaction mode. */
  readonly session?: boolean | undefined;
  readonly shared?: boolean | undefined;
  /** So many may hold it at once. */
  readonly slots?: number | undefined;
  /** Anything that has a JSON. */
  readonly metadata?: unknown;
  /** Gives the acquire up, which then throws the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

/** An acquire; times are in milliseconds, and `wait` may be infinite. `call` is one try, or a portion of the wait. */
export type Asked = Readonly<{ names: readonly string[]; ttl: number; wait: number; session: boolean; call: (portion: number) => Call }>;

/** A shorter ttl, in milliseconds, leaves no time for a renewal. */
const SHORTEST_TTL = 100;
/** A wait below the role's timeouts, whatever these are. */
const WAIT = `least($4::text::interval, nullif(current_setting('statement_timeout'), '0')::interval / 2,
  nullif(current_setting('lock_timeout'), '0')::interval / 2)`;

/** Looked over before anything is sent. */
export function askedFor(prefix: string, names: Names, options: LeaseOptions): Asked {
  if (typeof options === "function") throw new TypeError("the options come before the work");
  const { metadata = null, slots = 1, reclaim = false, session = false, shared = false } = options;
  Object.entries({ reclaim, session, shared }).forEach(([what, flag]) => checked(what, flag, "boolean"));
  const [all, ttl, wait, holder] = [listOf(names), ttlOf(options.ttl), msOf("wait", options.wait ?? { seconds: 0 }), holderOf(options.holder)];
  const json = metadata === null ? null : JSON.stringify(metadata);
  if (json === undefined) throw new TypeError(`metadata has no JSON: ${String(metadata)}`);
  if (reclaim && options.holder === undefined) throw new TypeError("reclaim takes a holder: whose lease is it?");
  if (wait < 0) throw new RangeError("wait is not negative");
  // By whom it is taken, where that can be seen.
  const takenBy = `LEFT JOIN LATERAL (SELECT i.holder, extract(epoch FROM i.remaining)::float8 FROM unnest($1::text[]) AS n(name),
    ${prefix}lease_info(n.name) AS i WHERE granted IS NULL AND i.state IN ('held', 'uncommitted')
    ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true`;
  const select = (call: string) => `SELECT granted, taken.* FROM ${prefix}${call} AS granted ${takenBy}`;
  if (all.length !== 1) {
    if (shared || slots !== 1 || reclaim) throw new TypeError("several names at once are exclusive: no shared, slots or reclaim");
    const text = select("lease_acquire_all($1::text[], $2::text, $3::text::interval, $4::text::jsonb, $5::text::boolean)");
    return { names: all, ttl, wait, session, call: () => [text, list(all), holder, span(ttl), json, String(session)] };
  }
  const others = "$5::text::jsonb, $6::text::boolean, $7::text::integer, $8::text::boolean, $9::text::boolean";
  const text = select(`lease_acquire(($1::text[])[1], $2::text, $3::text::interval, ${WAIT}, ${others})`);
  const kind = [shared, checked("slots", slots, "number"), reclaim, session].map(String);
  return { names: all, ttl, wait, session, call: (portion) => [text, list(all), holder, span(ttl), span(portion), json, ...kind] };
}

export function ttlOf(ttl: Span = { seconds: 30 }): number {
  const ms = msOf("ttl", ttl);
  if (ms < SHORTEST_TTL) throw new RangeError(`ttl is ${SHORTEST_TTL} ms or more, for it is renewed meanwhile: not ${ms} ms`);
  return ms;
}

export function holderOf(holder = `${hostname()}/${process.pid}/${randomUUID().slice(0, 8)}`): string {
  return checked("holder", holder, "string");
}

/** The holder that adopts where none is named: all fences of this process are one holder. */
export const PROCESS = holderOf();

export function listOf(names: Names): readonly string[] {
  const all = (Array.isArray(names) ? [...names] : [names]) as string[];
  return all.map((name) => checked("the name of a lease", name, "string"));
}

export function checked<T>(what: string, value: T, kind: "string" | "number" | "boolean"): T {
  if (typeof value !== kind) throw new TypeError(`${what} is a ${kind}: not ${String(value)}`);
  return value;
}

const span = (ms: number) => `${ms} milliseconds`;
const list = (all: readonly unknown[]) => `{${all.map((one) => `"${String(one).replace(/["\\]/g, "\\$&")}"`).join()}}`;
const pairsOf = (pairs: readonly Pair[]) => [list(pairs.map(([name]) => name)), list(pairs.map(([, token]) => token))];

export function keep(prefix: string, pairs: readonly Pair[]): Call {
  const spans = "extract(epoch FROM remaining)::float8, extract(epoch FROM again_in)::float8";
  return [`SELECT outcome, ${spans} FROM ${prefix}lease_keep($1::text[], $2::bigint[])`, ...pairsOf(pairs)];
}

/** In a transaction of its own, which waits for so many milliseconds for the lock of somebody's open transaction. */
export function releaseAside(prefix: string, pairs: readonly Pair[], lockLimit: number): Call {
  const from = "set_config('lock_timeout', $1::text, true), unnest($2::text[], $3::bigint[]) AS x(name, token)";
  const limit = String(Math.max(10, Math.round(lockLimit)));
  return [`SELECT ${prefix}lease_release(x.name, x.token) FROM ${from}`, limit, ...pairsOf(pairs)];
}

export function guard(prefix: string, name: string, token: number): Call {
  return [`SELECT ${prefix}lease_guard($1::text, $2::bigint), pg_backend_pid()`, name, String(token)];
}

/** Each transaction makes the number known, and whose it is. */
export function guardAdopted(prefix: string, name: string, token: number | bigint, holder: string): Call {
  const adopt = `(SELECT ${prefix}lease_adopt($1::text, $2::bigint, $3::text))`;
  return [`SELECT ${prefix}lease_guard($1::text, ${adopt}), pg_backend_pid()`, name, String(token), holder];
}

/** Within a transaction of the work. */
export function release(prefix: string, names: readonly string[], token: number | bigint): Call {
  const [form, value] = names.length > 1 ? ["_all($1::text[]", list(names)] : ["($1::text", `${names[0]}`];
  return [`SELECT ${prefix}lease_release${form}, $2::bigint)`, `${value}`, String(token)];
}
