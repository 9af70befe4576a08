/** Leases on the driver `pg`. @module */
import type { Duplex } from "node:stream";
import pg from "pg";
import { isSettings, type Opener, type Session } from "./connection.js";
import { codeOf, sqlstateOf } from "./errors.js";
import * as fence from "./fence.js";
import { endsSession } from "./lease_state.js";
import { type Counted, isOpen } from "./statements.js";
import { NotOpen, Transaction } from "./transaction.js";

export * from "./index.js";

/** The source of connections: a connection string, a URL, the settings of a client, a pool, of
 * which only the settings are used, or a function that opens a connection or takes one from a pool.
 * A connection of a pool is ended when it is released to the pool. */
export type Source = string | URL | pg.ClientConfig | pg.Pool | (() => PromiseLike<pg.ClientBase>);
export type On = pg.Pool | pg.ClientBase;
export type Lease = fence.Lease<On, pg.ClientBase>;
export type Adopted = fence.Adopted<On, pg.ClientBase>;

export class Fence extends fence.Fence<On, pg.ClientBase> {
  constructor(source: Source, options?: fence.FenceOptions) {
    const isOfPg = (on: unknown): on is On => isPool(on) || "getTransactionStatus" in Object(on);
    const transaction = (on: unknown) => (isOfPg(on) ? () => new PgTransaction(on) : undefined);
    const takes = "a pg.Pool or a connected client of pg";
    super({ open: opener(source), transaction, takes }, options);
  }
}

function isPool(one: unknown): one is pg.Pool {
  return "idleCount" in Object(one) && "options" in Object(one);
}

function opener(source: Source): Opener {
  if (typeof source === "function" && !("unsafe" in source))
    return async (_, ended) => {
      const client: Partial<pg.PoolClient & pg.Client> = Object(await source());
      if (client.getTransactionStatus?.() === "I") return sessionOn(client as pg.Client, ended);
      // A grant in an open transaction would not be committed.
      if (client.release) client.release(true);
      else if (client.getTransactionStatus) client.end?.().catch(() => {});
      throw new TypeError("a fence's function returns a connected client without a transaction");
    };
  const isText = typeof source === "string" || source instanceof URL;
  const settings = isPool(source) ? source.options : source;
  const config = (isText ? { connectionString: String(source) } : settings) as pg.ClientConfig;
  if (!isSettings(config)) {
    const takes =
      "a connection string, a URL, settings of pg, a pg.Pool or a function that connects";
    throw new TypeError(`a fence takes ${takes}: not ${source}`);
  }
  return async (limit, ended) => {
    const connectionTimeoutMillis = Math.min(limit, config.connectionTimeoutMillis || limit);
    // The password of a pool's settings is not enumerable, so a spread leaves it out.
    const password = config.password === undefined ? {} : { password: config.password };
    const own: object = { ...config, ...password, connectionTimeoutMillis, binary: false };
    const client = new pg.Client(own);
    const session = sessionOn(client, ended);
    await client.connect();
    return session;
  };
}

/** The parts of a client that the types of pg leave out. */
interface InnerClient extends Pick<pg.Client, "user" | "end"> {
  readonly connection: { readonly stream: Duplex };
  unref(): void;
}
const innerOf = (client: pg.ClientBase) => client as unknown as InnerClient;
/** Returns columns as the server writes them, also if the program has set other parsers. */
const types = { getTypeParser: () => String } as unknown as pg.CustomTypesConfig;
/** The longest time that a timer takes. The program's timeout, which may be shorter than a wait,
 * must not apply to calls: each has its own limit. */
const query_timeout = 2 ** 31 - 1;

function sessionOn(client: pg.ClientBase, ended: () => void): Session {
  client.on("error", ended).on("end", ended);
  // A client of a pool occupies a place there until it is released.
  client.once("end", () => (client as Partial<pg.PoolClient>).release?.(true));
  const inner = innerOf(client);
  return {
    role: inner.user,
    async rows([text, ...values]) {
      inner.unref();
      const query = { text, values, rowMode: "array", types, query_timeout } as const;
      return (await client.query<(string | null)[]>(query)).rows;
    },
    end: () => inner.end(),
    destroy: () => void inner.connection.stream.destroy(),
  };
}

