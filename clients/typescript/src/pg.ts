/**
 * Leases on the driver `pg`.
 *
 * @module
 */
import { connect } from "node:net";
import type { Duplex } from "node:stream";
import pg from "pg";

import type { Adopted as AnyAdopted } from "./adopted.js";
import { isPlain, sendCancel, shown, valueOf, type Connection, type Driver, type Row, type Transaction } from "./connection.js";
import { Fence as AnyFence, type FenceOptions } from "./fence.js";
import { checkStillOpen, rolledBackError } from "./guarded.js";
import type { Holding } from "./holding.js";
import type { Lease as AnyLease } from "./lease.js";

export * from "./index.js";

/** Where connections come from: a connection string, the settings of a client, or a pool, for its settings. */
export type Source = string | pg.ClientConfig | pg.Pool;
/** What transactions begin on. */
export type On = pg.Pool | pg.ClientBase;
/** A lease of this driver's. */
export type Lease = AnyLease<On, pg.ClientBase>;
/** An adopted one. */
export type Adopted = AnyAdopted<On, pg.ClientBase>;

/** Where leases come from. */
export class Fence extends AnyFence<On, pg.ClientBase> {
  constructor(source: Source, options?: FenceOptions) {
    super(driver(source), options);
  }
}

/** @internal */
export function driver(source: Source): Driver<On, pg.ClientBase> {
  const config = typeof source === "string" ? { connectionString: source } : isPool(source) ? source.options : source;
  if (!isPool(source) && !isPlain(config)) {
    throw new TypeError(`a Fence takes a connection string, settings of pg or a pg.Pool, and not ${shown(source)}`);
  }
  return {
    connection: (onEnd) => new PgConnection(config, onEnd),
    transaction(on) {
      if (!isPool(on) && !isClient(on)) {
        const what = "a pg.Pool, a client of pg, or a function that runs a query in an open transaction";
        throw new TypeError(`a transaction begins on ${what}, and not on ${shown(on)}`);
      }
      return new PgTransaction(on);
    },
  };
}

function isPool(one: unknown): one is pg.Pool {
  return Object(one) === one && "idleCount" in (one as object) && "options" in (one as object);
}

function isClient(one: unknown): one is pg.ClientBase {
  const { query, connect, on } = Object(one) as Record<string, unknown>;
  return [query, connect, on].every((method) => typeof method === "function");
}

/**
 * Every connection of the pool presents the lease's token, or that token, from now on, so that code which knows nothing
 * of leases is fenced. Returns what ends it. It presents, and does not guard; and not through a pooler in transaction
 * mode.
 */
export function attach(pool: pg.Pool, lease: Holding<any, any> | number | bigint): () => void {
  if (!isPool(pool)) {
    throw new TypeError(`a lease is attached to a pg.Pool, and not to ${shown(pool)}`);
  }
  const token = String(typeof lease === "object" ? lease.token : lease);
  const attached = ATTACHED.get(pool) ?? prepare(pool);
  attached.token = token;
  return () => {
    if (attached.token === token) {
      attached.token = "";
    }
  };
}

/** The token that a pool's connections are to present, or nothing. */
interface Attached {
  token: string;
}

const ATTACHED = new WeakMap<pg.Pool, Attached>();

/** Has the pool hand out no connection that presents another token. */
function prepare(pool: pg.Pool): Attached {
  const attached: Attached = { token: "" };
  const presented = new WeakMap<pg.ClientBase, string>();
  const connect = pool.connect.bind(pool) as () => Promise<pg.PoolClient>;
  const connected = async () => {
    const client = await connect();
    const { token } = attached;
    if ((presented.get(client) ?? "") !== token) {
      try {
        await client.query(token === "" ? "RESET pg_fence.token" : `SET pg_fence.token = '${token}'`);
      } catch (error) {
        client.release(true);
        throw error;
      }
      presented.set(client, token);
    }
    return client;
  };
  type Callback = (error: unknown, client: pg.PoolClient | undefined, done: (release?: any) => void) => void;
  const tell = (callback: Callback) => {
    connected().then(
      (client) => process.nextTick(callback, undefined, client, client.release),
      (error) => process.nextTick(callback, error, undefined, () => {}),
    );
  };
  pool.connect = ((callback?: Callback) => (callback === undefined ? connected() : tell(callback))) as typeof pool.connect;
  ATTACHED.set(pool, attached);
  return attached;
}

