/**
 * Leases on the driver `postgres`.
 *
 * @module
 */
import { connect, type Socket } from "node:net";
import postgres from "postgres";

import type { Adopted as AnyAdopted } from "./adopted.js";
import { isPlain, sendCancel, shown, valueOf, type Connection, type Driver, type Row, type Transaction } from "./connection.js";
import { Fence as AnyFence, type FenceOptions } from "./fence.js";
import { checkStillOpen } from "./guarded.js";
import type { Lease as AnyLease } from "./lease.js";

export * from "./index.js";

type Sql = postgres.Sql<any>;
type TransactionSql = postgres.TransactionSql<any>;

/** Where connections come from: a connection string, options, or what `postgres()` returned, for its options. */
export type Source = string | postgres.Options<any> | Sql;
/** What transactions begin on. */
export type On = Sql | TransactionSql;
/** A lease of this driver's. */
export type Lease = AnyLease<On, TransactionSql>;
/** An adopted one. */
export type Adopted = AnyAdopted<On, TransactionSql>;

/** Where leases come from. */
export class Fence extends AnyFence<On, TransactionSql> {
  constructor(source: Source, options?: FenceOptions) {
    super(driver(source), options);
  }
}

/** @internal */
export function driver(source: Source): Driver<On, TransactionSql> {
  if (typeof source !== "string" && !isPlain(source) && !(isSql(source) && "options" in source)) {
    const what = "a connection string, options of postgres, or what postgres() returned";
    throw new TypeError(`a Fence takes ${what}, and not ${shown(source)}`);
  }
  // Nothing is connected before the first query.
  const { options } = typeof source === "function" ? source : postgres(source as string);
  const socketOf = (options as { socket?: (all: object) => Socket | Promise<Socket> }).socket;
  let host = 0;
  const open = async () => {
    if (socketOf !== undefined) {
      return socketOf(options);
    }
    const at = host++ % options.host.length;
    const name = options.host[at] ?? "localhost";
    // postgres itself looks at `host` where it begins TLS.
    return Object.assign(options.path ? connect(options.path) : connect(options.port[at] ?? 5432, name), { host: name });
  };
  return {
    connection: (onEnd) => new PostgresConnection(options, open, onEnd),
    transaction(on) {
      if (!isSql(on)) {
        const what = "what postgres() or sql.begin gave, or a function that runs a query in an open transaction";
        throw new TypeError(`a transaction begins on ${what}, and not on ${shown(on)}`);
      }
      return new PostgresTransaction(on);
    },
  };
}

function isSql(one: unknown): one is On {
  return typeof one === "function" && "unsafe" in one;
}

class PostgresConnection implements Connection {
  isBroken = false;
  readonly #sql: Sql;
  readonly #open: () => Promise<Socket>;
  #socket: Socket | undefined;
  #query: postgres.PendingQuery<any> | undefined;

  constructor(options: object, open: () => Promise<Socket>, onEnd: () => void) {
    this.#open = open;
    this.#sql = postgres({
      ...options,
      // Options that were read once are not read again, so these are in their inner form.
      max: 1,
      prepare: false,
      fetch_types: false,
      idle_timeout: null,
      max_lifetime: null,
      shared: { retries: 0, typeArrayMap: {} },
      parameters: {},
      onnotice() {},
      onclose: () => {
        this.isBroken = true;
        onEnd();
      },
      // The driver shows no other way to break a connection off.
      socket: () => this.#connect(),
    } as object);
  }

  async #connect(): Promise<Socket> {
    this.#refuseIfBroken();
    const socket = await this.#open();
    if (this.isBroken) {
      socket.destroy();
    }
    this.#socket = socket.unref();
    return socket;
  }

  /** The driver would connect once more. */
  #refuseIfBroken(): void {
    if (this.isBroken) {
      throw new Error("Connection terminated");
    }
  }

  async run(sql: string, parameters?: readonly unknown[]): Promise<readonly Row[]> {
    const result = await this.#result(sql, parameters);
    return "command" in result ? result : (result.at(-1) ?? []);
  }

  async columns(sql: string, parameters: readonly unknown[]): Promise<readonly string[]> {
    const { columns } = await this.#result(sql, parameters);
    return columns.map(({ name }: { name: string }) => name);
  }

  async #result(sql: string, parameters: readonly unknown[] = []): Promise<any> {
    this.#refuseIfBroken();
    try {
      this.#query = this.#sql.unsafe(sql, parameters.map(inText) as any[]);
      return await this.#query;
    } catch (error) {
      this.isBroken ||= (error as { severity?: string }).severity !== "ERROR";
      throw error;
    } finally {
      this.#query = undefined;
    }
  }

  cut(): void {
    this.isBroken = true;
    this.#socket?.destroy();
  }

  cancel(): void {
    const state = (this.#query as { state?: { pid?: number; secret?: number } } | undefined)?.state;
    if (!state?.pid || state.secret === undefined) {
      return this.cut();
    }
    const { pid, secret } = state;
    this.#open().then((socket) => sendCancel(socket, pid, secret), () => {});
  }

  end(): Promise<unknown> {
    return this.#sql.end();
  }
}

