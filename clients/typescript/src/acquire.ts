import { randomUUID } from "node:crypto";
import { hostname } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";

import { now } from "./clock.js";
import { intervalInSql, jsonInSql, literal, OwnConnection, TimedOut } from "./connection.js";
import { AcquireTimeout, classify, NotInstalled } from "./errors.js";
import { callOn, Kept, tokenOf, type Keeper } from "./keeper.js";
import { notNegativeMs, ttlMsOf, type LeaseOptions } from "./options.js";

/** There is no line to wait in for several at once. */
const TRY_AGAIN_MS = 250;

/** What the view of all leases shows as the holder, unless one is named. */
export function uniqueHolder(): string {
  return `${hostname()}/${process.pid}/${randomUUID().slice(0, 8)}`;
}

/** One acquire. */
export class Acquire {
  readonly ttlMs: number;
  readonly #waitMs: number;
  readonly #thirdMs: number;
  readonly #holder: string;
  /** When the call was begun that has granted it. */
  #before = -Infinity;

  constructor(
    readonly keeper: Keeper,
    readonly names: readonly string[],
    readonly options: LeaseOptions,
  ) {
    this.ttlMs = ttlMsOf(options);
    this.#waitMs = notNegativeMs("wait", options.wait ?? { seconds: 0 });
    this.#thirdMs = this.ttlMs / 3;
    this.#holder = options.holder ?? uniqueHolder();
  }

  /** The lease, kept from then on; null where it is taken. */
  async take(): Promise<Kept | null> {
    const { signal } = this.options;
    signal?.throwIfAborted();
    try {
      const isTry = this.#waitMs === 0 && !this.options.session;
      const kept = isTry ? await this.#try() : await this.#onItsOwn();
      if (kept !== null && signal?.aborted) {
        // The grant came all the same.
        await this.keeper.release(kept, 0);
        throw signal.reason;
      }
      return kept;
    } catch (error) {
      throw signal?.aborted ? signal.reason : toldOfAcquire(this.names, error);
    }
  }

  async #try(): Promise<Kept | null> {
    // A grant whose answer was lost is known by its holder, where that is ours alone.
    const canAskAgain = this.options.holder === undefined && this.names.length === 1;
    const answer = await this.keeper.ask(this.#thirdMs, (isAgain) => {
      this.#before = now();
      return isAgain && !canAskAgain ? undefined : this.#sql(0, this.options.reclaim || isAgain);
    });
    return this.#kept(tokenOf(answer));
  }

  /** Waits in line on a connection of its own, which stays the lease's where it is to end with its session. */
  async #onItsOwn(): Promise<Kept | null> {
    let kept: Kept | null = null;
    const ends = () => {
      if (kept?.session === own) {
        this.keeper.lose(kept, "session");
      }
    };
    const own = new OwnConnection((onEnd) => this.keeper.driver.connection(onEnd), ends);
    try {
      kept = this.#kept(await own.cancelledBy(this.options.signal, () => this.#granted(own)));
      return kept;
    } finally {
      if (kept === null || !this.options.session) {
        await own.close(this.#thirdMs);
      } else {
        kept.session = own;
        if (!own.isOpen) {
          ends();
        }
      }
    }
  }

  async #granted(own: OwnConnection): Promise<number | null> {
    this.#before = now();
    const first = tokenOf(await this.#ask(own));
    // After a wait in line the server counts from a later moment than we do: a renewal mends that.
    for (let token = first; token !== null && now() >= this.#before + this.#thirdMs; ) {
      if (this.options.signal?.aborted) {
        break;
      }
      this.#before = now();
      const renew = callOn(this.names, "lease_renew", `${first}::bigint`);
      token = tokenOf(await own.call(this.#thirdMs, `SELECT ${this.keeper.schema}${renew}`));
      if (token === null) {
        return null;
      }
    }
    return first;
  }

  async #ask(own: OwnConnection): Promise<unknown> {
    const { reclaim = false, signal } = this.options;
    if (this.names.length === 1) {
      return own.call(this.#thirdMs + this.#waitMs, this.#sql(this.#waitMs, reclaim));
    }
    const until = now() + this.#waitMs;
    for (;;) {
      this.#before = now();
      const token = await own.call(this.#thirdMs, this.#sql(0, false));
      if (token !== null || now() >= until) {
        return token;
      }
      await sleep(Math.min(TRY_AGAIN_MS, Math.max(0, until - now())), undefined, { signal });
    }
  }

  #sql(waitMs: number, reclaim: boolean | undefined): string {
    const { shared = false, slots = 1, session = false, metadata } = this.options;
    const [holder, ttl, json] = [literal(this.#holder), intervalInSql(this.ttlMs), jsonInSql(metadata)];
    const kind = `${shared}, ${Number(slots)}, ${reclaim ?? false}, ${session}`;
    const others = this.names.length > 1 ? [json, `${session}`] : [intervalInSql(waitMs), json, kind];
    return `SELECT ${this.keeper.schema}${callOn(this.names, "lease_acquire", holder, ttl, ...others)}`;
  }

  #kept(token: number | null): Kept | null {
    if (token === null) {
      return null;
    }
    return keepFrom(this.keeper, this.names, this.ttlMs, token, this.#before, this.options);
  }
}

/** Keeps a lease that a call begun at `before` has granted. */
export function keepFrom(
  keeper: Keeper,
  names: readonly string[],
  ttlMs: number,
  token: number,
  before: number,
  { holdAtMost }: LeaseOptions,
): Kept {
  const kept = new Kept(names, ttlMs, token);
  kept.renewedUntil = holdAtMost === undefined ? Infinity : now() + notNegativeMs("holdAtMost", holdAtMost);
  kept.countsFrom(before, token);
  keeper.add(kept);
  return kept;
}

/** What is told of an acquire that failed. */
export function toldOfAcquire(names: readonly string[], error: unknown): unknown {
  if (error instanceof TimedOut) {
    const what = `nothing was heard of the server in time, so the acquire of ${names.join(", ")} was broken off`;
    return new AcquireTimeout(what, { cause: error.cause });
  }
  const told = classify(error);
  return told instanceof NotInstalled ? told : error;
}
