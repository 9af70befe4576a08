import { HeartbeatConnection, within, type Opener, type Row } from "./connection.js";
import { codeOfOpening, LeaseLost, sessionEnded, sqlstateOf } from "./errors.js";
import { toldOfAcquire, toldOfCall } from "./errors.js";
import type { Left, Reason } from "./errors.js";
import { LeaseStates, NEVER } from "./lease_state.js";
import type {
  Ask,
  CallEffect,
  Effect,
  EventEffect,
  LogEffect,
  Reply,
  Rows,
  Taken,
} from "./lease_state.js";
import { now } from "./span.js";
import type { LeaseRow, Statement, Statements } from "./statements.js";

/** In milliseconds: the shortest time for a connection to open, and the longest for a statement. */
const [OPENING, LONGEST] = [2_000, 10_000];
/** The most names in a line of the log. */
const MOST_NAMES = 5;

/** An event for `onEvent`, which must not block. A loss has a `reason`; a release that the server
 * has not confirmed has `unconfirmed`. `interrupted` is of `lead`: it leads no more, and goes on. */
export type LeaseEvent = Readonly<{
  kind: "acquired" | "renewed" | "lost" | "released" | "interrupted";
  names: readonly string[];
  token: number;
  remaining: Left;
  reason: Reason | undefined;
}>;

/** A lease that is held, until it is over. The heartbeat refers to this, and not to the lease of
 * the program, so that a lease that the program has forgotten can be collected. */
export class Holding {
  over: Reason | undefined;
  advice: string | undefined;
  /** Breaks off the transactions that are in a guard of it. Each keeps the leases of its guard from
   * being collected. */
  readonly cuts = new Map<() => void, readonly unknown[]>();
  /** The lease whose signal the program has, so that it is not collected while work goes by the
   * signal alone. */
  lease: unknown;
  readonly aborts = new AbortController();
  /** Its holder knows of its loss, or waits for that. */
  isHeard = false;
  /** Those who wait for its next renewal, or its end. */
  readonly waiting: (() => void)[] = [];

  /** Of a row lease. */
  readonly row: LeaseRow | undefined;

  constructor(
    readonly key: string,
    readonly names: readonly string[],
    readonly token: number,
    { table, names: [row = ""] }: Ask,
  ) {
    this.row = table === undefined ? undefined : { table, key: row, token };
  }

  get isLost(): boolean {
    return this.over !== undefined && this.over !== "released";
  }

  lost(cause?: unknown): LeaseLost {
    this.isHeard = true;
    return new LeaseLost(this.over ?? "released", this.names, cause, this.advice);
  }

  /** Waits for a renewal or the end. */
  next(): Promise<void> {
    return new Promise((go) => (this.over === undefined ? this.waiting.push(go) : go()));
  }
}

/** An acquire that is under way, and the error of its last call. */
interface Acquire {
  readonly ask: Ask;
  /** Of a row lease, the table and the key. */
  readonly names: readonly string[];
  settle(reply: Reply, holding: Holding | undefined): void;
  cause?: unknown;
  role?: string | undefined;
}

const clock = () => Math.floor(now());

/** Keeps all leases of a fence. It gives the inputs to LeaseStates, which decides, and carries out
 * the effects: it has the clock, the timer and the connections. */
export class Heartbeat {
  /** The pauses of clients differ. */
  readonly spread = Math.floor(Math.random() * 1001);
  readonly #states = new LeaseStates(this.spread);
  readonly #holdings = new Map<string, Holding>();
  /** Those whose loss somebody waits for, so that the process stays alive. */
  readonly #heard = new Set<Holding>();
  readonly #acquires = new Map<string, Acquire>();
  readonly #connections = new Map<number, HeartbeatConnection>();
  readonly #ending = new Set<Promise<void>>();
  #lastId = 0;
  #lastError: unknown;
  #timer: NodeJS.Timeout | undefined;
  /** Events and answers, which are told in their order, after the effects were carried out. */
  readonly #toTell: (() => void)[] = [];
  #isTelling = false;
  /** The leases that the input has ended, for the log. */
  #ended: [reason: Reason | undefined, names: readonly string[]][] = [];
  #done: () => void = () => {};
  readonly #closed = new Promise<void>((done) => (this.#done = done));

