import { setTimeout as sleep } from "node:timers/promises";
import * as sql from "./asked.js";
import { FenceError, LeaseLost, LeaseTaken, Refused, sessionEnded, sqlstateOf, toldOfCall, toldOfWork, TransactionLost } from "./errors.js";
import type { Grant, Keeper } from "./keeper.js";
import { within } from "./line.js";

/** In milliseconds: how long the work may take to find out that its session has ended, for no driver settles all it was sent;
 * and how long a rollback waits for a statement that the work has left behind. */
const [GRACE, PATIENCE] = [1000, 1000];
export const FAILED = "a statement of the transaction has failed: all of it is rolled back";
const ENDED = "the work has ended the transaction itself: what it did after that was not guarded";

/** A transaction, as a driver does it; within one that somebody else ends (`isInner`), a savepoint. */
export abstract class Transaction<Tx> {
  role: string | undefined;
  /** The cause that ended its session, as far as it can be seen: an ORM shows no connection. */
  broken: unknown;
  readonly showsEnd: boolean = true;
  #tell: (error: unknown) => void = () => {};
  readonly #breaks = new Promise<never>((_, reject) => (this.#tell = reject));
  constructor(public isInner = false) { this.#breaks.catch(() => {}); }
  /** Returns what the work is done with. */
  abstract begin(): Promise<Tx>;
  /** The only row of a statement. */
  abstract row(call: sql.Call): Promise<readonly unknown[]>;
  abstract commit(): Promise<unknown>;
  protected abstract undo(): Promise<unknown>;
  /** Ends the connection, so that what hangs on it fails, whether the driver notices or not. */
  cut(why: string): void { this.breaks(new Error(`Connection terminated: ${why}`)); }
  leave(): void {}

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
    return Promise.race([work, this.#breaks.catch((error) => sleep(GRACE).then(() => Promise.reject(error)))]);
  }

  /** Throws where it is open no more. The end of a transaction ends the setting, too, that its guard has made. */
  async check(): Promise<void> {
    const [token] = await this.row(["SELECT current_setting('pg_fence.token', true)"]).catch((error) => {
      throw sqlstateOf(error) === "25P02" ? new TransactionLost(FAILED, error) : error;
    });
    if (!token) throw Object.assign(new TransactionLost(ENDED), { inDoubt: true });
  }

  /** A connection on which that fails, or takes too long, ends. */
  async rollback(late: () => void): Promise<void> {
    if (this.broken !== undefined) return;
    await within(PATIENCE, this.undo(), late).catch(() => this.cut("it could not be rolled back"));
  }
}

/** Runs a query in an open transaction of an ORM's. */
export type Query = (sql: string) => PromiseLike<unknown>;

/** That transaction, of which we see no more than its queries. ORMs differ in how they take parameters: here the values are
 * digits of the statement. */
export class OpenTransaction extends Transaction<undefined> {
  override readonly showsEnd = false;

  constructor(readonly query: Query) { super(true); }
  async begin(): Promise<undefined> { await this.#run("SAVEPOINT pg_fence"); }

  row([text, ...values]: sql.Call): Promise<readonly unknown[]> {
    const digits = (value: string) => `convert_from(decode('${Buffer.from(value).toString("hex")}', 'hex'), 'UTF8')`;
    return this.#run(text.replace(/\$(\d+)/g, (_, number) => digits(values[number - 1] ?? "")));
  }

  commit(): Promise<unknown> { return this.#run("RELEASE SAVEPOINT pg_fence"); }

  protected async undo(): Promise<void> {
    await this.#run("ROLLBACK TO SAVEPOINT pg_fence");
    await this.#run("RELEASE SAVEPOINT pg_fence");
  }

  async #run(text: string): Promise<readonly unknown[]> {
    const result = Object(await this.until(() => this.query(text))) as { rows?: unknown };
    // Sequelize returns the rows and something beside.
    return Object.values(Object([result.rows ?? result].flat(2)[0]));
  }
}

/** `leases` are those of the grants. They are held on to while the transaction runs, so that none is collected. */
export type Under = Readonly<{
  keeper: Keeper; leases: readonly unknown[]; grants: readonly Grant[]; begins: readonly sql.Call[]; ends: readonly sql.Call[];
}>;

/** By these leases, in the same order everywhere, so that no two wait for each other. */
export function under(keeper: Keeper, leases: readonly unknown[], grants: readonly Grant[], release: boolean): Under {
  if (grants.length === 0) throw new TypeError("a guard takes a lease");
  const pairs = grants.flatMap(({ names, token }) => names.map((name) => [Buffer.from(name), name, token] as const));
  const begins = pairs.sort(([one], [other]) => Buffer.compare(one, other)).map(([, ...of]) => sql.guard(keeper.prefix, ...of));
  const ends = release ? grants.map(({ names, token }) => sql.release(keeper.prefix, names, token)) : [];
  return { keeper, leases, grants, begins, ends };
}

type Stage = "begin" | "work" | "end" | "commit";

/** Does the work in a transaction under leases, and returns what it returned. */
export async function guarded<Tx, T>(
  of: Under, make: () => Transaction<Tx>, work: (tx: Tx) => PromiseLike<T>, isFirst = true,
): Promise<T> {
  const { keeper, leases, grants, begins, ends } = of;
  grants.forEach((grant) => keeper.check(grant));
  const transaction = make();
  // From here on a loss breaks the connection off, where it hangs, too.
  const cut = () => transaction.cut("the lease is lost");
  grants.forEach(({ cuts }) => cuts.set(cut, leases));
  let [stage, session]: [Stage, unknown?] = ["begin"];
  // The heartbeat leaves out what is about to be released.
  const rest = (more: number) => grants.forEach(({ keeping }) => (keeping.resting += more));
  try {
    const tx = await transaction.begin();
    for (const call of begins) [, session] = await transaction.row(call);
    stage = "work";
    const result = await transaction.worked(work(tx));
    stage = "end";
    if (ends.length > 0) rest(1);
    await transaction.check();
    for (const [number, call] of ends.entries()) {
      const [closing = null] = await transaction.row(call);
      if (closing !== null) continue;
      keeper.end(grants.slice(number, number + 1), "gone");
      throw grants[number]?.lost() ?? new LeaseLost("gone", [`${call[1]}`]);
    }
    stage = "commit";
    await transaction.commit();
    keeper.tell("released", ends.length > 0 ? keeper.end(grants, "released") : []);
    return result;
  } catch (error) {
    const told = await toldBy(of, transaction, error, stage);
    if (stage === "commit" && told !== error && (told instanceof LeaseLost || told instanceof TransactionLost)) {
      // The server has ended an idle transaction before it read the commit.
      told.inDoubt = !transaction.isInner && !/^25P0[34]$/.test(sqlstateOf(error));
    }
    // A statement that the work has left running would hold its locks.
    await transaction.rollback(() => keeper.cancel(session));
    // After a failover no token speaks until its holder has renewed.
    const speaks = !(told instanceof Refused && told.sqlstate === "PF004");
    if (stage !== "begin" || !isFirst || speaks || transaction.isInner || grants.length === 0) throw told;
  } finally {
    if (ends.length > 0 && (stage === "end" || stage === "commit")) rest(-1);
    grants.forEach(({ cuts }) => cuts.delete(cut));
    transaction.leave();
  }
  await keeper.keep(grants);
  return guarded(of, make, work, false);
}

/** The typed error, where it is one. A connection that was broken off because of a loss tells the loss. */
async function toldBy(of: Under, transaction: Transaction<unknown>, error: unknown, stage: Stage): Promise<unknown> {
  const [{ keeper, grants, begins }, state] = [of, sqlstateOf(error)];
  if (!(error instanceof FenceError) && sessionEnded(error)) {
    // Some drivers tell the end of the connection a moment later.
    await new Promise(setImmediate);
    // A connection of something else may have broken: that is the work's own business.
    if (state !== "" || transaction.broken !== undefined || !transaction.showsEnd) {
      const told = `the session ended under the transaction: ${(error as Error).message}`;
      return grants.find((grant) => grant.isLost)?.lost(error) ?? new TransactionLost(told, error);
    }
  }
  if (state === "PF001" || state === "PF004") keeper.beatSoon(grants);
  const told = stage === "work" ? toldOfWork(error) : toldOfCall(error, transaction.role);
  // NULL from lease_adopt: an older number is guarded. PF004 from it: another holder has adopted this number.
  const isTaken = stage === "begin" && grants.length === 0 && (state === "22004" || state === "PF004");
  if (!isTaken || !(told instanceof Refused)) return told;
  const { holder } = told.detail;
  return new LeaseTaken([`${begins[0]?.[1]}`], typeof holder === "string" ? holder : undefined, undefined, error);
}
