import { LOOK_AGAIN_MS, now } from "./clock.js";
import { intervalInSql, literal, OwnConnection, TimedOut, valueOf, type Driver, type Limits, type Row } from "./connection.js";
import { isPermanent, LeaseLost, sqlstateIn, type LossReason } from "./errors.js";
import { NO_HOOKS, tellHook, type Hooks } from "./hooks.js";
import { log } from "./log.js";

/** How many names are renewed by one statement: each takes a place in the server's lock table. */
const LARGEST_BATCH = 500;

/** As long as nothing is held, a call takes no longer than a third of the usual ttl. */
const LIMIT_MS = 10_000;

/** How long a release that is held up waits before it is tried again. */
const RELEASE_AGAIN_MS = 250;

/**
 * A lease as it is kept. What its holder has in hand is a `Lease`: once that is garbage nobody can release it, and it is
 * kept no more.
 */
export class Kept {
  /** On the clock of `now`. */
  deadline = -Infinity;
  nextBeat = Infinity;
  /** What the latest renewal has returned; null where it failed. */
  renewed: number | null = null;
  loss: LeaseLost | undefined;
  /** Its renewal failed, and not for the others: it is renewed by itself until that succeeds. */
  isApart = false;
  /** Its holder wants no more renewals: it ends. */
  isEnding = false;
  /** Renewals that would wait for a release in a transaction of the holder's. */
  pauses = 0;
  /** From then on it is not renewed. */
  renewedUntil = Infinity;
  /** The statement that renews it. */
  sending: Promise<unknown> | undefined;
  /** Those who wait for a renewal that begins from now on. */
  waiting: (() => void)[] = [];
  /** Its own connection: it ends with that session. */
  session: OwnConnection | undefined;
  /** What a loss breaks off. */
  readonly cuts = new Set<() => void>();
  readonly aborts = new AbortController();
  /** Somebody listens to the signal of its loss: so the process is to stay alive. */
  isHeard = false;
  readonly thirdMs: number;
  /** In the order of the server's text, for everybody locks in that order. */
  readonly key: Buffer;

  constructor(readonly names: readonly string[], readonly ttlMs: number, public token: number) {
    this.thirdMs = ttlMs / 3;
    this.key = Buffer.from(names[0] ?? "");
  }

  /** Granted or renewed by a call that was begun at `before`: from there the ttl counts. */
  countsFrom(before: number, token: number): void {
    this.deadline = before + this.ttlMs;
    this.nextBeat = before + this.thirdMs;
    this.renewed = token;
    this.isApart = false;
  }

  mayBeRenewed(at: number): boolean {
    return this.pauses === 0 && !this.isEnding && at < this.renewedUntil;
  }

  /** Whether it is to be renewed at that time, or will be so long after it. */
  isDue(at: number, soonMs = 0): boolean {
    return this.mayBeRenewed(at) && (this.nextBeat <= at + soonMs || this.waiting.length > 0);
  }
}

/**
 * Keeps all leases of a client: one connection, open while there is something to do, and one timer.
 *
 * Renewals that are due go first, all of them by one statement; all else stands in line behind.
 */
export class Keeper<On = unknown, Tx = unknown> {
  readonly hooks: Hooks;
  readonly #kept = new Set<Kept>();
  readonly #own: OwnConnection;
  readonly #jobs: (() => Promise<void>)[] = [];
  /** Who looks at a lease of others now and then. */
  #lookers = 0;
  #serving: Promise<void> | undefined;
  #timer: NodeJS.Timeout | undefined;

  /** `schema` stands in front of the name of a function. */
  constructor(
    readonly driver: Driver<On, Tx>,
    readonly schema: string,
    hooks: Partial<Hooks> = {},
  ) {
    this.#own = new OwnConnection((onEnd) => driver.connection(onEnd));
    this.hooks = { ...NO_HOOKS, ...hooks };
  }

