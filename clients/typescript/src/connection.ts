import type { Socket } from "node:net";

import { LONGEST_TIMER_MS } from "./clock.js";

/** A row of a result: its columns in their order. */
export type Row = Readonly<Record<string, unknown>>;

/** A connection of the client's own, on either driver. It connects when it is first used, and only once. */
export interface Connection {
  /** Runs statements at once, with parameters only a single one; returns the rows of the last that has rows. */
  run(sql: string, parameters?: readonly unknown[]): Promise<readonly Row[]>;
  /** The names of a statement's columns. */
  columns(sql: string, parameters: readonly unknown[]): Promise<readonly string[]>;
  /** Breaks it off, so that what hangs on it fails. */
  cut(): void;
  /** Asks the server to end the call that is under way, whose answer then comes. */
  cancel(): void;
  end(): Promise<unknown>;
  readonly isBroken: boolean;
}

/** A transaction on a connection of the worker's. */
export interface Transaction<Tx> {
  /** Begins it, where it is not open already, with that statement. Returns what the work is done with. */
  begin(first: string): Promise<Tx>;
  /** The only value of a statement. */
  value(sql: string): Promise<unknown>;
  /** Nothing where somebody else has begun it. */
  commit(): Promise<void>;
  rollback(): Promise<void>;
  /** Breaks the connection off, so that what hangs on it fails. */
  cut(): void;
  /** Lets go of the connection. */
  leave(): void;
  /** What has ended its session, if it is known to have ended. */
  readonly broken: unknown;
  /** Whether we would know: an ORM shows no connection. */
  readonly showsConnection: boolean;
  /** Whether it is ours to begin once more. */
  readonly isOurs: boolean;
}

/** What a driver has to do. `On` is what its transactions begin on, `Tx` what the work in them is done with. */
export interface Driver<On, Tx> {
  /** A connection that is not connected yet. `onEnd` is told when it has ended. It does not keep
   * the process alive. */
  connection(onEnd: () => void): Connection;
  /** Throws a TypeError where that is nothing to begin a transaction on. */
  transaction(on: On): Transaction<Tx>;
}

/** A text as SQL, whatever `standard_conforming_strings` says. */
export function literal(text: string): string {
  if (text.includes("\0")) {
    throw new TypeError("no text of PostgreSQL holds a zero byte");
  }
  const quoted = `'${text.replaceAll("'", "''")}'`;
  return text.includes("\\") ? ` E${quoted.replaceAll("\\", "\\\\")}` : quoted;
}

/** Milliseconds as a span of PostgreSQL's. */
export function intervalInSql(ms: number): string {
  return `'${ms} milliseconds'::interval`;
}

/** What has a JSON, or NULL. */
export function jsonInSql(value: unknown): string {
  return `${value === undefined ? "NULL" : literal(JSON.stringify(value))}::jsonb`;
}

/** The only value of the only row of what a driver or an ORM returns for a query. */
export function valueOf(result: unknown): unknown {
  const rows = (result as { rows?: unknown }).rows ?? result;
  const row = (rows as readonly unknown[])[0];
  // Sequelize returns the rows and something beside.
  const first = Array.isArray(row) ? row[0] : row;
  return first === undefined || first === null ? undefined : Object.values(first)[0];
}

/** Whether it is an object of settings, and nothing that a library has made. */
export function isPlain(one: unknown): one is object {
  const prototype: unknown = Object(one) === one ? Object.getPrototypeOf(one) : undefined;
  return prototype === null || (typeof one !== "function" && (prototype as object)?.constructor?.name === "Object");
}

/** What somebody has given instead, in a word. */
export function shown(one: unknown): string {
  const name = Object(one) === one ? (one as object).constructor?.name : undefined;
  return name === undefined ? String(one) : `a ${name}`;
}

/** Asks the server, over a connection of its own, to end the call of that session. */
export function sendCancel(socket: Socket, pid: number, secret: number): void {
  const request = Buffer.alloc(16);
  [16, 80_877_102, pid, secret].forEach((word, index) => request.writeInt32BE(word | 0, index * 4));
  socket.on("error", () => {});
  socket.setTimeout(5000, () => socket.destroy());
  socket.end(request);
}

/** What a setting in milliseconds holds: the server refuses more. */
const LONGEST_TIMEOUT_MS = 2 ** 31 - 1;

/** How long a statement that was cancelled may take to end. */
const CANCEL_AGAIN_MS = 1000;

/** A call took longer than it may, so its connection was broken off. */
export class TimedOut extends Error {}

/** How long a transaction may take, and wait for a lock. */
export interface Limits {
  readonly callMs: number;
  readonly lockMs?: number;
}

