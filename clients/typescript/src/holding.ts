import { literal, type Row } from "./connection.js";
import { LeaseLost, type LossReason } from "./errors.js";
import { openTransaction, run, type Kind, type Query } from "./guarded.js";
import { callOn, type Keeper } from "./keeper.js";

/** How a transaction under a lease ends. */
export interface Ending {
  /** Its last statement gives the lease back. */
  readonly release?: boolean | undefined;
}

/**
 * A lease that somebody holds, under a token that its transactions present: `Lease`, or `Adopted`.
 */
export abstract class Holding<On = never, Tx = never> implements AsyncDisposable {
  readonly names: readonly string[];
  /** The row of the query that it was claimed by, with its columns. */
  row: Row | undefined;
  /** @internal Somebody was refused with the loss. */
  isTold = false;
  /** @internal A transaction was refused: the next one mends before it begins. */
  isInDoubt = false;
  /** @internal */
  readonly keeper: Keeper<On, Tx>;

  constructor(keeper: Keeper<On, Tx>, names: readonly string[]) {
    this.keeper = keeper;
    this.names = names;
  }

  /** The token that its transactions present; it serves for as long as the lease is held. */
  abstract readonly token: number | bigint;

  /** Why the lease was lost, once it was. */
  abstract readonly loss: LeaseLost | undefined;

  /**
   * What opens a connection whose every transaction presents the token, so that code which knows nothing of leases is
   * fenced by its connection alone: PostgreSQL's `options`, as `-c pg_fence.token=34`. It presents, and does not guard.
   */
  get options(): string {
    return `-c pg_fence.token=${this.token}`;
  }

  /**
   * A transaction during which nobody else is granted the lease, and whose writes present its token. It does not begin
   * when the lease is lost. With `release`, its end releases the lease.
   *
   * Where a transaction is open already on that connection, it is guarded from here on, and the code that began it
   * ends it; a function runs a query in a transaction that an ORM has opened.
   */
  guard<T>(on: On, work: (tx: Tx) => Promise<T>, options?: Ending): Promise<T>;
  guard<T>(on: Query, work: () => Promise<T>, options?: Ending): Promise<T>;
  guard<T>(on: On | Query, work: (tx: Tx) => Promise<T>, options?: Ending): Promise<T> {
    return transact([this], "guard", on, work, options);
  }

  /**
   * As `guard`, without a lock: its writes present the token, and somebody else may be granted the lease until one of
   * them is to a bound table.
   */
  present<T>(on: On, work: (tx: Tx) => Promise<T>, options?: Ending): Promise<T>;
  present<T>(on: Query, work: () => Promise<T>, options?: Ending): Promise<T>;
  present<T>(on: On | Query, work: (tx: Tx) => Promise<T>, options?: Ending): Promise<T> {
    return transact([this], "present", on, work, options);
  }

  /** Gives it back. */
  abstract release(): Promise<void>;

  /** Releases, and throws LeaseLost where the block would otherwise end in good order after a loss. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.release();
    if (this.loss !== undefined && !this.isTold) {
      throw this.lost();
    }
  }

  /** @internal The loss, to be told. */
  lost(cause?: unknown): LeaseLost {
    this.isTold = true;
    const reason = this.loss?.reason ?? "released";
    // A new one each time: an error keeps the trace of where it was made.
    return new LeaseLost(reason, this.names, cause ?? this.loss?.cause);
  }

  protected abstract lose(reason: LossReason, cause?: unknown): void;

  // Its SQL

  protected sql(call: string): string {
    return `${this.keeper.schema}${call}`;
  }

  protected releaseSql(): string {
    return `SELECT ${this.sql(callOn(this.names, "lease_release", `${this.token}::bigint`))}`;
  }

  // For the transactions under it

  /** @internal What a transaction guards it by. */
  guardSql(): string {
    return this.sql(callOn(this.names, "lease_guard", `${this.token}::bigint`));
  }

  /** @internal Throws LeaseLost when it is known to be ours no more. */
  abstract refuseIfOver(): void;

  /** @internal Whether `mend` may help where a transaction could not begin because of that. */
  abstract canMend(error: unknown): boolean;

  /** @internal Makes the token speak again, as after a failover; whether it does. */
  abstract mend(): Promise<boolean>;

  /** @internal From here on a loss calls `cut`. Throws LeaseLost. */
  enter(_cut: () => void): void {
    this.refuseIfOver();
  }

  /** @internal */
  leave(_cut: () => void): void {}

  /** @internal The server refused a write: to be found out whether the lease is lost. */
  abstract beatSoon(): void;

  /** @internal Waits for a renewal that is under way, and has no other begin: it would wait for the release. */
  async pause(): Promise<void> {}

  /** @internal */
  goOn(): void {}

  /** @internal Releases it in a transaction of its holder's. */
  async releaseBy(value: (sql: string) => Promise<unknown>): Promise<void> {
    if (((await value(this.releaseSql())) ?? null) === null) {
      this.lose("gone");
      this.refuseIfOver();
    }
  }

  /** @internal That transaction was committed. */
  abstract hasBeenReleased(): Promise<void>;
}

/** A transaction under all of these. */
export function transact<On, Tx, T>(
  holdings: readonly Holding<On, Tx>[],
  kind: Kind,
  on: On | Query,
  work: (tx: Tx) => Promise<T>,
  { release = false }: Ending = {},
): Promise<T> {
  const [first] = holdings;
  if (first === undefined) {
    throw new TypeError("a transaction is guarded by one lease or more");
  }
  const { driver, hooks } = first.keeper;
  const transaction = isQuery(on) ? openTransaction<Tx>(on) : driver.transaction(on);
  // In the order of their names, so that two such transactions do not wait for each other.
  const inOrder = [...holdings].sort((a, b) => Buffer.compare(keyOf(a), keyOf(b)));
  const attributes = { "pg_fence.lease": inOrder.flatMap(({ names }) => names).join(",") };
  return hooks.span(`pg_fence.${kind}`, attributes, () => run(inOrder, transaction, kind, release, work));
}

function keyOf({ names: [name = ""] }: Holding<any, any>): Buffer {
  return Buffer.from(name);
}

/** What a transaction of that kind begins with. */
export function firstOf(holdings: readonly Holding<any, any>[], kind: Kind): string {
  const [first] = holdings;
  if (kind === "present") {
    // As text: there is no set_config that takes a number.
    return `SELECT set_config('pg_fence.token', ${literal(String(first?.token))}, true)`;
  }
  return `SELECT ${holdings.map((holding) => holding.guardSql()).join(", ")}`;
}

function isQuery(on: unknown): on is Query {
  // The `sql` of postgres is a function, too.
  return typeof on === "function" && !("unsafe" in on);
}
