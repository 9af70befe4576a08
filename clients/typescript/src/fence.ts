import { Acquire, toldOfAcquire, uniqueHolder } from "./acquire.js";
import { Adopted, type AdoptOptions, type AdoptSpec } from "./adopted.js";
import { claim, type ClaimOptions } from "./claim.js";
import type { Driver } from "./connection.js";
import type { Query } from "./guarded.js";
import { transact, type Ending, type Holding } from "./holding.js";
import type { Hooks } from "./hooks.js";
import { Keeper } from "./keeper.js";
import { lead, type LeadOptions } from "./lead.js";
import { Lease, resume } from "./lease.js";
import { observe, type Leader, type ObserveOptions } from "./observe.js";
import { namesOf, type LeaseOptions } from "./options.js";

/** How a fence finds the extension, and who is told what it does. */
export interface FenceOptions {
  /** The extension's schema, where that is not in the search path. */
  readonly schema?: string | undefined;
  /** For measuring and tracing. */
  readonly hooks?: Partial<Hooks> | undefined;
}

/** How somebody goes on with a lease. */
export type ResumeOptions = Pick<LeaseOptions, "ttl" | "holdAtMost" | "holdAtLeast">;

/**
 * Where leases come from. All that are held have one connection together, opened with the first and closed with the last.
 * One that ends with its session keeps another, and so does an acquire while it waits.
 */
export class Fence<On, Tx> {
  readonly #keeper: Keeper<On, Tx>;

  /** @internal */
  constructor(driver: Driver<On, Tx>, { schema, hooks }: FenceOptions = {}) {
    const prefix = schema === undefined ? "" : `"${schema.replaceAll('"', '""')}".`;
    this.#keeper = this.makeKeeper(driver, prefix, hooks);
  }

  protected makeKeeper(driver: Driver<On, Tx>, schema: string, hooks: Partial<Hooks> | undefined): Keeper<On, Tx> {
    return new Keeper(driver, schema, hooks);
  }

  /**
   * A lease of one name, or of several at once, all or none. Null: it is taken, and stayed so for as long as we
   * waited. Throws AcquireTimeout where the server does not answer.
   *
   *     await using lease = await fence.lease("order:7", { ttl: { seconds: 30 } });
   */
  lease(names: string | readonly string[], options?: LeaseOptions): Promise<Lease<On, Tx> | null>;
  lease(...names: [string, string, ...string[]]): Promise<Lease<On, Tx> | null>;
  lease(...namesAndOptions: [string, string, ...string[], LeaseOptions]): Promise<Lease<On, Tx> | null>;
  async lease(...given: unknown[]): Promise<Lease<On, Tx> | null> {
    const [names, options] = split(given);
    if (names.length > 1 && (options.shared || options.reclaim || (options.slots ?? 1) !== 1)) {
      throw new TypeError("several names at once are exclusive: no shared, slots or reclaim");
    }
    if (options.session && options.holdAtLeast !== undefined) {
      throw new TypeError("a lease that ends with its session cannot be held beyond that: no holdAtLeast");
    }
    const acquire = new Acquire(this.#keeper, names, options);
    const attributes = { "pg_fence.lease": names.join(",") };
    const kept = await this.#keeper.hooks.span("pg_fence.acquire", attributes, () => acquire.take());
    return kept === null ? null : new Lease(this.#keeper, kept, options);
  }

  /**
   * Goes on with a lease by a token of it that another process has handed over (`lease.detach()`). It is renewed at once.
   * Throws LeaseLost where it has ended.
   */
  async resume(
    names: string | readonly string[],
    token: number,
    options: ResumeOptions = {},
  ): Promise<Lease<On, Tx>> {
    if (!Number.isSafeInteger(token)) {
      throw new TypeError(`a token is a whole number, and not ${String(token)}`);
    }
    const all = namesOf([names]);
    try {
      return await resume(this.#keeper, all, token, options);
    } catch (error) {
      throw toldOfAcquire(all, error);
    }
  }

  /**
   * The first `n` leases that are free among a query's rows, in their order; the query's first column is the lease's
   * name. Each lease has its `row`. What the query saw may be over: look again inside of the guard.
   *
   *     await fence.claim("SELECT 'job:' || id, id FROM jobs WHERE NOT done ORDER BY id", [], 10);
   */
  async claim(
    query: string,
    parameters: readonly unknown[],
    n: number,
    options: ClaimOptions = {},
  ): Promise<Lease<On, Tx>[]> {
    const claimed = await claim(this.#keeper, query, parameters, n, options);
    return claimed.map(([kept, row]) => {
      const lease = new Lease(this.#keeper, kept, options);
      lease.row = row;
      return lease;
    });
  }

  /**
   * Makes a lease known that somebody else has granted (etcd, ZooKeeper, Redis, another database), under the number
   * that it has there. Null: a transaction guards an older one, and did so for as long as we waited; then that one has
   * ended all the same, and it is to be tried again.
   *
   * Throws StaleToken where the name has had a greater number, or this one was released.
   */
  async adopt(name: string, token: number | bigint, options: AdoptOptions = {}): Promise<Adopted<On, Tx> | null> {
    const { holder = uniqueHolder(), metadata, wait = { seconds: 0 }, signal } = options;
    const adopted = this.makeAdopted(this.#keeper, { names: namesOf([name]), token, holder, metadata });
    return (await adopted.adopt(wait, signal)) ? adopted : null;
  }

  protected makeAdopted(keeper: Keeper<On, Tx>, spec: AdoptSpec): Adopted<On, Tx> {
    return new Adopted(keeper, spec);
  }

  /** One transaction that guards several leases, as `Lease.guard` does: all of it lands, or nothing. */
  guard<T>(leases: readonly Holding<On, Tx>[], on: On, work: (tx: Tx) => Promise<T>, options?: Ending): Promise<T>;
  guard<T>(leases: readonly Holding<On, Tx>[], on: Query, work: () => Promise<T>, options?: Ending): Promise<T>;
  guard<T>(
    leases: readonly Holding<On, Tx>[],
    on: On | Query,
    work: (tx: Tx) => Promise<T>,
    options?: Ending,
  ): Promise<T> {
    return transact(leases, "guard", on, work, options);
  }

  /**
   * Runs `work` while leading, again after each loss, and returns what it returned once it came to its end; undefined
   * when `signal` ended it. The signal that the work is given is aborted by both, a loss and the end.
   */
  lead<T>(
    name: string,
    work: (lease: Lease<On, Tx>, signal: AbortSignal) => Promise<T>,
    options: LeadOptions = {},
  ): Promise<T | undefined> {
    return lead(this, name, work, options);
  }

  /** Who holds that lease: now, and at each change, by looking each second. Ends with its `signal`, or with the loop.
   *
   *     for await (const leader of fence.observe("scheduler")) console.log(leader.holder);
   */
  observe(name: string, options?: ObserveOptions): AsyncGenerator<Leader, void, undefined> {
    return observe(this.#keeper, name, options);
  }
}

/** The names, and the options where they come last. */
function split(given: readonly unknown[]): [string[], LeaseOptions] {
  const last = given.at(-1);
  const hasOptions = given.length > 1 && (last === undefined || (Object(last) === last && !Array.isArray(last)));
  const names = namesOf(hasOptions ? given.slice(0, -1) : given);
  return [names, ((hasOptions ? last : undefined) ?? {}) as LeaseOptions];
}
