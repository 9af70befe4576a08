import { setTimeout as sleep } from "node:timers/promises";

import { Adopted, type AdoptOptions, type AdoptSpec } from "./adopted.js";
import { spanMs, type Span } from "./clock.js";
import type { Driver } from "./connection.js";
import { classify, isPermanent, LeaseLost, NotSpeaking, StaleToken } from "./errors.js";
import { Lease, uniqueHolder, type LeaseOptions, type Spec } from "./lease.js";

/** How a fence finds the extension. */
export interface FenceOptions {
  /** The extension's schema, where that is not in the search path. */
  readonly schema?: string;
}

/** How somebody leads. */
export interface LeadOptions {
  readonly ttl?: Span;
  /** Ends it. */
  readonly signal?: AbortSignal;
}

/** Where leases come from. Each has one connection of its own while it is held. */
export class Fence<On, Tx> {
  readonly #driver: Driver<On, Tx>;
  readonly #schema: string;

  constructor(driver: Driver<On, Tx>, options: FenceOptions = {}) {
    this.#driver = driver;
    this.#schema = options.schema === undefined ? "" : `"${options.schema.replaceAll('"', '""')}".`;
  }

  /**
   * A lease of one name, or of several at once, all or none. Null: it is taken, and stayed so for as long as we
   * waited.
   *
   *     await using lease = await fence.lease("order:7", { ttl: { seconds: 30 } });
   */
  async lease(names: string | readonly string[], options: LeaseOptions = {}): Promise<Lease<On, Tx> | null> {
    const all = typeof names === "string" ? [names] : [...names];
    if (all.length === 0) {
      throw new TypeError("a lease needs a name");
    }
    if (all.length > 1 && (options.shared || options.reclaim || (options.slots ?? 1) !== 1)) {
      throw new TypeError("several names at once are exclusive: no shared, slots or reclaim");
    }
    const lease = this.make({ ...options, names: all, driver: this.#driver, schema: this.#schema });
    return (await lease.acquire()) ? lease : null;
  }

  protected make(spec: Spec<On, Tx>): Lease<On, Tx> {
    return new Lease(spec);
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
    const place = { names: [name], driver: this.#driver, schema: this.#schema };
    const adopted = this.makeAdopted({ ...place, token, holder, metadata });
    return (await adopted.adopt(wait, signal)) ? adopted : null;
  }

  protected makeAdopted(spec: AdoptSpec<On, Tx>): Adopted<On, Tx> {
    return new Adopted(spec);
  }

  /**
   * Runs `work` while leading, again after each loss, and returns what it returned once it came to its end; undefined
   * when `signal` ended it. The signal that the work is given is aborted by both, a loss and the end.
   */
  async lead<T>(
    name: string,
    work: (lease: Lease<On, Tx>, signal: AbortSignal) => Promise<T>,
    options: LeadOptions = {},
  ): Promise<T | undefined> {
    const { ttl = { seconds: 30 }, signal } = options;
    const ttlMs = spanMs("ttl", ttl);
    // Whoever never saw the answer to an acquire takes the grant over by its own unique name.
    const wait = { milliseconds: Math.min(Math.max(ttlMs / 3, 1000), 10_000) };
    const request = { ttl, wait, holder: uniqueHolder(), reclaim: true, signal };
    while (!signal?.aborted) {
      let lease: Lease<On, Tx> | null = null;
      try {
        lease = await this.lease(name, request);
        const result = lease === null ? undefined : await workWith(lease, work, signal);
        await lease?.release();
        if (lease !== null && lease.loss === undefined) {
          return result;
        }
      } catch (error) {
        if (isEnd(error, signal)) {
          return undefined;
        }
        if (!goesOn(lease, error)) {
          throw error;
        }
        await lease?.release();
        await sleep(ttlMs / 12, undefined, { signal }).catch(() => {});
      } finally {
        await lease?.release();
      }
    }
    return undefined;
  }
}

async function workWith<On, Tx, T>(
  lease: Lease<On, Tx>,
  work: (lease: Lease<On, Tx>, signal: AbortSignal) => Promise<T>,
  end: AbortSignal | undefined,
): Promise<T> {
  const both = new AbortController();
  const signals = [lease.signal, end].filter((signal) => signal !== undefined);
  const abort = () => both.abort(signals.find((signal) => signal.aborted)?.reason);
  signals.forEach((signal) => signal.addEventListener("abort", abort));
  try {
    return await work(lease, both.signal);
  } finally {
    signals.forEach((signal) => signal.removeEventListener("abort", abort));
  }
}

/** Whether it is the end that was asked for, as `fetch` or a timer tells it. */
function isEnd(error: unknown, signal: AbortSignal | undefined): boolean {
  return signal?.aborted === true && (error === signal.reason || (error as Error | null)?.cause === signal.reason);
}

/** Whether whoever leads tries again: the lease was lost, or the server could not be reached to acquire it. */
function goesOn(lease: Lease<never, never> | Lease<any, any> | null, error: unknown): boolean {
  if (lease === null) {
    return !isPermanent(error) && !(error instanceof TypeError) && !(error instanceof RangeError);
  }
  const told = classify(error);
  return (
    lease.loss !== undefined || told instanceof LeaseLost || told instanceof StaleToken || told instanceof NotSpeaking
  );
}
