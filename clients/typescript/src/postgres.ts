/** Leases on the driver `postgres`. @module */
import { connect, type Socket } from "node:net";
import postgres from "postgres";
import { isSettings, type Opener, type Session } from "./connection.js";
import { codeOfOpening, sqlstateOf } from "./errors.js";
import * as fence from "./fence.js";
import type { Counted } from "./statements.js";
import { Transaction } from "./transaction.js";

export * from "./index.js";

// biome-ignore lint/suspicious/noExplicitAny: the program chooses the types of its own columns
type Types = any;
type Sql = postgres.Sql<Types>;
type TransactionSql = postgres.TransactionSql<Types>;

/** The source of connections: a connection string, a URL, options, what `postgres()` returned, of
 * which only the options are used, or a function that returns such an `sql` with `max: 1`. */
export type Source = string | URL | postgres.Options<Types> | Sql | (() => Sql | PromiseLike<Sql>);
export type On = Sql | TransactionSql;
export type Lease = fence.Lease<On, TransactionSql>;
export type Adopted = fence.Adopted<On, TransactionSql>;

export class Fence extends fence.Fence<On, TransactionSql> {
  constructor(source: Source, options?: fence.FenceOptions) {
    const transaction = (on: unknown) =>
      isOfPostgres(on) ? () => new PostgresTransaction(on) : undefined;
    const takes = "what postgres() or sql.begin gave (and not Bun's SQL)";
    super({ open: opener(source), transaction, takes }, options);
  }
}

/** True if the value is of this driver and can begin a transaction, which what `sql.reserve` gave
 * cannot. Bun's own SQL is not: it has most of the methods, but shows no connection that could be
 * cut. */
function isOfPostgres(value: unknown): value is On {
  const [sql, verbs] = [Object(value), ["begin", "savepoint"]];
  return "typed" in sql && verbs.some((verb) => verb in sql);
}

function opener(source: Source): Opener {
  if (typeof source === "function" && !("unsafe" in source)) {
    return async (_, ended) => {
      const sql = await source();
      if (!isOfPostgres(sql) || !("options" in sql))
        throw new TypeError("a fence's function returns what postgres() returned");
      const session = await sessionOn(sql, ended);
      if (!(await isInTransaction(sql))) return session;
      // A grant in an open transaction would not be committed.
      session.destroy();
      throw new TypeError("a fence's function returns a connection without a transaction");
    };
  }
  const isText = typeof source === "string" || source instanceof URL;
  if (!isText && !isSettings(source) && !isOfPostgres(source)) {
    const takes = "a connection string, a URL, options of postgres, what postgres() returned";
    throw new TypeError(`a fence takes ${takes} (and not Bun's SQL), or a function: not ${source}`);
  }
  // postgres() opens no connection before the first query.
  const given = (isText ? String(source) : source) as string;
  const { options } = typeof source === "function" ? source : postgres(given);
  return async (limit, ended) => {
    const hosts = options.host.map((host, i) => [host, options.port[i] ?? 5432] as const);
    const limitOfEach = limit / hosts.length;
    let failure: unknown;
    for (const [host, port] of hosts) {
      try {
        return await open(options, host, port, limitOfEach, ended);
      } catch (error) {
        // If a retry may succeed for one of the hosts, the error is that of this host.
        if (codeOfOpening(failure) !== "connect") failure = error;
      }
    }
    throw failure;
  };
}

/** Opens a session on one of the hosts. */
async function open(
  options: Sql["options"],
  host: string,
  port: number,
  limit: number,
  ended: () => void,
) {
  let socket: Socket | undefined;
  // The driver reads `host` of the socket when it begins TLS.
  const connectSocket = async () =>
    Object.assign(options.path ? connect(options.path) : connect(port, host), { host });
  const openSocket =
    (options as { socket?: (of: object) => Promise<Socket> }).socket ?? connectSocket;
  const sql = postgres({
    ...options,
    // The driver does not parse options that it has parsed before, so these have their parsed form.
    ...{ max: 1, prepare: false, fetch_types: false, idle_timeout: null, max_lifetime: null },
    ...{ parameters: {}, onnotice() {}, connect_timeout: limit / 1000 },
    // With more hosts the driver would retry, and not report that this one refuses.
    ...{ host: [host], port: [port] },
    // The driver has no other way to get at the socket of a connection.
    socket: async () => (socket = (await openSocket(options)).unref()),
    transform: { undefined: undefined, column: {}, value: {}, row: {} },
    shared: { retries: 0, typeArrayMap: {} },
  } as object);
  return sessionOn(sql, ended, () => socket?.destroy());
}

/** The connection that the driver passes to a query's option `onexecute`. */
type InnerConnection = { terminate(): void; onclose: ((error: Error) => void) | null };

/** Runs an empty query. `begun` is called with its connection, and `ended` when that has ended. */
function watch(
  sql: On,
  begun: (inner: InnerConnection) => void,
  ended: (error: Error) => void,
): PromiseLike<unknown> {
  const onexecute = (inner: InnerConnection) => {
    const previous = inner.onclose;
    inner.onclose = (error) => {
      previous?.(error);
      ended(error);
    };
    begun(inner);
    return true;
  };
  return sql.unsafe("SELECT", [], { onexecute } as object);
}

