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
import { once } from "node:events";
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

import { LeaseLost, TransactionLost, type LeaseEvent, type Query } from "../dist/index.js";
import * as onPg from "../dist/pg.js";
import * as onPostgres from "../dist/postgres.js";

const URL = process.env.DATABASE_URL ?? "";
const ON_PG = (process.argv[2] ?? "pg") === "pg";
const LONG = { ttl: { minutes: 5 } };
const PAY = "UPDATE orders SET status = 'paid' WHERE id = 7";
/** Those of other tests are on other databases. */
const SESSIONS = `pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`;
const UNDONE = "UPDATE orders SET status = 'undone' WHERE id = 7";

const admin = new pg.Client(URL);
const pool = new pg.Pool({ connectionString: URL, max: 3 });
// A row may become anything.
const transform = { row: { from: (row: object) => ({ made: Object.keys(row) }) } };
const sql = postgres(URL, { max: 3, onnotice() {}, transform });
const { host, port, database, user } = admin as Required<pg.Client>;
/** As this driver's settings name them. */
const as = (user: string): any => ({ host, port, database, [ON_PG ? "user" : "username"]: user });

const Fence: new (...of: any[]) => onPg.Fence = ON_PG ? onPg.Fence : (onPostgres.Fence as any);
/** The source of transactions, and how the work runs a statement. */
const on: any = ON_PG ? pool : sql;
const run = (tx: any, statement: string) => (ON_PG ? tx.query(statement) : tx.unsafe(statement));
const fence = new Fence(on);
if (ON_PG) await import("./lease_state.test.mjs");

before(() => admin.connect());
after(() => Promise.all([fence.close(), admin.end(), pool.end(), sql.end({ timeout: 5 })]));

