import { hostname } from "node:os";
import { inspect } from "node:util";
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { isSettings, type Opener } from "./connection.js";
import * as errors from "./errors.js";
import { Heartbeat, numberOf, warn, type Holding, type LeaseEvent } from "./heartbeat.js";
import { LeadState } from "./lease_state.js";
import { msOf, now, type Span } from "./span.js";
import { tableOf, type Key, type Pair } from "./statements.js";
import {
  guarded,
  OpenTransaction,
  type GuardedBy,
  type Query,
  type Transaction,
} from "./transaction.js";

/** A driver. `takes` describes what its transactions begin on, and `Tx` is the work's handle of
 * them. `transaction` returns undefined for anything that is no connection of the driver. */
export interface Driver<Tx> {
  readonly open: Opener;
  readonly takes: string;
  transaction(on: unknown): (() => Transaction<Tx>) | undefined;
}

export interface FenceOptions {
  /** The extension's schema, if that is not in the search path. */
  readonly schema?: string | undefined;
  /** Called with each change of a lease. It must not block. */
  readonly onEvent?: ((event: LeaseEvent) => void) | undefined;
}

interface HeldOptions {
  /** How long the lease is held without a renewal, at least 100 ms. The default is 30 s. */
  readonly ttl?: Span | undefined;
  /** How long the lease may be held. Then it is lost, whatever its heartbeat does, which ends work
   * that hangs. The default is no limit. */
  readonly atMost?: Span | undefined;
  /** Gives up the acquire, which then throws the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

/** The options of a row lease. */
export interface RowOptions extends HeldOptions {
  /** The columns of the token and of the deadline. The defaults are fence and held_until. */
  readonly fence?: string | undefined;
  readonly deadline?: string | undefined;
}

/** The options of an acquire. */
export interface LeaseOptions extends HeldOptions {
  /** How long to wait for a lease that is taken. The default is not to wait. */
  readonly wait?: Span | undefined;
  /** The holder that others see. The default is a text that is unique for each call. */
  readonly holder?: string | undefined;
  /** Takes the lease over from a holder of the same name. */
  readonly reclaim?: boolean | undefined;
  /** The lease also ends with its connection. A pooler in transaction mode cannot serve it. */
  readonly session?: boolean | undefined;
  /** Others may hold the lease at the same time, if they share it, too. */
  readonly shared?: boolean | undefined;
  /** How many holders the lease may have at a time. The default is 1. */
  readonly slots?: number | undefined;
  /** Any value that has a JSON, for others to see. */
  readonly metadata?: unknown;
}

/** With `release` the transaction's last statement releases the lease. */
export type GuardOptions = { readonly release?: boolean | undefined };
/** `holder` is the holder of the number. The default is this process. */
export type AdoptOptions = Pick<LeaseOptions, "holder">;
/** `stop` ends the wait for the lease. It does not end the work, which has to watch it. */
export type LeadOptions = Pick<LeaseOptions, "ttl"> & { readonly stop?: AbortSignal | undefined };

/** A shorter ttl leaves no time for a renewal. In milliseconds. */
const SHORTEST_TTL = 100;

/** Returns the holder, which by default is unique for each call. */
function holderOf(holder = `${hostname()}/${process.pid}/${randomUUID().slice(0, 8)}`): string {
  return checked("holder", holder, "string");
}

/** The default holder of adopted leases, which is the same for all fences of the process. */
const PROCESS_HOLDER = holderOf();

/** Returns the value, or throws a TypeError with its name. */
function checked<T>(what: string, value: T, kind: "string" | "number" | "boolean"): T {
  if (typeof value !== kind) throw new TypeError(`${what} is a ${kind}: not ${String(value)}`);
  return value;
}

/** Returns the request of an acquire. It checks the options before anything is sent. */
function requestOf(names: string | readonly string[], options: LeaseOptions) {
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
    throw new TypeError("reclaim requires a holder");
  }
  if (all.length !== 1 && (shared || slots !== 1 || reclaim)) {
    throw new TypeError("several names at once are exclusive: no shared, slots or reclaim");
  }
  const holder = holderOf(options.holder);
  return { names: all, ttl, wait, holder, named, ...flags, slots, atMost, metadata };
}

/** Does the work in a transaction that is guarded by the lease, and returns the work's result.
 * Until the transaction ends the lease is granted to nobody else. The guard of a row lease writes
 * the row first, so that nobody else can claim it before the transaction ends; with `release` it
 * releases the row, unless the work has done so. */
export interface Guard<On, Tx> {
  /** `on` is a pool or a connection. If the connection has an open transaction, the guard is a
   * savepoint in it, and `release` takes effect when that transaction has committed. */
  <T>(on: On, work: (tx: Tx) => PromiseLike<T>, options?: GuardOptions): Promise<T>;
  /** `query` runs a query in the open transaction of an ORM, and returns its rows. */
  <T>(query: Query, work: () => PromiseLike<T>, options?: GuardOptions): Promise<T>;
}

