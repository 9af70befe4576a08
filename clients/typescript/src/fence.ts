import { setTimeout as sleep } from "node:timers/promises";
import * as sql from "./asked.js";
import type { LeaseOptions, Names } from "./asked.js";
import { FenceError, LeaseLost, LeaseTaken, ofSignal, Refused, sessionEnded, sqlstateOf, TransactionLost, type Left } from "./errors.js";
import { guarded, OpenTransaction, under, type Query, type Transaction, type Under } from "./guard.js";
import { Keeper, warn, type Grant, type LeaseEvent } from "./keeper.js";
import type { Opener } from "./line.js";

/** A driver: `On` is what its transactions begin on, in words `takes`; `Tx` what the work in them is done with. There
 * is no transaction where that is none of its connections. */
export type Driver<On, Tx> = Readonly<{ open: Opener; takes: string; transaction(on: On): (() => Transaction<Tx>) | undefined }>;

export interface FenceOptions {
  /** The extension's schema, where that is not in the search path. */
  readonly schema?: string | undefined;
  /** Told what becomes of leases; it must not block. */
  readonly onEvent?: ((event: LeaseEvent) => void) | undefined;
}

/** `release`: the last statement gives the lease back. */
export type GuardOptions = { readonly release?: boolean | undefined };
/** `holder`: whose the number is, by default this process's. */
export type AdoptOptions = Pick<LeaseOptions, "holder">;
/** `stop` ends the waiting. The work looks at it by itself, and is waited for. */
export type LeadOptions = Pick<LeaseOptions, "ttl"> & { readonly stop?: AbortSignal | undefined };

/** Does the work in a transaction, during which nobody else is granted the lease, and returns what it returned. */
export interface Guard<On, Tx> {
  /** `on` is a pool, or a connection, whose open transaction it is, where there is one. */
  <T>(on: On, work: (tx: Tx) => PromiseLike<T>, options?: GuardOptions): Promise<T>;
  /** `query` runs a query in the open transaction of an ORM. */
  <T>(query: Query, work: () => PromiseLike<T>, options?: GuardOptions): Promise<T>;
}

/** A lease that somebody else grants, under the number that it has there. With `release` the number is refused from then on. */
export type Adopted<On, Tx> = Readonly<{ name: string; token: number | bigint; guard: Guard<On, Tx> }>;

let grantOf: (lease: Lease<any, any>) => Grant;

/** A lease that is held until it is released or lost. `await using` releases it at the end of a block, and throws LeaseLost
 * there where nothing has told it before. */
