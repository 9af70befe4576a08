import { valueOf, type Transaction } from "./connection.js";
import { classify, LeaseLost, NotSpeaking, StaleToken, TransactionLost } from "./errors.js";
import type { Holding } from "./holding.js";

/** Runs a query in a transaction that is open already, as an ORM does it. */
export type Query = (sql: string) => PromiseLike<unknown>;

/** With a lock on the grant, or without. */
export type Kind = "guard" | "present";

/** The transaction of an ORM, of which we see no more than its queries. */
export function openTransaction<Tx>(query: Query): Transaction<Tx> {
  return {
    async begin(first) {
      for (const statement of first) {
        await query(statement);
      }
      return undefined as Tx;
    },
    value: async (sql) => valueOf(await query(sql)),
    commit: async () => {},
    rollback: async () => {},
    cut() {},
    leave() {},
    broken: undefined,
    showsConnection: false,
    isOurs: false,
  };
}

/** Runs `work` in a transaction under the lease. */
export async function run<On, Tx, T>(
  lease: Holding<On, Tx>,
  transaction: Transaction<Tx>,
  kind: Kind,
  release: boolean,
  work: (tx: Tx) => Promise<T>,
): Promise<T> {
  const cut = () => transaction.cut();
  let isPaused = false;
  try {
    const tx = await begin(lease, transaction, kind, cut);
    let result: T;
    try {
      result = await work(tx);
      if (release) {
        isPaused = true;
        await lease.pause();
        await lease.releaseBy((sql) => transaction.value(sql));
      }
    } catch (error) {
      throw await rolledBack(lease, transaction, error);
    }
    await commit(lease, transaction);
    if (release) {
      await lease.hasBeenReleased();
    }
    return result;
  } finally {
    if (isPaused) {
      lease.goOn();
    }
    lease.leave(cut);
    transaction.leave();
  }
}

async function begin<On, Tx>(
  lease: Holding<On, Tx>,
  transaction: Transaction<Tx>,
  kind: Kind,
  cut: () => void,
): Promise<Tx> {
  for (let isMended = false; ; isMended = true) {
    // From here on a loss breaks the connection off, where it hangs, too.
    lease.enter(cut);
    try {
      if (lease.isInDoubt) {
        await lease.mend();
      }
      const tx = await transaction.begin(lease.firstOf(kind));
      lease.refuseIfOver();
      return tx;
    } catch (error) {
      const told = await rolledBack(lease, transaction, error);
      // After a failover no token speaks until its holder has renewed, or adopted again.
      const mayMend = transaction.isOurs && !isMended && lease.canMend(told);
      if (!mayMend || !(await lease.mend())) {
        throw told;
      }
    }
  }
}

/** Rolls back, and returns what is to be told. */
async function rolledBack<On, Tx>(lease: Holding<On, Tx>, transaction: Transaction<Tx>, error: unknown): Promise<unknown> {
  // The error that led here is the one to tell, not that of a rollback.
  await transaction.rollback().catch(() => {});
  return toldBy(lease, transaction, error);
}

async function commit<On, Tx>(lease: Holding<On, Tx>, transaction: Transaction<Tx>): Promise<void> {
  try {
    await transaction.commit();
  } catch (error) {
    const told = toldBy(lease, transaction, error);
    if (told instanceof LeaseLost || told instanceof TransactionLost) {
      told.inDoubt = true;
    }
    throw told;
  }
}

/** The typed error, where it is one. A connection that was broken off because of a loss tells the loss. */
function toldBy<On, Tx>(lease: Holding<On, Tx>, transaction: Transaction<Tx>, error: unknown): unknown {
  let found = classify(error);
  if (found instanceof TransactionLost && found.sqlstate === undefined) {
    if (transaction.showsConnection && transaction.broken === undefined) {
      // A connection broke, but not the one of this transaction: that is the work's own business.
      return error;
    }
    // The server may have said why before.
    found = classify(transaction.broken) ?? found;
  }
  if (found instanceof TransactionLost && lease.loss !== undefined) {
    return lease.lost(error);
  }
  if (found instanceof StaleToken || found instanceof NotSpeaking) {
    lease.beatSoon();
  }
  lease.isTold ||= found instanceof LeaseLost && lease.loss !== undefined;
  return found ?? error;
}