  /** Whether something is left: a lease, a timer, a connection. */
  get isIdle(): boolean {
    return this.#kept.size === 0 && this.#serving === undefined && this.#timer === undefined && !this.#own.isOpen;
  }

  // What it keeps

  add(kept: Kept): void {
    this.#kept.add(kept);
    ACTIVE.add(this);
    this.#own.hurry(kept.thirdMs);
    this.#plan();
  }

  has(kept: Kept): boolean {
    return this.#kept.has(kept);
  }

  /** Ends without a word to the server. When nothing is left, the connection is closed. */
  async drop(kept: Kept): Promise<void> {
    kept.isEnding = true;
    this.#kept.delete(kept);
    kept.waiting.splice(0).forEach((tell) => tell());
    const session = kept.session;
    kept.session = undefined;
    this.#plan();
    await session?.close(kept.thirdMs);
    await this.#settled();
  }

  /** Renews it at once, or fails to. */
  async renew(kept: Kept): Promise<void> {
    if (this.has(kept) && kept.mayBeRenewed(now())) {
      kept.renewed = null;
      const done = new Promise<void>((resolve) => kept.waiting.push(resolve));
      this.#plan();
      await done;
    }
  }

  /** The signal of its loss is somebody's: the process stays alive for it. */
  hear(kept: Kept): void {
    if (!kept.isHeard && this.has(kept)) {
      kept.isHeard = true;
      this.#plan();
    }
  }

  /** Nobody has it in hand any more: it is not renewed, and ends at its deadline. */
  forget(kept: Kept): void {
    if (this.has(kept) && !kept.isEnding) {
      kept.isEnding = true;
      warn(kept, "was forgotten: nothing refers to it, and nobody has released it");
      this.#plan();
    }
  }

  /** Gives it back, or leaves it until `keptMs` more have passed. */
  async release(kept: Kept, keptMs: number): Promise<void> {
    if (this.has(kept)) {
      try {
        await this.#giveBack(kept, keptMs);
      } catch (error) {
        log("the lease %s was not released, and ends at its ttl: %s", kept.names[0], error);
      }
      await this.drop(kept);
    }
    await this.#settled();
  }

