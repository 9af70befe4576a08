/**
 * What the scenarios of all clients do not show: each kind of transaction, the ORMs, and what is JavaScript's own.
 *
 *     DATABASE_URL=postgresql://… node tests/pg_fence.test.mjs pg    (or postgres)
 *
 * The database has the extension and is otherwise of no use: a table is made and dropped in it.
 */
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { EventEmitter, once } from "node:events";
import { createRequire } from "node:module";
import { createServer, type AddressInfo } from "node:net";
import { after, before, beforeEach, test } from "node:test";
import { promisify } from "node:util";
import { bigint, integer, pgTable, text } from "drizzle-orm/pg-core";
import { drizzle as drizzleOnPg } from "drizzle-orm/node-postgres";
import { drizzle as drizzleOnPostgres } from "drizzle-orm/postgres-js";
import { eq, sql as drizzleSql } from "drizzle-orm";
import { Kysely, PostgresDialect, sql as kyselySql } from "kysely";
import pg from "pg";
import { PrismaPg } from "@prisma/adapter-pg";
import postgres from "postgres";
import { InMemoryMetricExporter, MeterProvider, PeriodicExportingMetricReader } from "@opentelemetry/sdk-metrics";
import { BasicTracerProvider, InMemorySpanExporter, SimpleSpanProcessor } from "@opentelemetry/sdk-trace-base";
import { DataTypes, Sequelize } from "sequelize";
import { DataSource, EntitySchema } from "typeorm";

import {
  AcquireTimeout, classify, FenceError, LeaseLost, NoToken, NotInstalled, NotSpeaking, StaleToken, TransactionLost,
  type Adopted, type Leader, type Lease, type LeaseOptions,
} from "../dist/index.js";
import type { Fence as AnyFence } from "../dist/fence.js";
import * as onPg from "../dist/pg.js";
import * as onPostgres from "../dist/postgres.js";
import { openTelemetry } from "../dist/opentelemetry.js";
import { unfenced } from "../dist/testing.js";

const URL = process.env["DATABASE_URL"] ?? "";
const DRIVER = process.argv[2] ?? "pg";
const LONG = { ttl: { minutes: 5 } };

const admin = new pg.Client(URL);
const pool = new pg.Pool({ connectionString: URL, max: 3 });
const sql = postgres(URL, { max: 3, onnotice() {} });
const fenceOn = (options: object): AnyFence<any, any> =>
  DRIVER === "pg" ? new onPg.Fence(pool, options) : new onPostgres.Fence(sql, options);
const fence = fenceOn({});
/** What transactions begin on. */
const on: any = DRIVER === "pg" ? pool : sql;
/** Runs a statement by what the work is given. */
const run = (tx: any, statement: string): Promise<any> => (DRIVER === "pg" ? tx.query(statement) : tx.unsafe(statement));

before(() => admin.connect());
after(async () => {
  await Promise.all([admin.end(), pool.end(), sql.end()]);
});

beforeEach(async () => {
  await admin.query(`
    DROP TABLE IF EXISTS orders;
    CREATE TABLE orders (id bigint PRIMARY KEY, status text, version int NOT NULL DEFAULT 1);
    INSERT INTO orders VALUES (7, 'new');
    SELECT fence_protect('orders', lease => 'order:{id}');
  `);
});

async function value(statement: string): Promise<unknown> {
  return Object.values((await admin.query(statement)).rows[0] ?? {})[0];
}

const status = () => value("SELECT status FROM orders");

async function lease(names: string | string[] = "order:7", options = {}): Promise<Lease<any, any>> {
  const taken = await fence.lease(names, { ...LONG, ...options });
  assert.ok(taken);
  return taken;
}

/** What it is rejected with. */
async function errorOf(work: () => Promise<unknown>): Promise<any> {
  try {
    await work();
  } catch (error) {
    return error;
  }
  return assert.fail("nothing is thrown");
}

test("a bare number is no span of time", async () => {
  await assert.rejects(fence.lease("order:7", { ttl: 30000 as any }), TypeError);
  await assert.rejects(fence.lease("order:7", { ttl: { second: 30 } as any }), TypeError);
});

test("a ttl that cannot be kept is refused by name", async () => {
  for (const ttl of [{ seconds: 0 }, { seconds: -1 }, { milliseconds: 99 }]) {
    await assert.rejects(fence.lease("order:7", { ttl }), /^RangeError: a ttl of -?\d+ ms is too short/);
    await assert.rejects(fence.lead("order:7", async () => {}, { ttl }), /^RangeError: a ttl/);
    await assert.rejects(fence.resume("order:7", 1, { ttl }), /^RangeError: a ttl/);
  }
  await assert.rejects(fence.lease("order:7", { wait: { seconds: -1 } }), /^RangeError: wait/);
});

test("each driver's integers can be cast to what set_config takes", async () => {
  for (const token of [34, "34", 34n]) {
    await admin.query("SELECT set_config('pg_fence.token', $1::bigint::text, true)", [token]);
    await sql`SELECT set_config('pg_fence.token', ${token as number}::bigint::text, true)`;
  }
  assert.equal((await errorOf(() => sql`SELECT set_config('pg_fence.token', ${34n as any}, true)`)).code, "42883");
});

test("a lease that is taken is null", async () => {
  await using first = await lease("order:7", { holder: "it's \\ me", metadata: { run: 7 } });
  assert.equal(await fence.lease("order:7"), null);
  const shown = await value("SELECT holder || ' ' || metadata FROM lease_info('order:7')");
  assert.equal(shown, `it's \\ me {"run": 7}`);
  assert.ok(first.held && first.remainingMs > 200_000);
});

test("several are all there or none", async () => {
  await using _ = await lease("order:8");
  assert.equal(await fence.lease(["order:7", "order:8"]), null);
  await using both = await lease(["order:9", "order:7"]);
  await both.guard(on, (tx) => run(tx, "UPDATE orders SET status = 'paid'"));
  assert.ok((await both.renew())! > both.token);
  assert.equal(await status(), "paid");
});

