/**
 * The worker of the scenarios in TypeScript. It reads orders, one JSON object a line, carries them
 * out, and writes what has happened. clients/new-language.md specifies the orders and the answers,
 * which are the same for the clients of all languages. `--driver` is `pg` or `postgres`.
 */
import { createHook } from "node:async_hooks";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import pg from "pg";
import postgres from "postgres";

import * as pgFence from "../dist/index.js";
import { Fence as PgFence } from "../dist/pg.js";
import { Fence as PostgresFence } from "../dist/postgres.js";

type Order = Record<string, any>;

const ON_PG = !process.argv.includes("postgres");

// The timers and sockets that exist, also those that do not keep the process alive.
const alive = new Set<number>();
createHook({
  init: (id, type) => void (/^(Timeout|TCPWRAP|TCPCONNECTWRAP)$/.test(type) && alive.add(id)),
  destroy: (id) => void alive.delete(id),
}).enable();

function say(event: string, more: object = {}): void {
  process.stdout.write(`${JSON.stringify({ event, at: Date.now(), ...more })}\n`);
}

/** An error of the leader's work. */
class WorkError extends Error {}

function sayRefused(error: any): void {
  const sqlstate = error?.sqlstate ?? (/^[0-9A-Z]{5}$/.test(error?.code) ? error.code : undefined);
  const kinds: [new (...args: any[]) => Error, string][] = [
    [pgFence.TransactionLost, error?.inDoubt ? "in-doubt" : "transaction-lost"],
    [pgFence.LeaseTaken, "taken"],
    [pgFence.LeaseLost, "lost"],
    [pgFence.NotInstalled, "not-installed"],
    [pgFence.NotGranted, "not-granted"],
    [pgFence.Refused, "refused"],
    [pgFence.FenceError, "no-answer"],
  ];
  const kind =
    error?.name === "TimeoutError"
      ? "deadline"
      : kinds.find(([type]) => error instanceof type)?.[1];
  say("refused", {
    error: kind ?? (sqlstate ? "refused" : "other"),
    sqlstate,
    message: String(error),
  });
}

/** Rejects after `ms` milliseconds, if the work has no result by then. */
async function within<T>(ms: number | undefined, work: PromiseLike<T>): Promise<T> {
  if (ms === undefined) return work;
  const signal = AbortSignal.timeout(ms);
  return Promise.race([
    work,
    new Promise<never>((_, reject) =>
      signal.addEventListener("abort", () => reject(signal.reason)),
    ),
  ]);
}

/** True if the fence's next connection must fail to open. */
let failsNextOpening = false;

function failIfBroken(): void {
  if (!failsNextOpening) return;
  failsNextOpening = false;
  throw "broken";
}

/** What differs between the drivers. */
interface Driver {
  fence(onEvent: (event: pgFence.LeaseEvent) => void): PgFence | PostgresFence;
  /** Opens a connection, does the work with it, and closes it. */
  withConnection(work: (on: any) => Promise<void>, options?: string): Promise<void>;
  run(tx: any, text: string, values?: any[]): Promise<any>;
}

function onPg({ host, port, user, dbname, application }: Order): Driver {
  const settings = { host, port, user, database: dbname, application_name: application };
  const open = () => {
    failIfBroken();
    return new pg.Client({ ...settings, connectionTimeoutMillis: 2000 }).connect();
  };
  return {
    fence: (onEvent) => new PgFence(open, { onEvent }),
    async withConnection(work, options) {
      const client = new pg.Client({ ...settings, options });
      client.on("error", () => {});
      try {
        await client.connect();
        await work(client);
      } finally {
        await client.end();
      }
    },
    run: (tx, text, values) => tx.query(text, values),
  };
}

function onPostgres({ host, port, user, dbname, application }: Order): Driver {
  const settings = { host, port, user, database: dbname, max: 1, onnotice() {} };
  const open = () => {
    failIfBroken();
    return postgres({ ...settings, connection: { application_name: application } });
  };
  return {
    fence: (onEvent) => new PostgresFence(open, { onEvent }),
    async withConnection(work, options) {
      const sql = postgres({
        ...settings,
        connection: { application_name: application, ...(options ? { options } : {}) },
      });
      try {
        await work(sql);
      } finally {
        await sql.end({ timeout: 0 });
      }
    },
    run: (tx, text, values) => tx.unsafe(text, values),
  };
}

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

async function nextOrder(): Promise<Order | undefined> {
  const { value, done } = await lines.next();
  return done ? undefined : JSON.parse(value);
}

/** Returns the deadline of a lease in milliseconds since 1970. */
function deadlineOf({ remaining }: { remaining: { milliseconds: number } }): number {
  return Math.floor(Date.now() + remaining.milliseconds);
}

