import { setMaxListeners } from "node:events";
import { inspect, types } from "node:util";
import { Connection, within, type Opener, type Row } from "./connection.js";
import * as errors from "./errors.js";
import { errorType, LeaseStates, LONGEST_CALL, NEVER, SHORTEST_OPENING } from "./lease_state.js";
import type {
  CallEffect,
  Effect,
  EventEffect,
  LastStage,
  LeaseRequest,
  LogEffect,
  Reason,
  Reply,
  Rows,
  Taken,
} from "./lease_state.js";
import { now } from "./span.js";
import { quoted, statementOf } from "./statements.js";

/** A change of a lease, for `onEvent`, which must not block. A loss has a `reason`, and so has a
 * release without an answer (`unconfirmed`). `interrupted` comes from `lead`, which no longer leads
 * and will try again. */
export type LeaseEvent = Readonly<{
  kind: "acquired" | "renewed" | "lost" | "released" | "interrupted";
  names: readonly string[];
  token: number;
  remaining: errors.Left;
  reason: Reason | undefined;
}>;

/** A lease, from its acquire to its end. The heartbeat refers to the holding, and not to the Lease
 * of the program, so that the garbage collector can take a Lease that the program has forgotten. */
export class Holding {
  /** The names for messages. A row lease has two: its table and its key. */
  readonly names: readonly string[];
  token = 0;
  endReason: Reason | undefined;
  advice: string | undefined;
  /** The error of its last call, and the login role of that connection. */
  cause: unknown;
  role: string | undefined;
  /** Aborted at a loss, for the program and for the transactions that the lease guards. */
  readonly loss = new AbortController();
  /** True if the program has learned of the loss, or has the signal that reports it. */
  isLossSeen = false;
  /** Called at the next renewal or at the end. */
  readonly waiters: (() => void)[] = [];

  constructor(
    readonly request: LeaseRequest,
    /** Called with the reply to the acquire. */
    readonly settle: (reply: Reply) => void,
  ) {
    setMaxListeners(0, this.loss.signal);
    this.names =
      request.table === undefined
        ? request.names
        : [JSON.parse(request.table)[0], ...request.names];
  }

  get isRow(): boolean {
    return this.request.table !== undefined;
  }

  get isLost(): boolean {
    return this.endReason !== undefined && this.endReason !== "released";
  }

  lossError(cause?: unknown): errors.LeaseLost {
    return new errors.LeaseLost(this.endReason ?? "released", this.names, cause, this.advice);
  }

  /** Resolves at the next renewal, or at the end. */
  nextChange(): Promise<void> {
    return new Promise((resolve) =>
      this.endReason === undefined ? this.waiters.push(resolve) : resolve(),
    );
  }
}

const clock = () => Math.floor(now());

/** The heartbeat of a fence, which renews its leases. It owns the clock, the timer and the
 * connections, gives all inputs to LeaseStates, which decides, and carries out the effects. */
export class Heartbeat {
  /** Shortens the pauses, so that clients do not retry at the same time. */
  readonly jitter = Math.floor(Math.random() * 1001);
  readonly #states = new LeaseStates(this.jitter);
  readonly #holdings = new Map<string, Holding>();
  /** The leases whose signal the program has. They keep the process alive, and the map keeps them
   * from the garbage collector while the work uses nothing but the signal. */
  readonly #watched = new Map<Holding, unknown>();
  readonly #connections = new Map<number, Connection>();
  /** The connections that are being closed. */
  readonly #closing = new Set<Promise<void>>();
  #lastId = 0;
  /** The error of the call that the input answers. A call that got no answer has none. */
  #lastError: unknown;
  /** The reasons and names of the leases that the current input has ended, for the log. */
  #ended: (readonly [Reason | undefined, string])[] = [];
  #timer: NodeJS.Timeout | undefined;
  /** Events and replies for the program, which are called in their order, after the effects were
   * carried out. */
  readonly #callbacks: (() => void)[] = [];
  #isCallingBack = false;
  #resolveClosed: () => void = () => {};
  readonly #closed = new Promise<void>((resolve) => (this.#resolveClosed = resolve));

  readonly #prefix: string;

  constructor(
    readonly open: Opener,
    schema: string | undefined,
    readonly onEvent: ((event: LeaseEvent) => void) | undefined,
  ) {
    this.#prefix = schema === undefined ? "" : `${quoted(schema)}.`;
  }