test("several names are several arguments or one list, and nothing but names", async () => {
  const many = (...of: unknown[]) => (fence.lease as (...of: unknown[]) => Promise<Lease<any, any> | null>)(...of);
  for (const given of [["a", "b"], ["a", "b", LONG], [["a", "b"], LONG], [["a", "b"], undefined]]) {
    await using both = await many(...given);
    assert.deepEqual(both?.names, ["a", "b"]);
    assert.equal(await fence.lease("b"), null);
  }
  for (const given of [[7], ["a", 7], [["a", 7]], [null], [], [[]], [["a", undefined]]]) {
    await assert.rejects(many(...given), TypeError);
  }
});

test("a wrong object is refused, and what is taken is named", async () => {
  const wrong: any[] = DRIVER === "pg" ? [sql, admin, undefined, 7, fence] : [pool, undefined, 7, fence];
  const Fence: any = DRIVER === "pg" ? onPg.Fence : onPostgres.Fence;
  for (const source of wrong) {
    assert.throws(() => new Fence(source), /^TypeError: a Fence takes a connection string/);
  }
  await using held = await lease();
  for (const there of [DRIVER === "pg" ? sql : pool, undefined, "pool", fence] as any[]) {
    assert.throws(() => held.guard(there, async () => {}), /^TypeError: a transaction begins on/);
  }
  assert.throws(() => fence.guard([], on, async () => {}), TypeError);
});

/** Another fence of the same driver, with settings of PostgreSQL's own. */
function fenceWith(options: string, schema?: string): AnyFence<any, any> {
  const { host, port, database, user } = admin as Required<pg.Client>;
  const of = schema === undefined ? {} : { schema };
  return DRIVER === "pg"
    ? new onPg.Fence({ connectionString: URL, options, application_name: "keeper" }, of)
    : new onPostgres.Fence({
        host, port, database: database!, username: user!, connection: { options, application_name: "keeper" },
      }, of);
}

test("a database without the extension says so, and so does a search path without it", async () => {
  const schema = (await value("SELECT extnamespace::regnamespace::text FROM pg_extension WHERE extname = 'pg_fence'")) as string;
  const blind = fenceWith("-c search_path=pg_catalog");
  const calls = [
    () => blind.lease("order:7"), () => blind.lease("order:7", { wait: { seconds: 1 } }), () => blind.adopt("x", 7),
    () => blind.resume("order:7", 7), () => blind.claim("SELECT 'x'", [], 1), () => blind.observe("order:7").next(),
    () => blind.lead("order:7", async () => {}),
  ];
  for (const call of calls) {
    const error = await errorOf(call as () => Promise<unknown>);
    assert.ok(error instanceof NotInstalled, String(error));
    assert.match(String(error.hint), /schema/);
  }
  const seeing = fenceWith("-c search_path=pg_catalog", schema);
  await using held = await seeing.lease("order:7", LONG);
  assert.ok(held !== null && (await held.renew()));
});

test("an acquire that nobody answers is broken off", async () => {
  const silent = createServer(() => {}).listen(0, "127.0.0.1");
  await once(silent, "listening");
  const { port } = silent.address() as AddressInfo;
  const of = { host: "127.0.0.1", port, database: "x", user: "x", username: "x" };
  const deaf: any = DRIVER === "pg" ? new onPg.Fence(of) : new onPostgres.Fence(of);
  for (const more of [{}, { wait: { milliseconds: 50 } }, { session: true }] as LeaseOptions[]) {
    const error = await errorOf(() => deaf.lease("order:7", { ttl: { milliseconds: 300 }, ...more }));
    assert.ok(error instanceof AcquireTimeout, String(error));
  }
  silent.close();
});

test("a sleep ends with its signal", async () => {
  await using held = await lease();
  const stop = new AbortController();
  const slept = errorOf(() => held.wait({ minutes: 5 }, { signal: stop.signal }));
  stop.abort();
  assert.equal(await slept, stop.signal.reason);
  assert.equal(await errorOf(() => held.wait({ minutes: 5 }, { signal: stop.signal })), stop.signal.reason);
  await held.wait({ milliseconds: 1 }, { signal: new AbortController().signal });
});

/** A process of its own with that module as its program, and what it says. */
function program(body: string, ...flags: string[]): Promise<{ stdout: string; stderr: string }> {
  const source = `
    import { Fence } from ${JSON.stringify(new globalThis.URL(`../dist/${DRIVER}.js`, import.meta.url).href)};
    const fence = new Fence(${JSON.stringify(URL)});
    ${body}`;
  return promisify(execFile)(process.execPath, [...flags, "--input-type=module", "-e", source]);
}

test("a lease that was never released does not keep the process alive", async () => {
  for (const more of ["", ", session: true"]) {
    const { stdout, stderr } = await program(`
      const lease = await fence.lease("forgotten", { ttl: { minutes: 5 }${more} });
      console.log(lease.token);`);
    assert.match(stdout, /^\d+\n$/);
    assert.match(stderr, /ResourceWarning: the lease forgotten was never released/);
    await value("SELECT lease_revoke('forgotten')");
  }
});

test("a lease that nothing refers to is renewed no more, and its signal tells the end", async () => {
  const { stdout, stderr } = await program(`
    let signal;
    await (async () => ({ signal } = await fence.lease("forgotten", { ttl: { seconds: 2 } })))();
    const collects = setInterval(() => gc(), 50);
    await new Promise((resolve) => signal.addEventListener("abort", resolve));
    clearInterval(collects);
    console.log(signal.reason.reason);`, "--expose-gc");
  assert.equal(stdout, "deadline\n");
  assert.match(stderr, /ResourceWarning: the lease forgotten was forgotten/);
});

test("a process waits for the loss of a lease, and for its release", async () => {
  const { stdout, stderr } = await program(`
    const lease = await fence.lease("short", { ttl: { seconds: 3 }, holdAtMost: { milliseconds: 1 } });
    await new Promise((resolve) => lease.signal.addEventListener("abort", resolve));
    await (await fence.lease("next")).release();
    console.log(lease.loss.reason);`);
  assert.equal(stdout + stderr, "deadline\n");
});