/** Commits only the guard's transaction: otherwise the division fails, and nothing is committed. */
const COMMIT = `SELECT 1 / count(*) ${isOpen(false).from}; COMMIT`;

class PgTransaction extends Transaction<pg.ClientBase> {
  #client: pg.ClientBase | undefined;
  #release: (isBroken: boolean) => void = () => {};
  constructor(readonly on: On) {
    super();
  }

  async begin(): Promise<pg.ClientBase> {
    const client = await this.unlessBroken(() => this.#connected());
    const status = client.getTransactionStatus();
    if (status === null) {
      const takes = "a connected client of pg 8.21 or newer, and not its native bindings";
      throw new TypeError(`a guard takes ${takes}`);
    }
    this.#client = client;
    this.role = innerOf(client).user;
    // The rollback ends it.
    if (isPool(this.on) && status !== "I")
      throw new TypeError("a client of the pool was in a transaction that nobody would commit");
    this.isInner = status !== "I";
    await this.#run(this.isInner ? "SAVEPOINT pg_fence" : "BEGIN").catch((error) => {
      // The session may have ended before it was watched.
      if (endsSession(codeOf(error))) this.markBroken(error);
      this.failBegin(error);
    });
    return client;
  }

  #connected(): Promise<pg.ClientBase> {
    // Without a listener a session that ends between two queries would end the process.
    const watched = (client: pg.ClientBase) =>
      client.on("error", this.#ended).on("end", this.#ended);
    const { on } = this;
    if (!isPool(on)) return Promise.resolve(watched(on));
    return new Promise((resolve, reject) =>
      on.connect((error, client, release) => {
        if (client === undefined) return reject(error);
        if (this.broken !== undefined) return release();
        this.#release = release;
        resolve(watched(client));
      }),
    );
  }

  readonly #ended = (error: unknown = new Error("Connection terminated")): void =>
    this.markBroken(error);
  #run(text: string): Promise<pg.QueryResult | undefined> {
    return this.unlessBroken(async () => this.#client?.query(text));
  }

  async commit(): Promise<void> {
    const end = this.#run(this.isInner ? "RELEASE SAVEPOINT pg_fence" : COMMIT);
    await end.catch(async (error) => {
      // The driver's query_timeout leaves the statement running.
      if (codeOf(error) === "") this.markBroken(error);
      // A COMMIT that fails ends the transaction. After the division any statement fails.
      const isOfDivision = (): never => {
        throw new NotOpen("no transaction");
      };
      if (sqlstateOf(error) === "22012") await this.#run("SELECT").catch(isOfDivision);
      throw error;
    });
  }

  protected undo(): Promise<unknown> {
    return this.#run(
      this.isInner ? "ROLLBACK TO SAVEPOINT pg_fence; RELEASE SAVEPOINT pg_fence" : "ROLLBACK",
    );
  }

  async count({ from, values }: Counted): Promise<number> {
    const text = `SELECT pg_backend_pid() ${from}`;
    const result = await this.unlessBroken(async () =>
      this.#client?.query({ text, values: [...values], rowMode: "array" }),
    );
    this.pid = result?.rows[0]?.[0] ?? this.pid;
    return result?.rowCount ?? 0;
  }

  /** Asks the server only if the driver's own status is not that of an open transaction. */
  override async check(): Promise<void> {
    if (this.broken !== undefined || this.#client?.getTransactionStatus() !== "T")
      await super.check();
  }

  override cut(why: string): void {
    super.cut(why);
    if (this.#client) innerOf(this.#client).connection.stream.destroy();
  }

  override leave(): void {
    // A connection that was cut reports its end later, so it keeps its listeners.
    if (this.broken === undefined) this.#client?.off("error", this.#ended).off("end", this.#ended);
    this.#release(this.broken !== undefined);
  }
}