beforeEach(async () => {
  // The leftovers of a test that failed.
  await admin.query(
    `SELECT pg_terminate_backend(pid, 1000) FROM ${SESSIONS} AND state ~ '^idle in'`,
  );
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
const held = (name: string) => `SELECT count(*) = 1 FROM fence.leases
  WHERE name = '${name}' AND state = 'held'`;
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

const textOf = async (work: () => PromiseLike<unknown>) => String(await errorOf(work));

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
  const adopted = fence.adopted("a", 1);
  const began = () => assert.fail("it began");
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
    [/^TypeError: a guard takes a lease/, () => fence.guard(on, [], began)],
    [/^TypeError: a guard takes/, () => adopted.guard(fence as any, began)],
    // A function that runs outside of a transaction.
    [/SAVEPOINT can only/, () => adopted.guard((text: string) => admin.query(text), began)],
    // @ts-expect-error a key has columns
    [/^TypeError: a key/, () => fence.keepRow("runs", 1, 1)],
    [/relation "nowhere" does not exist/, () => fence.keepRow("nowhere", { id: 1 }, 1)],
    [/^Refused: .* bigint: "a"/, () => fence.keepRow("runs", { part: "a", id: "a" }, 1)],
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

test("what is not acquired says why, and at once if no other try could open a connection", async (t) => {
  const mine = await fence.lease("mine", LONG);
  const both = await fence.lease(["held", "b"], { holder: "night shift" });
  await admin.query("CREATE ROLE nobody_else LOGIN");
  await admin.query("BEGIN; SELECT lease_acquire('new')");
  t.after(() => admin.query("ROLLBACK; SELECT fence_revoke('nobody_else'); DROP ROLE nobody_else"));
  const fails = () => Promise.reject(new Error("no secret"));
  const says: [RegExp, unknown, string?][] = [
    [/^LeaseTaken: .*by night shift, for \d+ s/, on, "held"],
    [/^LeaseTaken: .*not committed yet/, on, "new"],
    [/^NotGranted: .*fence_grant\('nobody_else'\)/, as("nobody_else")],
    [/^NoConnection: .*does not exist/, { ...as(`${user}`), database: "nowhere" }],
    [/^NoConnection: .*no secret/, fails],
  ];
  if (ON_PG) says.push([/^NoConnection: .*not support SSL/, { ...as(`${user}`), ssl: true }]);
  for (const [message, source, name] of says) {
    await using made = new Fence(source);
    const [wait, signal] = [{ minutes: name ? 0 : 1 }, AbortSignal.timeout(30_000)];
    assert.match(await textOf(() => made.lease(name ?? "job", { wait, signal })), message);
    // A leader waits for a lease that is taken.
    if (!name) assert.match(await textOf(() => made.lead("job", fails, { stop: signal })), message);
  }
  await assert.rejects(new Fence(on, { schema: "elsewhere" }).lease("job"), /^NotInstalled: /);
  await admin.query("ROLLBACK; SELECT fence_grant('nobody_else')");
  const work: any = ON_PG ? new pg.Pool(as("nobody_else")) : postgres(as("nobody_else"));
  const told = await textOf(() => mine.guard(work, async () => {}));
  assert.match(told, /role nobody_else .*another role; .*act as one role/);
  await Promise.all([work.end(), mine.release(), both.release()]);
  assert.equal((await errorOf(async () => mine.check())).reason, "released");
  const warning = once(process, "warning", { signal: AbortSignal.timeout(30_000) });
  await using away = new Fence({ ...as(`${user}`), port: 1 });
  await errorOf(() => away.lease("job", { wait: { seconds: 1 } }));
  assert.match(`${await warning}`, /^pg_fence: no lease could be acquired, .* ECONNREFUSED/);
});

test("a guard returns what its work does, and a refusal has the driver's error", async () => {
  await using lease = await fence.lease("other", LONG);
  assert.equal(await lease.guard(on, async () => 42), 42);
  const own = await errorOf(() => lease.guard(on, (tx) => run(tx, "SELECT 1/0")));
  const refused = await errorOf(() => lease.guard(on, (tx) => run(tx, PAY)));
  const told = [own.code, refused.detail.lease, refused.cause.code];
  assert.deepEqual(told, ["22012", "order:7", "PF004"]);
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
  await using lease = await fence.lease("order:7", LONG);
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
  assert.ok(lease.held && (await value(held("order:7"))), "it lives on");
  // The end of this block tells no loss.
  await inOwn((tx) => lease.guard(tx, (same) => run(same, PAY), { release: true }));
});

test("several leases guard one transaction, and its last statement releases them", async () => {
  const [one, two] = [await fence.lease("order:7", LONG), await fence.lease(["a", "b"], LONG)];
  const late = await errorOf(() =>
    fence.guard(on, [two, one], (tx) => run(tx, UNDONE).then(() => revoke()), { release: true }),
  );
  assert.ok(late instanceof LeaseLost && late.reason === "gone" && !late.inDoubt, String(late));
  assert.deepEqual(late.names, ["order:7"]);
  await two.guard(on, async () => {}, { release: true });
  assert.ok(!two.held && !(await value(held("a"))) && (await status()) === "new");
});

test("numbers of others are exact", async () => {
  const number = 2n ** 60n;
  await fence.adopted("elsewhere", number).guard(on, async () => {});
  assert.equal(await value("SELECT token FROM lease_info('elsewhere')"), String(number));
  const other = fence.adopted("elsewhere", number, { holder: "another" });
  assert.match(await textOf(() => other.guard(on, async () => {})), /^LeaseTaken: /);
  await fence.adopted("elsewhere", number).guard(on, async () => {}, { release: true });
  await admin.query("SELECT lease_forget('elsewhere')");
});

test("a row that was claimed is kept, written under its lease, and given up", async () => {
  const claim = `UPDATE runs SET held_until = clock_timestamp() + '1 s' WHERE held_until IS NULL
    RETURNING fence`;
  const token = await value(claim);
  await fence.keepRow(
    "runs",
    { part: "a", id: 1 },
    token,
    { ttl: { seconds: 1 } },
    async (lease) => {
      await sleep(2000);
      const work = async (tx: any) => {
        await run(tx, "UPDATE runs SET state = 'done'");
        await sleep(1500);
        // Nobody else can claim the row meanwhile.
        lease.check();
      };
      await lease.guard(on, work, { release: true });
    },
  );
  const givenUp = "SELECT state FROM runs WHERE held_until IS NULL";
  assert.equal(await value(givenUp), "done");
  const lost = await errorOf(() => fence.keepRow("runs", { part: "a", id: 1 }, token));
  assert.ok(lost instanceof LeaseLost && lost.reason === "gone", String(lost));
  const other = await fence.keepRow("public.runs", { id: 1, part: "a" }, await value(claim), LONG);
  await other.release();
  assert.ok(!other.held && (await value(givenUp)));
});

test("a session that ends is no loss, and leaves the pool as it was", async () => {
  await using lease = await fence.lease("order:7", LONG);
  const backend = `SELECT pid FROM ${SESSIONS} AND state = 'idle in transaction'`;
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
});

test("a loss ends work that hangs, and aborts the signal", async () => {
  const lost = await errorOf(() =>
    fence.lease("order:7", { ttl: { seconds: 6 } }, async (lease) => {
      const { signal } = lease;
      const hangs = errorOf(() => lease.guard(on, () => new Promise(() => {})));
      const waits = errorOf(() => sleep(60_000, undefined, { signal }));
      setTimeout(revoke, 100);
      assert.deepEqual([(await hangs).reason, (await waits).cause.reason], ["gone", "gone"]);
      await sleep(1, undefined, { signal });
    }),
  );
  assert.ok(lost instanceof LeaseLost && lost.reason === "gone", "and not the timer's AbortError");
});

test("a rollback that cannot be ends the connection, and the server's statement", async () => {
  await using lease = await fence.lease("order:7", LONG);
  const error = await errorOf(() =>
    lease.guard(on, async (tx) => {
      run(tx, "SELECT pg_sleep(600)").catch(() => {});
      await sleep(50);
      throw new Error("mine");
    }),
  );
  assert.equal(error.message, "mine");
  await comesTrue(`SELECT count(*) = 0 FROM ${SESSIONS} AND wait_event = 'PgSleep'`);
});

test("the end of a block tells a loss that nothing has told, and replaces no error", async () => {
  const block = await errorOf(() => fence.lease("order:7", LONG, () => revoke()));
  const untold = await errorOf(async () => {
    await using _ = await fence.lease("order:7", LONG);
    await revoke();
  });
  const told = await errorOf(async () => {
    await using lease = await fence.lease("order:7", LONG);
    await revoke();
    await lease.guard(on, () => assert.fail("it began"));
  });
  // And no SuppressedError.
  for (const error of [block, untold, told]) assert.ok(error instanceof LeaseLost, error);
});

test("events, a leader that goes on, and what its stop ends", async () => {
  const events: string[] = [];
  const onEvent = ({ kind, reason }: LeaseEvent) => {
    events.push(kind + (reason ?? ""));
    if (kind === "acquired") throw new Error("a handler may fail");
  };
  await using watched = new Fence(on, { onEvent });
  const work = async (lease: onPg.Lease) =>
    events.length > 1 ? 7 : revoke().then(() => lease.check());
  assert.equal(await watched.lead("order:7", work, LONG), 7);
  await using short = await watched.lease("job", { atMost: { milliseconds: 200 } });
  await sleep(300);
  await assert.rejects(async () => short.check(), /at_most/);
  const led = "acquired,lostgone,interrupted,acquired,released";
  assert.equal(events.join(), `${led},acquired,lostat_most`);
  await fence.lease("chief", LONG, async () => {
    const stop = AbortSignal.timeout(100);
    assert.equal(await fence.lead("chief", () => assert.fail("it leads"), { stop }), undefined);
  });
});

/** A process of its own with that module as its program, and what it prints. */
async function program(body: string): Promise<string> {
  const at = new globalThis.URL(`../dist/${ON_PG ? "pg" : "postgres"}.js`, import.meta.url);
  const source = `
    import { Fence } from ${JSON.stringify(at.href)};
    import driver from ${JSON.stringify(import.meta.resolve(ON_PG ? "pg" : "postgres"))};
    const [url, ttl] = [${JSON.stringify(URL)}, { ttl: { seconds: 15 } }];
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
  assert.equal(await value(held("kept")), false);
  const waits = program(`
    const { signal } = await fence.lease("kept", ttl);
    await new Promise((resolve) => signal.addEventListener("abort", resolve));
    console.log(signal.reason.reason);`);
  await comesTrue(held("kept"));
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

type Save = (status: string) => any;
type Begin = (work: (query: Query, save: Save) => any) => any;
type Orm = { begin: Begin; close: () => unknown };

const ORMS: Record<string, () => Orm | Promise<Orm>> = {
  async typeorm() {
    const columns = { id: { type: "bigint", primary: true }, status: { type: "text" } } as const;
    const Order = new EntitySchema<any>({ name: "Order", tableName: "orders", columns });
    const db = await new DataSource({ type: "postgres", url: URL, entities: [Order] }).initialize();
    const begin: Begin = (work) =>
      db.transaction((tx) => {
        const save: Save = (status) => tx.save(Order, { id: "7", status });
        return work((text) => tx.query(text), save);
      });
    return { begin, close: () => db.destroy() };
  },
  sequelize() {
    const at = { host, port, database, username: user } as any;
    const db = new Sequelize({ dialect: "postgres", ...at, logging: false });
    const columns = { id: { type: DataTypes.BIGINT, primaryKey: true }, status: DataTypes.TEXT };
    const Order = db.define("orders", columns, { timestamps: false });
    const begin: Begin = (work) =>
      db.transaction((transaction) => {
        const of = { where: { id: 7 }, transaction };
        return work(
          (text) => db.query(text, { transaction }),
          (status) => Order.update({ status }, of),
        );
      });
    return { begin, close: () => db.close() };
  },
  kysely() {
    const dialect = new PostgresDialect({ pool: new pg.Pool({ connectionString: URL }) });
    const db = new Kysely<{ orders: { id: string; status: string } }>({ dialect });
    const begin: Begin = (work) =>
      db.transaction().execute((tx) => {
        const save: Save = (status) =>
          tx.updateTable("orders").set({ status }).where("id", "=", "7").execute();
        return work((text) => kyselySql.raw(text).execute(tx), save);
      });
    return { begin, close: () => db.destroy() };
  },
  drizzle() {
    const columns = { id: bigint({ mode: "number" }).primaryKey(), status: text() };
    const [orders, own] = [pgTable("orders", columns), postgres(URL)];
    const db: any = ON_PG ? drizzleOnPg(pool) : drizzleOnPostgres(own);
    const begin: Begin = (work) =>
      db.transaction((tx: any) => {
        const save: Save = (status) => tx.update(orders).set({ status });
        return work((text) => tx.execute(drizzleSql.raw(text)), save);
      });
    return { begin, close: () => own.end() };
  },
  prisma() {
    // Its client is generated.
    const { PrismaClient } = createRequire(import.meta.url)("./prisma/index.js");
    const db = new PrismaClient({ adapter: new PrismaPg({ host, port, user, database }) });
    const begin: Begin = (work) =>
      db.$transaction((tx: any) => {
        const save: Save = (status) => tx.orders.update({ where: { id: 7 }, data: { status } });
        return work((text) => tx.$queryRawUnsafe(text), save);
      });
    return { begin, close: () => db.$disconnect() };
  },
};

for (const [name, open] of Object.entries(ORMS)) {
  test(`${name}: a model is saved as ever under a lease, and only there`, async () => {
    const { begin, close } = await open();
    const [lease, other] = [await fence.lease("order:7", LONG), await fence.lease("other", LONG)];
    const saves = (status: string, guard: onPg.Lease["guard"], release = false) =>
      begin((query, save) => guard(query, () => save(status), { release }));
    try {
      await saves("paid", lease.guard);
      await assert.rejects(async () => begin((_, save) => save("without a lease")));
      const mine = new Error("mine");
      const fails: Save = async (of) => [await of, assert.fail(mine)];
      const failed = begin((query, save) => lease.guard(query, () => fails(save("undone"))));
      assert.equal(await errorOf(() => failed), mine);
      assert.equal((await errorOf(() => saves("late", other.guard))).sqlstate, "PF004");
      assert.equal(await status(), "paid");
      const gone = () =>
        begin((query) => other.guard(query, () => revoke("other"), { release: true }));
      await assert.rejects(async () => gone(), /^LeaseLost: .*gone/);
      await saves("last", lease.guard, true);
      await lease.release();
      assert.equal(await status(), "last");
    } finally {
      await Promise.all([close(), lease.release(), other.release()]);
    }
  });
}