test("a session lease is lost as soon as its socket says so", async () => {
  await using held = await lease("order:7", { session: true });
  held.isTold = true;
  const lost = once(held.signal, "abort");
  await value("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query ~ 'lease_acquire' AND pid <> pg_backend_pid()");
  await lost;
  assert.equal(held.loss?.reason, "session");
});

test("one connection keeps all, and is closed with the last", async () => {
  const mine = fenceWith("-c search_path=public");
  const sessions = () => value("SELECT count(*)::int FROM pg_stat_activity WHERE application_name = 'keeper'");
  const none = async () => {
    while ((await sessions()) !== 0) {}
  };
  const backend = "SELECT pid FROM pg_stat_activity WHERE application_name = 'keeper'";
  await using only = await mine.lease("only", LONG);
  const pid = await value(backend);
  await new Promise((resolve) => setTimeout(resolve, 100));
  await only?.renew();
  assert.ok(pid !== undefined && pid === (await value(backend)), "it stays open from the first on");
  await only?.release();
  await none();
  const names = Array.from({ length: 40 }, (_, n) => `many:${n}`);
  const held = await Promise.all(names.map((name) => mine.lease(name, { ttl: { seconds: 3 } })));
  await using several = await mine.lease(["several:1", "several:2"], { ttl: { seconds: 3 } });
  assert.equal(await sessions(), 1);
  await several?.wait({ seconds: 4 });
  assert.ok(held.every((one) => one?.held), "each was renewed");
  assert.equal(await sessions(), 1);
  await Promise.all([...held, several].map((one) => one?.release()));
  await none();
  assert.equal(await mine.lease("many:0").then((one) => one?.release()), undefined);
  await none();
});

test("a renewal that is refused, and one that has to wait, hold up no other", async () => {
  const mine = fenceWith("-c search_path=public");
  const names = Array.from({ length: 9 }, (_, n) => `many:${n}`);
  const ttl = { ttl: { seconds: 3 } };
  const held = (await Promise.all(names.map((name) => mine.lease(name, ttl)))).filter((one) => one !== null);
  const other = new pg.Client(URL);
  await other.connect();
  await other.query(`BEGIN; SELECT lease_renew('many:3', ${held[3]?.token})`);
  const lost = once(held[3]!.signal, "abort");
  await lost;
  assert.equal(held[3]?.loss?.reason, "deadline");
  assert.deepEqual(held.filter((one) => one.held).length, 8);
  // A release that waits for it, too: the others' go on.
  await other.query("COMMIT");
  await other.query(`BEGIN; SELECT lease_renew('many:4', ${held[4]?.token})`);
  const waits = held[4]!.release();
  await held[5]!.release();
  await other.query("COMMIT");
  await waits;
  assert.equal(await value("SELECT count(*)::int FROM lease_info('many:4') WHERE state = 'held'"), 0);
  await other.end();
  await Promise.all(held.map((one) => one.release()));
});

test("bad input is the server's error", async () => {
  const error = await errorOf(() => fence.lease(""));
  assert.equal(error.code, "22023");
  assert.equal(classify(error), undefined);
});

const PAY = "UPDATE orders SET status = 'paid' WHERE id = 10";
const SEND = "UPDATE orders SET status = 'sent' WHERE id = 10";

/** As a failover to a standby that has missed the adoption does. */
async function forget(): Promise<void> {
  await value("SELECT lease_revoke('order:10')");
  await value("SELECT lease_forget('order:10')");
}

async function adopt(token: number | bigint, options = {}): Promise<Adopted<any, any>> {
  const adopted = await fence.adopt("order:10", token, options);
  assert.ok(adopted);
  return adopted;
}

/** With an order whose lease somebody else grants. */
async function withAdopted(work: () => Promise<void>): Promise<void> {
  await admin.query(`
    SELECT fence_unprotect('orders');
    INSERT INTO orders VALUES (10, 'new');
    SELECT fence_protect('orders', lease => 'order:{id}');
  `);
  await work();
  assert.equal(await value("SELECT count(*)::int FROM lease_info('order:10') WHERE state = 'held'"), 0);
  await forget();
}

const order = () => value("SELECT status || ' ' || coalesce(fence, 0) FROM orders WHERE id = 10");

test("an adopted lease's number is judged", () => withAdopted(async () => {
  const number = 2n ** 60n;
  const first = await adopt(number, { holder: "it's A", metadata: { run: 7 } });
  const shown = await value("SELECT holder || ' ' || metadata || ' ' || adopted FROM lease_info('order:10')");
  assert.equal(shown, `it's A {"run": 7} true`);
  await first.guard(on, (tx) => run(tx, PAY));
  await first.present(on, (tx) => run(tx, PAY));
  assert.equal(await order(), `paid ${number}`);
  {
    await using second = await adopt(number + 1n);
    assert.ok((await errorOf(() => first.present(on, (tx) => run(tx, SEND)))) instanceof NotSpeaking);
    // Refused once, it looks before it begins.
    assert.ok((await errorOf(() => first.present(on, () => assert.fail("it is stale")))) instanceof StaleToken);
    const stale = await errorOf(() => first.guard(on, () => assert.fail("it is stale")));
    assert.ok(stale instanceof StaleToken && stale.hint !== undefined);
    assert.ok((await errorOf(() => adopt(number))) instanceof StaleToken);
    await second.guard(on, (tx) => run(tx, SEND));
  }
  const lost = await errorOf(async () => {
    await using _ = first;
  });
  assert.ok(lost instanceof LeaseLost && lost.reason === "gone");
  assert.equal(await order(), `sent ${number + 1n}`);
}));

const WAITS_TO_ADOPT =
  "SELECT count(*)::int FROM pg_stat_activity WHERE query LIKE 'SELECT lease_adopt%' AND state = 'active'";