const CLAIM = `UPDATE run SET held_until = clock_timestamp() + $1 * interval '1 ms' WHERE id = (
    SELECT id FROM run WHERE held_until IS NULL OR held_until < clock_timestamp()
    FOR UPDATE SKIP LOCKED) RETURNING fence`;
/** The orders that are for an open transaction. */
const IN_TRANSACTION = ["update", "sleep", "commit", "rollback", "commit-itself", "fail-and-go-on"];
const ROLLBACK = new Error("rollback");

class Worker {
  lease: any;
  /** The table that orders write: that of the row lease, or `work`. */
  table = "work";
  /** The leases that `hold` has acquired, and all names that it was given. */
  heldLeases: any[] = [];
  heldNames = new Set<string>();
  driver!: Driver;
  fence!: any;
  leading: Promise<void> | undefined;
  stopping = new AbortController();
  /** What the leader's work does next. */
  workOrder: string | undefined;

  async serve(): Promise<void> {
    for (let order = await nextOrder(); order !== undefined; order = await nextOrder()) {
      const { do: what, ...rest } = order;
      try {
        if (IN_TRANSACTION.includes(what))
          throw new pgFence.LeaseLost("released", ["its transaction has ended"]);
        if (typeof (this as any)[what] !== "function") throw new Error("unknown order");
        await (this as any)[what](rest);
      } catch (error) {
        sayRefused(error);
      }
    }
    await this.fence.close();
  }

  connect(order: Order): void {
    this.driver = ON_PG ? onPg(order) : onPostgres(order);
    this.fence = this.driver.fence(({ kind, names: [name], token, remaining, reason }) => {
      if (kind === "lost") say("lost", { name, reason });
      if (kind === "renewed" && !this.heldNames.has(`${name}`))
        say("renewed", { token, deadline: deadlineOf({ remaining }) });
    });
    process.once("SIGTERM", () => void this.fence.close().finally(() => process.exit(0)));
    say("connected");
  }

  async endLease(): Promise<void> {
    await this.lease?.release?.();
    this.lease = undefined;
    this.table = "work";
  }

  async claim({ ttl_ms }: Order): Promise<void> {
    await this.endLease();
    let claimed: any;
    await this.driver.withConnection(async (on) => {
      const result = await this.driver.run(on, CLAIM, [ttl_ms]);
      claimed = (result.rows ?? result)[0];
    });
    if (claimed === undefined) return say("taken");
    const options = { ttl: { milliseconds: ttl_ms } };
    this.lease = await this.fence.keepRow("run", { id: 1 }, claimed.fence, options);
    this.table = "run";
    say("acquired", { token: this.lease.token, deadline: deadlineOf(this.lease) });
  }

  update(tx: any, value: string): Promise<any> {
    return this.driver.run(tx, `UPDATE ${this.table} SET value = $1 WHERE id = 1`, [value]);
  }

  async acquire({ names, ttl_ms, wait_ms = 0, within_ms, ...kind }: Order): Promise<void> {
    await this.endLease();
    const signal = within_ms === undefined ? undefined : AbortSignal.timeout(within_ms);
    const spans = { ttl: { milliseconds: ttl_ms }, wait: { milliseconds: wait_ms } };
    try {
      this.lease = await this.fence.lease(names.length > 1 ? names : names[0], {
        ...spans,
        ...kind,
        signal,
      });
    } catch (error) {
      if (error instanceof pgFence.LeaseTaken) return say("taken");
      throw error;
    }
    say("acquired", { token: this.lease.token, deadline: deadlineOf(this.lease) });
  }

  async hold({ names, ttl_ms }: Order): Promise<void> {
    for (const name of names) this.heldNames.add(name);
    // A hundred at a time: an acquire that is not sent within 20 s fails.
    for (let from = 0; from < names.length; from += 100) {
      const batch: string[] = names.slice(from, from + 100);
      const options = { ttl: { milliseconds: ttl_ms } };
      const acquires = batch.map((name) => this.fence.lease(name, options));
      for (const result of await Promise.allSettled(acquires)) {
        if (result.status === "fulfilled") this.heldLeases.push(result.value);
        else if (result.reason instanceof pgFence.LeaseTaken) return say("taken");
        else throw result.reason;
      }
    }
    this.holding();
  }

  holding(): void {
    say("holding", { count: this.heldLeases.filter(({ held }) => held).length });
  }

  async "release-all"(): Promise<void> {
    await Promise.all(this.heldLeases.splice(0).map((lease) => lease.release()));
    say("released");
  }

  adopted({ name, token }: Order): void {
    this.lease = this.fence.adopted(name, token);
    this.table = "work";
    say("adopted", { token });
  }

  currentLease(): any {
    if (this.lease === undefined) throw new pgFence.LeaseLost("gone", ["job"]);
    return this.lease;
  }

  check(): void {
    this.currentLease().check();
    say("held");
  }

