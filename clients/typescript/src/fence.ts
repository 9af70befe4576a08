import { hostname } from "node:os";
import { inspect } from "node:util";
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { isSettings, type Opener } from "./connection.js";
import * as errors from "./errors.js";
import { Heartbeat, numberOf, warn, type Holding, type LeaseEvent } from "./heartbeat.js";
import { isTransient, LeadState, type LeadEffect } from "./lease_state.js";
import { msOf, now, type Span } from "./span.js";
import { Statements, tableOf, type Key, type Pair } from "./statements.js";
import {
  guarded,
  OpenTransaction,
  type Query,
  type Transaction,
  type Under,
} from "./transaction.js";

/** A driver: `takes` names what its transactions begin on; `Tx` is what the work in them is done
 * with. There is no transaction on what is none of its connections. */
export interface Driver<Tx> {
  readonly open: Opener;
  readonly takes: string;
  transaction(on: unknown): (() => Transaction<Tx>) | undefined;
}

export interface FenceOptions {
  /** The extension's schema, if that is not in the search path. */
  readonly schema?: string | undefined;
  /** Told what becomes of leases; it must not block. */
  readonly onEvent?: ((event: LeaseEvent) => void) | undefined;
}

interface HeldOptions {
  /** How long it is ours without a renewal: 30 s. */
  readonly ttl?: Span | undefined;
  /** So long after its acquire it is lost, whatever its heartbeat does: for work that hangs. */
  readonly atMost?: Span | undefined;
  /** Gives the acquire up, which then throws the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

/** How a row lease is kept. */
export interface RowOptions extends HeldOptions {
  /** The columns of the token and the deadline: fence and held_until. */
  readonly fence?: string | undefined;
  readonly deadline?: string | undefined;
}

/** How a lease is acquired. */
export interface LeaseOptions extends HeldOptions {
  /** How long to wait for it, when it is taken. */
  readonly wait?: Span | undefined;
  /** The holder, as others see it; by default a text that is unique for each call. */
  readonly holder?: string | undefined;
  /** Takes it over from a holder of the same name. */
  readonly reclaim?: boolean | undefined;
  /** It ends with its connection, too. Not through a pooler in transaction mode. */
  readonly session?: boolean | undefined;
  readonly shared?: boolean | undefined;
  /** So many may hold it at once. */
  readonly slots?: number | undefined;
  /** Anything that has a JSON. */
  readonly metadata?: unknown;
}

/** `release`: the last statement gives the lease back. */
export type GuardOptions = { readonly release?: boolean | undefined };
/** `holder`: whose the number is, by default this process's. */
export type AdoptOptions = Pick<LeaseOptions, "holder">;
/** `stop` ends the waiting. The work looks at it by itself, and is waited for. */
export type LeadOptions = Pick<LeaseOptions, "ttl"> & { readonly stop?: AbortSignal | undefined };

/** A shorter ttl, in milliseconds, leaves no time for a renewal. */
const SHORTEST_TTL = 100;

/** The holder is unique for each call, unless it is named. */
function holderOf(holder = `${hostname()}/${process.pid}/${randomUUID().slice(0, 8)}`): string {
  return checked("holder", holder, "string");
}

/** The holder that adopts if none is named: all fences of this process are one holder. */
const PROCESS = holderOf();

function checked<T>(what: string, value: T, kind: "string" | "number" | "boolean"): T {
  if (typeof value !== kind) throw new TypeError(`${what} is a ${kind}: not ${String(value)}`);
  return value;
}

/** Looks the options over, before anything is sent. */
function askedFor(names: string | readonly string[], options: LeaseOptions) {
  if (typeof options === "function") throw new TypeError("the options come before the work");
  const { slots = 1, reclaim = false, session = false, shared = false } = options;
  const flags = { reclaim, session, shared };
  for (const [what, flag] of Object.entries(flags)) checked(what, flag, "boolean");
  checked("slots", slots, "number");
  const all = [names].flat().map((name) => checked("the name of a lease", name, "string"));
  const named = options.holder !== undefined;
  const ttl = Math.floor(msOf("ttl", options.ttl ?? { seconds: 30 }));
  const wait = msOf("wait", options.wait ?? { seconds: 0 });
  const atMost = options.atMost == null ? undefined : msOf("atMost", options.atMost);
  const metadata = options.metadata == null ? null : JSON.stringify(options.metadata);
  if (metadata === undefined) {
    throw new TypeError(`metadata has no JSON: ${String(options.metadata)}`);
  }
  if (ttl < SHORTEST_TTL) {
    const why = "for it is renewed meanwhile";
    throw new RangeError(`ttl is ${SHORTEST_TTL} ms or more, ${why}: not ${ttl} ms`);
  }
  if (wait < 0 || (atMost ?? 1) <= 0) throw new RangeError("wait and atMost are not negative");
  if (reclaim && !named) {
    throw new TypeError("reclaim takes a holder: whose lease is it?");
  }
  if (all.length !== 1 && (shared || slots !== 1 || reclaim)) {
    throw new TypeError("several names at once are exclusive: no shared, slots or reclaim");
  }
  const holder = holderOf(options.holder);
  return { names: all, ttl, wait, holder, named, ...flags, slots, atMost, metadata };
}

/** Does the work in a transaction, during which nobody else is granted the lease, and returns what
 * it returned. Of a row lease it writes the row first, so that all further writes of the row in the
 * transaction are its holder's; with `release` it gives the row up, unless the work has. */
export interface Guard<On, Tx> {
  /** `on` is a pool, or a connection, whose open transaction it is, if there is one. */
  <T>(on: On, work: (tx: Tx) => PromiseLike<T>, options?: GuardOptions): Promise<T>;
  /** `query` runs a query in the open transaction of an ORM, and returns its rows. */
  <T>(query: Query, work: () => PromiseLike<T>, options?: GuardOptions): Promise<T>;
}

/** A lease that somebody else grants, under the number that it has there. With `release` the number
 * is refused from then on. */
export type Adopted<On, Tx> = Readonly<{
  name: string;
  token: number | bigint;
  guard: Guard<On, Tx>;
}>;

let isLeaseOf: <On, Tx>(lease: Lease<On, Tx>, heartbeat: Heartbeat) => boolean;
let holdingOf: <On, Tx>(lease: Lease<On, Tx>) => Holding;

/** A lease that is held until it is released or lost. `await using` releases it at the end of a
 * block, and throws LeaseLost there if nothing has told it before. */
export class Lease<On, Tx> {
  static {
    isLeaseOf = (lease, heartbeat) => lease.#heartbeat === heartbeat;
    holdingOf = (lease) => lease.#holding;
  }
  readonly #heartbeat: Heartbeat;
  readonly #holding: Holding;
  /** Of a row lease, the table and the key. */
  readonly names: readonly string[];
  /** The acquire's: it serves for as long as the lease is held. */
  readonly token: number;
  readonly guard: Guard<On, Tx>;