test("an adoption is null while an older one is guarded", () => withAdopted(async () => {
  let waits: Promise<unknown> = Promise.resolve();
  await (await adopt(33)).guard(on, async (tx) => {
    await run(tx, PAY);
    assert.equal(await fence.adopt("order:10", 34), null);
    const stop = new AbortController();
    const givenUp = errorOf(() => adopt(35, { wait: { minutes: 5 }, signal: stop.signal }));
    while ((await value(WAITS_TO_ADOPT)) === 0) {}
    stop.abort();
    assert.equal(await givenUp, stop.signal.reason);
    assert.equal(await value(WAITS_TO_ADOPT), 0);
    waits = adopt(36, { wait: { minutes: 5 } }).then((adopted) => adopted.release());
    while ((await value(WAITS_TO_ADOPT)) === 0) {}
  });
  await waits;
  assert.equal(await order(), "paid 33");
}));

test("each transaction makes an adopted number known", () => withAdopted(async () => {
  for (const level of ["read committed", "repeatable read"] as const) {
    const options = `-c default_transaction_isolation=${level.replace(" ", "\\ ")}`;
    const client = new pg.Client({ connectionString: URL, options });
    const one = postgres(URL, { max: 1, onnotice() {}, connection: { default_transaction_isolation: level } });
    const there: any = DRIVER === "pg" ? client : one;
    await client.connect();
    try {
      const adopted = await adopt(33);
      for (const silence of [forget, () => value("SELECT fence_new_epoch()")]) {
        await silence();
        await adopted.guard(there, (tx) => run(tx, PAY));
        await silence();
        assert.ok((await errorOf(() => adopted.present(there, (tx) => run(tx, PAY)))) instanceof NotSpeaking);
        await adopted.present(there, (tx) => run(tx, PAY));
      }
      await adopted.release();
      await forget();
    } finally {
      await Promise.all([client.end(), one.end()]);
    }
  }
}));

test("an older number may come first after a failover", () => withAdopted(async () => {
  const newer = await adopt(34);
  await forget();
  const older = await adopt(33);
  await older.guard(on, async (tx) => {
    await run(tx, PAY);
    const taken = await errorOf(() => newer.guard(on, () => assert.fail("the older one is guarded")));
    assert.match(String(taken), /^FenceError: the lease order:10 is taken/);
  });
  await newer.guard(on, (tx) => run(tx, SEND));
  await newer.release();
  assert.equal(await order(), "sent 34");
}));

test("an adopted lease that was released is over", () => withAdopted(async () => {
  const adopted = await adopt(33);
  await adopted.guard(on, (tx) => run(tx, PAY), { release: true });
  const over = await errorOf(() => adopted.guard(on, () => assert.fail("it is released")));
  assert.ok(over instanceof LeaseLost && over.reason === "released");
  await adopted.release();
  assert.ok((await errorOf(() => adopt(33))) instanceof StaleToken);
  assert.equal(await order(), "paid 33");
}));

test("a name is granted here or adopted, and a number is exact", async () => {
  await using _ = await lease();
  assert.equal((await errorOf(() => fence.adopt("order:7", 33))).code, "55000");
  await assert.rejects(fence.adopt("order:10", 2 ** 60), RangeError);
  await assert.rejects(fence.adopt("order:10", 33, { wait: 5 as any }), TypeError);
});

const WAITING =
  "SELECT count(*)::int FROM pg_stat_activity WHERE query ~ 'lease_acquire\\(''order:7' AND state = 'active' AND pid <> pg_backend_pid()";

test("a caller that gives up waiting leaves nothing behind", async () => {
  await using _ = await lease();
  const signal = AbortSignal.timeout(300);
  const error = await errorOf(() => fence.lease("order:7", { wait: { minutes: 5 }, signal }));
  assert.equal(error, signal.reason);
  assert.equal(await value(WAITING), 0);
});

test("a grant that comes while its wait is given up is given back", async () => {
  for (let round = 0; round < 40; round++) {
    const first = await lease();
    const stop = new AbortController();
    const waits = fence.lease("order:7", { ...LONG, wait: { minutes: 5 }, signal: stop.signal }).then(
      (granted) => granted?.release(),
      (error) => assert.equal(error, stop.signal.reason),
    );
    while ((await value(WAITING)) === 0) {}
    const releases = first.release();
    // Before, during and after the hand-over.
    const until = performance.now() + round / 10;
    do {
      await new Promise(setImmediate);
    } while (performance.now() < until);
    stop.abort();
    await Promise.all([waits, releases]);
    assert.equal(await value("SELECT count(*)::int FROM lease_info('order:7') WHERE state = 'held'"), 0, `in round ${round}`);
  }
});

test("the longest ttl can be renewed", async () => {
  await using held = await lease("order:7", { ttl: { days: 366 } });
  assert.ok(await held.renew());
});

test("a loss aborts the signal, and is told at the end of a block that was not told", async () => {
  const error = await errorOf(async () => {
    await using held = await lease("order:7", { ttl: { seconds: 2 } });
    await value("SELECT lease_revoke('order:7')");
    await new Promise((resolve) => held.signal.addEventListener("abort", resolve));
    assert.ok(held.signal.reason instanceof LeaseLost);
  });
  assert.ok(error instanceof LeaseLost);
  assert.equal(error.reason, "gone");
});

test("a loss that was told is told once, and another error stays to be found", async () => {
  const told = await errorOf(async () => {
    await using held = await lease("order:7", { ttl: { seconds: 2 } });
    await value("SELECT lease_revoke('order:7')");
    await held.wait({ minutes: 5 });
  });
  assert.ok(told instanceof LeaseLost);
  const both = await errorOf(async () => {
    await using held = await lease();
    await value("SELECT lease_revoke('order:7')");
    await held.renew().catch(() => (held.isTold = false));
    throw new Error("of the work");
  });
  assert.equal(both.suppressed.message, "of the work");
  assert.ok(classify(both) instanceof LeaseLost);
});

test("a transaction commits, returns what its work returns, and rolls back what fails", async () => {
  await using held = await lease();
  assert.equal(await held.guard(on, async (tx) => (await run(tx, "UPDATE orders SET status = 'guarded'"), 42)), 42);
  assert.equal(await status(), "guarded");
  await held.present(on, (tx) => run(tx, "UPDATE orders SET status = 'presented'"));
  const mine = new Error("of the work");
  const work = async (tx: unknown) => {
    await run(tx, "UPDATE orders SET status = 'undone'");
    throw mine;
  };
  assert.equal(await errorOf(() => held.guard(on, work)), mine);
  assert.equal(await status(), "presented");
});

