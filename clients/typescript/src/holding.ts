import { debuglog } from "node:util";

import { literal, type Driver } from "./connection.js";
import { LeaseLost, type LossReason } from "./errors.js";
import { openTransaction, run, type Kind, type Query } from "./guarded.js";

/** NODE_DEBUG=pg_fence shows it. */
export const log = debuglog("pg_fence");

/** How a transaction under a lease ends. */
export interface Ending {
  /** Its last statement gives the lease back. */
  readonly release?: boolean;
}

/** Of what, and where. */
export interface Place<On, Tx> {
  readonly names: readonly string[];
  readonly driver: Driver<On, Tx>;
  /** In front of the name of a function. */
  readonly schema: string;
}

/**
 * A lease that somebody holds, under a token that its transactions present: `Lease`, or `Adopted`.
 */
export abstract class Holding<On = never, Tx = never> implements AsyncDisposable {
  readonly names: readonly string[];
  /** The token that its transactions present; it serves for as long as the lease is held. */
  abstract readonly token: number | bigint;
  /** Why the lease was lost, once it was. */
  loss: LeaseLost | undefined;
  /** @internal Somebody was refused with the loss. */
  isTold = false;
  /** @internal A transaction was refused: the next one mends before it begins. */
  isInDoubt = false;
  readonly #place: Place<On, Tx>;

  constructor(place: Place<On, Tx>) {
    this.#place = place;
    this.names = place.names;
  }

  /**
   * A transaction during which nobody else is granted the lease, and whose writes present its token. It does not begin
   * when the lease is lost. With `release`, its end releases the lease.
   *
   * Where a transaction is open already on that connection, it is guarded from here on, and its end is left to whoever
   * began it; a function runs a query in a transaction that an ORM has opened.
   */
  guard<T>(on: On, work: (tx: Tx) => Promise<T>, options?: Ending): Promise<T>;
  guard<T>(on: Query, work: () => Promise<T>, options?: Ending): Promise<T>;
  guard<T>(on: On | Query, work: (tx: Tx) => Promise<T>, options?: Ending): Promise<T> {
    return this.#transact("guard", on, work, options);
  }

  /**
   * As `guard`, without a lock: its writes present the token, and somebody else may be granted the lease until one of
   * them is to a bound table.
   */
  present<T>(on: On, work: (tx: Tx) => Promise<T>, options?: Ending): Promise<T>;
  present<T>(on: Query, work: () => Promise<T>, options?: Ending): Promise<T>;
  present<T>(on: On | Query, work: (tx: Tx) => Promise<T>, options?: Ending): Promise<T> {
    return this.#transact("present", on, work, options);
  }

  #transact<T>(kind: Kind, on: On | Query, work: (tx: Tx) => Promise<T>, options: Ending = {}): Promise<T> {
    const transaction = isQuery(on) ? openTransaction<Tx>(on) : this.#place.driver.transaction(on);
    return run(this, transaction, kind, options.release ?? false, work);
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
    return `SELECT ${this.#place.schema}${call}`;
  }

  protected nameInSql(): string {
    const names = this.names.map(literal);
    return names.length > 1 ? `ARRAY[${names.join(", ")}]::text[]` : `${names[0]}::text`;
  }

  protected onNames(call: "lease_renew" | "lease_release"): string {
    const all = this.names.length > 1 ? "_all" : "";
    return this.sql(`${call}${all}(${this.nameInSql()}, ${this.token}::bigint)`);
  }

  /** What a transaction under it guards by. */
  protected guardOf(name: string): string {
    return this.sql(`lease_guard(${literal(name)}::text, ${this.token}::bigint)`);
  }

  // For the transactions under it

  /** @internal What a transaction of that kind begins with. */
  firstOf(kind: Kind): string[] {
    if (kind === "present") {
      // As text: there is no set_config that takes a number.
      return [`SELECT set_config('pg_fence.token', '${this.token}', true)`];
    }
    return [...this.names].sort().map((name) => this.guardOf(name));
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
    if (((await value(this.onNames("lease_release"))) ?? null) === null) {
      this.lose("gone");
      this.refuseIfOver();
    }
  }

  /** @internal That transaction was committed. */
  abstract hasBeenReleased(): Promise<void>;
}

function isQuery(on: unknown): on is Query {
  // The `sql` of postgres is a function, too.
  return typeof on === "function" && !("unsafe" in on);
}