export class Lease<On, Tx> {
  static { grantOf = (lease) => lease.#grant; }
  readonly #keeper: Keeper;
  readonly #grant: Grant;
  readonly names: readonly string[];
  /** The acquire's: it serves for as long as the lease is held. */
  readonly token: number;
  readonly guard: Guard<On, Tx>;

  /** @internal */
  constructor(driver: Driver<On, Tx>, keeper: Keeper, grant: Grant) {
    [this.#keeper, this.#grant, this.names, this.token] = [keeper, grant, grant.names, grant.token];
    this.guard = guardOf(driver, (release) => under(keeper, [this], [grant], release));
    FORGOTTEN.register(this, [keeper, grant]);
  }

  /** Whether it is ours at this moment, by our own clock. */
  get held(): boolean { return this.remaining.milliseconds > 0; }
  /** How long it is ours if no renewal comes through any more. */
  get remaining(): Left { return this.#grant.remaining; }

  /** Aborted at a loss, by the deadline at the latest, with a LeaseLost as its reason: for `fetch`, timers, streams. */
  get signal(): AbortSignal {
    this.#keeper.hear(this.#grant, this);
    return this.#grant.aborts.signal;
  }

  /** Throws LeaseLost once it is ours no more. For long steps, and before each call to the outside. */
  check(): void { this.#keeper.check(this.#grant); }
  /** Gives it back. No error where that fails: then it ends at its ttl. */
  release(): Promise<void> { return this.#keeper.release([this.#grant]); }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.release();
    if (this.#grant.isLost && !this.#grant.isHeard) throw this.#grant.lost();
  }
}

const FORGOTTEN = new FinalizationRegistry<[Keeper, Grant]>(([keeper, grant]) => {
  if (grant.reason !== undefined) return;
  warn(`the lease ${grant.names.join(", ")} was forgotten, and not released`);
  grant.aborts.abort(new LeaseLost("released", grant.names));
  void keeper.release([grant]);
});

/** Where leases come from: one for a process. `await using` closes it at the end of a block. */
export class Fence<On, Tx> {
  readonly #driver: Driver<On, Tx>;
  readonly #keeper: Keeper;

  /** @internal */
  constructor(driver: Driver<On, Tx>, { schema, onEvent }: FenceOptions = {}) {
    const prefix = schema === undefined ? "" : `"${sql.checked("schema", schema, "string").replaceAll('"', '""')}".`;
    [this.#driver, this.#keeper] = [driver, new Keeper(driver.open, prefix, onEvent)];
  }

  /** A lease of one name, or of several at once, all or none. Throws LeaseTaken. Held for as long as the work runs, whose
   * result it returns; without work until `release`, or by `await using`. */
  lease(names: Names, options?: LeaseOptions): Promise<Lease<On, Tx>>;
  lease<T>(names: Names, options: LeaseOptions, work: (lease: Lease<On, Tx>) => PromiseLike<T>): Promise<T>;
  async lease(names: Names, options: LeaseOptions = {}, work?: (lease: Lease<On, Tx>) => PromiseLike<unknown>): Promise<unknown> {
    const grant = await this.#keeper.acquire(sql.askedFor(this.#keeper.prefix, names, options), options.signal);
    const lease = new Lease(this.#driver, this.#keeper, grant);
    return work ? this.#during(lease, work) : lease;
  }

  /** A transaction that is guarded by several leases at once. */
  guard<T>(on: On, leases: readonly Lease<On, Tx>[], work: (tx: Tx) => PromiseLike<T>, options?: GuardOptions): Promise<T>;
  guard<T>(query: Query, leases: readonly Lease<On, Tx>[], work: () => PromiseLike<T>, options?: GuardOptions): Promise<T>;
  guard<T>(on: any, leases: readonly Lease<On, Tx>[], work: (tx: Tx) => PromiseLike<T>, options?: GuardOptions): Promise<T> {
    return guardOf(this.#driver, (release) => under(this.#keeper, [...leases], leases.map(grantOf), release))(on, work, options);
  }

  /** A lease that somebody else grants (etcd, ZooKeeper, Redis, another database), under its number there, which is that of
   * one holder: LeaseTaken where another one has adopted it. The holder is this process, unless another one is named. */
  adopted(name: string, token: number | bigint, { holder = sql.PROCESS }: AdoptOptions = {}): Adopted<On, Tx> {
    if (typeof token !== "bigint" && !Number.isSafeInteger(token)) {
      throw new TypeError(`a token is a whole number, above 2^53 a bigint: not ${String(token)}`);
    }
    const keeper = this.#keeper;
    const begins = [sql.guardAdopted(keeper.prefix, sql.checked("the name of a lease", name, "string"), token, sql.holderOf(holder))];
    const ends = [sql.release(keeper.prefix, [name], token)];
    const guard = guardOf(this.#driver, (release) => ({ keeper, leases: [], grants: [], begins, ends: release ? ends : [] }));
    return { name, token, guard };
  }

  /** Does the work whenever this process leads, again after each loss, and returns what it returned; undefined when `stop` was
   * aborted first. */
  async lead<T>(name: string, work: (lease: Lease<On, Tx>) => PromiseLike<T>, { stop, ttl }: LeadOptions = {}): Promise<T | undefined> {
    // If the answer to an acquire was lost, its own holder takes the grant over.
    const options = { ttl, holder: sql.holderOf(), reclaim: true };
    const asked = { ...sql.askedFor(this.#keeper.prefix, name, options), wait: Infinity };
    while (!stop?.aborted) {
      let grant: Grant | undefined;
      try {
        grant = await this.#keeper.acquire(asked, stop);
        const lease = new Lease(this.#driver, this.#keeper, grant);
        return await this.#during(lease, work);
      } catch (error) {
        if (grant === undefined && stop?.aborted) break;
        if (this.#keeper.isClosed || !goesOn(error, grant)) throw error;
        await sleep(asked.ttl / 12, undefined, stop && { signal: stop }).catch(() => {});
      }
    }
    return undefined;
  }

  /** Gives everything back, and ends all waits. */
  close(): Promise<void> { return this.#keeper.close(); }
  [Symbol.asyncDispose](): Promise<void> { return this.close(); }

  /** An error that ends the work is never replaced; where it has none, and the lease is lost, that is told. */
  async #during<T>(lease: Lease<On, Tx>, work: (lease: Lease<On, Tx>) => PromiseLike<T>): Promise<T> {
    // This holds on to the lease, so that it is not collected while the work runs.
    const release = () => lease.release();
    try {
      const result = await work(lease);
      await release();
      if (grantOf(lease).isLost) throw grantOf(lease).lost();
      return result;
    } catch (error) {
      await release();
      throw ofSignal(error);
    }
  }
}

function guardOf<On, Tx>(driver: Driver<On, Tx>, of: (release: boolean) => Under): Guard<On, Tx> {
  return async <T>(on: any, work: (tx: any) => PromiseLike<T>, { release = false }: GuardOptions = {}) => {
    const begins = driver.transaction(on) ?? (typeof on === "function" && !("unsafe" in on) ? () => new OpenTransaction(on) : undefined);
    if (begins) return guarded(of(release), begins, work);
    throw new TypeError(`a guard takes ${driver.takes}, or a function that runs a query in an open transaction: not ${String(on)}`);
  };
}

/** Whether to lead again: after a loss of the lease, the transaction, the connection or the server. */
function goesOn(error: unknown, grant: Grant | undefined): boolean {
  const isLoss = [LeaseTaken, LeaseLost, TransactionLost].some((type) => error instanceof type) || grant?.isLost;
  if (isLoss || Object(error).constructor === FenceError || sessionEnded(error)) return true;
  // While it acquires: the server has no time or place now, or is a standby still.
  if (grant === undefined) return /^(25|40|53|55P03|57|58)/.test(sqlstateOf(error));
  return error instanceof Refused && /^PF00[14]$/.test(error.sqlstate);
}

/** For code that knows nothing of fences: a connection opened with these (`options` of pg, `connection: { options }` of
 * postgres) presents the token in all its transactions. Not through a pooler in transaction mode. */
export function options(lease: { readonly token: number | bigint }): string { return `-c pg_fence.token=${lease.token}`; }