test("a failure that the work swallows does not look like a commit", async () => {
  await using held = await lease();
  const error = await errorOf(() =>
    held.guard(on, async (tx) => {
      await run(tx, "UPDATE orders SET status = 'undone'");
      await run(tx, "SELECT 1/0").catch(() => {});
    }),
  );
  assert.ok(error instanceof TransactionLost && !error.inDoubt, String(error));
  assert.equal(await status(), "new");
});

test("what the work has rolled back itself, or an ORM would, does not look like a commit either", async () => {
  await using held = await lease();
  const client = await pool.connect();
  const query = (statement: string) => client.query(statement);
  try {
    for (const by of ["guard", "present"] as const) {
      const ended = await errorOf(() => held[by](on, async (tx) => void (await run(tx, "ROLLBACK"))));
      assert.ok(ended instanceof TransactionLost, String(ended));
      for (const fails of ["SELECT 1/0", "ROLLBACK"]) {
        await query("BEGIN");
        const error = await errorOf(() => held[by](query, async () => void (await query(fails).catch(() => {}))));
        assert.ok(error instanceof TransactionLost, String(error));
        await query("ROLLBACK");
      }
      if (DRIVER === "pg") {
        await query("BEGIN");
        const inner = await errorOf(() => held[by](client as any, async () => void (await query("SELECT 1/0").catch(() => {}))));
        assert.ok(inner instanceof TransactionLost, String(inner));
        await query("ROLLBACK");
      }
    }
  } finally {
    client.release();
  }
});

test("errors have their types, the driver's as their cause, and their detail", async () => {
  await using held = await lease("other");
  const error = await errorOf(() => held.guard(on, (tx) => run(tx, "UPDATE orders SET status = 'late'")));
  assert.ok(error instanceof NotSpeaking && error instanceof FenceError);
  assert.equal(error.name, "NotSpeaking");
  assert.equal(error.sqlstate, "PF004");
  assert.equal(error.detail["lease"], "order:7");
  assert.ok(error.hint);
  assert.equal((error.cause as any).code, "PF004");
  const division = await errorOf(() => held.guard(on, (tx) => run(tx, "SELECT 1/0")));
  assert.equal(division.code, "22012");
});

test("a connection that breaks elsewhere is the work's own business", async () => {
  await using held = await lease();
  const reset = Object.assign(new Error("read ECONNRESET"), { code: "ECONNRESET", syscall: "read" });
  assert.equal(await errorOf(() => held.guard(on, () => Promise.reject(reset))), reset);
  const fetched = new TypeError("fetch failed", { cause: reset });
  assert.equal(classify(fetched), undefined);
  assert.ok(classify(reset) instanceof TransactionLost);
});

test("the last write releases", async () => {
  const held = await lease();
  await held.guard(on, (tx) => run(tx, "UPDATE orders SET status = 'paid'"), { release: true });
  assert.throws(() => held.check(), (error: any) => error.reason === "released");
  assert.equal(await value("SELECT count(*)::int FROM lease_info('order:7') WHERE state = 'held'"), 0);
  assert.equal(await status(), "paid");
});

test("an open transaction is left to the code that began it", async () => {
  await using held = await lease();
  if (DRIVER === "pg") {
    const client = await pool.connect();
    await client.query("BEGIN");
    await held.guard(client as any, (tx) => tx.query("UPDATE orders SET status = 'paid'"));
    assert.equal(await status(), "new");
    await client.query("COMMIT");
    client.release();
  } else {
    await sql.begin(async (tx) => {
      await held.guard(tx as any, (inner) => inner`UPDATE orders SET status = 'paid'`);
      assert.equal(await status(), "new");
    });
  }
  assert.equal(await status(), "paid");
});

test("a session that ends under a transaction leaves the pool as it was", async () => {
  await using held = await lease();
  const error = await errorOf(() =>
    held.guard(on, async (tx) => {
      await run(tx, "UPDATE orders SET status = 'undone'");
      const pids = await run(tx, "SELECT pg_backend_pid() AS pid");
      await value(`SELECT pg_terminate_backend(${(pids.rows ?? pids)[0].pid}, 10000)`);
      await new Promise((resolve) => setTimeout(resolve, 200));
      await run(tx, "UPDATE orders SET status = 'undone'");
    }),
  );
  assert.ok(error instanceof TransactionLost);
  for (let round = 0; round < 4; round++) {
    await held.guard(on, (tx) => run(tx, `UPDATE orders SET status = 'paid ${round}'`));
  }
  assert.equal(await status(), "paid 3");
});

test("leading ends when it is told to, and when the work has ended", async () => {
  assert.equal(await fence.lead("chief", async () => 7, LONG), 7);
  const stop = new AbortController();
  const led = fence.lead("chief", (_, signal) => new Promise((__, reject) => {
    signal.addEventListener("abort", () => reject(signal.reason));
    stop.abort();
  }), { ...LONG, signal: stop.signal });
  assert.equal(await led, undefined);
  await assert.rejects(fence.lead("chief", () => Promise.reject(new Error("mine")), LONG), /mine/);
  assert.equal(await value("SELECT count(*)::int FROM lease_info('chief') WHERE state = 'held'"), 0);
});

