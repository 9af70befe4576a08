import { setTimeout as sleep } from "node:timers/promises";
import { within } from "./connection.js";
import { FenceError, LeaseLost, LeaseTaken, Refused, TransactionLost } from "./errors.js";
import { sessionEnded, sqlstateOf, toldOfCall, toldOfWork } from "./errors.js";
import type { Heartbeat, Holding } from "./heartbeat.js";
import { isOpen, type Counted, type Pair } from "./statements.js";

/** In milliseconds: how long the work may take to find out that its session has ended, for no
 * driver settles all it was sent; and how long a rollback waits for a statement that the work has
 * left behind. */
const [GRACE, PATIENCE] = [1000, 1000];
export const FAILED = "a statement of the transaction has failed: all of it is rolled back";
const ENDED = "the work has ended the transaction itself: what it did after that was not guarded";

/** A transaction, as a driver does it; in one that somebody else ends (`isInner`), a savepoint. */
export abstract class Transaction<Tx> {
  role: string | undefined;
  /** The server's process, if the driver tells it. */
  session: unknown;
  /** The cause that ended its session, as far as it can be seen: an ORM shows no connection. */
  broken: unknown;
  readonly showsEnd: boolean = true;
  #isRefused = false;
  #tell: (error: unknown) => void = () => {};
  readonly #breaks = new Promise<never>((_, reject) => (this.#tell = reject));

  constructor(public isInner = false) {
    this.#breaks.catch(() => {});
  }

  /** Returns what the work is done with. */
  abstract begin(): Promise<Tx>;
  /** The statement that begins it has failed. If the server says so, there is nothing to roll back:
   * in a transaction that has failed, the savepoint of that name is another guard's. */
  protected refused(error: unknown): never {
    this.#isRefused = sqlstateOf(error) !== "";
    throw error;
  }
  /** Runs a statement, and returns the number of its rows. */
  abstract count(statement: Counted): Promise<number>;
  abstract commit(): Promise<unknown>;
  protected abstract undo(): Promise<unknown>;
  leave(): void {}

  /** Ends the connection, so that what hangs on it fails, whether the driver notices or not. */
  cut(why: string): void {
    this.breaks(new Error(`Connection terminated: ${why}`));
  }

  /** Its session has ended. */
  protected breaks(error: unknown): void {
    this.broken ??= error;
    this.#tell(this.broken);
  }

