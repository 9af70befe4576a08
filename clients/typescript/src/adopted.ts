import type { Span } from "./clock.js";
import { intervalInSql, jsonInSql, literal, OwnConnection, valueOf } from "./connection.js";
import { classify, FenceError, LeaseLost, NotInstalled, NotSpeaking, sqlstateIn, StaleToken, type LossReason } from "./errors.js";
import { Holding } from "./holding.js";
import { callOn, type Keeper } from "./keeper.js";
import { log } from "./log.js";
import { notNegativeMs } from "./options.js";

/** How long a call may take beside its wait: a third of the usual ttl, for an adopted lease has none. */
const LIMIT_MS = 10_000;

/** How a lease is adopted. */
export interface AdoptOptions {
  /** How long to wait for transactions that guard an older number. */
  readonly wait?: Span;
  /** What the view of all leases shows as its holder; by default a text that is unique for each call. */
  readonly holder?: string;
  /** Anything that has a JSON. */
  readonly metadata?: unknown;
  /** Gives the waiting up. */
  readonly signal?: AbortSignal | undefined;
}

/** What an adopted lease is made from. */
export interface AdoptSpec {
  readonly names: readonly string[];
  readonly token: number | bigint;
  readonly holder: string;
  readonly metadata: unknown;
}

/**
 * A lease that somebody else grants, known here under the number that it has there. `Fence.adopt` makes it.
 *
 * There is no heartbeat, no deadline and no connection: nothing has to be closed. As a block (`await using`) it is
 * released at the end; the same number is refused from then on.
 */
export class Adopted<On = never, Tx = never> extends Holding<On, Tx> {
  readonly token: number | bigint;
  loss: LeaseLost | undefined;
  readonly #spec: AdoptSpec;
  #isOver = false;
  #releasing: Promise<void> | undefined;

  /** @internal */
  constructor(keeper: Keeper<On, Tx>, spec: AdoptSpec) {
    super(keeper, spec.names);
    if (typeof spec.token === "number" && !Number.isSafeInteger(spec.token)) {
      throw new RangeError(`no number of JavaScript holds ${spec.token} exactly: take a bigint`);
    }
    this.token = spec.token;
    this.#spec = spec;
  }

  /** @internal Makes the number known; false where an older one is guarded still. */
  async adopt(wait: Span, signal?: AbortSignal): Promise<boolean> {
    const waitMs = notNegativeMs("wait", wait);
    const sql = `SELECT ${this.#adoption(intervalInSql(waitMs))}`;
    const adopted = await this.#call((own) => own.cancelledBy(signal, () => own.call(LIMIT_MS + waitMs, sql)));
    const isKnown = (adopted ?? null) !== null;
    this.isInDoubt &&= !isKnown;
    return isKnown;
  }

  /** Gives it back: the number is refused from then on. No error where that fails: then it stays until a greater one
   * is adopted. */
  release(): Promise<void> {
    return (this.#releasing ??= this.#giveBack());
  }

  async #giveBack(): Promise<void> {
    if (this.#isOver) {
      return;
    }
    this.#isOver = true;
    try {
      const rows = await this.#call((own) => own.callWithin({ callMs: LIMIT_MS }, this.releaseSql()));
      if ((valueOf(rows) ?? null) === null) {
        this.lose("gone");
      }
    } catch (error) {
      log("the lease %s was not released: %s", this.names[0], error);
    }
  }

  async #call<T>(call: (own: OwnConnection) => Promise<T>): Promise<T> {
    const own = new OwnConnection((onEnd) => this.keeper.driver.connection(onEnd));
    try {
      return await call(own);
    } catch (error) {
      const told = classify(error);
      throw told instanceof StaleToken || told instanceof NotInstalled ? told : error;
    } finally {
      await own.close(LIMIT_MS);
    }
  }

  #adoption(wait: string): string {
    const { holder, metadata } = this.#spec;
    const others = [`${this.token}::bigint`, literal(holder), wait, jsonInSql(metadata)];
    return this.sql(callOn(this.names, "lease_adopt", ...others));
  }

  protected lose(reason: LossReason, cause?: unknown): void {
    this.loss ??= new LeaseLost(reason, this.names, cause);
    log("%s", this.loss.message);
  }

  // For the transactions under it

  /** @internal */
  override guardSql(): string {
    // Each transaction makes the number known: a failover may have lost it, and then silences it in any case.
    return this.sql(callOn(this.names, "lease_guard", `(SELECT ${this.#adoption("NULL")})`));
  }

  /** @internal */
  refuseIfOver(): void {
    if (this.#isOver || this.loss !== undefined) {
      throw this.lost();
    }
  }

  /** @internal A guard's own adoption was NULL (22004), or cannot be relied on in its transaction, at REPEATABLE READ
   * (55000); in a transaction of its own it can. */
  canMend(error: unknown): boolean {
    return error instanceof NotSpeaking || /^(22004|55000)$/.test(sqlstateIn(error) ?? "");
  }

  /** @internal */
  async mend(): Promise<boolean> {
    if (!(await this.adopt({ seconds: 0 }))) {
      throw new FenceError(`the lease ${this.names[0]} is taken: a transaction guards an older number`);
    }
    return true;
  }

  /** @internal */
  beatSoon(): void {
    this.isInDoubt = true;
  }

  /** @internal */
  async hasBeenReleased(): Promise<void> {
    this.#isOver = true;
  }
}