  async release(): Promise<void> {
    this.currentLease().check();
    await this.lease[Symbol.asyncDispose]();
    say("released");
  }

  async write({ value, release = false, read_first = false }: Order): Promise<void> {
    const lease = this.currentLease();
    await this.driver.withConnection(async (on) => {
      if (read_first) await this.driver.run(on, "SELECT 1");
      await lease.guard(on, (tx: any) => this.update(tx, value), { release });
    });
    say("wrote");
  }

  async unfenced({ value }: Order): Promise<void> {
    await this.driver.withConnection((on) => this.update(on, value));
    say("wrote");
  }

  async truncate(): Promise<void> {
    await this.driver.withConnection((on) =>
      this.currentLease().guard(on, (tx: any) => this.driver.run(tx, "TRUNCATE work")),
    );
    say("wrote");
  }

  async guard(): Promise<void> {
    const lease = this.currentLease();
    await this.driver.withConnection((on) =>
      this.transaction("guarded", (work) => lease.guard(on, work)),
    );
  }

  async "guard-all"(): Promise<void> {
    await this.driver.withConnection((on) =>
      this.transaction("guarded", (work) => this.fence.guard(on, this.heldLeases, work)),
    );
  }

  async present(): Promise<void> {
    const begin = async (on: any, work: (tx: any) => Promise<void>) => {
      if (!ON_PG) return on.begin(work);
      await on.query("BEGIN");
      await work(on);
      await on.query("COMMIT");
    };
    await this.driver.withConnection(
      (on) => this.transaction("presented", (work) => begin(on, work)),
      pgFence.options(this.currentLease()),
    );
  }

  /** Carries out orders in one transaction, which `run` begins, until `commit` or `rollback`.
   * `begun` is the answer once it has begun. */
  async transaction(
    begun: string,
    run: (work: (tx: any) => Promise<void>) => Promise<void>,
  ): Promise<void> {
    try {
      await run(async (tx) => {
        say(begun);
        await this.runOrders(tx);
      });
    } catch (error) {
      if (error !== ROLLBACK) throw error;
      return say("rolled-back");
    }
    say("committed");
  }

  async runOrders(tx: any): Promise<void> {
    for (let order = await nextOrder(); order !== undefined; order = await nextOrder()) {
      if (order.do === "commit") return;
      if (order.do === "rollback") throw ROLLBACK;
      if (order.do === "update") {
        await this.update(tx, order.value);
        say("updated");
      } else if (order.do === "sleep") {
        await within(order.within_ms, this.driver.run(tx, `SELECT pg_sleep(${order.ms / 1000})`));
        say("slept");
      } else if (order.do === "guard") {
        await this.transaction("guarded", (work) => this.currentLease().guard(tx, work));
      } else if (order.do === "check") {
        this.check();
      } else if (order.do === "commit-itself") {
        await this.driver.run(tx, "COMMIT");
        say("done");
      } else if (order.do === "fail-and-go-on") {
        await this.driver.run(tx, "SELECT 1 / 0").catch(() => {});
        say("done");
      } else {
        throw new Error(`unknown order: ${order.do}`);
      }
    }
  }

  break(): void {
    failsNextOpening = true;
    say("done");
  }

  lead({ name, ttl_ms }: Order): void {
    this.stopping = new AbortController();
    const { signal: stop } = this.stopping;
    const work = async (lease: any) => {
      this.lease = lease;
      say("leading", { token: lease.token, deadline: deadlineOf(lease) });
      while (!stop.aborted) {
        const { workOrder } = this;
        this.workOrder = undefined;
        if (workOrder === "returns") return;
        if (workOrder === "fails") throw new WorkError();
        if (workOrder === "loses-connection") {
          await this.driver.withConnection((on) =>
            this.driver.run(on, "SELECT pg_terminate_backend(pg_backend_pid())"),
          );
        }
        await sleep(50, undefined, { signal: AbortSignal.any([lease.signal, stop]) }).catch(
          () => {},
        );
        lease.check();
      }
    };
    this.leading = this.fence.lead(name, work, { stop, ttl: { milliseconds: ttl_ms } }).then(
      () => say("stopped"),
      (error: unknown) =>
        error instanceof WorkError
          ? say("stopped", { reason: "fails" })
          : say("stopped", { reason: String(error) }),
    );
    say("done");
  }

  work({ how }: Order): void {
    this.workOrder = how;
    say("done");
  }

  stop(): void {
    this.stopping.abort();
    say("done");
  }

  census(): void {
    say("census", { tasks: alive.size });
  }

  async close(): Promise<void> {
    this.stopping.abort();
    await this.leading;
    await this.fence.close();
    this.lease = this.leading = undefined;
    this.heldLeases = [];
    say("closed");
  }
}

await new Worker().serve();
