import { randomUUID } from "node:crypto";
import { hostname } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";

import { LONGEST_TIMER_MS, LOOK_AGAIN_MS, now, spanMs, type Span } from "./clock.js";
import { literal, OwnConnection } from "./connection.js";
import { isPermanent, LeaseLost, NotSpeaking, type LossReason } from "./errors.js";
import { Holding, log, type Place } from "./holding.js";

/** How a lease is asked for. */
export interface LeaseOptions {
  /** How long it is held without a renewal: 30 s. */
  readonly ttl?: Span;
  /** How long to wait in line for it. */
  readonly wait?: Span;
  /** What the view of all leases shows as its holder; by default a text that is unique for each call. */
  readonly holder?: string;
  /** Anything that has a JSON. */
  readonly metadata?: unknown;
  readonly shared?: boolean;
  readonly slots?: number;
  /** The lease ends with its session, too. Not through a pooler. */
  readonly session?: boolean;
  /** Where `holder` has it already, it gets a new grant at once. */
  readonly reclaim?: boolean;
  /** Gives the waiting up. */
  readonly signal?: AbortSignal | undefined;
}

/** What a lease is made from. */
export interface Spec<On, Tx> extends LeaseOptions, Place<On, Tx> {}

/** What the view of all leases shows as the holder, unless one is named. */
export function uniqueHolder(): string {
  return `${hostname()}/${process.pid}/${randomUUID().slice(0, 8)}`;
}

/**
 * A lease that is kept by a connection of its own, until it is released or lost. `Fence.lease` makes it.
 */
export class Lease<On = never, Tx = never> extends Holding<On, Tx> {
  /** The token that the acquire returned; it serves for as long as the lease is held. */
  token = 0;
  protected readonly own: OwnConnection;
  /** On the clock of `now`. */
  protected deadline = -Infinity;
  /** The holder wants it to end. */
  protected isEnding = false;
  readonly #spec: Spec<On, Tx>;
  readonly #ttlMs: number;
  readonly #waitMs: number;
  /** Between two renewals, and how long a call may take. */
  readonly #thirdMs: number;
  readonly #aborts = new AbortController();
  readonly #cuts = new Set<() => void>();
  #isHeld = false;
  #nextBeat = Infinity;
  #timer: NodeJS.Timeout | undefined;
  #beating: Promise<void> | undefined;
  #pauses = 0;
  #renewed: number | null = null;
  #releasing: Promise<void> | undefined;
  /** Its release was part of a transaction of the holder's. */
  #isReleased = false;

  constructor(spec: Spec<On, Tx>) {
    super(spec);
    this.#spec = spec;
    this.#ttlMs = spanMs("ttl", spec.ttl ?? { seconds: 30 });
    this.#waitMs = spanMs("wait", spec.wait ?? { seconds: 0 });
    if (this.#ttlMs <= 0 || this.#waitMs < 0) {
      throw new RangeError("a ttl is longer than nothing, and a wait not shorter");
    }
    this.#thirdMs = this.#ttlMs / 3;
    this.own = new OwnConnection(() => spec.driver.connection());
  }

  // What its holder asks

  /** Aborted, with a LeaseLost as its reason, at the deadline at the latest, when the lease is lost. */
  get signal(): AbortSignal {
    return this.#aborts.signal;
  }

  /** Whether it is ours at this moment, by our own clock. */
  get held(): boolean {
    return this.remainingMs > 0;
  }

  /** How long it is ours if no renewal comes through any more. */
  get remainingMs(): number {
    return this.#isHeld && this.loss === undefined ? Math.max(0, this.deadline - now()) : 0;
  }

  /** Throws LeaseLost when it is ours no more. Before each step that cannot be aborted, and after each await. */
  check(): void {
    if (now() >= this.deadline) {
      this.lose("deadline");
    }
    if (this.loss !== undefined || !this.#isHeld) {
      throw this.lost();
    }
  }