test("leading that is stopped ends while it waits, and ends the lease of a work that hears nothing", async () => {
  const stop = new AbortController();
  const leaders: (string | null)[] = [];
  const onLeader = ({ holder }: Leader) => leaders.push(holder);
  let waiting: Promise<unknown> = Promise.resolve();
  const led = await fence.lead("chief", async (held) => {
    waiting = fence.lead("chief", () => assert.fail("it is taken"), { ...LONG, signal: stop.signal, onLeader });
    while (leaders.length === 0 || (await value(WAITING.replace("order:7", "chief"))) === 0) {
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
    stop.abort();
    assert.equal(await waiting, undefined);
    return held.token;
  }, LONG);
  assert.ok(led && led > 0);
  const end = new AbortController();
  const deaf = fence.lead("chief", async (held) => {
    setImmediate(() => end.abort());
    for (;;) {
      await held.wait({ minutes: 5 });
    }
  }, { ...LONG, signal: end.signal });
  assert.equal(await deaf, undefined);
  assert.equal(await value("SELECT count(*)::int FROM lease_info('chief') WHERE state = 'held'"), 0);
  await assert.rejects(fence.lead("chief", (held) => held.wait({ minutes: 5 }), { ...LONG, onLeader: () => { throw new Error("mine"); } }), /mine/);
});

test("another process goes on with a lease", async () => {
  const held = await lease();
  const renewed = (await held.renew())!;
  const token = await held.detach();
  assert.equal(token, held.token);
  assert.throws(() => held.check(), LeaseLost);
  await held.release();
  assert.equal(await fence.lease("order:7"), null);
  // Of the grant's tokens it is the first that serves for long.
  const next = await fence.resume("order:7", renewed, LONG);
  assert.equal(next.token, token);
  await next.guard(on, (tx) => run(tx, "UPDATE orders SET status = 'resumed'"));
  await next.release();
  const over = await errorOf(() => fence.resume("order:7", token, LONG));
  assert.ok(over instanceof LeaseLost && over.reason === "gone");
  const both = await lease(["order:7", "order:8"]);
  await using again = await fence.resume(["order:7", "order:8"], await both.detach(), LONG);
  assert.ok(await again.renew());
  await assert.rejects(fence.resume("order:7", "7" as any), TypeError);
  await using bound = await lease("bound", { session: true });
  await assert.rejects(bound.detach(), TypeError);
});

test("the first that are free are claimed, with their rows and in their order", async () => {
  const query = "SELECT n || '' AS job, n, $1::text AS what FROM generate_series(1, 9) AS n ORDER BY n DESC -- free;";
  await using _ = await lease("8");
  const claimed = await fence.claim(query, ["x"], 3, { ...LONG, holder: "me" });
  const others = await fence.claim(`${query}\n;`, ["y"], 100, LONG);
  try {
    assert.deepEqual(claimed.map(({ names, row }) => [names[0], row]), [
      ["9", { job: "9", n: 9, what: "x" }], ["7", { job: "7", n: 7, what: "x" }], ["6", { job: "6", n: 6, what: "x" }],
    ]);
    assert.deepEqual(others.map(({ row }) => row?.["n"]), [5, 4, 3, 2, 1]);
    assert.equal(await value("SELECT count(*)::int FROM generate_series(1, 9) n, lease_info(n::text) WHERE state = 'held'"), 9);
    assert.equal((await fence.claim(query, ["z"], 1, LONG)).length, 0);
    // A condition of the query holds before a lease is taken, wherever the planner puts it.
    const joined = "SELECT 'j' || a FROM generate_series(1, 50) a JOIN generate_series(50, 60) b ON a = b";
    others.push(...(await fence.claim(joined, [], 50, LONG)));
    assert.equal(await value("SELECT count(*)::int FROM generate_series(1, 50) n, lease_info('j' || n) WHERE state = 'held'"), 1);
    await assert.rejects(fence.claim(query, ["x"], 0), RangeError);
  } finally {
    await Promise.all([...claimed, ...others].map((one) => one.release()));
  }
});

test("who holds a lease is told at each change", async () => {
  const stop = new AbortController();
  const seen: Leader[] = [];
  const next = new EventEmitter();
  const observing = (async () => {
    for await (const leader of fence.observe("chief", { every: { milliseconds: 20 }, signal: stop.signal })) {
      seen.push(leader);
      next.emit("one");
    }
  })();
  await once(next, "one");
  const told = once(next, "one");
  const held = await lease("chief", { holder: "A" });
  await told;
  await held.renew();
  const free = once(next, "one");
  await held.release();
  await free;
  stop.abort();
  await observing;
  assert.deepEqual(seen.map(({ holder, token }) => [holder, token]), [[null, null], ["A", held.token], [null, null]]);
  assert.ok(Math.abs(Number(seen[1]?.since) - Date.now()) < 3_600_000);
});

test("a lease is held at most and at least for so long", async () => {
  const most = await lease("order:7", { ttl: { seconds: 3 }, holdAtMost: { seconds: 1 } });
  const lost = await errorOf(() => most.wait({ minutes: 5 }));
  assert.ok(lost instanceof LeaseLost && lost.reason === "deadline");
  for (const release of [
    (held: Lease<any, any>) => held.release(),
    (held: Lease<any, any>) => held.guard(on, async (tx) => void (await run(tx, "SELECT 1")), { release: true }),
  ]) {
    const least = await lease("order:7", { ...LONG, holdAtLeast: { minutes: 10 } });
    await release(least);
    assert.ok(!least.held);
    assert.equal(await value("SELECT remaining > '8 minutes' FROM lease_info('order:7')"), true);
    await value("SELECT lease_revoke('order:7')");
  }
  await assert.rejects(fence.lease("x", { session: true, holdAtLeast: { seconds: 1 } }), TypeError);
});

test("one transaction is guarded by several leases, and all of it lands or nothing", async () => {
  await using one = await lease("order:7");
  await using two = await lease(["a", "b"]);
  await using three = await lease("b2");
  await fence.guard([three, two, one], on, (tx) => run(tx, "UPDATE orders SET status = 'all'"));
  assert.equal(await status(), "all");
  await fence.guard([three], on, async () => {}, { release: true });
  await value("SELECT lease_revoke('a')");
  const error = await errorOf(() => fence.guard([one, two], on, (tx) => run(tx, "UPDATE orders SET status = 'late'")));
  assert.ok(error instanceof LeaseLost || error instanceof NotSpeaking, String(error));
  assert.ok(one.held && !two.held);
  assert.equal(await status(), "all");
  two.isTold = true;
});

test("code that knows nothing of leases is fenced by its connection", async () => {
  await using held = await lease();
  if (DRIVER === "pg") {
    const client = new pg.Client({ connectionString: URL, options: held.options });
    await client.connect();
    await client.query("UPDATE orders SET status = 'options'");
    await client.end();
  } else {
    const { host, port, database, user } = admin as Required<pg.Client>;
    const one = postgres({ host, port, database: database!, username: user!, connection: { options: held.options } });
    await one`UPDATE orders SET status = 'options'`;
    await one.end();
  }
  assert.equal(await status(), "options");
  const theirs = new pg.Pool({ connectionString: URL, max: 1 });
  const update = (how: string) => `UPDATE orders SET status = '${how}'`;
  assert.ok(classify(await errorOf(() => theirs.query(update("late")))) instanceof NoToken);
  const detach = onPg.attach(theirs, held);
  await theirs.query(update("a pool"));
  await new Promise((resolve, reject) => theirs.query(update("a callback"), (error) => (error ? reject(error) : resolve(0))));
  await held.release();
  await using other = await lease();
  assert.ok(classify(await errorOf(() => theirs.query(update("late")))) instanceof NotSpeaking);
  onPg.attach(theirs, other.token);
  detach();
  const client = await theirs.connect();
  await client.query(update("others"));
  client.release();
  onPg.attach(theirs, other)();
  assert.ok(classify(await errorOf(() => theirs.query(update("late")))) instanceof NoToken);
  await theirs.end();
  assert.equal(await status(), "others");
  assert.throws(() => onPg.attach(sql as any, other), TypeError);
});

test("hooks are told of acquires, transactions, refusals and losses", async () => {
  const told: string[] = [];
  const hooks = {
    span: async <T,>(name: string, attributes: object, work: () => Promise<T>) => {
      told.push(`${name} ${Object.values(attributes)}`);
      return work();
    },
    refused: (error: FenceError) => told.push(String(error.sqlstate)),
    lost(loss: LeaseLost) {
      told.push(loss.reason);
      throw new Error("a hook is no reason to stop");
    },
  };
  const watched = fenceOn({ hooks });
  const held = (await watched.lease("other", LONG))!;
  await errorOf(() => held.present(on, (tx) => run(tx, "UPDATE orders SET status = 'late'")));
  await value("SELECT lease_revoke('other')");
  await errorOf(() => held.renew());
  assert.deepEqual(told, ["pg_fence.acquire other", "pg_fence.present other", "PF004", "gone"]);
});

test("OpenTelemetry has spans and counters", async () => {
  const exporter = new InMemorySpanExporter();
  const tracerProvider = new BasicTracerProvider({ spanProcessors: [new SimpleSpanProcessor(exporter)] });
  const reader = new PeriodicExportingMetricReader({ exporter: new InMemoryMetricExporter(0) });
  const meterProvider = new MeterProvider({ readers: [reader] });
  const hooks = openTelemetry({ tracerProvider, meterProvider });
  const watched = fenceOn({ hooks });
  const held = (await watched.lease("other", LONG))!;
  await errorOf(() => held.guard(on, (tx) => run(tx, "UPDATE orders SET status = 'late'")));
  await value("SELECT lease_revoke('other')");
  await errorOf(() => held.renew());
  const spans = exporter.getFinishedSpans();
  assert.deepEqual(spans.map(({ name, attributes, status }) => [name, attributes["pg_fence.lease"], status.code]), [
    ["pg_fence.acquire", "other", 0], ["pg_fence.guard", "other", 2],
  ]);
  const { resourceMetrics } = await reader.collect();
  const counters = resourceMetrics.scopeMetrics.flatMap(({ metrics }) => metrics);
  assert.deepEqual(counters.map(({ descriptor, dataPoints: [point] }) => [descriptor.name, point?.value, point?.attributes]), [
    ["pg_fence.leases.lost", 1, { reason: "gone" }], ["pg_fence.writes.refused", 1, { sqlstate: "PF004" }],
  ]);
  await reader.shutdown();
});

test("CommonJS has the same classes", () => {
  const require = createRequire(import.meta.url);
  assert.equal(require("pg_fence/pg").Fence, onPg.Fence);
  assert.equal(require("pg_fence").LeaseLost, LeaseLost);
  assert.equal(require("pg_fence/postgres").Fence, onPostgres.Fence);
});

test("fences are off for one transaction, and on again as they were", async () => {
  const state = `SELECT string_agg(tgname || tgenabled::text, ' ' ORDER BY tgname) FROM pg_trigger WHERE tgrelid = 'orders'::regclass`;
  await value("SELECT fence_protect('orders', always => true)");
  const before = await value(state);
  const client = await pool.connect();
  const query = (statement: string) => client.query(statement);
  try {
    await query("BEGIN");
    await unfenced(query, () => query("TRUNCATE orders; INSERT INTO orders VALUES (7, 'fixture')"));
    assert.ok(classify(await errorOf(() => query("DELETE FROM orders"))) instanceof NoToken);
    await query("ROLLBACK");
    await query("BEGIN");
    await unfenced(query, () => query("UPDATE orders SET status = 'fixture'"));
    await assert.rejects(unfenced(query, () => query("UPDATE orders SET status = 1/0")), /division by zero/);
    await query("COMMIT");
    assert.equal(await status(), "fixture");
    assert.equal(await value(state), before);
    assert.equal((await errorOf(() => unfenced(query, async () => {}))).code, "25P01", "it takes a transaction");
  } finally {
    client.release();
  }
});

// The ORMs: a model saved as ever, that knows nothing of the fence, and has a version of its own beside it.

interface Orm {
  read(): Promise<any>;
  /**
   * What was read, with another status: in a transaction, under the lease if there is one. Rejects where somebody else
   * has saved since it was read.
   */
  save(read: any, status: string, under?: Lease<any, any>): Promise<unknown>;
  /** A transaction, in which a function runs SQL. */
  transaction(work: (query: Query) => Promise<unknown>): Promise<unknown>;
  close(): Promise<unknown>;
}

type Query = (statement: string) => Promise<unknown>;

const saved = (under: Lease<any, any> | undefined, query: Query, save: () => Promise<unknown>) =>
  under === undefined ? save() : under.guard(query as any, save);

async function typeorm(): Promise<Orm> {
  const Order = new EntitySchema<{ id: string; status: string; version: number }>({
    name: "Order",
    tableName: "orders",
    columns: { id: { type: "bigint", primary: true }, status: { type: "text" }, version: { type: "int", version: true } },
  });
  const source = await new DataSource({ type: "postgres", url: URL, entities: [Order] }).initialize();
  return {
    read: () => source.manager.findOneByOrFail(Order, { id: "7" }),
    save: (order, status, under) =>
      source.transaction((manager) =>
        saved(under, (statement) => manager.query(statement), async () => {
          // Its save does not look at the version.
          await manager.findOne(Order, { where: { id: "7" }, lock: { mode: "optimistic", version: order.version } });
          await manager.save(Order, Object.assign(order, { status }));
        }),
      ),
    transaction: (work) => source.transaction((manager) => work((statement) => manager.query(statement))),
    close: () => source.destroy(),
  };
}

async function sequelize(): Promise<Orm> {
  // It does not read a user that stands behind the question mark.
  const { host, port, database, user: username } = new pg.Client(URL) as Required<pg.Client>;
  const db = new Sequelize({ dialect: "postgres", host, port, database: database!, username: username!, logging: false });
  const columns = { id: { type: DataTypes.BIGINT, primaryKey: true }, status: DataTypes.TEXT };
  const Order = db.define("orders", columns, { timestamps: false, version: true });
  return {
    read: () => Order.findByPk(7),
    save: (order, status, under) =>
      db.transaction((transaction) =>
        saved(under, (statement) => db.query(statement, { transaction }), () => order.update({ status }, { transaction })),
      ),
    transaction: (work) => db.transaction((transaction) => work((statement) => db.query(statement, { transaction }))),
    close: () => db.close(),
  };
}

async function kysely(): Promise<Orm> {
  interface Tables {
    orders: { id: string; status: string; version: number };
  }
  const db = new Kysely<Tables>({ dialect: new PostgresDialect({ pool: new pg.Pool({ connectionString: URL }) }) });
  return {
    read: () => db.selectFrom("orders").selectAll().executeTakeFirstOrThrow(),
    save: ({ version }, status, under) =>
      db.transaction().execute((trx) =>
        saved(under, (statement) => kyselySql.raw(statement).execute(trx), () =>
          trx
            .updateTable("orders")
            .set((row) => ({ status, version: row("version", "+", 1) }))
            .where("id", "=", "7")
            .where("version", "=", version)
            .returning("id")
            .executeTakeFirstOrThrow(),
        ),
      ),
    transaction: (work) =>
      db.transaction().execute((trx) => work((statement) => kyselySql.raw(statement).execute(trx))),
    close: () => db.destroy(),
  };
}

async function drizzle(): Promise<Orm> {
  const orders = pgTable("orders", {
    id: bigint("id", { mode: "number" }).primaryKey(),
    status: text("status"),
    version: integer("version").notNull(),
  });
  const db: any = DRIVER === "pg" ? drizzleOnPg(pool) : drizzleOnPostgres(sql);
  return {
    read: async () => (await db.select().from(orders))[0],
    save: ({ version }, status, under) =>
      db.transaction((tx: any) =>
        saved(under, (statement) => tx.execute(drizzleSql.raw(statement)), async () => {
          const found = drizzleSql`${orders.id} = 7 AND ${eq(orders.version, version)}`;
          const rows = await tx.update(orders).set({ status, version: version + 1 }).where(found).returning();
          assert.equal(rows.length, 1, "another version");
        }),
      ),
    transaction: (work) => db.transaction((tx: any) => work((statement) => tx.execute(drizzleSql.raw(statement)))),
    close: async () => {},
  };
}

async function prisma(): Promise<Orm> {
  // Its client is generated, so that no types are here.
  const { PrismaClient } = createRequire(import.meta.url)("./prisma/index.js");
  const { database, host, port, user } = admin as Required<pg.Client>;
  const db = new PrismaClient({ adapter: new PrismaPg({ host, port, user, database: database! }) });
  return {
    read: () => db.orders.findUniqueOrThrow({ where: { id: 7 } }),
    save: ({ version }, status, under) =>
      db.$transaction((tx: any) =>
        saved(under, (statement) => tx.$queryRawUnsafe(statement), async () => {
          const { count } = await tx.orders.updateMany({ where: { id: 7, version }, data: { status, version: version + 1 } });
          assert.equal(count, 1, "another version");
        }),
      ),
    transaction: (work) =>
      db.$transaction((tx: any) => work((text) => (/^SELECT|^\s+SELECT/.test(text) ? tx.$queryRawUnsafe(text) : tx.$executeRawUnsafe(text)))),
    close: () => db.$disconnect(),
  };
}

for (const open of [typeorm, sequelize, kysely, drizzle, prisma]) {
  test(`${open.name}: a model is saved as ever under a lease, and only there`, async () => {
    const orm = await open();
    const held = await lease();
    const save = async (status: string, under?: Lease<any, any>) => orm.save(await orm.read(), status, under);
    try {
      await save("paid", held);
      await save("paid again", held);
      assert.equal(await value("SELECT status || ' ' || version || ' ' || (fence > 0) FROM orders"), "paid again 3 true");
      assert.ok(classify(await errorOf(() => save("without a lease"))) instanceof NoToken);
      // Somebody else has saved: the version tells, for the lease is ours.
      const older = await orm.read();
      await save("in between", held);
      assert.equal(classify(await errorOf(() => orm.save(older, "older", held))), undefined);
      assert.equal(await status(), "in between");
      // The version is the right one, and the lease another's: the fence tells.
      await value("SELECT lease_revoke('order:7')");
      await using other = await lease();
      const late = await errorOf(() => save("late", held));
      assert.ok(late instanceof NotSpeaking || late instanceof LeaseLost, String(late));
      await save("the other's", other);
      assert.equal(await status(), "the other's");
      // A test suite empties the table.
      await orm.transaction((query) => unfenced(query, () => query("TRUNCATE orders"), ["orders"]));
      assert.equal(await value("SELECT count(*) FROM orders"), "0");
    } finally {
      await held.release();
      await orm.close();
    }
  });
}
