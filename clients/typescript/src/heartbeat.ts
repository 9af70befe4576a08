import { setMaxListeners } from "node:events";
import { types } from "node:util";
import { Connection, within, type Opener, type Row } from "./connection.js";
import { codeOfOpening, LeaseLost, sessionEnded, sqlstateOf } from "./errors.js";
import { toldOfAcquire, type Left, type Reason } from "./errors.js";
import { LeaseStates, NEVER } from "./lease_state.js";
import type {
  CallEffect,
  Effect,
  EventEffect,
  LeaseRequest,
  LogEffect,
  Reply,
  Rows,
  Taken,
} from "./lease_state.js";
import { now } from "./span.js";
import type { Statements } from "./statements.js";

/** In milliseconds: the shortest time for a connection to open, and the longest for a statement. */
const [OPENING, LONGEST] = [2_000, 10_000];
/** The most names in a line of the log. */
const MOST_NAMES = 5;

/** An event for `onEvent`, which must not block. A loss has a `reason`; a release that the server has
 * not confirmed has `unconfirmed`. `interrupted` is of `lead`: it leads no more, and goes on. */
export type LeaseEvent = Readonly<{
  kind: "acquired" | "renewed" | "lost" | "released" | "interrupted";
  names: readonly string[];
  token: number;
  remaining: Left;
  reason: Reason | undefined;
}>;

/** A lease, from its acquire to its end. The heartbeat refers to this, and not to the lease of the
 * program, so that a lease that the program has forgotten can be collected. */
export class Holding {
  /** Of a row lease, the table and the key. */
  readonly names: readonly string[];
  token = 0;
  over: Reason | undefined;
  advice: string | undefined;
  /** The error of the last call, and the role of its connection. */
  cause: unknown;
  role: string | undefined;
  /** Tells the program of a loss, and the transactions that are in a guard of it. */
  readonly aborts = new AbortController();
  /** Its holder knows of its loss, or waits for that. */
  isHeard = false;
  /** Those who wait for its next renewal, or its end. */
  readonly waiting: (() => void)[] = [];

  constructor(
    readonly request: LeaseRequest,
    /** Answers the acquire. */
    readonly settle: (reply: Reply) => void,
  ) {
    setMaxListeners(0, this.aborts.signal);
    this.names =
      request.table === undefined
        ? request.names
        : [JSON.parse(request.table)[0], ...request.names];
  }

  get isRow(): boolean {
    return this.request.table !== undefined;
  }

  get isLost(): boolean {
    return this.over !== undefined && this.over !== "released";
  }

  lost(cause?: unknown): LeaseLost {
    return new LeaseLost(this.over ?? "released", this.names, cause, this.advice);
  }

  /** Waits for a renewal or the end. */
  next(): Promise<void> {
    return new Promise((go) => (this.over === undefined ? this.waiting.push(go) : go()));
  }
}

const clock = () => Math.floor(now());

/** Keeps all leases of a fence. It gives the inputs to LeaseStates, which decides, and carries out
 * the effects: it has the clock, the timer and the connections. */
export class Heartbeat {
  /** The pauses of clients differ. */
  readonly jitter = Math.floor(Math.random() * 1001);
  readonly #states = new LeaseStates(this.jitter);
  readonly #holdings = new Map<string, Holding>();
  /** The leases whose signal the program has: the process stays alive, and none is collected while
   * work goes by the signal alone. */
  readonly #heard = new Map<Holding, unknown>();
  readonly #connections = new Map<number, Connection>();
  readonly #ending = new Set<Promise<void>>();
  #lastId = 0;
  /** Of the call that the input is about; one that had no answer has none. */
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

  /** Gives an input to the states, which may be an answer to a call, and carries out what comes. */
  #input(decide: (states: LeaseStates) => void, answered?: number): void {
    this.#ended = [];
    const at = clock();
    const effects = this.#states.step(at, () => decide(this.#states), answered);
    for (const effect of effects) this.#carryOut(effect);
    this.#lastError = undefined;
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

