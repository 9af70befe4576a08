/** Leases on the driver `postgres`. @module */
import { connect, type Socket } from "node:net";
import postgres from "postgres";
import { isSettings, type Opener, type Session } from "./connection.js";
import { codeOfOpening } from "./errors.js";
import * as fence from "./fence.js";
import type { Counted } from "./statements.js";
import { Transaction } from "./transaction.js";

export * from "./index.js";

// biome-ignore lint/suspicious/noExplicitAny: the program chooses the types of its own columns
type Types = any;
type Sql = postgres.Sql<Types>;
type TransactionSql = postgres.TransactionSql<Types>;

/** Where connections come from: a connection string or URL, options, what `postgres()` returned,
 * for its options, or a function that returns such with `max: 1`. */
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

/** Bun's own SQL has most of its methods, but shows no connection that could be broken off. What
 * `sql.reserve` gave begins no transaction. */
function isOfPostgres(one: unknown): one is On {
  const [all, begins] = [Object(one), ["begin", "savepoint"]];
  return "typed" in all && begins.some((verb) => verb in all);
}

function opener(source: Source): Opener {
  if (typeof source === "function" && !("unsafe" in source)) {
    return async (_, ended) => sessionOn(await source(), ended);
  }
  const isText = typeof source === "string" || source instanceof URL;
  if (!isText && !isSettings(source) && !isOfPostgres(source)) {
    const what = "a connection string, a URL, options of postgres, what postgres() returned";
    throw new TypeError(`a fence takes ${what} (and not Bun's SQL), or a function: not ${source}`);
  }
  // Nothing is connected before the first query.
  const given = (isText ? String(source) : source) as string;
  const { options } = typeof source === "function" ? source : postgres(given);
  return async (limit, ended) => {
    const places = options.host.map((host, at) => [host, options.port[at] ?? 5432] as const);
    const each = limit / places.length;
    let failure: unknown;
    for (const [host, port] of places) {
      try {
        return await opened(options, host, port, each, ended);
      } catch (error) {
        // If one of them may be there later, so may the others.
        if (codeOfOpening(failure) !== "connect") failure = error;
      }
    }
    throw failure;
  };
}

/** Connects to one of the hosts. */
async function opened(
  options: Sql["options"],
  host: string,
  port: number,
  limit: number,
  ended: () => void,
) {
  let socket: Socket | undefined;
  // It looks at `host` where it begins TLS.
  const open = async () =>
    Object.assign(options.path ? connect(options.path) : connect(port, host), { host });
  const opens = (options as { socket?: (of: object) => Promise<Socket> }).socket ?? open;
  const sql = postgres({
    ...options,
    // Options that were read once are not read again, so these are in their inner form.
    ...{ max: 1, prepare: false, fetch_types: false, idle_timeout: null, max_lifetime: null },
    ...{ parameters: {}, onnotice() {}, connect_timeout: limit / 1000 },
    // With more hosts it would try again instead of telling that this one refuses.
    ...{ host: [host], port: [port] },
    // The driver shows no other way to a socket of its own.
    socket: async () => (socket = (await opens(options)).unref()),
    transform: { undefined: undefined, column: {}, value: {}, row: {} },
    shared: { retries: 0, typeArrayMap: {} },
  } as object);
  return sessionOn(sql, ended, () => socket?.destroy());
}

/** The connection, as the driver shows it to a query's option `onexecute`. */
type Inner = { terminate(): void; onclose: ((error: Error) => void) | null };

/** A query without parameters, which tells of the connection that it runs on, and of its end. */
function watch(
  sql: On,
  begun: (inner: Inner) => void,
  ended: (error: Error) => void,
): PromiseLike<unknown> {
  const onexecute = (inner: Inner) => {
    const before = inner.onclose;
    inner.onclose = (error) => {
      before?.(error);
      ended(error);
    };
    begun(inner);
    return true;
  };
  return sql.unsafe("SELECT", [], { onexecute } as object);
}

/** The one connection of an `sql`; `close` closes its socket, if that is ours. */
async function sessionOn(sql: Sql, ended: () => void, close = () => {}): Promise<Session> {
  let inner: Inner | undefined;
  // The program's rows may be anything; those of this connection are ours.
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
    // Without a limit, the driver waits for ever for a query of a connection that has ended.
    end: () => sql.end({ timeout: 1 }),
  };
}

const ROLLBACK = new Error("rolled back");

class PostgresTransaction extends Transaction<TransactionSql> {
  #sql: TransactionSql | undefined;
  #inner: Inner | undefined;
  #isOver = false;
  /** The whole transaction, as `sql.begin` sees it, and how to end it. */
  #whole: Promise<unknown> = Promise.resolve();
  #commit: () => void = () => {};
  #fail: (error: unknown) => void = () => {};

  constructor(readonly on: On) {
    super("savepoint" in on);
    this.role = (on as Partial<Sql>).options?.user;
  }

  async begin(): Promise<TransactionSql> {
    const begun = new Promise<TransactionSql>((begun, failed) => {
      const scope = (tx: TransactionSql) =>
        new Promise<void>((commit, fail) => {
          [this.#commit, this.#fail] = [commit, fail];
          this.broken === undefined ? begun(tx) : fail(this.broken);
        });
      this.#whole = "savepoint" in this.on ? this.on.savepoint(scope) : this.on.begin(scope);
      // No rollback may follow an end: the driver loses the connection, and others wait for it.
      this.#whole.catch((error) => {
        failed(error);
        if (this.#sql) this.breaks(error);
      });
    });
    const tx = await this.until(() => begun);
    this.#sql = tx;
    const ended = (error: Error) => {
      this.#inner = undefined;
      this.breaks(error);
    };
    await this.until(() => watch(tx, (inner) => (this.#inner = inner), ended));
    return this.#untilOver(tx);
  }

  /** After the end of its session the driver hands the connection to others, whose the statements
   * would then be. */
  #untilOver(tx: TransactionSql): TransactionSql {
    const unlessOver = <T>(value: T): T => {
      if (this.#isOver || this.broken !== undefined)
        throw this.broken ?? new Error("the transaction is over");
      return value;
    };
    return new Proxy(tx, {
      apply: (target, self, args) => Reflect.apply(unlessOver(target), self, args),
      get: (target, key) =>
        ((value: unknown) => (typeof value === "function" ? unlessOver(value) : value))(
          Reflect.get(target, key),
        ),
    });
  }

  async count({ from, values }: Counted): Promise<number> {
    const text = `SELECT ${from}`;
    const answer = await this.until(async () => this.#sql?.unsafe(text, [...values]).raw());
    this.session = (answer?.state as { pid?: number } | undefined)?.pid;
    return answer?.count ?? 0;
  }

  async commit(): Promise<void> {
    this.#commit();
    await this.until(() => this.#whole);
  }

  protected async undo(): Promise<void> {
    this.#fail(ROLLBACK);
    await this.#whole.catch((error) => (error === ROLLBACK ? undefined : Promise.reject(error)));
  }

  override cut(why: string): void {
    super.cut(why);
    // Data that is written by now goes first: the driver would wait for that for ever, whatever it
    // connects to next.
    setImmediate(() => this.#inner?.terminate());
  }

  override leave(): void {
    this.#isOver = true;
  }
}
