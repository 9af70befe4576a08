import { setTimeout as sleep } from "node:timers/promises";
import { within } from "./connection.js";
import * as errors from "./errors.js";
import type { Heartbeat, Holding } from "./heartbeat.js";
import { guardFailed, type GuardError, type GuardFailure, type LastStage } from "./lease_state.js";
import * as statements from "./statements.js";
import type { Counted, Pair } from "./statements.js";

/** How long the work may take to notice that its session has ended, as no driver settles all its
 * statements; and how long a rollback waits for a statement that the work has left running. In
 * milliseconds. */
const [END_NOTICED, ROLLBACK_TIMEOUT] = [1000, 1000];

/** The messages of TransactionLost, by the code of the error. */
const LOST: Record<string, string> = {
  "25P02": "a statement of the transaction has failed: all of it is rolled back",
  "no transaction":
    "the work has ended the transaction itself: what it did after that was not guarded",
};
/** The error of a transaction that the driver shows to be no longer open. */
export class NotOpen extends Error {
  constructor(readonly code: "25P02" | "no transaction") {
    super(LOST[code]);
  }
}

/** A transaction of a driver. Within one that the program ends (`isInner`) it is a savepoint. */
export abstract class Transaction<Tx> {
  role: string | undefined;
  /** The number of the server's process, if it is known. The server tells it: behind a pooler that
   * of the driver may belong to another session. */
  pid: unknown;
  /** Why the session has ended. */
  broken: unknown;
  /** The session as the driver shows it before its end. An ORM does not show it. */
  readonly session: "open" | "unknown" = "open";
  /** True if there is nothing to roll back. */
  protected isOver = false;
  #rejectEnd: (error: unknown) => void = () => {};
  readonly #end = new Promise<never>((_, reject) => (this.#rejectEnd = reject));

  constructor(public isInner = false) {
    this.#end.catch(() => {});
  }

  /** Begins the transaction, and returns the work's handle of it. */
  abstract begin(): Promise<Tx>;
  /** Throws the error of the statement that begins the transaction. If it is an error of the
   * server, there is nothing to roll back: the failed transaction of the program may have a
   * savepoint of the same name, which is another guard's. */
  protected failBegin(error: unknown): never {
    this.isOver = errors.sqlstateOf(error) !== "";
    throw error;
  }
  /** Runs a statement, and returns the number of its rows. */
  abstract count(statement: Counted): Promise<number>;
  abstract commit(): Promise<unknown>;
  protected abstract undo(): Promise<unknown>;
  /** Gives the connection back after the transaction. */
  leave(): void {}

  /** Ends the connection, so that a statement that hangs on it fails, also if the driver does not
   * report the end. */
  cut(why: string): void {
    this.markBroken(new Error(`Connection terminated: ${why}`));
  }

  /** Records that the session has ended. */
  protected markBroken(error: unknown): void {
    this.broken ??= error;
    this.#rejectEnd(this.broken);
  }

  /** Returns the result of the statement, or throws as soon as the session has ended. */
  protected async unlessBroken<T>(statement: () => PromiseLike<T>): Promise<T> {
    if (this.broken !== undefined) throw this.broken;
    return Promise.race([statement(), this.#end]);
  }

  /** Returns the result of the work, or throws a second after the session has ended: the work may
   * notice the end first, and throw an error of its own. */
  resultOf<T>(work: PromiseLike<T>): Promise<T> {
    const late = this.#end.catch((error) => sleep(END_NOTICED).then(() => Promise.reject(error)));
    return Promise.race([work, late]);
  }

  /** Throws an error if the transaction has failed, or is no longer open. */
  async check(): Promise<void> {
    if ((await this.count(statements.isOpen(this.isInner))) === 0)
      throw new NotOpen("no transaction");
  }

  /** Rolls back, or cuts the connection if that fails or takes too long. `late` is called if it
   * takes too long. */
  async rollback(late: () => void): Promise<void> {
    if (this.broken !== undefined || this.isOver) return;
    const isUndone = await within(ROLLBACK_TIMEOUT, this.undo(), late);
    if (!isUndone) this.cut("it could not be rolled back");
  }
}

/** Runs a query in the open transaction of an ORM, and returns what the ORM returned. */
export type Query = (sql: string) => PromiseLike<unknown>;

/** The open transaction of an ORM, which shows nothing but the results of queries. ORMs differ in
 * how they take parameters, so the statement contains the values, as hexadecimal digits. */
export class OpenTransaction extends Transaction<undefined> {
  override readonly session = "unknown";

  constructor(readonly query: Query) {
    super(true);
  }

  async begin(): Promise<undefined> {
    await this.#run("SAVEPOINT pg_fence").catch((error) => this.failBegin(error));
  }

  async count({ from, values }: Counted): Promise<number> {
    const literal = (value = "") =>
      `convert_from(decode('${Buffer.from(value).toString("hex")}', 'hex'), 'UTF8')`;
    const text = `SELECT count(*)::int AS n, pg_backend_pid() AS pid ${from}`;
    // The name of the schema, which is quoted, may contain a dollar and a digit.
    const whole = text.replace(/"[^"]*"|\$(\d+)/g, (part, at) =>
      at ? literal(values[at - 1]) : part,
    );
    const result = await this.#run(whole);
    // Sequelize returns a pair of the rows and its metadata.
    const { rows } = Object(result) as { rows?: unknown };
    const [count, pid] = Object.values(Object([rows ?? result].flat(2)[0]));
    this.pid = pid;
    if (count === undefined) throw new TypeError("the function returns no rows of its query");
    return Number(count);
  }

  commit(): Promise<unknown> {
    return this.#run("RELEASE SAVEPOINT pg_fence");
  }

  protected async undo(): Promise<void> {
    await this.#run("ROLLBACK TO SAVEPOINT pg_fence");
    await this.#run("RELEASE SAVEPOINT pg_fence");
  }

  #run(text: string): Promise<unknown> {
    return this.unlessBroken(() => this.query(text));
  }
}

