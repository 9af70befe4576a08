import { valueOf, type Transaction } from "./connection.js";
import { classify, LeaseLost, NotSpeaking, sqlstateIn, StaleToken, TransactionLost } from "./errors.js";
import { firstOf, type Holding } from "./holding.js";
import { tellHook } from "./hooks.js";

/** Runs a query in a transaction that is open already, as an ORM does it. */
export type Query = (sql: string) => PromiseLike<unknown>;

/** With a lock on the grant, or without. */
export type Kind = "guard" | "present";

type Holdings<On, Tx> = readonly Holding<On, Tx>[];

/** Throws where the transaction has failed, or the work itself has ended it. */
export async function checkStillOpen(value: (sql: string) => Promise<unknown>): Promise<void> {
  let token: unknown;
  try {
    token = await value("SELECT current_setting('pg_fence.token', true)");
  } catch (error) {
    // A connection that has broken tells so itself.
    throw sqlstateIn(error) === "25P02" ? rolledBackError(error) : error;
  }
  if (!token) {
    throw rolledBackError();
  }
}

/** The work swallowed what ended its transaction: nothing of it has landed. */
export function rolledBackError(cause?: unknown): TransactionLost {
  const message = "the transaction was rolled back: a statement failed, or the work has ended it";
  return new TransactionLost(message, cause === undefined ? {} : { cause });
}

/** The transaction of an ORM, of which we see no more than its queries. */
export function openTransaction<Tx>(query: Query): Transaction<Tx> {
  return {
    async begin(first) {
      await query(first);
      return undefined as Tx;
    },
    value: async (sql) => valueOf(await query(sql)),
    // The ORM would end it, and tell nobody.
    commit: () => checkStillOpen(async (sql) => valueOf(await query(sql))),
    rollback: async () => {},
    cut() {},
    leave() {},
    broken: undefined,
    showsConnection: false,
    isOurs: false,
  };
}

/** Runs `work` in a transaction under the leases. */
export async function run<On, Tx, T>(
  leases: Holdings<On, Tx>,
  transaction: Transaction<Tx>,
  kind: Kind,
  release: boolean,
  work: (tx: Tx) => Promise<T>,
): Promise<T> {
  const cut = () => transaction.cut();
  const paused: Holding<On, Tx>[] = [];
  try {
    const tx = await begin(leases, transaction, kind, cut);
    let result: T;
    try {
      result = await work(tx);
      for (const lease of release ? leases : []) {
        paused.push(lease);
        await lease.pause();
        await lease.releaseBy((sql) => transaction.value(sql));
      }
    } catch (error) {
      throw await rolledBack(leases, transaction, error);
    }
    await commit(leases, transaction);
    await Promise.all(paused.map((lease) => lease.hasBeenReleased()));
    return result;
  } finally {
    paused.forEach((lease) => lease.goOn());
    leases.forEach((lease) => lease.leave(cut));
    transaction.leave();
  }
}

async function begin<On, Tx>(
  leases: Holdings<On, Tx>,
  transaction: Transaction<Tx>,
  kind: Kind,
  cut: () => void,
): Promise<Tx> {
  for (let isMended = false; ; isMended = true) {
    // From here on a loss breaks the connection off, where it hangs, too.
    leases.forEach((lease) => lease.enter(cut));
    try {
      for (const lease of leases.filter(({ isInDoubt }) => isInDoubt)) {
        await lease.mend();
      }
      const tx = await transaction.begin(firstOf(leases, kind));
      leases.forEach((lease) => lease.refuseIfOver());
      return tx;
    } catch (error) {
      const told = await rolledBack(leases, transaction, error);
      // After a failover no token speaks until its holder has renewed, or adopted again.
      const mayMend = transaction.isOurs && !isMended && leases.some((lease) => lease.canMend(told));
      if (!mayMend || !(await mended(leases, told))) {
        throw told;
      }
    }
  }
}

async function mended<On, Tx>(leases: Holdings<On, Tx>, error: unknown): Promise<boolean> {
  const all = await Promise.all(leases.map(async (lease) => !lease.canMend(error) || lease.mend()));
  return all.every(Boolean);
}

/** Rolls back, and returns what is to be told. */
async function rolledBack<On, Tx>(
  leases: Holdings<On, Tx>,
  transaction: Transaction<Tx>,
  error: unknown,
): Promise<unknown> {
  // The error that led here is the one to tell, not that of a rollback.
  await transaction.rollback().catch(() => {});
  return toldBy(leases, transaction, error);
}

async function commit<On, Tx>(leases: Holdings<On, Tx>, transaction: Transaction<Tx>): Promise<void> {
  try {
    await transaction.commit();
  } catch (error) {
    const told = toldBy(leases, transaction, error);
    if (told instanceof LeaseLost || told instanceof TransactionLost) {
      // Our own says that it was rolled back.
      told.inDoubt = told !== error;
    }
    throw told;
  }
}

/** The typed error, where it is one. A connection that was broken off because of a loss tells the loss. */
function toldBy<On, Tx>(leases: Holdings<On, Tx>, transaction: Transaction<Tx>, error: unknown): unknown {
  let found = classify(error);
  if (found instanceof TransactionLost && found.sqlstate === undefined) {
    if (transaction.showsConnection && transaction.broken === undefined) {
      // A connection broke, but not the one of this transaction: that is the work's own business.
      return error;
    }
    // The server may have said why before.
    found = classify(transaction.broken) ?? found;
  }
  const lost = leases.find(({ loss }) => loss !== undefined);
  if (found instanceof TransactionLost && lost !== undefined) {
    return lost.lost(error);
  }
  if (found instanceof StaleToken || found instanceof NotSpeaking) {
    leases.forEach((lease) => lease.beatSoon());
  }
  if (found?.sqlstate?.startsWith("PF")) {
    const refused = found;
    tellHook(() => leases[0]?.keeper.hooks.refused(refused));
  }
  if (found instanceof LeaseLost && lost !== undefined) {
    lost.isTold = true;
  }
  return found ?? error;
}
