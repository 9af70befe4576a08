/**
 * Leases on the driver `pg`.
 *
 * @module
 */
import { connect } from "node:net";
import type { Duplex } from "node:stream";
import pg from "pg";

import type { Adopted as AnyAdopted } from "./adopted.js";
import { sendCancel, valueOf, type Connection, type Driver, type Transaction } from "./connection.js";
import { Fence as AnyFence, type FenceOptions } from "./fence.js";
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
  return {
    connection: () => new PgConnection(config),
    transaction: (on) => new PgTransaction(on),
  };
}

function isPool(one: object): one is pg.Pool {
  return "idleCount" in one;
}

/** What the types of pg do not tell. */
interface Internals {
  readonly connection?: { readonly stream?: Duplex };
  readonly processID?: number | null;
  readonly secretKey?: number | null;
}

function breakOff(client: pg.ClientBase | undefined): void {
  (client as Internals | undefined)?.connection?.stream?.destroy();
}

class PgConnection implements Connection {
  isBroken = false;
  readonly #client: pg.Client;
  #connecting: Promise<unknown> | undefined;

  constructor(config: pg.ClientConfig) {
    this.#client = new pg.Client(config);
    const ended = () => {
      this.isBroken = true;
    };
    this.#client.on("error", ended).on("end", ended);
  }

  async run(sql: string): Promise<unknown> {
    await (this.#connecting ??= this.#connect());
    const results = [await this.#client.query(sql)].flat();
    return valueOf(results.filter((result) => result.rows.length > 0).at(-1) ?? []);
  }

  async #connect(): Promise<void> {
    try {
      await this.#client.connect();
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

  async begin(first: readonly string[]): Promise<pg.ClientBase> {
    const client = (this.#client ??= await this.#connect());
    const status = client.getTransactionStatus?.() ?? null;
    if (status === null) {
      throw new TypeError("this takes pg 8.21 or newer, and not its native bindings");
    }
    this.isOurs = status === "I";
    await client.query([...(this.isOurs ? ["BEGIN"] : []), ...first].join("; "));
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
    if (this.isOurs) {
      const done = await this.#client?.query("COMMIT");
      if (done?.command === "ROLLBACK") {
        throw new Error("a statement of the transaction had failed, so its commit has rolled it back");
      }
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
