import { setTimeout as sleep } from "node:timers/promises";

import { keepFrom } from "./acquire.js";
import { LONGEST_TIMER_MS, now, spanMs, type Span } from "./clock.js";
import { intervalInSql } from "./connection.js";
import { LeaseLost, NotSpeaking, type LossReason } from "./errors.js";
import { Holding } from "./holding.js";
import { callOn, registerLease, tokenOf, type Keeper, type Kept } from "./keeper.js";
import { notNegativeMs, ttlMsOf, type LeaseOptions } from "./options.js";

/**
 * A lease that is kept until it is released or lost. `Fence.lease` makes it.
 *
 * When nothing refers to it any more it was forgotten: a warning says so, and it ends at its ttl. Nor does it keep the
 * process alive, unless its `signal` was asked for.
 */
export class Lease<On = never, Tx = never> extends Holding<On, Tx> {
  readonly #kept: Kept;
  /** A release before leaves it to end then. */
  readonly #keptUntil: number;
  #releasing: Promise<void> | undefined;
  #isStopped = false;

  /** @internal */
  constructor(keeper: Keeper<On, Tx>, kept: Kept, { holdAtLeast }: LeaseOptions) {
    super(keeper, kept.names);
    this.#kept = kept;
    this.#keptUntil = holdAtLeast === undefined ? 0 : now() + notNegativeMs("holdAtLeast", holdAtLeast);
    registerLease(this, keeper, kept);
  }

  // What its holder asks

  /** The token that the acquire returned; it serves for as long as the lease is held. */
  get token(): number {
    return this.#kept.token;
  }

  get loss(): LeaseLost | undefined {
    return this.#kept.loss;
  }

  /** Aborted, with a LeaseLost as its reason, at the deadline at the latest, when the lease is lost. */
  get signal(): AbortSignal {
    this.keeper.hear(this.#kept);
    return this.#kept.aborts.signal;
  }

  /** Whether it is ours at this moment, by our own clock. */
  get held(): boolean {
    return this.remainingMs > 0;
  }

  /** How long it is ours if no renewal comes through any more. */
  get remainingMs(): number {
    return this.#isKept ? Math.max(0, this.#kept.deadline - now()) : 0;
  }

  get #isKept(): boolean {
    return this.keeper.has(this.#kept) && this.#releasing === undefined && !this.#isStopped;
  }

  /** Throws LeaseLost when it is ours no more. Before each step that cannot be aborted, and after each await. */
  check(): void {
    if (now() >= this.#kept.deadline) {
      this.lose("deadline");
    }
    if (!this.#isKept) {
      throw this.lost();
    }
  }

  /** Sleeps; throws LeaseLost as soon as the lease is lost, and the reason of `signal` as soon as that is aborted. */
  async wait(span: Span, { signal }: { readonly signal?: AbortSignal | undefined } = {}): Promise<void> {
    const end = now() + spanMs("a wait", span);
    const either = signal === undefined ? this.signal : AbortSignal.any([this.signal, signal]);
    do {
      signal?.throwIfAborted();
      this.check();
      const ms = Math.max(0, Math.min(end - now(), LONGEST_TIMER_MS));
      await sleep(ms, undefined, { signal: either }).catch(() => {});
    } while (now() < end);
    signal?.throwIfAborted();
    this.check();
  }

  /**
   * Renews at once, and returns the new token, which a `strict` table asks for when a row is written again; null when
   * the renewal failed, which is no loss yet. Throws LeaseLost.
   */
  async renew(): Promise<number | null> {
    this.check();
    await this.keeper.renew(this.#kept);
    this.check();
    return this.#kept.renewed;
  }

  /** Gives it back. No error where that fails: then it ends at its ttl. */
  release(): Promise<void> {
    return (this.#releasing ??= this.keeper.release(this.#kept, this.#remainsKeptMs()));
  }

  /**
   * Keeps it no more, and does not release it either: another process goes on with it, by `resume` and this token,
   * before its ttl has passed. Throws LeaseLost.
   */
  async detach(): Promise<number> {
    this.check();
    if (this.#kept.session !== undefined) {
      throw new TypeError("a lease that ends with its session cannot be handed over");
    }
    await this.keeper.pause(this.#kept);
    this.check();
    await (this.#releasing = this.keeper.drop(this.#kept));
    return this.token;
  }

  #remainsKeptMs(): number {
    return Math.max(0, Math.ceil(this.#keptUntil - now()));
  }

  protected lose(reason: LossReason, cause?: unknown): void {
    this.keeper.lose(this.#kept, reason, cause);
  }

  // For the leader

  /** @internal The leader is to end: nothing begins under it any more, and it is given back as soon as no transaction
   * is under way. */
  stop(reason: unknown): void {
    this.#isStopped = true;
    this.#kept.aborts.abort(reason);
    this.#releaseIfFree();
  }

  #releaseIfFree(): void {
    if (this.#isStopped && this.#kept.cuts.size === 0) {
      void this.release();
    }
  }

  // For the transactions under it

  protected override releaseSql(): string {
    return this.keeper.releaseSql(this.#kept, this.#remainsKeptMs());
  }

  /** @internal */
  refuseIfOver(): void {
    this.check();
  }

  /** @internal */
  canMend(error: unknown): boolean {
    return error instanceof NotSpeaking;
  }

  /** @internal */
  async mend(): Promise<boolean> {
    return (await this.renew()) !== null;
  }

  /** @internal */
  override enter(cut: () => void): void {
    super.enter(cut);
    this.#kept.cuts.add(cut);
  }

  /** @internal */
  override leave(cut: () => void): void {
    this.#kept.cuts.delete(cut);
    this.#releaseIfFree();
  }

  /** @internal */
  beatSoon(): void {
    this.keeper.beatSoon(this.#kept);
  }

  /** @internal */
  override pause(): Promise<void> {
    return this.keeper.pause(this.#kept);
  }

  /** @internal */
  override goOn(): void {
    this.keeper.goOn(this.#kept);
  }

  /** @internal */
  async hasBeenReleased(): Promise<void> {
    await (this.#releasing ??= this.keeper.drop(this.#kept));
  }
}

/** Goes on with a lease by a token that another process has handed over. Throws LeaseLost where it has ended. */
export async function resume<On, Tx>(
  keeper: Keeper<On, Tx>,
  names: readonly string[],
  token: number,
  options: LeaseOptions,
): Promise<Lease<On, Tx>> {
  const ttlMs = ttlMsOf(options);
  const renewal = keeper.schema + callOn(names, "lease_renew", `${token}::bigint`, intervalInSql(ttlMs));
  // What was handed over may be a renewal's, which serves for 16 more renewals only.
  const info = keeper.schema + callOn(names.slice(0, 1), "lease_info", "t");
  const first = `(SELECT i.first_token FROM ${info} AS i WHERE i.token = t)`;
  let before = now();
  const [row] = await keeper.rows(ttlMs / 3, () => {
    before = now();
    return `SELECT t AS token, ${first} AS first FROM ${renewal} AS t`;
  });
  if (tokenOf(row?.["token"]) === null) {
    throw new LeaseLost("gone", names);
  }
  const kept = keepFrom(keeper, names, ttlMs, tokenOf(row?.["first"]) ?? token, before, options);
  return new Lease(keeper, kept, options);
}
