import { FenceError } from "./errors.js";
import type { Statement } from "./statements.js";

/** The columns of a row, in their order, as the server writes them. */
export type Row = readonly (string | null)[];

/** A connection of the fence's own, on either driver. It does not keep the process alive. */
export abstract class Connection {
  isEnded = false;
  onEnd: () => void = () => {};

  constructor(readonly role: string | undefined) {}

  /** Runs a statement in autocommit. */
  abstract rows(statement: Statement): Promise<readonly Row[]>;
  abstract end(): Promise<unknown>;
  protected abstract destroy(): void;

  /** Ends what hangs on it, whether the driver notices or not. */
  cut(): void {
    this.destroy();
    this.ended();
  }

  ended(): void {
    if (!this.isEnded) Object.assign(this, { isEnded: true }).onEnd();
  }
}

/** Opens a connection, which may take so many milliseconds. */
export type Opener = (limit: number) => Promise<Connection>;

/** A connection of the heartbeat's, which may be cut before it is open. */
export class HeartbeatConnection {
  #connection: Connection | undefined;
  #isCut = false;
  /** A call is about to be sent, which tells by itself if the connection has ended before. */
  isToSend = false;

  constructor(readonly onEnd: () => void) {}

  get isEnded(): boolean {
    return this.#isCut || this.#connection?.isEnded !== false;
  }
  get role(): string | undefined {
    return this.#connection?.role;
  }

  async open(opener: Opener, limit: number): Promise<void> {
    const connection = await opener(limit);
    if (this.#isCut) return connection.cut();
    this.#connection = connection;
    connection.onEnd = this.onEnd;
    if (connection.isEnded) throw new Error("Connection terminated");
  }

  rows(statement: Statement): Promise<readonly Row[]> {
    if (!this.#connection) throw new Error("Connection terminated");
    return this.#connection.rows(statement);
  }

  /** Ends it at once, whatever hangs in it. */
  cut(): void {
    this.#isCut = true;
    this.#connection?.cut();
  }

  /** Ends it as it should, which takes no longer than a second. */
  async hangUp(): Promise<void> {
    const connection = this.#connection;
    this.#isCut = true;
    if (connection) await within(1000, connection.end(), () => connection.cut()).catch(() => {});
  }
}

/** Returns the result within so many milliseconds; else `late` is called and FenceError thrown,
 * whatever becomes of the work. */
export async function within<T>(ms: number, work: PromiseLike<T>, late: () => void): Promise<T> {
  let timer: NodeJS.Timeout | undefined;
  const ends = new Promise<never>((_, reject) => {
    const error = new FenceError(`the server has not answered within ${(ms / 1000).toFixed(1)} s`);
    timer = setTimeout(() => {
      late();
      reject(error);
    }, ms);
  });
  return Promise.race([work, ends]).finally(() => clearTimeout(timer));
}

/** Whether it is an object of settings, and nothing that a library has made. */
export const isSettings = (one: unknown) =>
  Object(one) === one && ["Object", undefined].includes(Object(one).constructor?.name);
