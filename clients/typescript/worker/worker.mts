/**
 * The worker of the scenarios in TypeScript: does what it reads, a JSON object a line, and says what became of it.
 *
 * Its orders and answers are the same for the clients of all languages, and written down in clients/new-language.md.
 * `--driver` is `pg` or `postgres`.
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

// Timers and sockets, also those that do not keep the process alive.
const alive = new Set<number>();
createHook({
  init: (id, type) => void (/^(Timeout|TCPWRAP|TCPCONNECTWRAP)$/.test(type) && alive.add(id)),
  destroy: (id) => void alive.delete(id),
}).enable();

function say(event: string, more: object = {}): void {
  process.stdout.write(`${JSON.stringify({ event, at: Date.now(), ...more })}\n`);
}

/** An error of the work's own. */
class Work extends Error {}

function refused(error: any): void {
  const sqlstate = error?.sqlstate ?? (/^[0-9A-Z]{5}$/.test(error?.code) ? error.code : undefined);
  const kinds: [new (...of: any[]) => Error, string][] = [
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

/** Rejects as soon as the caller's own deadline has passed. */
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

/** The next connection of the fence's cannot be opened. */
let isBroken = false;

function breaks(): void {
  if (!isBroken) return;
  isBroken = false;
  throw "broken";
}

/** The differences between the drivers. */
interface Side {
  fence(onEvent: (event: pgFence.LeaseEvent) => void): PgFence | PostgresFence;
  /** Opens a connection, has something done with it, and closes it. */
  with(work: (on: any) => Promise<void>, options?: string): Promise<void>;
  run(tx: any, text: string, values?: any[]): Promise<any>;
}

function onPg({ host, port, user, dbname, application }: Order): Side {
  const settings = { host, port, user, database: dbname, application_name: application };
  const open = () => {
    breaks();
    return new pg.Client({ ...settings, connectionTimeoutMillis: 2000 }).connect();
  };
  return {
    fence: (onEvent) => new PgFence(open, { onEvent }),
    async with(work, options) {
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

function onPostgres({ host, port, user, dbname, application }: Order): Side {
  const settings = { host, port, user, database: dbname, max: 1, onnotice() {} };
  const open = () => {
    breaks();
    return postgres({ ...settings, connection: { application_name: application } });
  };
  return {
    fence: (onEvent) => new PostgresFence(open, { onEvent }),
    async with(work, options) {
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

async function next(): Promise<Order | undefined> {
  const { value, done } = await lines.next();
  return done ? undefined : JSON.parse(value);
}

/** In milliseconds since 1970. */
function deadlineOf({ remaining }: { remaining: { milliseconds: number } }): number {
  return Math.floor(Date.now() + remaining.milliseconds);
}

const CLAIM = `UPDATE run SET held_until = clock_timestamp() + $1 * interval '1 ms' WHERE id = (
    SELECT id FROM run WHERE held_until IS NULL OR held_until < clock_timestamp()
    FOR UPDATE SKIP LOCKED) RETURNING fence`;
/** Orders within a transaction. */
const WITHIN = ["update", "sleep", "commit", "rollback", "commit-itself", "fail-and-go-on"];
const ROLLBACK = new Error("rollback");

class Worker {
  lease: any;
  /** What it writes: that of the row that it keeps, or `work`. */
  table = "work";
  /** Of `hold`. */
  many: any[] = [];
  crowd = new Set<string>();
  side!: Side;
  fence!: any;
  leading: Promise<void> | undefined;
  stopping = new AbortController();
  how: string | undefined;

  async serve(): Promise<void> {
    for (let order = await next(); order !== undefined; order = await next()) {
      const { do: what, ...rest } = order;
      try {
        if (WITHIN.includes(what))
          throw new pgFence.LeaseLost("released", ["its transaction has ended"]);
        if (typeof (this as any)[what] !== "function") throw new Error("unknown order");
        await (this as any)[what](rest);
      } catch (error) {
        refused(error);
      }
    }
    await this.fence.close();
  }

  connect(place: Order): void {
    this.side = ON_PG ? onPg(place) : onPostgres(place);
    this.fence = this.side.fence(({ kind, names: [name], token, remaining, reason }) => {
      if (kind === "lost") say("lost", { name, reason });
      if (kind === "renewed" && !this.crowd.has(`${name}`))
        say("renewed", { token, deadline: deadlineOf({ remaining }) });
    });
    process.once("SIGTERM", () => void this.fence.close().finally(() => process.exit(0)));
    say("connected");
  }

  async ends(): Promise<void> {
    await this.lease?.release?.();
    this.lease = undefined;
    this.table = "work";
  }

  async claim({ ttl_ms }: Order): Promise<void> {
    await this.ends();
    let claimed: any;
    await this.side.with(async (on) => {
      const result = await this.side.run(on, CLAIM, [ttl_ms]);
      claimed = (result.rows ?? result)[0];
    });
    if (claimed === undefined) return say("taken");
    const options = { ttl: { milliseconds: ttl_ms } };
    this.lease = await this.fence.keepRow("run", { id: 1 }, claimed.fence, options);
    this.table = "run";
    say("acquired", { token: this.lease.token, deadline: deadlineOf(this.lease) });
  }

  update(tx: any, value: string): Promise<any> {
    return this.side.run(tx, `UPDATE ${this.table} SET value = $1 WHERE id = 1`, [value]);
  }

  async acquire({ names, ttl_ms, wait_ms = 0, within_ms, ...kind }: Order): Promise<void> {
    await this.ends();
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
    for (const name of names) this.crowd.add(name);
    // A hundred at a time: an acquire that waits for its turn for 20 s is given up.
    for (let from = 0; from < names.length; from += 100) {
      const some: string[] = names.slice(from, from + 100);
      const options = { ttl: { milliseconds: ttl_ms } };
      const taken = await Promise.allSettled(some.map((name) => this.fence.lease(name, options)));
      for (const one of taken) {
        if (one.status === "fulfilled") this.many.push(one.value);
        else if (one.reason instanceof pgFence.LeaseTaken) return say("taken");
        else throw one.reason;
      }
    }
    this.holding();
  }

  holding(): void {
    say("holding", { count: this.many.filter(({ held }) => held).length });
  }

  async "release-all"(): Promise<void> {
    await Promise.all(this.many.splice(0).map((lease) => lease.release()));
    say("released");
  }

  adopted({ name, token }: Order): void {
    this.lease = this.fence.adopted(name, token);
    this.table = "work";
    say("adopted", { token });
  }

  held(): any {
    if (this.lease === undefined) throw new pgFence.LeaseLost("gone", ["job"]);
    return this.lease;
  }

  check(): void {
    this.held().check();
    say("held");
  }

  async release(): Promise<void> {
    this.held().check();
    await this.lease[Symbol.asyncDispose]();
    say("released");
  }

  async write({ value, release = false, read_first = false }: Order): Promise<void> {
    const lease = this.held();
    await this.side.with(async (on) => {
      if (read_first) await this.side.run(on, "SELECT 1");
      await lease.guard(on, (tx: any) => this.update(tx, value), { release });
    });
    say("wrote");
  }

  async unfenced({ value }: Order): Promise<void> {
    await this.side.with((on) => this.update(on, value));
    say("wrote");
  }

  async truncate(): Promise<void> {
    await this.side.with((on) =>
      this.held().guard(on, (tx: any) => this.side.run(tx, "TRUNCATE work")),
    );
    say("wrote");
  }

  async guard(): Promise<void> {
    const lease = this.held();
    await this.side.with((on) => this.transaction("guarded", (work) => lease.guard(on, work)));
  }

  async "guard-all"(): Promise<void> {
    await this.side.with((on) =>
      this.transaction("guarded", (work) => this.fence.guard(on, this.many, work)),
    );
  }

  async present(): Promise<void> {
    const begin = async (on: any, work: (tx: any) => Promise<void>) => {
      if (!ON_PG) return on.begin(work);
      await on.query("BEGIN");
      await work(on);
      await on.query("COMMIT");
    };
    await this.side.with(
      (on) => this.transaction("presented", (work) => begin(on, work)),
      pgFence.options(this.held()),
    );
  }

  /** Until it reads `commit` or `rollback`, what it does is one transaction. */
  async transaction(
    begun: string,
    by: (work: (tx: any) => Promise<void>) => Promise<void>,
  ): Promise<void> {
    try {
      await by(async (tx) => {
        say(begun);
        await this.steps(tx);
      });
    } catch (error) {
      if (error !== ROLLBACK) throw error;
      return say("rolled-back");
    }
    say("committed");
  }

  async steps(tx: any): Promise<void> {
    for (let step = await next(); step !== undefined; step = await next()) {
      if (step.do === "commit") return;
      if (step.do === "rollback") throw ROLLBACK;
      if (step.do === "update") {
        await this.update(tx, step.value);
        say("updated");
      } else if (step.do === "sleep") {
        await within(step.within_ms, this.side.run(tx, `SELECT pg_sleep(${step.ms / 1000})`));
        say("slept");
      } else if (step.do === "guard") {
        await this.transaction("guarded", (work) => this.held().guard(tx, work));
      } else if (step.do === "commit-itself") {
        await this.side.run(tx, "COMMIT");
        say("done");
      } else if (step.do === "fail-and-go-on") {
        await this.side.run(tx, "SELECT 1 / 0").catch(() => {});
        say("done");
      } else {
        throw new Error(`unknown order: ${step.do}`);
      }
    }
  }

  break(): void {
    isBroken = true;
    say("done");
  }

  lead({ name, ttl_ms }: Order): void {
    this.stopping = new AbortController();
    const { signal: stop } = this.stopping;
    const work = async (lease: any) => {
      this.lease = lease;
      say("leading", { token: lease.token, deadline: deadlineOf(lease) });
      while (!stop.aborted) {
        const how = this.how;
        this.how = undefined;
        if (how === "returns") return;
        if (how === "fails") throw new Work();
        if (how === "loses-connection") {
          await this.side.with((on) =>
            this.side.run(on, "SELECT pg_terminate_backend(pg_backend_pid())"),
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
        error instanceof Work
          ? say("stopped", { reason: "fails" })
          : say("stopped", { reason: String(error) }),
    );
    say("done");
  }

  work({ how }: Order): void {
    this.how = how;
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
    this.many = [];
    say("closed");
  }
}

await new Worker().serve();