/** An array as the server reads it: the driver knows how only once it has fetched all types. */
function inText(parameter: unknown): unknown {
  if (!Array.isArray(parameter)) {
    return parameter;
  }
  const quoted = (one: unknown) => `"${String(one).replace(/["\\]/g, "\\$&")}"`;
  return `{${parameter.map((one) => (Array.isArray(one) ? inText(one) : one === null ? "NULL" : quoted(one))).join()}}`;
}

/** What the driver tells a query's option `onexecute` of its connection. */
interface Inner {
  terminate(): void;
  onclose: ((error: unknown) => void) | null;
}

const ROLLBACK = new Error("rolled back");

class PostgresTransaction implements Transaction<TransactionSql> {
  readonly showsConnection = true;
  readonly isOurs: boolean;
  broken: unknown;
  readonly #on: On;
  #sql: TransactionSql | undefined;
  #inner: Inner | undefined;
  #isOver = false;
  /** The whole transaction, as `sql.begin` sees it, and how to end it. */
  #whole: Promise<void> = Promise.resolve();
  #commit: () => void = () => {};
  #fail: (error: unknown) => void = () => {};
  /** Rejected when its session has ended: the driver leaves what was sent then without an answer. */
  readonly #broke: Promise<never>;
  #tellBroken: (error: unknown) => void = () => {};

  constructor(on: On) {
    this.#on = on;
    this.#broke = new Promise((_, reject) => (this.#tellBroken = reject));
    this.#broke.catch(() => {});
    this.isOurs = !("savepoint" in on);
  }

  async begin(first: string): Promise<TransactionSql> {
    this.#sql = "savepoint" in this.#on ? this.#on : await this.#begun(this.#on);
    const onexecute = (inner: Inner) => this.#watch(inner);
    await this.#sql.unsafe(first, [], { onexecute } as object);
    return this.#untilOver(this.#sql);
  }

  #begun(sql: Sql): Promise<TransactionSql> {
    return new Promise((begun, failed) => {
      this.#fail = failed;
      this.#whole = sql.begin(
        (tx) =>
          new Promise<void>((commit, fail) => {
            this.#commit = commit;
            this.#fail = fail;
            if (this.broken === undefined) {
              begun(tx);
            } else {
              fail(this.broken);
            }
          }),
      ) as Promise<void>;
      this.#whole.catch(failed);
    });
  }

  #watch(inner: Inner): boolean {
    const before = inner.onclose;
    this.#inner = inner;
    inner.onclose = (error) => {
      before?.(error);
      if (!this.#isOver) {
        // What is still sent would otherwise be written to a socket that is no more, which ends the process.
        inner.terminate();
        this.#end(error);
      }
    };
    return true;
  }

  /** After the end of its session the driver hands the connection to others, whose the statements would then be. */
  #untilOver(sql: TransactionSql): TransactionSql {
    const refuse = () => {
      if (this.#isOver || this.broken !== undefined) {
        throw this.broken ?? new Error("the transaction is over");
      }
    };
    return new Proxy(sql, {
      apply(target, self, args) {
        refuse();
        return Reflect.apply(target, self, args);
      },
      get(target, key) {
        const value: unknown = Reflect.get(target, key);
        if (typeof value === "function") {
          refuse();
        }
        return value;
      },
    });
  }

  async value(sql: string): Promise<unknown> {
    if (this.broken !== undefined) {
      throw this.broken;
    }
    return this.#sql === undefined ? undefined : valueOf(await Promise.race([this.#sql.unsafe(sql), this.#broke]));
  }

  async commit(): Promise<void> {
    try {
      // The driver would commit what has failed or was ended meanwhile, and tell nobody.
      await checkStillOpen((sql) => this.value(sql));
    } catch (error) {
      await this.rollback();
      throw error;
    }
    this.#commit();
    await this.#whole;
  }

  async rollback(): Promise<void> {
    this.#fail(ROLLBACK);
    await this.#whole.catch(() => {});
  }

  cut(): void {
    this.#end(new Error("Connection terminated: the lease is lost"));
    this.#inner?.terminate();
  }

  #end(error: unknown): void {
    this.broken ??= error;
    this.#tellBroken(this.broken);
    this.#fail(this.broken);
  }

  leave(): void {
    this.#isOver = true;
  }
}
