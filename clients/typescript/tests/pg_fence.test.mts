/**
 * What the vectors and the scenarios of all clients do not show: the shape of the API, the drivers
 * and the ORMs, and what is JavaScript's own.
 *
 *     DATABASE_URL=postgresql://… node tests/pg_fence.test.mjs pg    (or postgres)
 *
 * The database has the extension and is otherwise of no use: tables are made and dropped in it.
 */
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { createRequire } from "node:module";
import { after, before, beforeEach, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { promisify } from "node:util";
import { PrismaPg } from "@prisma/adapter-pg";
import { sql as drizzleSql } from "drizzle-orm";
import { drizzle as drizzleOnPg } from "drizzle-orm/node-postgres";
import { bigint, pgTable, text } from "drizzle-orm/pg-core";
import { drizzle as drizzleOnPostgres } from "drizzle-orm/postgres-js";
import { Kysely, PostgresDialect, sql as kyselySql } from "kysely";
import pg from "pg";
import postgres from "postgres";
import { DataTypes, Sequelize } from "sequelize";
import { DataSource, EntitySchema } from "typeorm";

import * as pgFence from "../dist/index.js";
import { LeaseLost, LeaseTaken, NotGranted, NotInstalled, TransactionLost } from "../dist/index.js";
import * as onPg from "../dist/pg.js";
import * as onPostgres from "../dist/postgres.js";

const URL = process.env.DATABASE_URL ?? "";
const ON_PG = (process.argv[2] ?? "pg") === "pg";
const LONG = { ttl: { minutes: 5 } };
const PAY = "UPDATE orders SET status = 'paid' WHERE id = 7";
const UNDONE = "UPDATE orders SET status = 'undone' WHERE id = 7";

const admin = new pg.Client(URL);
const pool = new pg.Pool({ connectionString: URL, max: 3 });
// A row may become anything.
const transform = { row: { from: (row: object) => ({ made: Object.keys(row) }) } };
const sql = postgres(URL, { max: 3, onnotice() {}, transform });
const { host, port, database, user } = admin as Required<pg.Client>;
/** As this driver's settings name them. */
const as = (user: string): any => ({ host, port, database, [ON_PG ? "user" : "username"]: user });

type Source = new (source: any, options?: pgFence.FenceOptions) => onPg.Fence;
const Fence: Source = ON_PG ? onPg.Fence : (onPostgres.Fence as any);
/** The source of transactions, and how the work runs a statement. */
const on: any = ON_PG ? pool : sql;
const run = (tx: any, statement: string) => (ON_PG ? tx.query(statement) : tx.unsafe(statement));
const fence = new Fence(on);
if (ON_PG) await import("./lease_state.test.mjs");

before(() => admin.connect());
after(() => Promise.all([fence.close(), admin.end(), pool.end(), sql.end({ timeout: 5 })]));

beforeEach(async () => {
  // The leftovers of a test that failed.
  await admin.query(`SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity
    WHERE state ~ '^idle in' AND pid <> pg_backend_pid()`);
  await admin.query(`
    DROP TABLE IF EXISTS orders, runs;
    CREATE TABLE orders (id bigint PRIMARY KEY, status text);
    INSERT INTO orders VALUES (7, 'new');
    SELECT fence_protect('orders', lease => 'order:{id}');
    CREATE TABLE runs (id bigint, part text, state text DEFAULT 'ready', PRIMARY KEY (part, id));
    INSERT INTO runs VALUES (1, 'a');
    SELECT fence_protect('runs', deadline => 'held_until')`);
  // What an acquire that was given up is granted, is given back a moment later.
  await comesTrue("SELECT count(*) = 0 FROM fence.leases WHERE state = 'held'");
});

async function value(statement: string): Promise<any> {
  return Object.values((await admin.query(statement)).rows[0] ?? {})[0];
}

const status = () => value("SELECT status FROM orders");
const isHeld = (name: string) =>
  value(`SELECT EXISTS (SELECT FROM lease_info('${name}') WHERE state = 'held')`);
const revoke = (name = "order:7") => value(`SELECT lease_revoke('${name}')`).then(() => {});

async function comesTrue(condition: string): Promise<void> {
  for (let round = 0; !(await value(condition)); round++) {
    assert.ok(round < 1200, `it does not come true: ${condition}`);
    await sleep(50);
  }
}

/** The error that it is rejected with. */
const errorOf = (work: () => PromiseLike<unknown>): Promise<any> =>
  Promise.resolve()
    .then(work)
    .then(
      () => assert.fail("nothing is thrown"),
      (error) => error,
    );

const withOrder = (work: (lease: onPg.Lease) => Promise<void>) => () =>
  fence.lease("order:7", LONG, work);

test("what is shown are the verbs, and nothing internal", () => {
  const shown = (of: { prototype: object }) => Object.getOwnPropertyNames(of.prototype).sort();
  const inherited = Object.getPrototypeOf(Fence);
  assert.equal(shown(inherited).join(), "adopted,close,constructor,guard,keepRow,lead,lease");
  assert.deepEqual(Object.keys(fence.adopted("job", 3)), ["name", "token", "guard"]);
  const require = createRequire(import.meta.url);
  assert.equal(require("pg_fence/pg").Fence, onPg.Fence);
  assert.equal(require("pg_fence/postgres").LeaseLost, require("pg_fence").LeaseLost);
});

test("the types are strict, and what is wrong is named before anything is sent", async () => {
  const wrong: [RegExp, () => unknown][] = [
    // @ts-expect-error a bare number is no span
    [/^TypeError: ttl/, () => fence.lease("job", { ttl: 30 })],
    // @ts-expect-error there is no such unit
    [/^TypeError: ttl/, () => fence.lease("job", { ttl: { second: 30 } })],
    // @ts-expect-error a flag is a boolean
    [/^TypeError: shared/, () => fence.lease("job", { shared: "yes" })],
    // @ts-expect-error a token is no text
    [/^TypeError: a token/, async () => fence.adopted("job", "3")],
    [/^TypeError: a token/, async () => fence.adopted("job", 2 ** 60)],
    [/^RangeError: ttl/, () => fence.lease("job", { ttl: { milliseconds: 50 } })],
    [/^RangeError: wait/, () => fence.lease("job", { wait: { seconds: -1 } })],
    [/^TypeError: reclaim/, () => fence.lease("job", { reclaim: true })],
    [/^TypeError: several/, () => fence.lease(["a", "b"], { shared: true })],
    [/^TypeError: metadata/, () => fence.lease("job", { metadata: () => {} })],
    [/^Refused: /, () => fence.lease([])],
    [/^TypeError: a guard takes a lease/, () => fence.guard(on, [], async () => {})],
    [/^TypeError: a guard takes/, () => fence.adopted("a", 1).guard(fence as any, async () => {})],
    [/^TypeError: the key/, () => fence.keepRow("runs", 1, 1)],
    [/^TypeError: the rows of orders/, () => fence.keepRow("orders", 1, 1)],
  ];
  for (const [error, call] of wrong) await assert.rejects(call as any, error);
  const sqlOfBun = Object.assign(async () => [], { unsafe() {}, options: {} });
  for (const source of [7, null, admin, fence, new Date(), sqlOfBun]) {
    assert.throws(() => new Fence(source), /^TypeError: a fence takes a connection string/);
  }
});

test("what a fence is made from", async () => {
  const mine = () => (ON_PG ? new pg.Client(URL).connect() : postgres(URL, { max: 1, transform }));
  for (const source of [URL, new globalThis.URL(URL), as(`${user}`), on, mine]) {
    await using made = new Fence(source, { schema: "public" });
    await made.lease("job", { session: true }, async (lease) => assert.ok(lease.held));
  }
  const odd = { holder: `it's \\ "me", {NULL}`, metadata: { run: "7'" } };
  await fence.lease('a "quoted", {name}\\', odd, async ({ names }) => {
    const told = await value(
      "SELECT holder || (metadata->>'run') || name FROM fence.leases WHERE holder LIKE 'it%'",
    );
    assert.equal(told, `${odd.holder}7'${names[0]}`);
  });
});

test("by whom it is taken, and for what an acquire waits", async () => {
  const both = await fence.lease(["a", "b"], { holder: "night shift" });
  const taken = await errorOf(() => fence.lease("b"));
  assert.ok(taken instanceof LeaseTaken && taken.waitsFor === "ttl", String(taken));
  assert.match(taken.message, /is taken by night shift, for \d+ s/);
  await both.release();
  assert.equal((await errorOf(async () => both.check())).reason, "released");
  await admin.query("BEGIN; SELECT lease_acquire('c')");
  assert.equal((await errorOf(() => fence.lease("c"))).waitsFor, "commit");
  await admin.query("ROLLBACK");
});

test("not installed, not granted, and another role's", async () => {
  await assert.rejects(new Fence(on, { schema: "elsewhere" }).lease("job"), NotInstalled);
  await admin.query(`CREATE ROLE team; CREATE ROLE monday LOGIN IN ROLE team;
    CREATE ROLE tuesday LOGIN IN ROLE team; CREATE ROLE nobody_else LOGIN; SELECT fence_grant('team')`);
  try {
    const nobody = await errorOf(() => new Fence(as("nobody_else")).lease("job"));
    assert.ok(nobody instanceof NotGranted && /fence_grant\('nobody_else'\)/.test(nobody.message));
    await using mine = new Fence(as("monday"));
    await using lease = await mine.lease("job");
    const work: any = ON_PG ? new pg.Pool(as("tuesday")) : postgres(as("tuesday"));
    const told = await errorOf(() => lease.guard(work, async () => {}));
    await work.end();
    assert.match(told.message, /role tuesday .*another role; .*act as one role/);
  } finally {
    const roles = "DROP ROLE team, monday, tuesday, nobody_else";
    await admin.query(`SELECT fence_revoke('team'); ${roles}`);
  }
});

test("what the work fails with is its own, and refusals have the driver's error", async () => {
  const mine = new Error("mine");
  await fence.lease("other", LONG, async (lease) => {
    assert.equal(await errorOf(() => lease.guard(on, () => assert.fail(mine))), mine);
    assert.equal(
      (await errorOf(() => lease.guard(on, (tx) => run(tx, "SELECT 1/0")))).code,
      "22012",
    );
    const refused = await errorOf(() => lease.guard(on, (tx) => run(tx, PAY)));
    assert.deepEqual([refused.sqlstate, refused.detail.lease], ["PF004", "order:7"]);
    assert.equal(refused.cause.code, "PF004");
    assert.equal(await lease.guard(on, async () => 42), 42);
  });
});

/** In a transaction that the program has begun itself, and rolls back if it fails. */
async function inOwn(work: (tx: any) => Promise<unknown>): Promise<void> {
  if (!ON_PG) return void (await sql.begin(work));
  const client = await pool.connect();
  await client.query("BEGIN");
  let end = "ROLLBACK";
  try {
    await work(client);
    end = "COMMIT";
  } finally {
    await client.query(end);
    client.release();
  }
}

test("an open transaction is left to the code that began it, with a release in it", async () => {
  const lease = await fence.lease("order:7", LONG);
  await inOwn(async (tx) => {
    await lease.guard(tx, (same) => lease.guard(same, (again) => run(again, PAY)));
    await assert.rejects(lease.guard(tx, async (same) => run(same, UNDONE).then(assert.fail)));
    assert.equal(await status(), "new");
  });
  assert.equal(await status(), "paid");
  const undone = inOwn(async (tx) => {
    await lease.guard(tx, (same) => run(same, UNDONE), { release: true });
    throw new Error("the program's own");
  });
  await undone.catch(() => {});
  await sleep(500);
  assert.ok(lease.held && (await isHeld("order:7")), "it lives on");
  await inOwn((tx) => lease.guard(tx, (same) => run(same, PAY), { release: true }));
  await lease.release();
  assert.ok(!(await isHeld("order:7")));
});

test("several leases guard one transaction, and its last statement releases them", async () => {
  const [one, two] = [await fence.lease("order:7", LONG), await fence.lease(["a", "b"], LONG)];
  const late = await errorOf(() =>
    fence.guard(on, [two, one], (tx) => run(tx, UNDONE).then(() => revoke()), { release: true }),
  );
  assert.ok(late instanceof LeaseLost && late.reason === "gone" && !late.inDoubt, String(late));
  assert.deepEqual(late.names, ["order:7"]);
  await two.guard(on, async () => {}, { release: true });
  assert.ok(!two.held && !(await isHeld("a")) && (await status()) === "new");
});

test("numbers of others are exact", async () => {
  const number = 2n ** 60n;
  await fence.adopted("elsewhere", number).guard(on, async () => {});
  assert.equal(await value("SELECT token FROM lease_info('elsewhere')"), String(number));
  const other = fence.adopted("elsewhere", number, { holder: "another" });
  assert.ok((await errorOf(() => other.guard(on, async () => {}))) instanceof LeaseTaken);
  await fence.adopted("elsewhere", number).guard(on, async () => {}, { release: true });
  await admin.query("SELECT lease_forget('elsewhere')");
});

test("a row that was claimed is kept, written under its lease, and given up", async () => {
  const claim = `UPDATE runs SET state = 'running', held_until = clock_timestamp() + '1 s' WHERE
    held_until IS NULL RETURNING fence`;
  const due = "SELECT held_until IS NULL FROM runs";
  const token = await value(claim);
  await fence.keepRow("runs", ["a", 1], token, { ttl: { seconds: 1 } }, async (lease) => {
    await sleep(2000);
    lease.check();
    const work = async (tx: any) => {
      await run(tx, "UPDATE runs SET state = 'done'");
      await sleep(1500);
      // Nobody else can claim the row meanwhile.
      lease.check();
    };
    await lease.guard(on, work, { release: true });
  });
  assert.ok((await value(due)) && (await value("SELECT state = 'done' FROM runs")));
  const lost = await errorOf(() => fence.keepRow("runs", ["a", 1], token));
  assert.ok(lost instanceof LeaseLost && lost.reason === "gone", String(lost));
  const lease = await fence.keepRow("public.runs", ["a", 1], await value(claim), LONG);
  await lease.release();
  assert.ok(!lease.held && (await value(due)));
});

test(
  "a session that ends is no loss, and leaves the pool as it was",
  withOrder(async (lease) => {
    const backend = "SELECT pid FROM pg_stat_activity WHERE state = 'idle in transaction'";
    for (const then of [async () => {}, (tx: any) => run(tx, UNDONE)]) {
      const error = await errorOf(() =>
        lease.guard(on, async (tx) => {
          await run(tx, UNDONE);
          await admin.query(`SELECT pg_terminate_backend((${backend}), 10000)`);
          await sleep(200);
          await then(tx);
        }),
      );
      assert.ok(error instanceof TransactionLost && !error.inDoubt, String(error));
    }
    assert.ok(lease.held);
    for (let round = 0; round < 4; round++) await lease.guard(on, (tx) => run(tx, PAY));
    const reset = { code: "ECONNRESET", syscall: "read" };
    const other = Object.assign(new Error("read ECONNRESET"), reset);
    assert.equal(await errorOf(() => lease.guard(on, () => Promise.reject(other))), other);
  }),
);

test("a loss ends what hangs, and aborts the signal", async () => {
  const look = "SET client_connection_check_interval = 100";
  const lost = await errorOf(() =>
    fence.lease("order:7", { ttl: { seconds: 6 } }, async (lease) => {
      const hangs = [
        errorOf(() =>
          lease.guard(on, (tx) => run(tx, look).then(() => run(tx, "SELECT pg_sleep(60)"))),
        ),
        errorOf(() => lease.guard(on, () => new Promise(() => {}))),
        errorOf(() => sleep(60_000, undefined, { signal: lease.signal })).then(
          ({ cause }) => cause,
        ),
      ];
      setTimeout(revoke, 100);
      for (const error of hangs) assert.equal((await error).reason, "gone");
      await sleep(1, undefined, { signal: lease.signal });
    }),
  );
  assert.ok(lost instanceof LeaseLost && lost.reason === "gone", "and not the timer's AbortError");
});

test(
  "a rollback that cannot be ends the connection, and the server's statement",
  withOrder(async (lease) => {
    const error = await errorOf(() =>
      lease.guard(on, async (tx) => {
        run(tx, "SELECT pg_sleep(600)").catch(() => {});
        await sleep(50);
        throw new Error("mine");
      }),
    );
    assert.equal(error.message, "mine");
    await comesTrue(`SELECT count(*) = 0 FROM pg_stat_activity
    WHERE query LIKE '%pg_sleep(600)%' AND pid <> pg_backend_pid()`);
  }),
);

test("the end of a block tells a loss that nothing has told, and replaces no error", async () => {
  assert.ok(
    (await errorOf(() => fence.lease("order:7", LONG, () => revoke()))) instanceof LeaseLost,
  );
  const untold = await errorOf(async () => {
    await using _ = await fence.lease("order:7", LONG);
    await revoke();
  });
  assert.ok(untold instanceof LeaseLost);
  const told = await errorOf(async () => {
    await using lease = await fence.lease("order:7", LONG);
    await revoke();
    await lease.guard(on, () => assert.fail("it began"));
  });
  assert.ok(told instanceof LeaseLost, "and no SuppressedError");
});

test("events, a leader that goes on, and what its stop and its errors end", async () => {
  const events: string[] = [];
  const onEvent = ({ kind, reason }: pgFence.LeaseEvent) => {
    events.push(kind + (reason ?? ""));
    if (kind === "acquired") throw new Error("a handler may fail");
  };
  await using watched = new Fence(on, { onEvent });
  let times = 0;
  const led = watched.lead(
    "order:7",
    async (lease) => (times++ ? 7 : revoke().then(() => lease.check())),
    LONG,
  );
  assert.equal(await led, 7);
  const short = await watched.lease("job", { atMost: { milliseconds: 200 } });
  await comesTrue("SELECT pg_sleep(0.3) IS NOT NULL");
  await assert.rejects(async () => short.check(), /at_most/);
  await short.release();
  assert.equal(
    events.join(),
    "acquired,lostgone,interrupted,acquired,released,acquired,lostat_most",
  );
  const mine = fence.lead("chief", () => Promise.reject(new Error("mine")));
  await assert.rejects(mine, /mine/);
  const stop = AbortSignal.timeout(100);
  await fence.lead("chief", async () => {
    assert.equal(await fence.lead("chief", () => assert.fail("it leads"), { stop }), undefined);
  });
});

test("what can never be opened is told at once, and an outage is waited for, with one warning", async () => {
  const wrong: [RegExp, unknown][] = [
    [/does not exist/, { ...as(user ?? ""), database: "nowhere" }],
    [/no secret/, () => Promise.reject(new Error("no secret"))],
  ];
  if (ON_PG) wrong.push([/does not support SSL/, { ...as(user ?? ""), ssl: true }]);
  for (const [message, source] of wrong) {
    await using never = new Fence(source);
    const signal = AbortSignal.timeout(5_000);
    const waited = await errorOf(() => never.lease("job", { wait: { minutes: 1 }, signal }));
    const led = await errorOf(() => never.lead("job", async () => {}, { stop: signal }));
    for (const error of [waited, led]) {
      assert.ok(error instanceof pgFence.NoConnection && message.test(error.message), error);
    }
  }
  const warnings: string[] = [];
  const warned = ({ message }: Error) => void warnings.push(message);
  process.on("warning", warned);
  await using away = new Fence({ ...as(user ?? ""), port: 1 });
  await errorOf(() => away.lease("job", { wait: { seconds: 1 } }));
  process.off("warning", warned);
  const line = /^no lease could be acquired, and it is tried again: Error: connect ECONNREFUSED/;
  assert.equal(warnings.filter((message) => line.test(message)).length, 1, warnings.join());
});

/** A process of its own with that module as its program, and what it prints. */
async function program(body: string): Promise<string> {
  const at = new globalThis.URL(`../dist/${ON_PG ? "pg" : "postgres"}.js`, import.meta.url);
  const source = `
    import { Fence } from ${JSON.stringify(at.href)};
    import driver from ${JSON.stringify(import.meta.resolve(ON_PG ? "pg" : "postgres"))};
    const [url, ttl] = [${JSON.stringify(URL)}, { ttl: { minutes: 5 } }];
    const fence = new Fence(url);
    const on = ${ON_PG ? "new driver.Pool({ connectionString: url })" : "driver(url)"};
    process.on("warning", ({ message }) => console.log(message));
    ${body}`;
  const flags = ["--expose-gc", "--input-type=module", "-e"];
  return (await promisify(execFile)(process.execPath, [...flags, source])).stdout;
}

test("a process ends by itself, with its leases, and not while it waits for a loss", async () => {
  const session = `(await fence.lease("kept", { ...ttl, session: true })).names.join()`;
  assert.equal(await program(`console.log(${session})`), "kept\n");
  assert.equal(await isHeld("kept"), false);
  const waits = program(`
    const { signal } = await fence.lease("kept", ttl);
    await new Promise((resolve) => signal.addEventListener("abort", resolve));
    console.log(signal.reason.reason);`);
  await comesTrue("SELECT EXISTS (SELECT FROM lease_info('kept') WHERE state = 'held')");
  await revoke("kept");
  assert.match(await waits, /\ngone\n|^gone\n/);
});

test("a lease that nothing refers to is released, and not while work goes by any part of it", async () => {
  const stdout = await program(`
    const ends = {};
    ends.promise = new Promise((resolve) => (ends.resolve = resolve));
    const use = (name, of) => fence.lease(name, ttl).then(of);
    const signal = await use("by signal", ({ signal }) => signal);
    const guard = await use("by guard", ({ guard }) => guard);
    const works = [
      use("in its guard", ({ guard }) => guard(on, () => ends.promise)),
      use("one of several", (lease) => fence.guard(on, [lease], () => ends.promise)),
      fence.lease("in a block", ttl, () => ends.promise),
    ];
    let isTold = false;
    process.once("warning", () => (isTold = true));
    await use("forgotten", () => {});
    for (let after = 0; after < 20; after += isTold) await new Promise((go) => setTimeout(go, 20, gc()));
    await guard(on, async () => {});
    ends.resolve();
    await Promise.all(works);
    console.log(signal.aborted);
    await Promise.all([fence.close(), on.end()]);`);
  assert.equal(stdout, "the lease forgotten was forgotten, and not released\nfalse\n");
});

// The ORMs: a model saved as ever, that knows nothing of the fence, in the ORM's own transaction.

type Save = (status: string, guard?: (query: pgFence.Query, save: () => any) => any) => any;
type Orm = { save: Save; close: () => unknown };
const plain = (_: pgFence.Query, save: () => any) => save();

const ORMS: Record<string, () => Orm | Promise<Orm>> = {
  async typeorm() {
    const columns = { id: { type: "bigint", primary: true }, status: { type: "text" } } as const;
    const Order = new EntitySchema<any>({ name: "Order", tableName: "orders", columns });
    const source = new DataSource({ type: "postgres", url: URL, entities: [Order] });
    await source.initialize();
    const save: Save = (status, guard = plain) =>
      source.transaction((manager) =>
        guard(
          (text) => manager.query(text),
          () => manager.save(Order, { id: "7", status }),
        ),
      );
    return { save, close: () => source.destroy() };
  },
  sequelize() {
    const at = { host, port, database, username: user } as any;
    const db = new Sequelize({ dialect: "postgres", ...at, logging: false });
    const columns = { id: { type: DataTypes.BIGINT, primaryKey: true }, status: DataTypes.TEXT };
    const Order = db.define("orders", columns, { timestamps: false });
    const save: Save = (status, guard = plain) =>
      db.transaction((transaction) =>
        guard(
          (text) => db.query(text, { transaction }),
          () => Order.update({ status }, { where: { id: 7 }, transaction }),
        ),
      );
    return { save, close: () => db.close() };
  },
  kysely() {
    const dialect = new PostgresDialect({ pool: new pg.Pool({ connectionString: URL }) });
    const db = new Kysely<{ orders: { id: string; status: string } }>({ dialect });
    const save: Save = (status, guard = plain) =>
      db.transaction().execute((trx) => {
        const update = trx.updateTable("orders").set({ status }).where("id", "=", "7");
        return guard(
          (text) => kyselySql.raw(text).execute(trx),
          () => update.execute(),
        );
      });
    return { save, close: () => db.destroy() };
  },
  drizzle() {
    const orders = pgTable("orders", {
      id: bigint({ mode: "number" }).primaryKey(),
      status: text(),
    });
    const own = postgres(URL);
    const db: any = ON_PG ? drizzleOnPg(pool) : drizzleOnPostgres(own);
    const save: Save = (status, guard = plain) =>
      db.transaction((tx: any) =>
        guard(
          (text) => tx.execute(drizzleSql.raw(text)),
          () => tx.update(orders).set({ status }),
        ),
      );
    return { save, close: () => own.end() };
  },
  prisma() {
    // Its client is generated.
    const { PrismaClient } = createRequire(import.meta.url)("./prisma/index.js");
    const db = new PrismaClient({ adapter: new PrismaPg({ host, port, user, database }) });
    const save: Save = (status, guard = plain) =>
      db.$transaction((tx: any) => {
        const update = () => tx.orders.update({ where: { id: 7 }, data: { status } });
        return guard((text) => tx.$queryRawUnsafe(text), update);
      });
    return { save, close: () => db.$disconnect() };
  },
};

for (const [name, open] of Object.entries(ORMS)) {
  test(`${name}: a model is saved as ever under a lease, and only there`, async () => {
    const { save, close } = await open();
    const [lease, other] = [await fence.lease("order:7", LONG), await fence.lease("other", LONG)];
    try {
      await save("paid", lease.guard);
      await assert.rejects(async () => save("without a lease"));
      const mine = new Error("mine");
      const fails = (query: pgFence.Query, work: () => any) =>
        lease.guard(query, async () => [await work(), assert.fail(mine)]);
      assert.equal(await errorOf(() => save("undone", fails)), mine);
      assert.equal((await errorOf(() => save("late", other.guard))).sqlstate, "PF004");
      assert.equal(await status(), "paid");
      await save("last", (query, work) => lease.guard(query, work, { release: true }));
      await lease.release();
      assert.equal(await status(), "last");
    } finally {
      await Promise.all([close(), lease.release(), other.release()]);
    }
  });
}

test(
  "a function that runs outside of a transaction is refused before the work",
  withOrder(async (lease) => {
    const query = (text: string) => admin.query(text);
    assert.equal(
      (await errorOf(() => lease.guard(query, () => assert.fail("it began")))).code,
      "25P01",
    );
  }),
);