/** What guards a transaction: leases of the fence, or an adopted lease. */
export interface GuardedBy {
  readonly heartbeat: Heartbeat;
  /** The leases of the holdings. This reference keeps them from the garbage collector while the
   * transaction runs. */
  readonly leases: readonly unknown[];
  readonly holdings: readonly Holding[];
  readonly adopted: Pair | undefined;
  readonly release: boolean;
}

/** Does the work in a transaction that is guarded by leases, and returns the work's result. */
export async function guarded<Tx, T>(
  by: GuardedBy,
  makeTransaction: () => Transaction<Tx>,
  work: (tx: Tx) => PromiseLike<T>,
): Promise<T> {
  if (by.holdings.length === 0 && !by.adopted) throw new TypeError("a guard takes a lease");
  const first = new Guard(by, makeTransaction());
  return first.run(work).catch(async (error: unknown) => {
    if (!first.beginsAgain) throw error;
    await by.heartbeat.renew(by.holdings);
    return new Guard(by, makeTransaction()).run(work);
  });
}

/** One transaction that is guarded by leases. */
class Guard<Tx> {
  /** True if the transaction has failed, and begins once more after a renewal. */
  beginsAgain = false;
  #stage: GuardError["stage"] = "open";
  #isReleasing = false;
  #hasRowLocks = false;
  readonly #rows: readonly Holding[];
  readonly #pairs: readonly Pair[];
  /** The leases whose loss ends the transaction. A row lease whose window is over is none of them
   * if it is released: the table's trigger checks its last write. */
  readonly #held: readonly Holding[];