  #forget(number: number): Connection | undefined {
    const connection = this.#connections.get(number);
    this.#connections.delete(number);
    return connection;
  }

  #hangUp(connection: Connection | undefined): void {
    const ending = connection?.hangUp() ?? Promise.resolve();
    this.#ending.add(ending);
    void ending.then(() => this.#ending.delete(ending));
  }

  #event({ event: kind, key, token, remaining, reason, advice }: EventEffect): void {
    const holding = this.#holdings.get(key) as Holding;
    holding.token = token;
    if (kind === "lost" || kind === "released") {
      this.#holdings.delete(key);
      this.#heard.delete(holding);
      this.#ended.push([reason, holding.names]);
      holding.over = kind === "lost" ? reason : "released";
      holding.advice = advice;
    }
    if (kind !== "acquired") for (const go of holding.waiting.splice(0)) go();
    if (kind === "lost") this.#toTell.push(() => holding.aborts.abort(holding.lost()));
    const left = { milliseconds: remaining };
    const event = { kind, names: holding.names, token, remaining: left, reason };
    this.#toTell.push(() => this.tell(event));
  }

  /** The handler may be asynchronous, and may throw what is no Error. */
  async tell(event: LeaseEvent): Promise<void> {
    try {
      await this.onEvent?.(event);
    } catch (error) {
      warn(`onEvent failed: ${String(error)}`);
    }
  }

  #reply(reply: Reply): void {
    const holding = this.#holdings.get(reply.reply);
    if (reply.error !== undefined) this.#holdings.delete(reply.reply);
    if (holding) this.#toTell.push(() => holding.settle(reply));
  }

  #log({ log, key = "", code, reason }: LogEffect): void {
    if (log === "not renewed") {
      return warn(`leases are not renewed, and it is tried again: ${this.#lastError ?? code}`);
    }
    if (log === "not acquired") {
      const cause = this.#holdings.get(key)?.cause ?? code;
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
    const holding = this.#holdings.get(call.for ?? "");
    if (holding) holding.cause = undefined;
    const statement = this.statements.of(call, holding?.request);
    if (open) this.#connect(call.connection);
    const on = this.#connections.get(call.connection) as Connection;
    let isOpen = !open;
    let input: (states: LeaseStates) => void;
    try {
      if (open) {
        await on.open(this.open, Math.max(call.limit, OPENING));
        isOpen = true;
        this.#input((states) => states.sent(number), number);
      } else {
        // An end that has come already is read first.
        on.isToSend = true;
        await new Promise(setImmediate);
        on.isToSend = false;
      }
      const answer = on.isEnded && !open ? undefined : read(call, await on.rows(statement));
      input = (states) =>
        answer ? states.answered(number, ...answer) : states.failed(number, "unsent", true);
    } catch (error) {
      const word =
        sqlstateOf(error) || (on.isEnded || sessionEnded(error) ? "ended" : "unreadable");
      // In Jest and node:vm, errors of Node.js are none of the program's own Error.
      const isError = error instanceof Error || types.isNativeError(error);
      const code = isError ? (isOpen ? word : codeOfOpening(error)) : "panicked";
      this.#lastError = error;
      if (holding) [holding.cause, holding.role] = [error, on.role];
      input = (states) => states.failed(number, code, on.isEnded);
    }
    this.#input(input, number);
  }

  #connect(number: number): void {
    const connection = new Connection(() => {
      // The error of its call, if there is one, comes first.
      setImmediate(() => {
        if (connection.isToSend) return;
        this.#connections.delete(number);
        this.#input((states) => states.disconnected(number));
      });
    });
    this.#connections.set(number, connection);
  }

  // What the program asks for.

  /** Throws LeaseTaken; and the reason of the signal as soon as that is aborted: a grant that comes
   * all the same is given back. */
  async acquire(request: Omit<LeaseRequest, "id">, signal?: AbortSignal): Promise<Holding> {
    signal?.throwIfAborted();
    const id = String(++this.#lastId);
    return new Promise((resolve, reject) => {
      const giveUp = () => this.#input((states) => states.giveUp(id));
      const holding = new Holding({ ...request, id }, (reply) => {
        signal?.removeEventListener("abort", giveUp);
        if (reply.leases) resolve(holding);
        else reject(reply.error === "GivenUp" ? signal?.reason : toldOfAcquire(reply, holding));
      });
      this.#holdings.set(id, holding);
      signal?.addEventListener("abort", giveUp);
      this.#input((states) => states.acquire(holding.request));
    });
  }

  remaining(holding: Holding): Left {
    return { milliseconds: this.#states.remaining(clock(), holding.request.id) };
  }

  /** Throws LeaseLost if it is over, whatever the heartbeat does. */
  check(holding: Holding): void {
    if (this.remaining(holding).milliseconds > 0) return;
    this.#input(() => {});
    holding.isHeard = true;
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
  last(holdings: readonly Holding[], stage: Parameters<LeaseStates["lastTransaction"]>[1]): void {
    this.#input((states) => states.lastTransaction(keysOf(holdings), stage));
  }

  /** Reports that a transaction has written the rows. */
  rowLocked(holdings: readonly Holding[]): void {
    this.#input((states) => states.rowLocked(keysOf(holdings)));
  }

  /** Reports that a transaction that has written the rows has ended. */
  rowUnlocked(holdings: readonly Holding[]): void {
    this.#input((states) => states.rowUnlocked(keysOf(holdings)));
  }

  hear(holding: Holding, lease: unknown): void {
    holding.isHeard = true;
    if (holding.over === undefined) this.#heard.set(holding, lease);
    this.#plan(clock());
  }

  /** No error if that fails: then it ends at its ttl. */
  async release(holding: Holding): Promise<void> {
    this.#input((states) => states.release(holding.request.id));
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
    if (session === undefined) return;
    const on = new Connection(() => {});
    const statement = ["SELECT pg_cancel_backend($1::text::integer)", String(session)] as const;
    const sent = on.open(this.open, LONGEST).then(() => on.rows(statement));
    const ends = () => this.#hangUp(on);
    void within(LONGEST, sent, () => on.cut()).then(ends, ends);
  }

  /** Gives everything back, and ends all waits. */
  async close(): Promise<void> {
    this.#input((states) => states.close());
    await this.#closed;
    await Promise.all(this.#ending);
  }
}

const keysOf = (holdings: readonly Holding[]) => holdings.map(({ request }) => request.id);

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

/** Those that have a lease, or are about to. A process that ends normally gives it back. */
const ACTIVE = new Set<Heartbeat>();
process.on("beforeExit", () => ACTIVE.forEach((heartbeat) => void heartbeat.close()));
