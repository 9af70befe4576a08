import type { Statement } from "./statements.js";

/** The columns of a row, in their order, as the server writes them. */
export type Row = readonly (string | null)[];

/** An open connection of the heartbeat, on either driver. It does not keep the process alive. */
export interface Session {
  readonly role: string | undefined;
  /** Runs a statement in autocommit. */
  rows(statement: Statement): Promise<readonly Row[]>;
  end(): Promise<unknown>;
  /** Ends the connection at once, also while a statement hangs on it. */
  destroy(): void;
}

/** Opens a session within `limit` milliseconds. `ended` is called when the session has ended. */
export type Opener = (limit: number, ended: () => void) => Promise<Session>;

/** A connection of the heartbeat, which may be cut before it is open. */
export class Connection {
  /** True before the connection is open, and after its end. */
  isEnded = true;
  #isCut = false;
  #session: Session | undefined;
  /** True while a call is about to be sent, which fails with `unsent` if the connection has ended
   * before. The end is then no input. */
  isAboutToSend = false;

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
    // The driver might open another connection for the statement.
    if (!this.#session || this.isEnded) throw new Error("Connection terminated");
    return this.#session.rows(statement);
  }

  /** Ends the connection at once, also if the driver does not report its end. */
  cut(): void {
    [this.#isCut, this.isEnded] = [true, true];
    this.#session?.destroy();
  }

  /** Ends the connection in order, or cuts it after a second. */
  async hangUp(): Promise<void> {
    [this.#isCut, this.isEnded] = [true, true];
    const ended = this.#session?.end() ?? Promise.resolve();
    await within(1000, ended, () => this.cut());
  }
}

/** Waits for the work, and returns true if it has succeeded within `ms` milliseconds. If it is late,
 * `late` is called, and the work goes on. */
export async function within(ms: number, work: PromiseLike<unknown>, late = () => {}) {
  let timer: NodeJS.Timeout | undefined;
  const timeout = new Promise<boolean>((resolve) => {
    timer = setTimeout(() => {
      late();
      resolve(false);
    }, ms);
  });
  const isInTime = await Promise.race([work.then(() => true), timeout]).catch(() => false);
  clearTimeout(timer);
  return isInTime;
}

/** True if the value is a plain object, as settings are, and no instance of a class. */
export const isSettings = (value: unknown) =>
  Object(value) === value && ["Object", undefined].includes(Object(value).constructor?.name);
