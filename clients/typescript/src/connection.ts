import { FenceError } from "./errors.js";
import type { Statement } from "./statements.js";

/** The columns of a row, in their order, as the server writes them. */
export type Row = readonly (string | null)[];

/** An open connection of the fence's own, on either driver. It does not keep the process alive. */
export interface Session {
  readonly role: string | undefined;
  /** Runs a statement in autocommit. */
  rows(statement: Statement): Promise<readonly Row[]>;
  end(): Promise<unknown>;
  /** Ends it at once, whatever hangs on it. */
  destroy(): void;
}

/** Opens one, which may take so many milliseconds. `ended` is called when it has ended. */
export type Opener = (limit: number, ended: () => void) => Promise<Session>;

/** A connection of the heartbeat's, which may be cut before it is open. */
export class Connection {
  /** It is not open, or no more. */
  isEnded = true;
  #isCut = false;
  #session: Session | undefined;
  /** A call is about to be sent, which tells by itself if the connection has ended before. */
  isToSend = false;

  constructor(readonly onEnd: () => void) {}

  get role(): string | undefined {
    return this.#session?.role;
  }

  async open(opener: Opener, limit: number): Promise<void> {
    let hasEnded = false;
    this.#session = await opener(limit, () => {
      hasEnded = true;
      if (!this.isEnded) this.onEnd();
      this.isEnded = true;
    });
    if (this.#isCut) this.cut();
    if (this.#isCut || hasEnded) throw new Error("Connection terminated");
    this.isEnded = false;
  }

  async rows(statement: Statement): Promise<readonly Row[]> {
    // A driver may connect once more.
    if (!this.#session || this.isEnded) throw new Error("Connection terminated");
    return this.#session.rows(statement);
  }

  /** Ends it at once, whether the driver notices or not. */
  cut(): void {
    [this.#isCut, this.isEnded] = [true, true];
    this.#session?.destroy();
  }

  /** Ends it as it should, which takes no longer than a second. */
  async hangUp(): Promise<void> {
    [this.#isCut, this.isEnded] = [true, true];
    const ended = this.#session?.end() ?? Promise.resolve();
    await within(1000, ended, () => this.cut()).catch(() => {});
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