/** Returns true if the one connection of an `sql` is in a transaction that the program has begun by
 * a statement, of which the driver knows nothing. A transaction begins at the time of its first
 * statement. */
async function isInTransaction(sql: Sql): Promise<boolean> {
  return (await sql.unsafe("SELECT WHERE now() < statement_timestamp()")).count > 0;
}

/** Returns the session on the one connection of an `sql`. `close` closes its socket, if this
 * package has opened it. */
async function sessionOn(sql: Sql, ended: () => void, close = () => {}): Promise<Session> {
  let inner: InnerConnection | undefined;
  // The program may have set a transformation of rows, which this connection must not have.
  const { transform } = sql.options as { transform?: { row?: unknown } };
  if (transform?.row) transform.row = {};
  await watch(sql, (opened) => (inner = opened), ended);
  return {
    role: sql.options.user,
    async rows([text, ...values]) {
      const rows: (Buffer | null)[][] = await sql.unsafe(text, values).raw();
      return rows.map((row) => row.map((column) => column?.toString() ?? null));
    },
    destroy() {
      inner?.terminate();
      close();
    },
    // Without a limit the driver waits for ever for a query of a connection that has ended.
    end: () => sql.end({ timeout: 1 }),
  };
}

const ROLLBACK = new Error("rolled back");

class PostgresTransaction extends Transaction<TransactionSql> {
  #sql: TransactionSql | undefined;
  #inner: InnerConnection | undefined;
  #hasEnded = false;
  /** The result of `sql.begin` or `sql.savepoint`, and the functions that end its transaction. */
  #whole: Promise<unknown> = Promise.resolve();
  #commit: () => void = () => {};
  #fail: (error: unknown) => void = () => {};

  constructor(readonly on: On) {
    super("savepoint" in on);
    this.role = (on as Partial<Sql>).options?.user;
  }

  async begin(): Promise<TransactionSql> {
    const { on } = this;
    const isOneConnection = !("savepoint" in on) && on.options.max === 1;
    if (isOneConnection && (await this.unlessBroken(() => isInTransaction(on))))
      throw new TypeError("the connection is in a transaction: begin it by sql.begin instead");
    const begun = (resolve: (tx: TransactionSql) => void, reject: (error: unknown) => void) => {
      const scope = (tx: TransactionSql) =>
        new Promise<void>((commit, fail) => {
          [this.#commit, this.#fail] = [commit, fail];
          this.broken === undefined ? resolve(tx) : fail(this.broken);
        });
      this.#whole = "savepoint" in on ? on.savepoint(scope) : on.begin(scope);
      // Afterwards there must be no rollback: the driver has rolled back, or it would lose the
      // connection for which others wait. Others may have it by then, so it must not be cut, either.
      const isSettled = this.#whole.catch((error) => {
        this.isOver = true;
        reject(error);
      });
      void isSettled.then(() => (this.#inner = undefined));
    };
    const tx = await this.unlessBroken(() => new Promise(begun));
    this.#sql = tx;
    const ended = (error: Error) => {
      this.#inner = undefined;
      this.markBroken(error);
    };
    await this.unlessBroken(() => watch(tx, (inner) => (this.#inner = inner), ended));
    return this.#refusingAfterEnd(tx);
  }

  /** Returns a handle that throws after the end of the transaction or its session. The driver then
   * gives the connection to others, and a late statement would become part of their transaction. */
  #refusingAfterEnd(tx: TransactionSql): TransactionSql {
    const unlessEnded = <T>(value: T): T => {
      if (this.#hasEnded || this.broken !== undefined)
        throw this.broken ?? new Error("the transaction is over");
      return value;
    };
    return new Proxy(tx, {
      apply: (target, self, args) => Reflect.apply(unlessEnded(target), self, args),
      get: (target, key) =>
        ((value: unknown) => (typeof value === "function" ? unlessEnded(value) : value))(
          Reflect.get(target, key),
        ),
    });
  }

  async count({ from, values }: Counted): Promise<number> {
    const text = `SELECT pg_backend_pid()::text ${from}`;
    const result = await this.unlessBroken(async () => this.#sql?.unsafe(text, [...values]).raw());
    // The program's transform may have made anything of the row.
    const [pid] = Object.values(Object(result?.[0]));
    this.pid = Buffer.isBuffer(pid) ? String(pid) : this.pid;
    return result?.count ?? 0;
  }

  async commit(): Promise<void> {
    this.#commit();
    await this.unlessBroken(() => this.#whole);
  }

  protected async undo(): Promise<void> {
    this.#fail(ROLLBACK);
    await this.#whole.catch((error) => {
      // If the work has ended the savepoint itself, the server refuses to roll back to it. The
      // transaction has failed then, or is over, and the driver ends it.
      if (error !== ROLLBACK && !(this.isInner && sqlstateOf(error))) throw error;
    });
  }

  override cut(why: string): void {
    super.cut(why);
    // Data that the driver has written goes first: otherwise it would wait for ever to write that
    // data, also on its next connection.
    setImmediate(() => this.#inner?.terminate());
  }

  override leave(): void {
    this.#hasEnded = true;
  }
}