/** A lease of another system, under the number that it has there. Its guard throws LeaseTaken while
 * a transaction guards an older number, and if another holder has adopted this number. After a
 * commit with `release` the number is refused. */
export type Adopted<On, Tx> = Readonly<{
  name: string;
  token: number | bigint;
  guard: Guard<On, Tx>;
}>;

let isLeaseOf: <On, Tx>(lease: Lease<On, Tx>, heartbeat: Heartbeat) => boolean;
let holdingOf: <On, Tx>(lease: Lease<On, Tx>) => Holding;

/** A lease that is held until it is released or lost. `await using` releases it at the end of a
 * block, and throws LeaseLost there if the program has not learned of a loss before. */
export class Lease<On, Tx> {
  static {
    isLeaseOf = (lease, heartbeat) => lease.#heartbeat === heartbeat;
    holdingOf = (lease) => lease.#holding;
  }
  readonly #heartbeat: Heartbeat;
  readonly #holding: Holding;
  /** The names of the lease. A row lease has two: its table and its key. */
  readonly names: readonly string[];
  /** The token of the acquire, which is valid for as long as the lease is held. */
  readonly token: number;
  readonly guard: Guard<On, Tx>;

  /** @internal */
  constructor(driver: Driver<Tx>, heartbeat: Heartbeat, holding: Holding) {
    [this.#heartbeat, this.#holding] = [heartbeat, holding];
    [this.names, this.token] = [holding.names, holding.token];
    this.guard = guardOf(driver, heartbeat, [this]);
    UNREFERENCED.register(this, [heartbeat, holding], holding);
  }

  /** True if the lease is held now, by this computer's clock. */
  get held(): boolean {
    return this.remaining.milliseconds > 0;
  }
  /** How long the lease is held if no renewal succeeds any more. */
  get remaining(): errors.Left {
    return this.#heartbeat.remaining(this.#holding);
  }

  /** A signal for `fetch`, timers and streams. It is aborted at a loss, at the deadline at the
   * latest, with a LeaseLost as its reason. */
  get signal(): AbortSignal {
    this.#heartbeat.watch(this.#holding, this);
    return this.#holding.loss.signal;
  }

  /** Throws LeaseLost if the lease is not held. Call it during long steps, and before each call to
   * another system. */
  check(): void {
    this.#heartbeat.check(this.#holding);
  }

  /** Releases the lease. If that fails no error is thrown, and the lease ends at its ttl. */
  async release(): Promise<void> {
    UNREFERENCED.unregister(this.#holding);
    await this.#heartbeat.release(this.#holding);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.release();
    if (this.#holding.isLost && !this.#holding.isLossSeen) throw this.#holding.lossError();
  }
}

/** Releases a lease when the program no longer refers to it. */
const UNREFERENCED = new FinalizationRegistry<[Heartbeat, Holding]>(([heartbeat, holding]) =>
  heartbeat.releaseForgotten(holding),
);

/** The source of leases, one for a process. `await using` closes it at the end of a block. */
export class Fence<On, Tx> {
  readonly #driver: Driver<Tx>;
  readonly #heartbeat: Heartbeat;

  /** @internal */
  constructor(driver: Driver<Tx>, { schema, onEvent }: FenceOptions = {}) {
    if (schema !== undefined) checked("schema", schema, "string");
    [this.#driver, this.#heartbeat] = [driver, new Heartbeat(driver.open, schema, onEvent)];
  }

  /** Acquires a lease of one name, or of all of several names. Throws LeaseTaken. With `work` the
   * lease is held while the work runs, and the result is the work's; without it the lease is
   * returned, and held until its `release` or the end of `await using`. Several names have no
   * queue: they are tried four times a second until `wait` is over, and may starve beside waiters
   * for each name. */
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
    const request = requestOf(names, options);
    return this.#runWork(await this.#heartbeat.acquire(request, options.signal), work);
  }

  /** Keeps a row lease, which your UPDATE has claimed and committed, with the token that it
   * returned. `key` is the columns of the row's key and their values, as `{ id: 7 }`. Throws
   * LeaseLost if another worker has claimed the row since. Finish the row in a `guard` with
   * `release`; the end of the lease releases a row that is not finished. */
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
    const { ttl, atMost } = requestOf(table, options);
    const values: readonly unknown[] = isSettings(key) ? Object.values(key) : [];
    if (values.length === 0 || !values.every((one) => /string|number|bigint/.test(typeof one))) {
      throw new TypeError(`a key is columns and their values, as { id: 7 }: not ${inspect(key)}`);
    }
    const names = [JSON.stringify(values.map(String))];
    const rowTable = tableOf(table, key, options.fence, options.deadline);
    const request = { names, ttl, atMost, table: rowTable, token: numberOf(token) };
    return this.#runWork(await this.#heartbeat.acquire(request, options.signal), work);
  }

  /** Does the work in a transaction that is guarded by all of the leases, as Lease.guard does. */
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
    if (!leases.every((lease) => isLeaseOf(lease, this.#heartbeat)))
      throw new TypeError("a guard takes leases of its own fence");
    return guardOf(this.#driver, this.#heartbeat, [...leases])(on, work, options);
  }

  /** Returns a lease of another system (etcd, ZooKeeper, Redis, another database) by the number
   * that it has there. The number belongs to one `holder`, which is this process by default. */
  adopted(name: string, token: number | bigint, options: AdoptOptions = {}): Adopted<On, Tx> {
    if (typeof token !== "bigint" && !Number.isSafeInteger(token)) {
      throw new TypeError(`a token is a whole number, above 2^53 a bigint: not ${String(token)}`);
    }
    checked("the name of a lease", name, "string");
    const adopted = { name, token, holder: holderOf(options.holder ?? PROCESS_HOLDER) };
    return { name, token, guard: guardOf(this.#driver, this.#heartbeat, [], adopted) };
  }

  /** Does the work while this process leads, and returns the work's result, or undefined if `stop`
   * was aborted before. An error of the work ends `lead`. After a loss of the lease, the server,
   * the connection or the transaction it acquires again, with a growing pause; an outage is one
   * warning and one event `interrupted`. */
  async lead<T>(
    name: string,
    work: (lease: Lease<On, Tx>) => PromiseLike<T>,
    { stop, ttl }: LeadOptions = {},
  ): Promise<T | undefined> {
    // If the answer to an acquire was lost, the next one with this holder takes the grant over.
    const request = requestOf(name, { ttl, holder: holderOf(), reclaim: true });
    const leader = new LeadState(request.ttl, this.#heartbeat.jitter);
    const none = { token: 0, remaining: { milliseconds: 0 }, reason: undefined };
    const interrupted = { kind: "interrupted", names: [name], ...none } as const;
    while (!stop?.aborted) {
      let holding: Holding | undefined;
      try {
        holding = await this.#heartbeat.acquire({ ...request, wait: Infinity }, stop);
        leader.granted(now());
        return (await this.#runWork(holding, work)) as T;
      } catch (error) {
        // The acquire was given up.
        if (!holding && stop?.aborted && error === stop.reason) break;
        const type = error instanceof errors.FenceError ? error.name : "";
        const [code, isLost] = [errors.codeOf(error), holding?.isLost ?? false];
        const [isStopped, isClosed] = [stop?.aborted ?? false, this.#heartbeat.isClosing];
        for (const effect of leader.failed(now(), type, code, isLost, isStopped, isClosed)) {
          if ("log" in effect) warn(`${name} ${effect.log}, and it is tried again: ${error}`);
          else if ("event" in effect) void this.#heartbeat.emit(interrupted);
          else if (effect.lead === "pause")
            await sleep(effect.pause, undefined, stop && { signal: stop }).catch(() => {});
          else if (effect.code === "stopped") return undefined;
          else throw error;
        }
      }
    }
    return undefined;
  }

  /** Releases all leases, and ends all waits. It takes at most 5 seconds. */
  close(): Promise<void> {
    return this.#heartbeat.close();
  }
  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  /** Does the work, and releases the lease. Throws LeaseLost after a loss, but never in place of an
   * error of the work. Without work it returns the lease. */
  async #runWork(holding: Holding, work?: (lease: Lease<On, Tx>) => PromiseLike<unknown>) {
    const lease = new Lease(this.#driver, this.#heartbeat, holding);
    if (!work) return lease;
    // This reference keeps the lease from the garbage collector while the work runs.
    const release = () => lease.release();
    try {
      const result = await work(lease);
      await release();
      if (holding.isLost) throw holding.lossError();
      return result;
    } catch (error) {
      await release();
      throw errors.unwrapAbort(error);
    }
  }
}

function guardOf<On, Tx>(
  driver: Driver<Tx>,
  heartbeat: Heartbeat,
  leases: readonly Lease<On, Tx>[],
  adopted?: Pair,
): Guard<On, Tx> {
  type Work<T> = (tx: Tx | undefined) => PromiseLike<T>;
  return async <T>(on: unknown, work: (tx: Tx) => PromiseLike<T>, options: GuardOptions = {}) => {
    const isQuery = typeof on === "function" && !("unsafe" in on);
    const makeTransaction =
      driver.transaction(on) ?? (isQuery ? () => new OpenTransaction(on as Query) : undefined);
    const release = checked("release", options.release ?? false, "boolean");
    const holdings = leases.map(holdingOf);
    const by: GuardedBy = { heartbeat, leases, holdings, adopted, release };
    if (makeTransaction) return guarded<Tx | undefined, T>(by, makeTransaction, work as Work<T>);
    const takes = `${driver.takes}, or a function that runs a query in an open transaction`;
    throw new TypeError(`a guard takes ${takes}: not ${String(on)}`);
  };
}

/** Returns connection options for code that does not use this package. A connection that is opened
 * with them (`options` of pg, `connection: { options }` of postgres) presents the token in all its
 * transactions. A pooler in transaction mode does not keep them. */
export function options(lease: { readonly token: number | bigint }): string {
  return `-c pg_fence.token=${lease.token}`;
}