  constructor(
    readonly by: GuardedBy,
    readonly transaction: Transaction<Tx>,
  ) {
    const { holdings, adopted, release } = by;
    this.#rows = holdings.filter(({ isRow }) => isRow);
    const pairsOf = ({ isRow, names, token }: Holding) =>
      isRow ? [] : names.map((name) => ({ name, token }));
    this.#pairs = adopted ? [adopted] : holdings.flatMap(pairsOf);
    this.#held = holdings.filter(
      ({ isRow, endReason }) => !(isRow && release && endReason === "deadline"),
    );
  }

  async run<T>(work: (tx: Tx) => PromiseLike<T>): Promise<T> {
    const { transaction, by } = this;
    this.#check();
    // From here on a loss cuts the connection, also while a statement hangs on it.
    for (const { loss } of this.#held) loss.signal.addEventListener("abort", this.#cut);
    let end: LastStage = "rolled back";
    try {
      const result = await this.#runWork(work);
      end = transaction.isInner ? "inner" : "committed";
      return result;
    } catch (error) {
      // The driver postgres throws the error of a statement before it reports the end of the
      // session.
      await sleep(1);
      const code = error instanceof NotOpen ? error.code : errors.codeOf(error);
      const failure = this.#failed(error, code);
      [end, this.beginsAgain] = [failure.last, failure.again];
      if (failure.suspect) by.heartbeat.suspect(by.holdings);
      // A statement that the work has left running keeps its locks until it is canceled.
      await transaction.rollback(() => by.heartbeat.cancel(transaction.pid));
      throw this.#errorOf(error, code, failure);
    } finally {
      if (this.#isReleasing) by.heartbeat.lastTransaction(by.holdings, end);
      if (this.#hasRowLocks) by.heartbeat.rowLocks(this.#rows, "rowUnlocked");
      for (const { loss } of this.#held) loss.signal.removeEventListener("abort", this.#cut);
      transaction.leave();
    }
  }

  readonly #cut = () => this.transaction.cut("the lease is lost");

  #check(): void {
    for (const holding of this.#held) this.by.heartbeat.check(holding);
  }

  async #runWork<T>(work: (tx: Tx) => PromiseLike<T>): Promise<T> {
    const { heartbeat, holdings, release } = this.by;
    const tx = await this.transaction.begin();
    const { isInner } = this.transaction;
    this.#stage = "begin";
    // Rows are written first, so that nobody else can claim them.
    for (const row of this.#rows) {
      const count = await this.#count(statements.guardRow(row.request, isInner));
      if (count === 0) throw this.#goneError(row.names, row);
    }
    this.#hasRowLocks = this.#rows.length > 0;
    if (this.#hasRowLocks) heartbeat.rowLocks(this.#rows, "rowLocked");
    if (this.#pairs.length > 0) await this.#count(statements.guard(this.#pairs, isInner));
    this.#check();
    this.#stage = "work";
    const result = await this.transaction.resultOf(work(tx));
    this.#stage = "check";
    // From here on the heartbeat does not renew the leases that are being released.
    if (release) heartbeat.lastTransaction(holdings, "begins");
    this.#isReleasing = release;
    await this.transaction.check();
    this.#stage = "release";
    if (release) await this.#release();
    this.#stage = "commit";
    await this.transaction.commit();
    return result;
  }

  #count({ from, values }: Counted): Promise<number> {
    return this.transaction.count({ from: this.by.heartbeat.qualified(from), values });
  }

  async #release(): Promise<void> {
    for (const row of this.#rows) await this.#count(statements.lastRow(row.request));
    if (this.#pairs.length === 0) return;
    const gone = this.#pairs[(await this.#count(statements.last(this.#pairs))) - 1];
    if (!gone) return;
    const isOfPair = ({ names, token }: Holding) =>
      names.includes(gone.name) && token === gone.token;
    throw this.#goneError([gone.name], this.by.holdings.find(isOfPair));
  }

  /** Returns the error of a lease that is lost, as the server says. The heartbeat learns of the loss
   * by a renewal. */
  #goneError(names: readonly string[], holding?: Holding): errors.LeaseLost {
    if (holding) {
      holding.isLossSeen = true;
      this.by.heartbeat.suspect([holding]);
    }
    return new errors.LeaseLost("gone", names);
  }

  /** True if no names guard the transaction, but rows alone. */
  get #isOfRows(): boolean {
    return this.#pairs.length === 0;
  }

  /** A lease that is lost, or a row whose window is over in this transaction. */
  get #lost(): Holding | undefined {
    const reasonOf = (holding: Holding) => this.by.heartbeat.lossOf(holding)?.reason ?? "released";
    return this.#held.find((holding) => reasonOf(holding) !== "released");
  }

  #failed(error: unknown, code: string): GuardFailure {
    const { transaction, by } = this;
    return guardFailed({
      stage: this.#stage,
      code,
      isFatal: errors.isFatal(error),
      session: transaction.broken === undefined ? transaction.session : "closed",
      of: by.adopted ? "adopted" : this.#isOfRows ? "rows" : "names",
      isInner: transaction.isInner,
      isLost: this.#lost !== undefined,
    });
  }

  /** Returns the error to throw. */
  #errorOf(error: unknown, code: string, { error: type, inDoubt }: GuardFailure): unknown {
    if (error instanceof errors.FenceError || type === "") return errors.unwrapAbort(error);
    if (type === "LeaseLost") {
      const lost = this.#lost as Holding;
      lost.isLossSeen = true;
      return Object.assign(this.by.heartbeat.lossOf(lost, error) as errors.LeaseLost, { inDoubt });
    }
    if (type === "TransactionLost") {
      const ended = `the session ended under the transaction: ${(error as Error).message}`;
      return Object.assign(new errors.TransactionLost(LOST[code] ?? ended, error), { inDoubt });
    }
    if (type === "LeaseTaken") {
      const { holder } = errors.refusal(error).detail;
      const names = this.#pairs.map(({ name }) => name);
      const by = typeof holder === "string" ? holder : undefined;
      return new errors.LeaseTaken(names, by, undefined, undefined, error);
    }
    return errors.typed(error, type, this.transaction.role, this.#isOfRows);
  }
}