  async #giveBack(kept: Kept, keptMs: number): Promise<void> {
    const until = now() + kept.thirdMs;
    for (;;) {
      try {
        let isAgain = false;
        const answer = await this.ask(kept.thirdMs, (again) => {
          isAgain = again;
          // Only now: in the line of a thousand it is renewed still.
          kept.isEnding = true;
          return this.releaseSql(kept, keptMs);
        });
        // The answer to the first may have been lost.
        if (answer === null && !isAgain && kept.loss === undefined) {
          this.lose(kept, "gone");
        }
        return;
      } catch (error) {
        if (sqlstateIn(error) !== "55P03" || now() >= until) {
          throw error;
        }
        // Somebody's open transaction has changed it, or our own.
        await new Promise((resolve) => setTimeout(resolve, RELEASE_AGAIN_MS));
      }
    }
  }

  lose(kept: Kept, reason: LossReason, cause?: unknown): void {
    if (!this.has(kept)) {
      return;
    }
    kept.loss = new LeaseLost(reason, kept.names, cause);
    log("%s", kept.loss.message);
    tellHook(() => this.hooks.lost(kept.loss as LeaseLost));
    // What still works under it ends here, wherever it hangs.
    kept.cuts.forEach((cut) => cut());
    kept.aborts.abort(kept.loss);
    // Nothing is left of it, even if its holder never looks at it again.
    void this.drop(kept);
    if (reason === "deadline" && this.#kept.size === 0 && this.#jobs.length === 0) {
      this.#own.cut();
    }
  }

  /** Waits for a renewal that is under way, and has no other begin. */
  async pause(kept: Kept): Promise<void> {
    kept.pauses += 1;
    await kept.sending;
  }

  goOn(kept: Kept): void {
    kept.pauses -= 1;
    this.#plan();
  }

  beatSoon(kept: Kept): void {
    kept.nextBeat = -Infinity;
    this.#plan();
  }

  // What is asked on its connection

  /**
   * The only value of a statement, in a transaction of its own. Where its connection had ended unseen it is asked once
   * more, on a new one, with what `sql(true)` says, if it says something.
   */
  async ask(limitMs: number, sql: (isAgain: boolean) => string | undefined): Promise<unknown> {
    return valueOf(await this.rows(limitMs, sql)) ?? null;
  }

  rows(limitMs: number, sql: (isAgain: boolean) => string | undefined): Promise<readonly Row[]> {
    return new Promise((resolve, reject) => {
      this.#jobs.push(() => this.#twice(limitMs, sql).then(resolve, reject));
      this.#own.hurry(limitMs);
      void this.#serve();
    });
  }

  async #twice(limitMs: number, sql: (isAgain: boolean) => string | undefined): Promise<readonly Row[]> {
    const wasOpen = this.#own.isOpen;
    try {
      return await this.#own.callWithin(this.#limits(limitMs), sql(false) ?? "");
    } catch (error) {
      const again = wasOpen && !this.#own.isOpen && !(error instanceof TimedOut) ? sql(true) : undefined;
      if (again === undefined) {
        throw error;
      }
      return this.#own.callWithin(this.#limits(limitMs), again);
    }
  }

  /** Nobody's call may keep the lease with the shortest ttl from its renewal. */
  #limits(limitMs: number): Limits {
    let callMs = limitMs;
    for (const kept of this.#kept) {
      callMs = Math.min(callMs, kept.thirdMs);
    }
    return { callMs, lockMs: Math.max(10, callMs / 80) };
  }

  /** The connection stays open for somebody who asks now and then. */
  startLooking(): void {
    this.#lookers += 1;
  }

  async stopLooking(): Promise<void> {
    this.#lookers -= 1;
    await this.#settled();
  }

  /** Where nothing is left to be done the connection is closed. */
  async #settled(): Promise<void> {
    if (this.#isDone()) {
      await this.#serve();
    }
  }

  // The heartbeat and the watch

  /** Looks whether a lease is lost or renewals are due, and when to look again. */
  #plan(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    this.watch();
    const at = now();
    let next = Infinity;
    let isDue = false;
    let isHeard = false;
    for (const kept of this.#kept) {
      isHeard ||= kept.isHeard && !kept.isEnding;
      isDue ||= kept.isDue(at);
      next = Math.min(next, kept.deadline, kept.mayBeRenewed(at) && kept.nextBeat > at ? kept.nextBeat : Infinity);
    }
    if (isDue) {
      void this.#serve();
    }
    if (this.#kept.size > 0) {
      const ms = Math.max(1, Math.min(Math.ceil(next - now()), LOOK_AGAIN_MS));
      this.#timer = setTimeout(() => this.#plan(), ms);
      // A lease alone does not keep the process alive, for it may be forgotten. Who waits for its loss does.
      if (!isHeard) {
        this.#timer.unref();
      }
    } else {
      ACTIVE.delete(this);
    }
  }

  /** Tells losses at the deadline, wherever the heartbeat hangs. */
  protected watch(): void {
    const at = now();
    for (const kept of this.#kept) {
      if (at >= kept.deadline) {
        this.lose(kept, "deadline");
      }
    }
  }

  #isDone(): boolean {
    return this.#kept.size === 0 && this.#jobs.length === 0 && this.#lookers === 0;
  }

  /** Does what there is to do, one after the other. It never fails. */
  #serve(): Promise<void> {
    return (this.#serving ??= this.#serveAll());
  }

  async #serveAll(): Promise<void> {
    // Only then is it known to be under way.
    await Promise.resolve();
    do {
      for (let next = this.#next(); next !== undefined; next = this.#next()) {
        await next();
      }
      // A caller that has just been granted a lease is about to have it kept.
      await new Promise(setImmediate);
      if (this.#isDone()) {
        await this.#own.close(LIMIT_MS);
      }
    } while (this.#next(false) !== undefined);
    this.#serving = undefined;
  }

  /** Renewals that are due, or the oldest of the others. */
  #next(take = true): (() => Promise<void>) | undefined {
    const due = this.#due();
    return due.length > 0 ? () => this.beat(due) : take ? this.#jobs.shift() : this.#jobs[0];
  }

  /** If a renewal is due, all that will be due soon: so leases of one ttl beat together from then on. */
  #due(): Kept[] {
    const at = now();
    for (const kept of this.#kept) {
      if (kept.isDue(at)) {
        return [...this.#kept].filter((other) => other.isDue(at, other.isApart ? 0 : other.thirdMs / 4));
      }
    }
    return [];
  }

  /** Renews them, each with an answer of its own. */
  protected async beat(due: readonly Kept[]): Promise<void> {
    for (const batch of batches(due)) {
      await this.#renewAll(batch);
    }
    this.#plan();
  }

  async #renewAll(all: readonly Kept[], mayTryAgain = true): Promise<void> {
    const before = now();
    const batch = all.filter((kept) => this.has(kept) && kept.mayBeRenewed(before));
    if (batch.length === 0) {
      return;
    }
    const wasOpen = this.#own.isOpen;
    const asked = batch.flatMap((kept) => kept.waiting.splice(0));
    batch.forEach((kept) => (kept.nextBeat = Infinity));
    try {
      const sent = this.askToRenew(batch);
      const settled = sent.then(() => {}, () => {});
      batch.forEach((kept) => (kept.sending = settled));
      const tokens = await sent;
      batch.forEach((kept) => this.#answered(kept, before, tokens.get(kept.token) ?? null));
    } catch (error) {
      if (wasOpen && !this.#own.isOpen && mayTryAgain) {
        // The connection had ended unseen since the last time: a new one may do at once.
        await this.#renewAll(batch, false);
      } else if (batch.length > 1 && this.#own.isOpen && !isOfServer(error)) {
        // Somebody holds one of them, or may not renew it: the others need not wait.
        for (const part of this.divide(batch)) {
          await this.#renewAll(part);
        }
      } else {
        batch.forEach((kept) => this.#failed(kept, error, batch.length === 1 && this.#own.isOpen));
      }
    } finally {
      batch.forEach((kept) => (kept.sending = undefined));
      asked.forEach((tell) => tell());
    }
  }

  /** Their new tokens by their old ones: null where the lease is lost. */
  protected async askToRenew(batch: readonly Kept[]): Promise<ReadonlyMap<number, number | null>> {
    const [one] = batch;
    const limits = this.#limits(Math.min(...batch.map((kept) => kept.thirdMs)));
    if (one !== undefined && one.names.length > 1) {
      const sql = `SELECT ${this.schema}${callOn(one.names, "lease_renew", `${one.token}::bigint`)} AS renewed`;
      const [row] = await this.#own.callWithin(limits, sql);
      return new Map([[one.token, tokenOf(row?.["renewed"])]]);
    }
    const names = `ARRAY[${batch.map((kept) => literal(kept.names[0] ?? "")).join(", ")}]::text[]`;
    const tokens = `ARRAY[${batch.map((kept) => kept.token).join(", ")}]::bigint[]`;
    const each = `unnest(${names}, ${tokens}) AS x(name, token)`;
    const sql = `SELECT x.token, ${this.schema}lease_renew(x.name, x.token) AS renewed FROM ${each}`;
    const rows = await this.#own.callWithin(limits, sql);
    return new Map(rows.map((row) => [Number(row["token"]), tokenOf(row["renewed"])]));
  }

  /** What is tried of a batch whose statement failed: its halves, until who has spoilt it stands alone. */
  protected divide(batch: readonly Kept[]): readonly (readonly Kept[])[] {
    const half = Math.ceil(batch.length / 2);
    return [batch.slice(0, half), batch.slice(half)];
  }

  #answered(kept: Kept, before: number, token: number | null): void {
    if (token === null) {
      this.lose(kept, "gone");
    } else if (this.has(kept)) {
      this.countsFrom(kept, before, token);
    }
  }

  protected countsFrom(kept: Kept, before: number, token: number): void {
    kept.countsFrom(before, token);
  }

  /** No loss yet where trying again can help: the deadline tells. */
  #failed(kept: Kept, error: unknown, isAlone: boolean): void {
    log("the lease %s was not renewed: %s", kept.names[0], error);
    if (isPermanent(error)) {
      this.lose(kept, "denied", error);
    }
    kept.isApart = isAlone;
    kept.nextBeat = now() + kept.thirdMs / 4;
  }

  // Its SQL

  releaseSql(kept: Kept, keptMs: number): string {
    const token = `${kept.token}::bigint`;
    const call = keptMs > 0
      ? callOn(kept.names, "lease_renew", token, intervalInSql(keptMs))
      : callOn(kept.names, "lease_release", token);
    return `SELECT ${this.schema}${call}`;
  }

  /** @internal */
  warnOfAll(): void {
    for (const kept of this.#kept) {
      if (!kept.isEnding) {
        warn(kept, "was never released: it ends at its ttl");
      }
    }
  }
}

