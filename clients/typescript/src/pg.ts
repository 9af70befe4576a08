/** Leases on the driver `pg`. @module */
import type { Duplex } from "node:stream";
import pg from "pg";
import type { Call } from "./asked.js";
import { sessionEnded, TransactionLost } from "./errors.js";
import * as fence from "./fence.js";
import { FAILED, Transaction } from "./guard.js";
import { Connection, isSettings, type Opener, type Row } from "./line.js";

export * from "./index.js";

/** Where connections come from: a connection string or URL, settings of a client, a pool, for its settings, or a function that
 * opens a connection. */
export type Source = string | URL | pg.ClientConfig | pg.Pool | (() => PromiseLike<pg.ClientBase>);
export type On = pg.Pool | pg.ClientBase;
export type Lease = fence.Lease<On, pg.ClientBase>;
export type Adopted = fence.Adopted<On, pg.ClientBase>;

export class Fence extends fence.Fence<On, pg.ClientBase> {
  constructor(source: Source, options?: fence.FenceOptions) {
    const transaction = (on: On) => (isPool(on) || "getTransactionStatus" in Object(on) ? () => new PgTransaction(on) : undefined);
    super({ open: opener(source), transaction, takes: "a pg.Pool or a connected client of pg" }, options);
  }
}

function isPool(one: unknown): one is pg.Pool { return "idleCount" in Object(one) && "options" in Object(one); }

function opener(source: Source): Opener {
  if (typeof source === "function" && !("unsafe" in source)) return async () => new PgConnection(await source());
  const isText = typeof source === "string" || source instanceof URL;
  const config = (isText ? { connectionString: String(source) } : isPool(source) ? source.options : source) as pg.ClientConfig;
  if (!isSettings(config)) {
    throw new TypeError(`a fence takes a connection string, a URL, settings of pg, a pg.Pool or a function that connects: not ${source}`);
  }
  return async (limit) => {
    const connectionTimeoutMillis = Math.min(limit, config.connectionTimeoutMillis || limit);
    // A pool hides its password from those who list its settings.
    const password = config.password === undefined ? {} : { password: config.password };
    const settings: object = { ...config, ...password, connectionTimeoutMillis, binary: false };
    const client = new pg.Client(settings);
    const connection = new PgConnection(client);
    await client.connect();
    return connection;
  };
}

/** The parts of a client that the types of pg leave out. */
type Inner = Pick<pg.Client, "user" | "end"> & { readonly connection: { readonly stream: Duplex }; unref(): void };
const innerOf = (client: pg.ClientBase | undefined) => client as unknown as Inner | undefined;
/** Columns as the server writes them, whatever the program makes of them. */
const types = { getTypeParser: () => String } as unknown as pg.CustomTypesConfig;

class PgConnection extends Connection {
  constructor(readonly client: pg.ClientBase) {
    super(innerOf(client)?.user);
    const ended = () => this.ended();
    client.on("error", ended).on("end", ended);
  }

  async rows([text, ...values]: Call): Promise<readonly Row[]> {
    innerOf(this.client)?.unref();
    return (await this.client.query<(string | null)[]>({ text, values, rowMode: "array", types })).rows;
  }

  protected destroy(): void { innerOf(this.client)?.connection.stream.destroy(); }
  async end(): Promise<void> { await innerOf(this.client)?.end(); }
}

class PgTransaction extends Transaction<pg.ClientBase> {
  #client: pg.ClientBase | undefined;
  #release: (isBroken: boolean) => void = () => {};
  constructor(readonly on: On) { super(); }

  async begin(): Promise<pg.ClientBase> {
    const client = (this.#client = await this.until(() => this.#connected()));
    const status = client.getTransactionStatus();
    if (status === null) throw new TypeError("a guard takes a connected client of pg 8.21 or newer, and not its native bindings");
    this.role = innerOf(client)?.user;
    this.isInner = status !== "I";
    await this.#run(this.isInner ? "SAVEPOINT pg_fence" : "BEGIN").catch((error) => {
      // It may have ended before we listened.
      if (sessionEnded(error)) this.breaks(error);
      throw error;
    });
    return client;
  }

  #connected(): Promise<pg.ClientBase> {
    // Without a listener, a session that ends between two queries ends the process, too.
    const heard = (client: pg.ClientBase) => client.on("error", this.#ended).on("end", this.#ended);
    const { on } = this;
    if (!isPool(on)) return Promise.resolve(heard(on));
    return new Promise((resolve, reject) => on.connect((error, client, release) => {
      if (client === undefined) return reject(error);
      if (this.broken !== undefined) return release();
      this.#release = release;
      resolve(heard(client));
    }));
  }

  readonly #ended = (error: unknown = new Error("Connection terminated")): void => this.breaks(error);
  #run(text: string): Promise<pg.QueryResult | undefined> { return this.until(async () => this.#client?.query(text)); }

  async commit(): Promise<void> {
    const done = await this.#run(this.isInner ? "RELEASE SAVEPOINT pg_fence" : "COMMIT");
    if (done?.command === "ROLLBACK") throw new TransactionLost(FAILED);
  }

  protected undo(): Promise<unknown> {
    return this.#run(this.isInner ? "ROLLBACK TO SAVEPOINT pg_fence; RELEASE SAVEPOINT pg_fence" : "ROLLBACK");
  }

  async row([text, ...values]: Call): Promise<readonly unknown[]> {
    const answer = await this.until(async () => this.#client?.query<unknown[]>({ text, values, rowMode: "array" }));
    return answer?.rows[0] ?? [];
  }

  /** The driver knows already whether it is open. */
  override async check(): Promise<void> {
    if (this.broken !== undefined || this.#client?.getTransactionStatus() !== "T") await super.check();
  }

  override cut(why: string): void {
    super.cut(why);
    innerOf(this.#client)?.connection.stream.destroy();
  }

  override leave(): void {
    // The end of one that was broken off is told later.
    if (this.broken === undefined) this.#client?.off("error", this.#ended).off("end", this.#ended);
    this.#release(this.broken !== undefined);
  }
}
