import type { Call } from "./asked.js";
import { FenceError, sessionEnded, toldOfCall } from "./errors.js";

/** The columns of a row, in their order, as the server writes them. */
export type Row = readonly (string | null)[];

/** A connection of the fence's own, on either driver. It does not keep the process alive. */
export abstract class Connection {
  isEnded = false;
  onEnd: () => void = () => {};
  constructor(readonly role: string | undefined) {}
  abstract rows(call: Call): Promise<readonly Row[]>;
  abstract end(): Promise<unknown>;
  protected abstract destroy(): void;

  /** Ends what hangs on it, whether the driver notices or not. */
  cut(): void {
    this.destroy();
    this.ended();
  }

  ended(): void { if (!this.isEnded) Object.assign(this, { isEnded: true }).onEnd(); }
}

/** Opens a connection, which may take so many milliseconds. */
export type Opener = (limit: number) => Promise<Connection>;

/** Whether it is an object of settings, and nothing that a library has made. */
export const isSettings = (one: any) => Object(one) === one && ["Object", undefined].includes(one.constructor?.name);

/** Its result within so many milliseconds; then `late` is called, and FenceError thrown, whatever becomes of it. */
export async function within<T>(limit: number, work: PromiseLike<T>, late: () => void): Promise<T> {
  let timer: NodeJS.Timeout | undefined;
  const ends = new Promise<never>((_, reject) => {
    const error = new FenceError(`the server has not answered within ${(limit / 1000).toFixed(1)} s`);
    timer = setTimeout(() => (late(), reject(error)), limit);
  });
  return Promise.race([work, ends]).finally(() => clearTimeout(timer));
}

/** A connection that is opened when it is needed, for one call at a time, which is broken off when it takes too long. */
export class Line {
  readonly #waiting: (() => void)[] = [];
  #isBusy = false;
  #connection: Connection | undefined;
  /** Which connection it is: another number after the end of each. */
  session = 0;

  constructor(readonly open: Opener, readonly onEnd: () => void = () => {}) {}

  /** A statement in autocommit, which may take so many milliseconds beside opening the connection. An urgent one goes first;
   * one that may be run twice is, where it only shows that the connection has ended since the last time. */
  async rows(call: Call, limit: number, { urgent = false, repeats = false } = {}): Promise<readonly Row[]> {
    if (this.#isBusy) await new Promise<void>((go) => (urgent ? this.#waiting.unshift(go) : this.#waiting.push(go)));
    this.#isBusy = true;
    const before = this.#connection;
    try {
      return await this.#rows(call, limit);
    } catch (error) {
      if (!repeats || before === undefined || before === this.#connection || !sessionEnded(error)) throw error;
      return await this.#rows(call, limit);
    } finally {
      const next = this.#waiting.shift();
      this.#isBusy = next !== undefined;
      next?.();
    }
  }

  async #rows(call: Call, limit: number): Promise<readonly Row[]> {
    let connection: Connection | undefined;
    try {
      const open = (connection = this.#connection ??= await this.#opened(limit));
      return await within(limit, open.rows(call), () => open.cut());
    } catch (error) {
      if (sessionEnded(error)) connection?.cut();
      throw toldOfCall(error, connection?.role);
    }
  }

  async #opened(limit: number): Promise<Connection> {
    // The driver gives up after us. One that comes too late is nobody's.
    const opening = this.open(2 * limit);
    const connection = await within(limit, opening, () => void opening.then((late) => late.cut(), () => {}));
    connection.onEnd = () => {
      if (this.#connection !== connection) return; // it was closed, when nobody had a lease
      [this.#connection, this.session] = [undefined, this.session + 1];
      this.onEnd();
    };
    if (connection.isEnded) throw new FenceError("the connection has ended while it was opened");
    return connection;
  }

  /** Takes no longer than a second. */
  async close(): Promise<void> {
    const connection = this.#connection;
    this.#connection = undefined;
    if (connection) await within(1000, connection.end(), () => connection.cut()).catch(() => {});
  }
}