/** Tokens stay below 2^53 for longer than anybody will care: a number is exact. */
export function tokenOf(value: unknown): number | null {
  const token = value === null || value === undefined ? null : Number(value);
  if (token !== null && !Number.isSafeInteger(token)) {
    throw new RangeError(`a token that no number of JavaScript can hold: ${String(value)}`);
  }
  return token;
}

/** A call of that function on one name, or of its form for several, with further arguments. */
export function callOn(names: readonly string[], call: string, ...others: readonly string[]): string {
  const all = names.map(literal);
  const [form, name] = all.length > 1 ? ["_all", `ARRAY[${all.join(", ")}]::text[]`] : ["", `${all[0]}::text`];
  return `${call}${form}(${[name, ...others].join(", ")})`;
}

/** What one statement renews. What is apart may wait for somebody, and comes last. */
function batches(due: readonly Kept[]): Kept[][] {
  const isAlone = (kept: Kept) => kept.isApart || kept.names.length > 1;
  const together = due.filter((kept) => !isAlone(kept)).sort((a, b) => Buffer.compare(a.key, b.key));
  const all: Kept[][] = [];
  for (let from = 0; from < together.length; from += LARGEST_BATCH) {
    all.push(together.slice(from, from + LARGEST_BATCH));
  }
  const alone = due.filter(isAlone).sort((a, b) => Number(a.isApart) - Number(b.isApart));
  return [...all, ...alone.map((kept) => [kept])];
}

/** Whether it is the whole server's, so that each lease's renewal would fail so: a standby, too many connections, a
 * shutdown. */
function isOfServer(error: unknown): boolean {
  return /^(25006|53...|57P..|58...)$/.test(sqlstateIn(error) ?? "");
}

// What is forgotten

/** Those that keep a lease. */
const ACTIVE = new Set<Keeper<any, any>>();

process.on("beforeExit", () => ACTIVE.forEach((keeper) => keeper.warnOfAll()));

const FORGOTTEN = new FinalizationRegistry<() => void>((tell) => tell());

/** Notices that nothing refers to that lease any more. */
export function registerLease(lease: object, keeper: Keeper<any, any>, kept: Kept): void {
  FORGOTTEN.register(lease, () => keeper.forget(kept));
}

const WARNED = new WeakSet<Kept>();

function warn(kept: Kept, what: string): void {
  if (!WARNED.has(kept)) {
    WARNED.add(kept);
    process.emitWarning(`the lease ${kept.names.join(", ")} ${what}`, { type: "ResourceWarning", code: "PG_FENCE" });
  }
}