/** A connection that is opened when it is needed, and again after it was broken off. */
export class OwnConnection {
  #connection: Connection | undefined;
  /** Breaks the call that is under way off. */
  #timer: NodeJS.Timeout | undefined;
  #until = Infinity;
  #isLate = false;
  /** Of a `call` that is under way. */
  #isCancellable = false;
  #isCancelled = false;

  constructor(
    readonly open: (onEnd: () => void) => Connection,
    readonly onEnd: () => void = () => {},
  ) {}

  get isOpen(): boolean {
    return this.#connection?.isBroken === false;
  }

  /** One statement, a transaction of its own. It can be cancelled. */
  async call(limitMs: number, sql: string): Promise<unknown> {
    this.#isCancellable = true;
    try {
      return valueOf(await this.#bounded(limitMs, (connection) => connection.run(sql)));
    } finally {
      this.#isCancellable = false;
      if (this.#isCancelled) {
        this.#isCancelled = false;
        // A request that is late would hit the next statement: the release of a grant that came all the same.
        await this.close(limitMs);
      }
    }
  }

  /** A transaction of that statement, which the server does not let go on for ever either. */
  callWithin(limits: Limits, sql: string): Promise<readonly Row[]> {
    return this.within(limits, (connection) => connection.run(`BEGIN; SELECT ${settings(limits)}; ${sql}; COMMIT`));
  }

  /** A transaction that `work` begins and commits. */
  within<T>(limits: Limits, work: (connection: Connection) => Promise<T>): Promise<T> {
    return this.#bounded(limits.callMs, async (connection) => {
      try {
        return await work(connection);
      } catch (error) {
        if (!connection.isBroken) {
          await connection.run("ROLLBACK");
        }
        throw error;
      }
    });
  }

  /** The call that is under way may go on for no longer than that. */
  hurry(limitMs: number): void {
    if (this.#timer !== undefined && performance.now() + limitMs < this.#until) {
      clearTimeout(this.#timer);
      this.#breakOffIn(limitMs);
    }
  }

  #breakOffIn(limitMs: number): void {
    this.#until = performance.now() + limitMs;
    this.#timer = setTimeout(() => {
      this.#isLate = true;
      this.cut();
    }, Math.min(limitMs, LONGEST_TIMER_MS));
  }

  async #bounded<T>(limitMs: number, call: (connection: Connection) => Promise<T>): Promise<T> {
    if (this.#connection?.isBroken !== false) {
      this.#connection = this.open(this.onEnd);
    }
    const connection = this.#connection;
    this.#isLate = false;
    this.#breakOffIn(limitMs);
    try {
      return await call(connection);
    } catch (error) {
      throw this.#isLate ? new TimedOut("it took longer than it may", { cause: error }) : error;
    } finally {
      clearTimeout(this.#timer);
      this.#timer = undefined;
    }
  }

  /** Ends what hangs on it. */
  cut(): void {
    this.#connection?.cut();
  }

  /** Asks the server to end the `call` that is under way, whose answer then comes. */
  cancel(): void {
    if (this.#isCancellable) {
      this.#isCancelled = true;
      this.#connection?.cancel();
    }
  }

  /** Does `work`, whose `call` the server is asked to end once the signal is aborted, the reason of which is thrown. */
  async cancelledBy<T>(signal: AbortSignal | undefined, work: () => Promise<T>): Promise<T> {
    let again: NodeJS.Timeout | undefined;
    const giveUp = () => {
      this.cancel();
      // A request that comes before the statement does is lost, hence more than one.
      again = setTimeout(giveUp, CANCEL_AGAIN_MS);
    };
    signal?.throwIfAborted();
    signal?.addEventListener("abort", giveUp);
    try {
      return await work();
    } catch (error) {
      throw signal?.aborted ? signal.reason : error;
    } finally {
      clearTimeout(again);
      signal?.removeEventListener("abort", giveUp);
    }
  }

  /** Never fails, and takes no longer than that. */
  async close(limitMs: number): Promise<void> {
    const connection = this.#connection;
    this.#connection = undefined;
    if (connection !== undefined) {
      const timer = setTimeout(() => connection.cut(), Math.min(limitMs, LONGEST_TIMER_MS));
      await connection.end().catch(() => {});
      clearTimeout(timer);
    }
  }
}

/** For this transaction only: behind a pooler the session is others', too. */
export function settings({ callMs, lockMs }: Limits): string {
  const of = (name: string, ms: number) => `set_config('${name}', '${whole(ms)}', true)`;
  return [of("statement_timeout", callMs), ...(lockMs === undefined ? [] : [of("lock_timeout", lockMs)])].join(", ");
}

/** As a setting holds it. */
function whole(ms: number): number {
  return Math.max(1, Math.min(Math.floor(ms), LONGEST_TIMEOUT_MS));
}
