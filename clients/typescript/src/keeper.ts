import { setTimeout as sleep } from "node:timers/promises";
import * as sql from "./asked.js";
import { FenceError, LeaseLost, LeaseTaken, NotGranted, NotInstalled, sqlstateOf, type Left, type Reason } from "./errors.js";
import { Keeping, type Answer } from "./keeping.js";
import { Line, within, type Opener, type Row } from "./line.js";
import { now } from "./span.js";

/** In milliseconds: when to look again, for timers stand still while the machine sleeps; the longest call, and portion of a
 * wait, whose snapshot holds back vacuum; how often several names are tried, which have no queue. */
const [LOOK_AGAIN, LONGEST, PORTION, TRY_AGAIN] = [1000, 10_000, 2000, 250];
/** The most for one `lease_keep`; and for a release in one transaction, which has its share of locks. */
const [MOST_PAIRS, MOST_RELEASED] = [10_000, 200];

/** An event for `onEvent`, which must not block. A loss has a `reason`. */
export type LeaseEvent = Readonly<{ kind: Kind; names: readonly string[]; token: number; remaining: Left; reason: Reason | undefined }>;
type Kind = "acquired" | "renewed" | "lost" | "released";

/** A lease that was granted, until it is released or lost: then it has a reason. */
export class Grant {
  reason: Reason | undefined;
  /** Breaks off the transactions that are in a guard of it. Each keeps the leases of its guard from being collected. */
  readonly cuts = new Map<() => void, readonly unknown[]>();
  /** The lease whose signal the program has, so that it is not collected while work goes by the signal alone. */
  lease: unknown;
  readonly aborts = new AbortController();
  /** Its holder knows of its loss, or waits for that, so that the process stays alive. */
  isHeard = false;
  /** The number of the connection that a session lease lives on. */
  session: number | undefined;

  constructor(readonly names: readonly string[], readonly token: number, readonly keeping: Keeping) {}
  get remaining(): Left { return { milliseconds: this.reason === undefined ? Math.max(0, this.keeping.deadline - now()) : 0 }; }
  get isLost(): boolean { return this.reason !== undefined && this.reason !== "released"; }

  lost(cause?: unknown): LeaseLost {
    this.isHeard = true;
    return new LeaseLost(this.reason ?? "deadline", this.names, cause);
  }
}

/** From a role whose transactions are SERIALIZABLE: nothing, and it is to be tried again. */
function unlessSerializable(error: unknown): void {
  if (sqlstateOf(error) !== "40001") throw error;
}

/** Keeps all leases of a fence, by one timer and one connection: they begin with the first lease, and end with the last. */
export class Keeper {
  readonly #grants = new Set<Grant>();
  readonly #line: Line;
  readonly #calls = new Set<Promise<unknown>>();
  #timer: NodeJS.Timeout | undefined;
  #isBeating = false;
  /** The heartbeat fails; and a loss by that is in the log: one line an outage, however many leases there are. */
  #isOut = false;
  #hasTold = false;
  isClosed = false;

  constructor(readonly open: Opener, readonly prefix: string, readonly onEvent: ((event: LeaseEvent) => void) | undefined) {
    this.#line = new Line(open, () => this.#sessionEnded());
  }

  /** Throws LeaseTaken; and the reason of `signal` as soon as that is aborted: a grant that comes all the same is given back. */
  async acquire(asked: sql.Asked, signal?: AbortSignal): Promise<Grant> {
    signal?.throwIfAborted();
    this.#refuseIfClosed();
    // A wait has a connection of its own: the others are renewed meanwhile.
    const line = asked.wait === 0 || asked.session ? this.#line : new Line(this.open);
    const granted = this.#calling(() => this.#acquire(line, asked, signal).finally(() => line === this.#line || line.close()));
    return new Promise((resolve, reject) => {
      const giveUp = () => (reject(signal?.reason), granted.then((grant) => this.release([grant]), () => {}));
      const settled = () => signal?.removeEventListener("abort", giveUp);
      signal?.addEventListener("abort", giveUp);
      granted.then((grant) => (settled(), resolve(grant)), (error) => (settled(), reject(error)));
    });
  }

