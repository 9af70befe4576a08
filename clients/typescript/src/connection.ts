import type { Socket } from "node:net";

import { LONGEST_TIMER_MS } from "./clock.js";

/** A connection of a lease's own, on whichever driver. It connects when it is first used, and only once. */
export interface Connection {
  /** Runs statements at once; returns the only value of the last that has one. */
  run(sql: string): Promise<unknown>;
  /** Breaks it off, so that what hangs on it fails. */
  cut(): void;
  /** Asks the server to end the call that is under way, whose answer then comes. */
  cancel(): void;
  end(): Promise<unknown>;
  readonly isBroken: boolean;
}

/** A transaction on a connection of the worker's. */
export interface Transaction<Tx> {
  /** Begins it, where it is not open already, with those statements. Returns what the work is done with. */
  begin(first: readonly string[]): Promise<Tx>;
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
  /** A connection that is not connected yet. */
  connection(): Connection;
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

/** The only value of the only row of what a driver or an ORM returns for a query. */
export function valueOf(result: unknown): unknown {
  const rows = (result as { rows?: unknown }).rows ?? result;
  const row = (rows as readonly unknown[])[0];
  // Sequelize returns the rows and something beside.
  const first = Array.isArray(row) ? row[0] : row;
  return first === undefined || first === null ? undefined : Object.values(first)[0];
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

/** A lease's own connection: opened when it is needed, again after it was broken off. */
export class OwnConnection {
  #connection: Connection | undefined;
  /** Of a `call` that is under way. */
  #isCancellable = false;
  #isCancelled = false;

  constructor(readonly open: () => Connection) {}

  get isOpen(): boolean {
    return this.#connection !== undefined;
  }

  /** One statement, a transaction of its own. It can be cancelled. */
  async call(limitMs: number, sql: string): Promise<unknown> {
    this.#isCancellable = true;
    try {
      return await this.#bounded(limitMs, (connection) => connection.run(sql));
    } finally {
      this.#isCancellable = false;
      if (this.#isCancelled) {
        this.#isCancelled = false;
        // A request that is late would hit the next statement: the release of a grant that came all the same.
        await this.close(limitMs);
      }
    }
  }

  /** The same, where the server does not let it go on for ever either. */
  callWithin(limitMs: number, sql: string): Promise<unknown> {
    // For this transaction only: behind a pooler the session is others', too.
    const timeoutMs = Math.max(1, Math.min(Math.floor(limitMs), LONGEST_TIMEOUT_MS));
    const timeout = `SELECT set_config('statement_timeout', '${timeoutMs}', true)`;
    return this.#bounded(limitMs, async (connection) => {
      try {
        return await connection.run(`BEGIN; ${timeout}; ${sql}; COMMIT`);
      } catch (error) {
        if (!connection.isBroken) {
          await connection.run("ROLLBACK");
        }
        throw error;
      }
    });
  }

  async #bounded(limitMs: number, call: (connection: Connection) => Promise<unknown>): Promise<unknown> {
    const connection = (this.#connection ??= this.open());
    const timer = setTimeout(() => connection.cut(), Math.min(limitMs, LONGEST_TIMER_MS));
    try {
      return await call(connection);
    } catch (error) {
      if (connection.isBroken && this.#connection === connection) {
        this.#connection = undefined;
      }
      throw error;
    } finally {
      clearTimeout(timer);
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