  constructor(
    readonly open: Opener,
    readonly statements: Statements,
    readonly onEvent: ((event: LeaseEvent) => void) | undefined,
  ) {}

  /** Gives an input to the states, and carries out what comes of it: the answer to a call, if any. */
  #input(decide: (states: LeaseStates) => void, answered?: number): void {
    this.#ended = [];
    const at = clock();
    const effects = this.#states.step(at, () => decide(this.#states), answered);
    for (const effect of effects) this.#carryOut(effect);
    this.#plan(at);
    this.#tellAll();
  }

  #tellAll(): void {
    if (this.#isTelling) return;
    this.#isTelling = true;
    for (let tell = this.#toTell.shift(); tell; tell = this.#toTell.shift()) tell();
    this.#isTelling = false;
  }

  #plan(at: number): void {
    clearTimeout(this.#timer);
    const next = this.#states.wake(at);
    if (next === NEVER) return void ACTIVE.delete(this);
    ACTIVE.add(this);
    this.#timer = setTimeout(() => this.#input(() => {}), next - at);
    // A lease alone does not keep the process alive, at whose end it is released.
    if (this.#heard.size === 0 && !this.#states.isWaitedFor) this.#timer.unref();
  }

  #carryOut(effect: Effect): void {
    if ("call" in effect) void this.#run(effect);
    else if ("cut" in effect) this.#forget(effect.cut)?.cut();
    else if ("hangUp" in effect) this.#hangUp(this.#forget(effect.hangUp));
    else if ("event" in effect) this.#event(effect);
    else if ("reply" in effect) this.#reply(effect);
    else if ("closed" in effect) this.#done();
    else this.#log(effect);
  }

  #forget(number: number): HeartbeatConnection | undefined {
    const connection = this.#connections.get(number);
    this.#connections.delete(number);
    return connection;
  }

  #hangUp(connection: HeartbeatConnection | undefined): void {
    const ending = connection?.hangUp() ?? Promise.resolve();
    this.#ending.add(ending);
    void ending.then(() => this.#ending.delete(ending));
  }

  #event({ event: kind, key, token, remaining, reason, advice }: EventEffect): void {
    if (kind === "acquired") {
      const { names, ask } = this.#acquires.get(key) as Acquire;
      this.#holdings.set(key, new Holding(key, names, token, ask));
    }
    const holding = this.#holdings.get(key) as Holding;
    if (kind === "lost" || kind === "released") {
      this.#holdings.delete(key);
      this.#heard.delete(holding);
      this.#ended.push([reason, holding.names]);
      holding.over = kind === "lost" ? reason : "released";
      [holding.advice, holding.lease] = [advice, undefined];
    }
    if (kind !== "acquired") for (const go of holding.waiting.splice(0)) go();
    if (kind === "lost") {
      const loss = new LeaseLost(reason ?? "gone", holding.names, undefined, advice);
      this.#toTell.push(() => holding.aborts.abort(loss));
      this.#toTell.push(() => {
        for (const cut of [...holding.cuts.keys()]) cut();
      });
    }
    const left = { milliseconds: remaining };
    this.tell({ kind, names: holding.names, token, remaining: left, reason }, true);
  }

  /** Tells an event, in its order. */
  tell(event: LeaseEvent, isLater = false): void {
    if (!this.onEvent) return;
    this.#toTell.push(() => {
      try {
        this.onEvent?.(event);
      } catch (error) {
        warn(`onEvent failed: ${error}`);
      }
    });
    if (!isLater) this.#tellAll();
  }

  #reply(reply: Reply): void {
    const acquire = this.#acquires.get(reply.reply);
    this.#acquires.delete(reply.reply);
    const holding = reply.leases && this.#holdings.get(reply.reply);
    if (acquire) this.#toTell.push(() => acquire.settle(reply, holding));
  }

  #log({ log, key = "", code, reason }: LogEffect): void {
    if (log === "not renewed") {
      return warn(`leases are not renewed, and it is tried again: ${this.#lastError}`);
    }
    if (log === "not acquired") {
      const cause = this.#acquires.get(key)?.cause ?? code;
      return warn(`no lease could be acquired, and it is tried again: ${cause}`);
    }
    const why = log === "lost" ? reason : "unconfirmed";
    const names = this.#ended.flatMap(([reason, names]) => (reason === why ? names : []));
    const more = names.length > MOST_NAMES ? ` and ${names.length - MOST_NAMES} more` : "";
    const all = `${names.slice(0, MOST_NAMES).join(", ")}${more}`;
    warn(`${names.length > 1 ? "leases are" : "the lease is"} ${log} (${why}): ${all}`);
  }

  // Calls.

  async #run(call: CallEffect): Promise<void> {
    const { call: number, open } = call;
    const acquire = this.#acquires.get(call.for ?? "");
    if (acquire) acquire.cause = undefined;
    const statement = this.#statement(call, acquire);
    const on = open ? this.#connection(call.on) : this.#connections.get(call.on);
    let [isOpen, answer]: [boolean, ReturnType<typeof read>?] = [!open];
    try {
      if (open) {
        await on?.open(this.open, Math.max(call.limit, OPENING));
        isOpen = true;
        this.#input((states) => states.sent(number), number);
      } else {
        // An end that has come already is read first.
        if (on) on.isToSend = true;
        await new Promise(setImmediate);
        if (on) on.isToSend = false;
      }
      if (!open && on?.isEnded !== false) {
        return this.#input((states) => states.failed(number, "unsent", true), number);
      }
      answer = read(call, (await on?.rows(statement)) ?? []);
    } catch (error) {
      const isEnded = on?.isEnded !== false || sessionEnded(error);
      const word = sqlstateOf(error) || (isEnded ? "ended" : "unreadable");
      const isThrown = error instanceof Error;
      const code = isThrown ? (isOpen ? word : codeOfOpening(error)) : "panicked";
      this.#lastError = error;
      if (acquire) [acquire.cause, acquire.role] = [error, on?.role];
      return this.#input((states) => states.failed(number, code, on?.isEnded), number);
    }
    this.#input(
      (states) => states.answered(number, ...(answer as ReturnType<typeof read>)),
      number,
    );
  }

  #connection(number: number): HeartbeatConnection {
    const ended = (states: LeaseStates) => states.disconnected(number);
    const connection = new HeartbeatConnection(() => {
      // The error of its call, if there is one, comes first.
      setImmediate(() => connection.isToSend || this.#input(ended));
    });
    this.#connections.set(number, connection);
    return connection;
  }

  #statement(call: CallEffect, acquire: Acquire | undefined): Statement {
    if (call.do === "acquire") return this.statements.acquire(call, (acquire as Acquire).ask);
    if (call.do === "undo") return this.statements.undo(call);
    return call.do === "release" ? this.statements.release(call) : this.statements.keep(call);
  }

  /** Runs a statement on a connection of its own, which is opened for it. */
  async #once(statement: Statement): Promise<readonly Row[]> {
    const on = new HeartbeatConnection(() => {});
    try {
      const rows = on.open(this.open, LONGEST).then(() => on.rows(statement));
      return await within(LONGEST, rows, () => on.cut());
    } catch (error) {
      throw toldOfCall(error, on.role);
    } finally {
      this.#hangUp(on);
    }
  }

  // What the program asks for.

  /** Throws LeaseTaken; and the reason of the signal as soon as that is aborted: a grant that comes
   * all the same is given back. Under a token, keeps a row that a statement of the program has
   * claimed. */
  async acquire(
    asked: Omit<Ask, "id">,
    signal?: AbortSignal,
    names = asked.names,
    token?: number,
  ): Promise<Holding> {
    signal?.throwIfAborted();
    const ask = { ...asked, id: String(++this.#lastId) };
    return new Promise((resolve, reject) => {
      const giveUp = () => this.#input((states) => states.giveUp(ask.id));
      const settle = (reply: Reply, holding: Holding | undefined) => {
        signal?.removeEventListener("abort", giveUp);
        if (holding) resolve(holding);
        else if (reply.error === "GivenUp") reject(signal?.reason);
        else {
          const table = token === undefined ? undefined : names[0];
          reject(toldOfAcquire(reply, names, acquire.cause, acquire.role, table));
        }
      };
      const acquire: Acquire = { ask, names, settle };
      this.#acquires.set(ask.id, acquire);
      signal?.addEventListener("abort", giveUp);
      this.#input((states) => {
        if (token === undefined) states.acquire(ask);
        else states.keepRow(ask, token);
      });
    });
  }

  remaining(holding: Holding): Left {
    return { milliseconds: this.#states.remaining(clock(), holding.key) };
  }

  /** Throws LeaseLost if it is over, whatever the heartbeat does. */
  check(holding: Holding): void {
    if (this.remaining(holding).milliseconds > 0) return;
    this.#input(() => {});
    throw holding.lost();
  }

  /** Waits for the next renewal of these, or their end. */
  async renew(holdings: readonly Holding[]): Promise<void> {
    const renewed = Promise.all(holdings.map((holding) => holding.next()));
    this.suspect(holdings);
    await within(LONGEST, renewed, () => {}).catch(() => {});
  }

  /** Has the next renewal tell whether they are lost. */
  suspect(holdings: readonly Holding[]): void {
    this.#input((states) => states.suspect(keysOf(holdings)));
  }

  /** Tells how far the transaction has come that releases them. */
  last(holdings: readonly Holding[], stage: Parameters<LeaseStates["last"]>[1]): void {
    this.#input((states) => states.last(keysOf(holdings), stage));
  }

  /** Tells of a transaction that has written the rows of row leases, or has ended. */
  touches(holdings: readonly Holding[], begins: boolean): void {
    for (const { key } of holdings) this.#input((states) => states.touches(key, begins));
  }

  hear(holding: Holding, lease: unknown): void {
    holding.isHeard = true;
    if (holding.over !== undefined) return;
    holding.lease = lease;
    this.#heard.add(holding);
    this.#plan(clock());
  }

  /** No error if that fails: then it ends at its ttl. */
  async release(holding: Holding): Promise<void> {
    this.#input((states) => states.release(holding.key));
    while (holding.over === undefined) await holding.next();
  }

  /** The program refers to the lease no more. */
  forget(holding: Holding): void {
    if (holding.over === undefined) {
      warn(`the lease ${holding.names.join(", ")} was forgotten, and not released`);
      holding.aborts.abort(new LeaseLost("released", holding.names));
    }
    void this.release(holding);
  }

  /** Ends the statement that this session is running, if it is one. */
  cancel(session: unknown): void {
    const statement = ["SELECT pg_cancel_backend($1::text::integer)", String(session)] as const;
    if (session !== undefined) void this.#once(statement).catch(() => {});
  }

  /** Gives everything back, and ends all waits. */
  async close(): Promise<void> {
    this.#input((states) => states.close());
    await this.#closed;
    await Promise.all(this.#ending);
  }
}

const keysOf = (holdings: readonly Holding[]) => holdings.map(({ key }) => key);

/** Tokens stay below 2^53 for longer than anybody will care: a number is exact. */
export function numberOf(token: unknown): number {
  const number = Number(token);
  if (Number.isSafeInteger(number) && token !== null && token !== "") return number;
  throw new RangeError(`a token that no number of JavaScript holds exactly: ${token}`);
}

/** What the rows of an answer say. */
function read(call: CallEffect, rows: readonly Row[]): [rows: Rows[keyof Rows][], taken?: Taken] {
  const { do: verb, names } = call;
  if (rows.length !== (verb === "acquire" || verb === "undo" ? 1 : names.length)) {
    throw new Error(`the server's answer has ${rows.length} rows`);
  }
  const ms = (seconds: string | null = null) =>
    seconds === null ? null : Math.max(0, Math.floor(Number(seconds) * 1000));
  const [[token = null, holder, remaining, state] = []] = rows;
  if (verb === "acquire" && token === null)
    return [[], { holder, remaining: ms(remaining), state }];
  return [
    rows.map(([first = null, second = null, third, code]) => {
      if (verb === "acquire") return [names, numberOf(first)];
      if (verb === "undo") return Number(first);
      if (verb === "release") return first === null ? null : Number(first);
      return [`${first}`, ms(second), ms(third), code];
    }),
  ];
}

export function warn(what: string): void {
  process.emitWarning(what, "pg_fence");
}

/** The heartbeats that have a lease, or are about to. A process that ends normally gives it back. */
const ACTIVE = new Set<Heartbeat>();
process.on("beforeExit", () => ACTIVE.forEach((heartbeat) => void heartbeat.close()));