  /** Returns the text of a statement with the extension's schema, if the program has named one. */
  qualified(text: string): string {
    return text.replaceAll(/\blease_/g, () => `${this.#prefix}lease_`);
  }

  /** Gives an input to the machine, and carries out the effects. If the input answers a call, its
   * number is `answerTo`. */
  #input(decide: (states: LeaseStates) => void, answerTo?: number): void {
    const at = clock();
    const effects = this.#states.step(at, () => decide(this.#states), answerTo);
    for (const effect of effects) this.#carryOut(effect);
    [this.#lastError, this.#ended] = [undefined, []];
    this.#schedule(at);
    this.#runCallbacks();
  }

  #runCallbacks(): void {
    if (this.#isCallingBack) return;
    this.#isCallingBack = true;
    const queue = this.#callbacks;
    for (let callback = queue.shift(); callback; callback = queue.shift()) callback();
    this.#isCallingBack = false;
  }

  /** Sets the timer for the next step. */
  #schedule(at: number): void {
    clearTimeout(this.#timer);
    const next = this.#states.wake(at);
    if (next === NEVER) return void ACTIVE.delete(this);
    ACTIVE.add(this);
    this.#timer = setTimeout(() => this.#input(() => {}), next - at);
    // A lease alone does not keep the process alive: `beforeExit` releases it.
    if (this.#watched.size === 0 && !this.#states.isWaitedFor) this.#timer.unref();
  }

  #carryOut(effect: Effect): void {
    if ("call" in effect) void this.#send(effect);
    else if ("cut" in effect) this.#remove(effect.cut)?.cut();
    else if ("hangUp" in effect) this.#hangUp(this.#remove(effect.hangUp));
    else if ("event" in effect) this.#event(effect);
    else if ("reply" in effect) this.#reply(effect);
    else if ("closed" in effect) this.#resolveClosed();
    else this.#log(effect);
  }