  /** Sleeps; throws LeaseLost as soon as the lease is lost. */
  async wait(span: Span): Promise<void> {
    const end = now() + spanMs("a wait", span);
    do {
      this.check();
      const ms = Math.max(0, Math.min(end - now(), LONGEST_TIMER_MS));
      await sleep(ms, undefined, { signal: this.signal }).catch(() => {});
    } while (now() < end);
    this.check();
  }

  /**
   * Renews at once, and returns the new token, which a `strict` table asks for when a row is written again; null when
   * the renewal failed, which is no loss yet. Throws LeaseLost.
   */
  async renew(): Promise<number | null> {
    this.check();
    // The one that is under way may have been judged before what the caller knows.
    await this.#beating;
    this.#renewed = null;
    await this.#beatNow();
    this.check();
    return this.#renewed;
  }

  /** Gives it back. No error where that fails: then it ends at its ttl. */
  release(): Promise<void> {
    this.isEnding = true;
    return (this.#releasing ??= this.#giveBack());
  }

  // Acquire

  /** @internal Whether the lease could be had. */
  async acquire(): Promise<boolean> {
    const signal = this.#spec.signal;
    try {
      return await this.own.cancelledBy(signal, async () => {
        const taken = await this.#take();
        if (signal?.aborted) {
          // The grant came all the same.
          await this.release();
          throw signal.reason;
        }
        return taken;
      });
    } catch (error) {
      await this.own.close(this.#thirdMs);
      throw error;
    }
  }

  async #take(): Promise<boolean> {
    let before = now();
    let token = tokenOf(await this.#ask());
    this.token = token ?? 0;
    // After a wait in line the server counts from a later moment than we do: a renewal mends that.
    while (token !== null && now() >= before + this.#thirdMs && !this.#spec.signal?.aborted) {
      before = now();
      token = await this.askToRenew();
    }
    if (token === null) {
      await this.own.close(this.#thirdMs);
      return false;
    }
    this.#isHeld = true;
    this.countsFrom(before, token);
    this.#plan();
    return true;
  }

  async #ask(): Promise<unknown> {
    const { shared = false, slots = 1, reclaim = false, session = false, metadata } = this.#spec;
    const holder = literal(this.#spec.holder ?? uniqueHolder());
    const ttl = `'${this.#ttlMs} milliseconds'::interval`;
    const json = metadata === undefined ? "NULL" : literal(JSON.stringify(metadata));
    if (this.names.length === 1) {
      const wait = `'${this.#waitMs} milliseconds'::interval`;
      const kind = `${shared}, ${slots}, ${reclaim}, ${session}`;
      const call = `lease_acquire(${this.nameInSql()}, ${holder}, ${ttl}, ${wait}, ${json}::jsonb, ${kind})`;
      return this.own.call(this.#thirdMs + this.#waitMs, this.sql(call));
    }
    const call = `lease_acquire_all(${this.nameInSql()}, ${holder}, ${ttl}, ${json}::jsonb, ${session})`;
    const until = now() + this.#waitMs;
    for (;;) {
      const token = await this.own.call(this.#thirdMs, this.sql(call));
      if (token !== null || now() >= until) {
        return token;
      }
      // The server has no line to wait in for several at once.
      await sleep(Math.min(250, Math.max(0, until - now())), undefined, { signal: this.#spec.signal });
    }
  }

  // The heartbeat and the watch

  /** Looks whether the lease is lost or a renewal is due, and when to look again. */
  #plan(): void {
    clearTimeout(this.#timer);
    if (!this.#isHeld) {
      return;
    }
    this.watch();
    const mayBeat = this.#beating === undefined && this.#pauses === 0 && !this.isEnding;
    if (mayBeat && this.loss === undefined && now() >= this.#nextBeat) {
      void this.#beatNow();
    }
    if (this.loss === undefined) {
      const next = Math.min(this.deadline, mayBeat ? this.#nextBeat : Infinity);
      const ms = Math.max(1, Math.min(Math.ceil(next - now()), LOOK_AGAIN_MS));
      this.#timer = setTimeout(() => this.#plan(), ms);
    }
  }

  /** Tells a loss at the deadline, wherever the heartbeat hangs. */
  protected watch(): void {
    if (now() >= this.deadline) {
      this.lose("deadline");
    }
  }

  #beatNow(): Promise<void> {
    this.#nextBeat = Infinity;
    return (this.#beating ??= this.beat().finally(() => {
      this.#beating = undefined;
      this.#plan();
    }));
  }

  protected async beat(): Promise<void> {
    const reusesConnection = this.own.isOpen;
    const before = now();
    let token: number | null;
    try {
      token = await this.askToRenew();
    } catch (error) {
      const isGone = reusesConnection && !this.own.isOpen;
      if (isGone && !this.#spec.session && !this.isEnding && this.loss === undefined) {
        // The connection had ended unseen since the last time: a new one may do at once.
        return this.beat();
      }
      return this.#beatFailed(error);
    }
    if (token === null) {
      this.lose("gone");
    } else {
      this.countsFrom(before, token);
    }
  }

  protected async askToRenew(): Promise<number | null> {
    return tokenOf(await this.own.callWithin(this.#thirdMs, this.onNames("lease_renew")));
  }

  /** Granted or renewed by a call that was begun at `before`: from there the ttl counts. */
  protected countsFrom(before: number, token: number): void {
    this.deadline = before + this.#ttlMs;
    this.#nextBeat = before + this.#thirdMs;
    this.#renewed = token;
  }

  /** No loss yet where trying again can help: the deadline tells. */
  #beatFailed(error: unknown): void {
    log("the lease %s was not renewed: %s", this.names[0], error);
    if (isPermanent(error)) {
      this.lose("denied", error);
    } else if (this.#spec.session && !this.own.isOpen) {
      this.lose("session", error);
    }
    this.#nextBeat = now() + this.#thirdMs / 4;
  }

  protected lose(reason: LossReason, cause?: unknown): void {
    if (!this.#isHeld || this.loss !== undefined) {
      return;
    }
    this.loss = new LeaseLost(reason, this.names, cause);
    log("%s", this.loss.message);
    // What still works under it ends here, wherever it hangs.
    this.#cuts.forEach((cut) => cut());
    if (reason === "deadline") {
      this.own.cut();
    }
    this.#aborts.abort(this.loss);
    // Nothing is left of it, even if its holder never looks at it again.
    void this.release();
  }

  async #giveBack(): Promise<void> {
    await this.#beating;
    if (this.#isHeld && this.loss === undefined && !this.#isReleased) {
      try {
        if ((await this.own.callWithin(this.#thirdMs, this.onNames("lease_release"))) === null) {
          this.lose("gone");
        }
      } catch (error) {
        log("the lease %s was not released, and ends at its ttl: %s", this.names[0], error);
      }
    }
    this.#isHeld = false;
    clearTimeout(this.#timer);
    await this.own.close(this.#thirdMs);
  }

  // For the transactions under it

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
    this.#cuts.add(cut);
  }

  /** @internal */
  override leave(cut: () => void): void {
    this.#cuts.delete(cut);
  }

  /** @internal */
  beatSoon(): void {
    this.#nextBeat = -Infinity;
    this.#plan();
  }

  /** @internal */
  override async pause(): Promise<void> {
    this.#pauses += 1;
    await this.#beating;
  }

  /** @internal */
  override goOn(): void {
    this.#pauses -= 1;
    this.#plan();
  }

  /** @internal */
  async hasBeenReleased(): Promise<void> {
    this.#isReleased = true;
    await this.release();
  }
}

/** Tokens stay below 2^53 for longer than anybody will care: a number is exact. */
function tokenOf(value: unknown): number | null {
  const token = value === null || value === undefined ? null : Number(value);
  if (token !== null && !Number.isSafeInteger(token)) {
    throw new RangeError(`a token that no number of JavaScript can hold: ${String(value)}`);
  }
  return token;
}