  /** No error where that fails: then they end at their ttl. */
  release(grants: readonly Grant[]): Promise<void> {
    return this.#calling(async () => {
      const ended = this.end(grants, "released");
      while (ended.length > 0 && (await this.#release(ended.splice(0, MOST_RELEASED))));
    });
  }

  async keep(grants: readonly Grant[]): Promise<void> {
    const [pairs, smallest, before] = [pairsOf(grants), smallestOf(grants), now()];
    const rows: Row[] = [];
    try {
      for (let from = 0; from < pairs.length; from += MOST_PAIRS) {
        const [call, limit] = [sql.keep(this.prefix, pairs.slice(from, from + MOST_PAIRS)), Math.min(smallest / 3, LONGEST)];
        rows.push(...(await this.#calling(() => this.#line.rows(call, limit, { urgent: true, repeats: true }))));
      }
    } catch (error) {
      // The statement itself: trying again cannot help.
      if (error instanceof NotGranted || error instanceof NotInstalled) return void this.end(grants, "refused");
      if (!(error instanceof Error)) throw error;
      grants.forEach(({ keeping }) => keeping.failed(smallest));
      if (!this.#isOut) warn(`leases are not renewed, and it is tried again: ${error.message || String(error)}`);
      this.#isOut = true;
      return;
    }
    this.#isOut = this.#hasTold = false;
    this.#take(grants, rows.map(answerOf), before);
  }

  /** Gives everything back, and ends the waits after their portions. */
  async close(): Promise<void> {
    this.isClosed = true;
    await this.release([...this.#grants]);
    await within(3 * LOOK_AGAIN, Promise.allSettled(this.#calls), () => {}).catch(() => {});
    await this.#line.close();
  }

  /** Ends the statement that this session is running, if it is one. */
  cancel(session: unknown): void {
    const call = [`SELECT pg_cancel_backend($1::text::integer)`, String(session)] as const;
    if (session !== undefined) this.#calling(() => this.#line.rows(call, LOOK_AGAIN)).catch(() => {});
  }

  /** Throws LeaseLost where it is over, whatever the heartbeat does. */
  check(grant: Grant): void {
    if (now() >= grant.keeping.deadline) this.end([grant], "deadline");
    if (grant.reason !== undefined) throw grant.lost();
  }

  /** Has the next renewal tell whether they are lost. */
  beatSoon(grants: readonly Grant[]): void {
    grants.forEach(({ keeping }) => (keeping.beatAt = -Infinity));
    this.#plan();
  }

  hear(grant: Grant, lease: unknown): void {
    grant.isHeard = true;
    if (grant.reason === undefined) grant.lease = lease;
    this.#plan();
  }

  /** Returns those that were not over before. */
  end(grants: readonly Grant[], reason: Reason): Grant[] {
    const ended = grants.filter((grant) => grant.reason === undefined);
    ended.forEach((grant) => this.#grants.delete(Object.assign(grant, { reason, lease: undefined })));
    if (ended.length > 0 && reason !== "released") {
      ended.forEach(({ aborts, names }) => aborts.abort(new LeaseLost(reason, names)));
      ended.forEach(({ cuts }) => [...cuts.keys()].forEach((cut) => cut()));
      const byOutage = this.#isOut && reason === "deadline";
      if (!byOutage || !this.#hasTold) warn(`${allOf(ended)} lost (${reason})`);
      this.#hasTold = byOutage;
      this.tell("lost", ended);
    }
    this.#plan();
    return ended;
  }

  tell(kind: Kind, grants: readonly Grant[]): void {
    for (const { names, token, remaining, reason } of this.onEvent ? grants : []) {
      try { this.onEvent?.({ kind, names, token, remaining, reason }); } catch (error) { warn(`onEvent failed: ${error}`); }
    }
  }

  async #acquire(line: Line, asked: sql.Asked, signal: AbortSignal | undefined): Promise<Grant> {
    const until = now() + asked.wait;
    for (;;) {
      const before = now();
      const limit = line === this.#line ? this.#limit(asked.ttl) : Math.min(asked.ttl / 3, LONGEST);
      // A session lease waits on the connection that keeps the others.
      const portion = Math.max(0, Math.min(until - before, PORTION, asked.session ? limit : PORTION));
      const answer = await line.rows(asked.call(portion), portion + limit).catch(unlessSerializable);
      const [token, holder, remaining] = answer?.[0] ?? [];
      if (typeof token === "string") {
        const grant = new Grant(asked.names, numberOf(token), new Keeping(before, asked.ttl));
        if (asked.session) grant.session = line.session;
        return this.#granted(grant);
      }
      if (answer && (now() >= until || signal?.aborted || this.isClosed)) {
        const left = remaining ? { milliseconds: Number(remaining) * 1000 } : undefined;
        throw new LeaseTaken(asked.names, holder ?? undefined, left);
      }
      if (asked.names.length > 1) await sleep(Math.max(0, Math.min(until - now(), TRY_AGAIN)));
    }
  }

  async #granted(grant: Grant): Promise<Grant> {
    // Where the call has waited, the server counts from a later moment.
    if (now() > grant.keeping.beatAt) {
      await this.keep([grant]).catch(async (error) => {
        await this.release([grant]);
        throw error;
      });
    }
    if (this.isClosed) await this.release([grant]);
    if (grant.reason === undefined) {
      this.#grants.add(grant);
      this.#sessionEnded();
      this.#plan();
    }
    this.check(grant);
    this.tell("acquired", [grant]);
    return grant;
  }

  /** In one transaction. Whether the server could be asked at all. */
  async #release(grants: readonly Grant[]): Promise<boolean> {
    const limit = this.#limit(smallestOf(grants));
    const call = sql.releaseAside(this.prefix, pairsOf(grants), limit / 4);
    for (const until = now() + limit; ; await sleep(limit / 4)) {
      try {
        this.#released(grants, [...(await this.#calling(() => this.#line.rows(call, limit, { repeats: true })))]);
        return true;
      } catch (error) {
        // Somebody's open transaction has changed one of them.
        const isLocked = ["55P03", "40001"].includes(sqlstateOf(error));
        if (isLocked && grants.length > 1) return (await Promise.all(grants.map((one) => this.#release([one])))).every(Boolean);
        if (isLocked && now() < until) continue;
        warn(`${allOf(grants)} not released, and ends at its ttl: ${error}`);
        return sqlstateOf(error) !== "";
      }
    }
  }

  #released(grants: readonly Grant[], answers: Row[]): void {
    for (const grant of grants) {
      if (answers.splice(0, grant.names.length).some(([closing]) => closing === null)) {
        grant.reason = "gone";
        warn(`${allOf([grant])} lost (gone)`);
      }
      this.tell(grant.isLost ? "lost" : "released", [grant]);
    }
  }

  #take(grants: readonly Grant[], answers: Answer[], before: number): void {
    const gotOn = answers.some(({ outcome }) => outcome === "kept");
    const losses: Partial<Record<Reason, Grant[]>> = {};
    let from = 0;
    for (const grant of grants) {
      const mine = answers.slice(from, (from += grant.names.length));
      const reason = grant.keeping.answered(mine, before, gotOn);
      if (reason !== undefined) (losses[reason] ??= []).push(grant);
      else if (grant.reason === undefined && mine.every(({ outcome }) => outcome === "kept")) this.tell("renewed", [grant]);
    }
    Object.entries(losses).forEach(([reason, lost]) => this.end(lost, reason as Reason));
  }

  /** How long a call may take: a third of that ttl and of all that are kept. */
  #limit(ttl: number): number { return Math.min(LONGEST, ttl / 3, smallestOf([...this.#grants]) / 3); }
  #refuseIfClosed(): void { if (this.isClosed) throw new FenceError("the fence is closed"); }

  /** Each call on the connection is one: when the last has ended, and no lease is left, that is closed. */
  async #calling<T>(work: () => Promise<T>): Promise<T> {
    ACTIVE.add(this);
    // Not before it is known to be under way.
    const call = Promise.resolve().then(work);
    this.#calls.add(call);
    return call.finally(() => {
      this.#calls.delete(call);
      this.#plan();
    });
  }

  #plan(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    if (this.#grants.size > 0) {
      const at = now();
      let [next, isHeard] = [at + LOOK_AGAIN, false];
      for (const grant of this.#grants) {
        next = Math.min(next, grant.keeping.deadline, this.#isBeating ? Infinity : grant.keeping.dueAt);
        isHeard ||= grant.isHeard;
      }
      this.#timer = setTimeout(() => this.#look(), Math.max(0, Math.ceil(next - at)));
      // A lease alone does not keep the process alive, at whose end it is released.
      if (!isHeard) this.#timer.unref();
    } else if (this.#calls.size === 0) {
      ACTIVE.delete(this);
      void this.#line.close();
    }
  }

  /** Tells losses at the deadline, wherever the heartbeat hangs, and has it begin. */
  #look(): void {
    const at = now();
    this.end([...this.#grants].filter(({ keeping }) => keeping.deadline <= at), "deadline");
    if (!this.#isBeating && [...this.#grants].some(({ keeping }) => keeping.dueAt <= at)) void this.#beat(at);
    this.#plan();
  }

  async #beat(at: number): Promise<void> {
    this.#isBeating = true;
    try {
      await this.keep([...this.#grants].filter(({ keeping }) => keeping.dueAt <= at + keeping.ttl / 6));
    } catch (error) {
      warn(`what kept the leases has died: ${error}`);
      this.end([...this.#grants], "keeper");
    }
    this.#isBeating = false;
    this.#plan();
  }

  #sessionEnded(): void {
    const { session } = this.#line;
    this.end([...this.#grants].filter((grant) => (grant.session ?? session) !== session), "session");
  }
}

/** Tokens stay below 2^53 for longer than anybody will care: a number is exact. */
function numberOf(token: string | null | undefined): number {
  const number = Number(token);
  if (Number.isSafeInteger(number)) return number;
  throw new RangeError(`a token that no number of JavaScript holds exactly: ${token}`);
}

function answerOf([outcome, remaining, againIn]: Row): Answer {
  const againMs = typeof againIn === "string" ? Number(againIn) * 1000 : undefined;
  return { outcome: `${outcome}`, remaining: Number(remaining) * 1000, againIn: againMs };
}

const pairsOf = (all: readonly Grant[]) => all.flatMap(({ names, token }) => names.map((name) => [name, token] as const));
const smallestOf = (all: readonly Grant[]) => all.reduce((smallest, { keeping: { ttl } }) => Math.min(smallest, ttl), Infinity);

function allOf(grants: readonly Grant[]): string {
  const [names, more] = [grants.slice(0, 5).flatMap((grant) => grant.names), grants.length > 5 ? ` and ${grants.length - 5} more` : ""];
  return `${grants.length > 1 ? "leases are" : "the lease is"} ${names.join(", ")}${more}:`;
}

export function warn(what: string): void { process.emitWarning(what, "pg_fence"); }

/** The keepers that have a lease, or are about to. A process that ends normally gives it back. */
const ACTIVE = new Set<Keeper>();
process.on("beforeExit", () => ACTIVE.forEach((keeper) => void keeper.close()));