/** What the types of pg do not tell. */
interface Internals {
  readonly connection?: { readonly stream?: Duplex };
  readonly processID?: number | null;
  readonly secretKey?: number | null;
  unref?(): void;
}

function breakOff(client: pg.ClientBase | undefined): void {
  (client as Internals | undefined)?.connection?.stream?.destroy();
}

class PgConnection implements Connection {
  isBroken = false;
  readonly #client: pg.Client;
  #connecting: Promise<unknown> | undefined;

  constructor(config: pg.ClientConfig, onEnd: () => void) {
    this.#client = new pg.Client(config);
    const ended = () => {
      if (!this.isBroken) {
        this.isBroken = true;
        onEnd();
      }
    };
    this.#client.on("error", ended).on("end", ended);
  }

  async run(sql: string, parameters?: readonly unknown[]): Promise<readonly Row[]> {
    await (this.#connecting ??= this.#connect());
    const results = [await this.#client.query(sql, parameters as unknown[] | undefined)].flat();
    return results.filter((result) => result.fields.length > 0).at(-1)?.rows ?? [];
  }

  async columns(sql: string, parameters: readonly unknown[]): Promise<readonly string[]> {
    const { fields } = await this.#client.query(sql, [...parameters]);
    return fields.map(({ name }) => name);
  }

  async #connect(): Promise<void> {
    try {
      await this.#client.connect();
      (this.#client as Internals).unref?.();
    } catch (error) {
      // Such a client cannot connect once more.
      this.isBroken = true;
      throw error;
    }
  }

  cut(): void {
    this.isBroken = true;
    breakOff(this.#client);
  }

  cancel(): void {
    const { processID, secretKey } = this.#client as Internals;
    if (typeof processID !== "number" || typeof secretKey !== "number") {
      return this.cut();
    }
    const { host, port } = this.#client;
    sendCancel(host.startsWith("/") ? connect(`${host}/.s.PGSQL.${port}`) : connect(port, host), processID, secretKey);
  }

  end(): Promise<unknown> {
    return this.#client.end();
  }
}

class PgTransaction implements Transaction<pg.ClientBase> {
  readonly showsConnection = true;
  isOurs = false;
  broken: unknown;
  readonly #on: On;
  #client: pg.ClientBase | undefined;
  /** Of a pool's client. */
  #release: ((isBroken: boolean) => void) | undefined;
  /** While a client is waited for. */
  #giveUp: (error: unknown) => void = () => {};

  constructor(on: On) {
    this.#on = on;
  }

  async begin(first: string): Promise<pg.ClientBase> {
    const client = (this.#client ??= await this.#connect());
    const status = client.getTransactionStatus?.() ?? null;
    if (status === null) {
      throw new TypeError("this takes pg 8.21 or newer, and not its native bindings");
    }
    this.isOurs = status === "I";
    await client.query(this.isOurs ? `BEGIN; ${first}` : first);
    return client;
  }

  async #connect(): Promise<pg.ClientBase> {
    const client = isPool(this.#on) ? await this.#ofPool(this.#on) : this.#on;
    // Without a listener, a session that ends between two queries ends the process, too.
    client.on("error", this.#ended);
    return client;
  }

  #ofPool(pool: pg.Pool): Promise<pg.ClientBase> {
    return new Promise((resolve, reject) => {
      this.#giveUp = reject;
      pool.connect().then((client) => {
        if (this.broken !== undefined) {
          client.release();
          return;
        }
        this.#release = (isBroken) => client.release(isBroken);
        resolve(client);
      }, reject);
    });
  }

  readonly #ended = (error: unknown): void => {
    this.broken ??= error;
  };

  async value(sql: string): Promise<unknown> {
    return valueOf(await this.#client?.query(sql));
  }

  async commit(): Promise<void> {
    if (!this.isOurs) {
      await checkStillOpen((sql) => this.value(sql));
      return;
    }
    const isOpen = this.#client?.getTransactionStatus() !== "I";
    const done = isOpen ? await this.#client?.query("COMMIT") : undefined;
    if (done?.command !== "COMMIT") {
      throw rolledBackError();
    }
  }

  async rollback(): Promise<void> {
    if (this.isOurs && this.broken === undefined) {
      await this.#client?.query("ROLLBACK").catch(this.#ended);
    }
  }

  cut(): void {
    this.broken ??= new Error("Connection terminated: the lease is lost");
    this.#giveUp(this.broken);
    breakOff(this.#client);
  }

  leave(): void {
    this.#client?.off("error", this.#ended);
    this.#release?.(this.broken !== undefined);
  }
}