  /** The result of a statement, or the end of the session. */
  protected async until<T>(statement: () => PromiseLike<T>): Promise<T> {
    if (this.broken !== undefined) throw this.broken;
    return Promise.race([statement(), this.#breaks]);
  }

  /** The result of the work; when the session has ended, it has a moment to find out. */
  worked<T>(work: PromiseLike<T>): Promise<T> {
    const late = this.#breaks.catch((error) => sleep(GRACE).then(() => Promise.reject(error)));
    return Promise.race([work, late]);
  }

  /** Throws if it is open no more. */
  async check(): Promise<void> {
    const open = await this.count(isOpen).catch((error) => {
      throw sqlstateOf(error) === "25P02" ? new TransactionLost(FAILED, error) : error;
    });
    if (open === 0) throw Object.assign(new TransactionLost(ENDED), { inDoubt: true });
  }

  /** A connection on which that fails, or takes too long, ends. */
  async rollback(late: () => void): Promise<void> {
    if (this.broken !== undefined || this.#isRefused) return;
    const undone = within(PATIENCE, this.undo(), late);
    await undone.catch(() => this.cut("it could not be rolled back"));
  }
}

/** Runs a query in an open transaction of an ORM's, and returns what that returned. */
export type Query = (sql: string) => PromiseLike<unknown>;

/** That transaction, of which we see no more than its queries. ORMs differ in how they take
 * parameters: here the values are digits of the statement. */
export class OpenTransaction extends Transaction<undefined> {
  override readonly showsEnd = false;

  constructor(readonly query: Query) {
    super(true);
  }

  async begin(): Promise<undefined> {
    await this.#run("SAVEPOINT pg_fence").catch((error) => this.refused(error));
  }

  async count({ from, values }: Counted): Promise<number> {
    const digits = (value = "") =>
      `convert_from(decode('${Buffer.from(value).toString("hex")}', 'hex'), 'UTF8')`;
    const text = `SELECT count(*)::int AS n, pg_backend_pid() AS pid ${from}`;
    const result = await this.#run(text.replace(/\$(\d+)/g, (_, at) => digits(values[at - 1])));
    // Sequelize returns the rows and something beside.
    const { rows } = Object(result) as { rows?: unknown };
    const [count, session] = Object.values(Object([rows ?? result].flat(2)[0]));
    this.session = session;
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
    return this.until(() => this.query(text));
  }
}

/** What guards a transaction: leases of the fence, or a number that somebody else grants. */
export interface Under {
  readonly heartbeat: Heartbeat;
  /** The leases of the holdings. They are held on to while the transaction runs, so that none is
   * collected. */
  readonly leases: readonly unknown[];
  readonly holdings: readonly Holding[];
  readonly adopted: Pair | undefined;
  readonly release: boolean;
}

type Stage = "begin" | "work" | "end" | "commit";

/** Does the work in a transaction under leases, and returns what it returned. */
export async function guarded<Tx, T>(
  of: Under,
  make: () => Transaction<Tx>,
  work: (tx: Tx) => PromiseLike<T>,
): Promise<T> {
  if (of.holdings.length === 0 && !of.adopted) throw new TypeError("a guard takes a lease");
  const first = new Guard(of, make());
  return first.run(work).catch(async (error: unknown) => {
    const isSilent = error instanceof Refused && error.sqlstate === "PF004" && !of.adopted;
    if (!isSilent || first.stage !== "begin" || first.transaction.isInner) throw error;
    // After a failover no token speaks until its holder has renewed.
    await of.heartbeat.renew(of.holdings);
    return new Guard(of, make()).run(work);
  });
}

/** One transaction under leases. */
class Guard<Tx> {
  stage: Stage = "begin";
  #isResting = false;
  #isTouching = false;
  readonly #rows: readonly Holding[];
  readonly #pairs: readonly Pair[];
  /** The leases that can be lost under it. Not a row lease whose window is over: its last write is
   * checked by the table's trigger. */
  readonly #held: readonly Holding[];

  constructor(
    readonly of: Under,
    readonly transaction: Transaction<Tx>,
  ) {
    const { holdings, adopted, release } = of;
    this.#rows = holdings.filter(({ isRow }) => isRow);
    const pairsOf = ({ isRow, names, token }: Holding) =>
      isRow ? [] : names.map((name) => ({ name, token }));
    this.#pairs = adopted ? [adopted] : holdings.flatMap(pairsOf);
    this.#held = holdings.filter(({ isRow, over }) => !(isRow && release && over === "deadline"));
  }

  async run<T>(work: (tx: Tx) => PromiseLike<T>): Promise<T> {
    const { transaction, of } = this;
    this.#check();
    // From here on a loss breaks the connection off, if it hangs, too.
    for (const { aborts } of this.#held) aborts.signal.addEventListener("abort", this.#cut);
    let ends: "committed" | "inner" | "in doubt" | "rolled back" = "rolled back";
    try {
      const result = await this.#does(work);
      ends = transaction.isInner ? "inner" : "committed";
      return result;
    } catch (error) {
      const told = await this.#told(error);
      const isLoss = told instanceof LeaseLost || told instanceof TransactionLost;
      if (this.stage === "commit" && told !== error && isLoss) {
        // The server has ended an idle transaction before it read the commit.
        told.inDoubt = !transaction.isInner && !/^25P0[34]$/.test(sqlstateOf(error));
        if (told.inDoubt) ends = "in doubt";
      }
      // A statement that the work has left running would hold its locks.
      await transaction.rollback(() => of.heartbeat.cancel(transaction.session));
      throw told;
    } finally {
      if (this.#isResting) of.heartbeat.last(of.holdings, ends);
      if (this.#isTouching) of.heartbeat.rowUnlocked(this.#rows);
      for (const { aborts } of this.#held) aborts.signal.removeEventListener("abort", this.#cut);
      transaction.leave();
    }
  }

  readonly #cut = () => this.transaction.cut("the lease is lost");

  #check(): void {
    for (const holding of this.#held) this.of.heartbeat.check(holding);
  }

  async #does<T>(work: (tx: Tx) => PromiseLike<T>): Promise<T> {
    const { heartbeat, holdings, release } = this.of;
    const tx = await this.transaction.begin();
    // Rows are written first, so that nobody else gets them.
    for (const row of this.#rows) {
      const count = await this.transaction.count(heartbeat.statements.guardRow(row));
      if (count === 0) throw this.#gone(row.names, row);
    }
    this.#isTouching = this.#rows.length > 0;
    if (this.#isTouching) heartbeat.rowLocked(this.#rows);
    if (this.#pairs.length > 0)
      await this.transaction.count(heartbeat.statements.guard(this.#pairs));
    this.#check();
    this.stage = "work";
    const result = await this.transaction.worked(work(tx));
    this.stage = "end";
    // The heartbeat leaves out what is about to be released.
    if (release) heartbeat.last(holdings, "begins");
    this.#isResting = release;
    await this.transaction.check();
    if (release) await this.#release();
    this.stage = "commit";
    await this.transaction.commit();
    return result;
  }

  async #release(): Promise<void> {
    const { statements } = this.of.heartbeat;
    for (const row of this.#rows) await this.transaction.count(statements.lastOfRow(row));
    if (this.#pairs.length === 0) return;
    const ended = this.#pairs[(await this.transaction.count(statements.last(this.#pairs))) - 1];
    if (!ended) return;
    const isOf = ({ names, token }: Holding) => names.includes(ended.name) && token === ended.token;
    throw this.#gone([ended.name], this.of.holdings.find(isOf));
  }

  /** The server says so in the transaction; the next renewal tells it to the heartbeat. */
  #gone(names: readonly string[], holding?: Holding): LeaseLost {
    if (holding) {
      holding.isHeard = true;
      this.of.heartbeat.suspect([holding]);
    }
    return new LeaseLost("gone", names);
  }

  /** The typed error, if it is one. A connection that was broken off because of a loss tells the
   * loss. */
  async #told(error: unknown): Promise<unknown> {
    const { transaction, stage, of } = this;
    const state = sqlstateOf(error);
    // The error of a statement comes before its socket is closed, by which postgres tells the end.
    await sleep(1);
    if (!(error instanceof FenceError) && sessionEnded(error)) {
      // A connection of something else may have broken: that is the work's own business.
      if (state !== "" || transaction.broken !== undefined || !transaction.showsEnd) {
        const lost = this.#held.find(({ isLost }) => isLost);
        if (lost) lost.isHeard = true;
        const what = `the session ended under the transaction: ${(error as Error).message}`;
        return lost?.lost(error) ?? new TransactionLost(what, error);
      }
    }
    if (state === "PF001" || state === "PF004") of.heartbeat.suspect(of.holdings);
    // A deferred trigger or constraint of the program's fails at the commit.
    const isOurs = stage === "begin" || stage === "end";
    const told = isOurs ? toldOfCall(error, transaction.role) : toldOfWork(error);
    // NULL from lease_adopt: an older number is guarded. PF004 from it: another holder has adopted
    // this number.
    const isTaken = stage === "begin" && of.adopted && (state === "22004" || state === "PF004");
    if (!isTaken || !(told instanceof Refused)) return told;
    const { holder } = told.detail;
    const by = typeof holder === "string" ? holder : undefined;
    return new LeaseTaken([of.adopted.name], by, undefined, undefined, error);
  }
}