  /** @internal */
  constructor(driver: Driver<Tx>, heartbeat: Heartbeat, holding: Holding) {
    [this.#heartbeat, this.#holding] = [heartbeat, holding];
    [this.names, this.token] = [holding.names, holding.token];
    this.guard = guardOf(driver, heartbeat, [this], [holding]);
    FORGOTTEN.register(this, [heartbeat, holding], holding);
  }

  /** Whether it is ours at this moment, by our own clock. */
  get held(): boolean {
    return this.remaining.milliseconds > 0;
  }
  /** How long it is ours if no renewal comes through any more. */
  get remaining(): errors.Left {
    return this.#heartbeat.remaining(this.#holding);
  }

  /** Aborted at a loss, by the deadline at the latest, with a LeaseLost as its reason: for `fetch`,
   * timers, streams. */
  get signal(): AbortSignal {
    this.#heartbeat.hear(this.#holding, this);
    return this.#holding.aborts.signal;
  }

  /** Throws LeaseLost once it is ours no more. For long steps, and before calls to the outside. */
  check(): void {
    this.#heartbeat.check(this.#holding);
  }

  /** Gives it back. No error if that fails: then it ends at its ttl. */
  async release(): Promise<void> {
    FORGOTTEN.unregister(this.#holding);
    await this.#heartbeat.release(this.#holding);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.release();
    if (this.#holding.isLost && !this.#holding.isHeard) throw this.#holding.lost();
  }
}

const FORGOTTEN = new FinalizationRegistry<[Heartbeat, Holding]>(([heartbeat, holding]) =>
  heartbeat.forget(holding),
);

/** Where leases come from: one for a process. `await using` closes it at the end of a block. */
export class Fence<On, Tx> {
  readonly #driver: Driver<Tx>;
  readonly #heartbeat: Heartbeat;

  /** @internal */
  constructor(driver: Driver<Tx>, { schema, onEvent }: FenceOptions = {}) {
    const statements = new Statements(schema && checked("schema", schema, "string"));
    [this.#driver, this.#heartbeat] = [driver, new Heartbeat(driver.open, statements, onEvent)];
  }

  /** A lease of one name, or of several at once, all or none. Throws LeaseTaken. Held while the work
   * runs, whose result it returns; without work until `release`, or by `await using`.
   * Several names have no queue: they are tried each quarter of a second, and may starve beside
   * waiters for each, until `wait` is over. */
  lease(names: string | readonly string[], options?: LeaseOptions): Promise<Lease<On, Tx>>;
  lease<T>(
    names: string | readonly string[],
    options: LeaseOptions,
    work: (lease: Lease<On, Tx>) => PromiseLike<T>,
  ): Promise<T>;
  async lease(
    names: string | readonly string[],
    options: LeaseOptions = {},
    work?: (lease: Lease<On, Tx>) => PromiseLike<unknown>,
  ): Promise<unknown> {
    const request = askedFor(names, options);
    return this.#during(await this.#heartbeat.acquire(request, options.signal), work);
  }

  /** Keeps a row of a table whose rows are leases of their own, which a statement of yours has
   * claimed: by the columns of its key, `{ id: 7 }`, under the token that the claim returned.
   * Throws LeaseLost if the row is another's by then. Finish the row in a `guard`; the end of the lease
   * gives up a row that is not. */
  keepRow(
    table: string,
    key: Key,
    token: number | bigint | string,
    options?: RowOptions,
  ): Promise<Lease<On, Tx>>;
  keepRow<T>(
    table: string,
    key: Key,
    token: number | bigint | string,
    options: RowOptions,
    work: (lease: Lease<On, Tx>) => PromiseLike<T>,
  ): Promise<T>;
  async keepRow(
    table: string,
    key: Key,
    token: number | bigint | string,
    options: RowOptions = {},
    work?: (lease: Lease<On, Tx>) => PromiseLike<unknown>,
  ): Promise<unknown> {
    const { ttl, atMost } = askedFor(table, options);
    const values: readonly unknown[] = isSettings(key) ? Object.values(key) : [];
    if (values.length === 0 || !values.every((one) => /string|number|bigint/.test(typeof one))) {
      throw new TypeError(`a key is columns and their values, as { id: 7 }: not ${inspect(key)}`);
    }
    const names = [JSON.stringify(values.map(String))];
    const of = tableOf(table, key, options.fence, options.deadline);
    const request = { names, ttl, atMost, table: of, token: numberOf(token) };
    return this.#during(await this.#heartbeat.acquire(request, options.signal), work);
  }

  /** A transaction that is guarded by several leases at once. */
  guard<T>(
    on: On,
    leases: readonly Lease<On, Tx>[],
    work: (tx: Tx) => PromiseLike<T>,
    options?: GuardOptions,
  ): Promise<T>;
  guard<T>(
    query: Query,
    leases: readonly Lease<On, Tx>[],
    work: () => PromiseLike<T>,
    options?: GuardOptions,
  ): Promise<T>;
  async guard<T>(
    on: On & Query,
    leases: readonly Lease<On, Tx>[],
    work: (tx: Tx) => PromiseLike<T>,
    options?: GuardOptions,
  ): Promise<T> {
    const holdings = leases.map(holdingOf);
    if (!leases.every((lease) => isLeaseOf(lease, this.#heartbeat)))
      throw new TypeError("a guard takes leases of its own fence");
    return guardOf(this.#driver, this.#heartbeat, [...leases], holdings)(on, work, options);
  }

  /** A lease that somebody else grants (etcd, ZooKeeper, Redis, another database), under its number
   * there, which is that of one holder: LeaseTaken if another one has adopted it. The holder is
   * this process, unless another one is named. */
  adopted(name: string, token: number | bigint, options: AdoptOptions = {}): Adopted<On, Tx> {
    if (typeof token !== "bigint" && !Number.isSafeInteger(token)) {
      throw new TypeError(`a token is a whole number, above 2^53 a bigint: not ${String(token)}`);
    }
    checked("the name of a lease", name, "string");
    const adopted = { name, token, holder: holderOf(options.holder ?? PROCESS) };
    return { name, token, guard: guardOf(this.#driver, this.#heartbeat, [], [], adopted) };
  }

  /** Does the work whenever this process leads, again after each loss, and returns what it has
   * returned; undefined when `stop` was aborted first. What it goes on after is a warning and the event
   * `interrupted`, once an outage, with a growing pause. */
  async lead<T>(
    name: string,
    work: (lease: Lease<On, Tx>) => PromiseLike<T>,
    { stop, ttl }: LeadOptions = {},
  ): Promise<T | undefined> {
    // If the answer to an acquire was lost, its own holder takes the grant over.
    const request = askedFor(name, { ttl, holder: holderOf(), reclaim: true });
    const leader = new LeadState(request.ttl, this.#heartbeat.jitter);
    const none = { token: 0, remaining: { milliseconds: 0 }, reason: undefined };
    const interrupted = { kind: "interrupted", names: [name], ...none } as const;
    let [effects, failure]: [LeadEffect[], unknown] = [leader.start(), undefined];
    for (;;) {
      for (const effect of effects) {
        if ("log" in effect) warn(`${name} ${effect.log}, and it is tried again: ${failure}`);
        else if ("event" in effect) void this.#heartbeat.tell(interrupted);
        else if (effect.lead === "end") throw failure;
        else if (effect.lead === "pause") {
          await sleep(effect.pause, undefined, stop && { signal: stop }).catch(() => {});
        }
      }
      if (stop?.aborted) return undefined;
      let holding: Holding | undefined;
      try {
        holding = await this.#heartbeat.acquire({ ...request, wait: Infinity }, stop);
        leader.granted(now());
        return (await this.#during(holding, work)) as T;
      } catch (error) {
        failure = error;
        if (!holding && stop?.aborted) return undefined;
        const cause = causeOf(error, holding === undefined);
        if (holding) effects = leader.workFailed(now(), cause, holding.isLost);
        else effects = leader.notGranted(now(), cause);
      }
    }
  }

  /** Gives everything back, and ends all waits. */
  close(): Promise<void> {
    return this.#heartbeat.close();
  }
  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  /** An error that ends the work is never replaced; if it has none, and the lease is lost, that is
   * told. */
  async #during(holding: Holding, work?: (lease: Lease<On, Tx>) => PromiseLike<unknown>) {
    const lease = new Lease(this.#driver, this.#heartbeat, holding);
    if (!work) return lease;
    // This holds on to the lease, so that it is not collected while the work runs.
    const release = () => lease.release();
    try {
      const result = await work(lease);
      await release();
      if (holding.isLost) throw holding.lost();
      return result;
    } catch (error) {
      await release();
      throw errors.ofSignal(error);
    }
  }
}

function guardOf<On, Tx>(
  driver: Driver<Tx>,
  heartbeat: Heartbeat,
  leases: readonly unknown[],
  holdings: readonly Holding[],
  adopted?: Pair,
): Guard<On, Tx> {
  type Work<T> = (tx: Tx | undefined) => PromiseLike<T>;
  return async <T>(on: unknown, work: (tx: Tx) => PromiseLike<T>, options: GuardOptions = {}) => {
    const isQuery = typeof on === "function" && !("unsafe" in on);
    const begins =
      driver.transaction(on) ?? (isQuery ? () => new OpenTransaction(on as Query) : undefined);
    const release = checked("release", options.release ?? false, "boolean");
    const under: Under = { heartbeat, leases, holdings, adopted, release };
    if (begins) return guarded<Tx | undefined, T>(under, begins, work as Work<T>);
    const takes = `${driver.takes}, or a function that runs a query in an open transaction`;
    throw new TypeError(`a guard takes ${takes}: not ${String(on)}`);
  };
}

/** What one who leads goes on after, or not. */
function causeOf(error: unknown, isOfAcquire: boolean): string {
  const state = errors.sqlstateOf(error);
  const passing = [errors.LeaseLost, errors.LeaseTaken, errors.TransactionLost, errors.NoAnswer];
  if (passing.some((type) => error instanceof type)) return (error as Error).name;
  if (error instanceof errors.NoConnection && state === "") {
    const mayPass = !error.cause || errors.codeOfOpening(error.cause) === "connect";
    return mayPass ? "NoConnection" : "own";
  }
  // The next renewal tells.
  if (state === "PF001" || state === "PF004") return "LeaseLost";
  if (errors.sessionEnded(error) || state === "53300") return "ConnectionLost";
  return isOfAcquire && isTransient(state) ? "transient" : "own";
}

/** For code that knows nothing of fences: a connection opened with these (`options` of pg,
 * `connection: { options }` of postgres) presents the token in all its transactions. Not through a
 * pooler in transaction mode. */
export function options(lease: { readonly token: number | bigint }): string {
  return `-c pg_fence.token=${lease.token}`;
}