  #remove(number: number): Connection | undefined {
    const connection = this.#connections.get(number);
    this.#connections.delete(number);
    return connection;
  }

  #hangUp(connection: Connection | undefined): void {
    const closing = connection?.hangUp() ?? Promise.resolve();
    this.#closing.add(closing);
    void closing.then(() => this.#closing.delete(closing));
  }

  #event({ event: kind, key, token, remaining, reason, advice }: EventEffect): void {
    const holding = this.#holdings.get(key) as Holding;
    holding.token = token;
    if (kind === "lost" || kind === "released") {
      this.#holdings.delete(key);
      this.#watched.delete(holding);
      holding.endReason = kind === "lost" ? reason : "released";
      this.#ended.push([reason, holding.names.join(", ")]);
      holding.advice = advice;
    }
    if (kind !== "acquired") for (const resolve of holding.waiters.splice(0)) resolve();
    if (kind === "lost") this.#callbacks.push(() => holding.loss.abort(holding.lossError()));
    const left = { milliseconds: remaining };
    const event = { kind, names: holding.names, token, remaining: left, reason };
    this.#callbacks.push(() => this.emit(event));
  }

  /** Calls `onEvent`, which may be asynchronous, and may throw something that is no Error. */
  async emit(event: LeaseEvent): Promise<void> {
    try {
      await this.onEvent?.(event);
    } catch (error) {
      warn(`onEvent failed: ${inspect(error)}`);
    }
  }

  #reply(reply: Reply): void {
    const holding = this.#holdings.get(reply.reply) as Holding;
    if (reply.error !== undefined) this.#holdings.delete(reply.reply);
    this.#callbacks.push(() => holding.settle(reply));
  }

  #log({ log, key = "", code, reason, count }: LogEffect): void {
    if (log === "not acquired") {
      const cause = this.#holdings.get(key)?.cause ?? code;
      return warn(`no lease could be acquired, and it is tried again: ${cause}`);
    }
    if (log === "not renewed") {
      return warn(`leases are not renewed, and it is tried again: ${this.#lastError ?? code}`);
    }
    const ended = this.#ended.filter(([why]) => why === (reason ?? "unconfirmed"));
    const names = ended.map(([, name], at) => (at < 3 ? name : "…")).slice(0, 4);
    const which = names.length > 0 ? ` (${names.join("; ")})` : "";
    warn(`leases are ${log}${reason === undefined ? "" : ` (${reason})`}: ${count}${which}`);
  }

  // Calls.

  /** Sends a call, and gives its answer to the machine. */
  async #send(call: CallEffect): Promise<void> {
    const { call: number, open } = call;
    const holding = this.#holdings.get(call.for ?? "");
    if (holding) holding.cause = undefined;
    const [text, ...values] = statementOf(call, holding?.request);
    const statement = [this.qualified(text), ...values] as const;
    if (open) this.#connect(call.connection);
    const connection = this.#connections.get(call.connection) as Connection;
    let isOpen = !open;
    let input: (states: LeaseStates) => void;
    try {
      if (open) {
        await connection.open(this.open, Math.max(call.limit, SHORTEST_OPENING));
        isOpen = true;
        this.#input((states) => states.sent(number), number);
      } else {
        // First the end of the connection is read, if it has come already.
        connection.isAboutToSend = true;
        await new Promise(setImmediate);
        connection.isAboutToSend = false;
      }
      const answer =
        connection.isEnded && !open ? undefined : answerOf(call, await connection.rows(statement));
      input = (states) =>
        answer ? states.answered(number, ...answer) : states.failed(number, "unsent", true);
    } catch (error) {
      const codeOfCall = errors.codeOf(error) || (connection.isEnded ? "ended" : "unreadable");
      // In Jest and node:vm the errors of Node.js are no instances of the program's Error.
      const isError = error instanceof Error || types.isNativeError(error);
      const code = isError ? (isOpen ? codeOfCall : errors.codeOfOpening(error)) : "panicked";
      this.#lastError = error;
      if (holding) [holding.cause, holding.role] = [error, connection.role];
      input = (states) => states.failed(number, code, connection.isEnded);
    }
    this.#input(input, number);
  }

  #connect(number: number): void {
    const connection = new Connection(() => {
      // The error of the call on the connection, if there is one, comes first.
      setImmediate(() => {
        if (connection.isAboutToSend) return;
        this.#connections.delete(number);
        this.#input((states) => states.disconnected(number));
      });
    });
    this.#connections.set(number, connection);
  }

  // Requests of the program.

  /** Acquires a lease. Throws LeaseTaken and the other errors of an acquire; and the reason of the
   * signal as soon as that is aborted, after which a late grant is released. */
  async acquire(request: Omit<LeaseRequest, "id">, signal?: AbortSignal): Promise<Holding> {
    signal?.throwIfAborted();
    const id = String(++this.#lastId);
    return new Promise((resolve, reject) => {
      const giveUp = () => this.#input((states) => states.giveUp(id));
      const holding = new Holding({ ...request, id }, (reply) => {
        signal?.removeEventListener("abort", giveUp);
        if (reply.leases) resolve(holding);
        else reject(reply.error === "GivenUp" ? signal?.reason : errorOfAcquire(reply, holding));
      });
      this.#holdings.set(id, holding);
      signal?.addEventListener("abort", giveUp);
      this.#input((states) => states.acquire(holding.request));
    });
  }

  remaining(holding: Holding): errors.Left {
    return { milliseconds: this.#states.remaining(clock(), holding.request.id) };
  }

  /** Returns the error of a lease that is not held by the clock of now, without waiting for the
   * timer. */
  lossOf(holding: Holding, cause?: unknown): errors.LeaseLost | undefined {
    if (this.remaining(holding).milliseconds > 0) return undefined;
    this.#input(() => {});
    return this.#states.isOver(clock(), holding.request.id)
      ? new errors.LeaseLost("deadline", holding.names, cause)
      : holding.lossError(cause);
  }

  /** Throws LeaseLost if the lease is not held. */
  check(holding: Holding): void {
    const loss = this.lossOf(holding);
    if (loss === undefined) return;
    holding.isLossSeen = true;
    throw loss;
  }

  /** Renews the leases at once, and waits for the outcome. */
  async renew(holdings: readonly Holding[]): Promise<void> {
    const renewed = Promise.all(holdings.map((holding) => holding.nextChange()));
    this.suspect(holdings);
    await within(LONGEST_CALL, renewed);
  }

  /** Renews the leases at once, which shows whether they are lost. */
  suspect(holdings: readonly Holding[]): void {
    this.#input((states) => states.suspect(keysOf(holdings)));
  }

  /** Reports the stage of the transaction that releases the leases. */
  lastTransaction(holdings: readonly Holding[], stage: LastStage): void {
    this.#input((states) => states.lastTransaction(keysOf(holdings), stage));
  }

  /** Reports that a transaction has written the rows, or has ended. */
  rowLocks(holdings: readonly Holding[], input: "rowLocked" | "rowUnlocked"): void {
    this.#input((states) => states[input](keysOf(holdings)));
  }

  /** Records that the program has the signal of the lease. */
  watch(holding: Holding, lease: unknown): void {
    holding.isLossSeen = true;
    if (holding.endReason === undefined) this.#watched.set(holding, lease);
    this.#schedule(clock());
  }

  /** Releases the lease. If that fails no error is thrown, and it ends at its ttl. */
  async release(holding: Holding): Promise<void> {
    this.#input((states) => states.release(holding.request.id));
    while (holding.endReason === undefined) await holding.nextChange();
  }

  /** Releases a lease to which the program no longer refers. */
  releaseForgotten(holding: Holding): void {
    if (holding.endReason === undefined) {
      warn(`the lease ${holding.names.join(", ")} was forgotten, and not released`);
      holding.loss.abort(new errors.LeaseLost("released", holding.names));
    }
    void this.release(holding);
  }

  /** Cancels the statement that a process of the server is running. `pid` is undefined if it is
   * not known. */
  cancel(pid: unknown): void {
    if (pid === undefined) return;
    const connection = new Connection(() => {});
    const statement = ["SELECT pg_cancel_backend($1::text::integer)", String(pid)] as const;
    const opened = connection.open(this.open, LONGEST_CALL);
    const canceled = opened.then(() => connection.rows(statement));
    const settled = within(LONGEST_CALL, canceled, () => connection.cut());
    void settled.then(() => this.#hangUp(connection));
  }

  /** True as soon as the program has begun to close the fence. */
  get isClosing(): boolean {
    return this.#states.isClosing;
  }

  /** Releases all leases, and ends all waits. */
  async close(): Promise<void> {
    this.#input((states) => states.close());
    await this.#closed;
    await Promise.all(this.#closing);
  }
}

const keysOf = (holdings: readonly Holding[]) => holdings.map(({ request }) => request.id);

/** Returns the token as a number, or throws RangeError if no number is exactly the token. Tokens of
 * the server do not reach 2^53 in practice. */
export function numberOf(token: unknown): number {
  const number = Number(token);
  if (Number.isSafeInteger(number) && token !== null && token !== "") return number;
  throw new RangeError(`a token that no number of JavaScript holds exactly: ${token}`);
}

/** Returns the rows of a call as the arguments of LeaseStates.answered. */
function answerOf(
  call: CallEffect,
  rows: readonly Row[],
): [rows: Rows[keyof Rows][], taken?: Taken] {
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

/** Returns the error that an acquire throws. */
function errorOfAcquire(reply: Reply, { names, cause, role, isRow }: Holding): unknown {
  const { error, holder, remaining, waitsFor, sqlstate, reason = "gone", inDoubt = false } = reply;
  if (error === "LeaseTaken") {
    const left = waitsFor && { milliseconds: remaining ?? 0 };
    return new errors.LeaseTaken(names, holder ?? undefined, left, waitsFor);
  }
  if (error === "LeaseLost") return new errors.LeaseLost(reason, names, undefined, reply.advice);
  if (error === "Closed") return new errors.Closed("the fence is closed");
  if (error === "NoConnection" || error === "NoAnswer") {
    const isSent = error === "NoAnswer";
    const Type = isSent ? errors.NoAnswer : errors.NoConnection;
    const message = isSent ? "the server has not answered in time" : "no connection to the server";
    const why = cause instanceof Error ? `: ${cause.message || errors.sqlstateOf(cause)}` : "";
    return Object.assign(new Type(message + why, cause), { inDoubt, sqlstate });
  }
  return errors.typed(cause, errorType(errors.sqlstateOf(cause), isRow), role, isRow);
}

export function warn(what: string): void {
  process.emitWarning(what, "pg_fence");
}

/** The heartbeats that have a lease, or are acquiring one. A process that ends normally releases
 * its leases. */
const ACTIVE = new Set<Heartbeat>();
process.on("beforeExit", () => ACTIVE.forEach((heartbeat) => void heartbeat.close()));
