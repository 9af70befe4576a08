/**
 * The tests of what the vectors and the scenarios of all clients leave out: the shape of the API,
 * the drivers and the ORMs, and what only JavaScript has.
 *
 *     DATABASE_URL=postgresql://… node tests/pg_fence.test.mjs pg    (or postgres)
 *
 * The database has the extension, and no other use: the tests create and drop tables in it.
 */
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { once } from "node:events";
import { createRequire } from "node:module";
import { after, before, beforeEach, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { promisify } from "node:util";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { PrismaPg } from "@prisma/adapter-pg";
import { sql as drizzleSql } from "drizzle-orm";
import { drizzle as drizzleOnPg } from "drizzle-orm/node-postgres";
import { drizzle as drizzleOnPostgres } from "drizzle-orm/postgres-js";
import { Kysely, PostgresDialect, sql as kyselySql } from "kysely";
import pg from "pg";
import postgres from "postgres";
import { Sequelize } from "sequelize";
import { DataSource } from "typeorm";

import { LeaseLost, TransactionLost, type LeaseEvent, type Query } from "../dist/index.js";
import * as onPg from "../dist/pg.js";
import * as onPostgres from "../dist/postgres.js";

const URL = process.env.DATABASE_URL ?? "";
const ON_PG = (process.argv[2] ?? "pg") === "pg";
const LONG = { ttl: { minutes: 5 } };
const PAY = "UPDATE orders SET status = 'paid' WHERE id = 7";
/** The sessions of these tests. Those of other tests are on other databases. */
const SESSIONS = `pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`;

const admin = new pg.Client(URL);
const pool = new pg.Pool({ connectionString: URL, max: 3 });
// The program may turn rows into anything.
const transform = { row: { from: (row: object) => ({ made: Object.keys(row) }) } };
const sql = postgres(URL, { max: 3, onnotice() {}, transform });
const { host, port, database, user } = admin as Required<pg.Client>;
/** Returns the settings of a connection as this role, in this driver's terms. */
const as = (user: string): any => ({ host, port, database, [ON_PG ? "user" : "username"]: user });

const Fence: new (...of: any[]) => onPg.Fence = ON_PG ? onPg.Fence : (onPostgres.Fence as any);
/** What transactions begin on, and how the work runs a statement. */
const on: any = ON_PG ? pool : sql;
const run = (tx: any, statement: string) => (ON_PG ? tx.query(statement) : tx.unsafe(statement));
const fence = new Fence(on);
if (ON_PG) await import("./lease_state.test.mjs");

before(() => admin.connect());
after(() => Promise.all([fence.close(), admin.end(), pool.end(), sql.end({ timeout: 5 })]));

beforeEach(async () => {
  // The first two end the leftovers of a test that failed.
  await admin.query(`
    SELECT pg_terminate_backend(pid, 1000) FROM ${SESSIONS} AND state ~ '^idle in';
    SELECT lease_revoke(name) FROM fence.leases WHERE state = 'held';
    DROP TABLE IF EXISTS orders, runs;
    CREATE TABLE orders (id bigint PRIMARY KEY, status text);
    INSERT INTO orders VALUES (7, 'new');
    SELECT fence_protect('orders', lease => 'order:{id}');
    CREATE TABLE runs (id bigint, part text, state text DEFAULT 'ready', PRIMARY KEY (part, id));
    INSERT INTO runs VALUES (1, 'a');
    SELECT fence_protect('runs', deadline => 'held_until')`);
});

const value = async (statement: string): Promise<any> =>
  Object.values((await admin.query(statement)).rows[0] ?? {})[0];
const status = () => value("SELECT status FROM orders");
const revoke = (name = "order:7") => value(`SELECT lease_revoke('${name}')`).then(() => {});

/** Returns the error of the work. */
async function errorOf(work: () => PromiseLike<unknown>): Promise<any> {
  try {
    await work();
  } catch (error) {
    return error;
  }
  return assert.fail("nothing is thrown");
}

test("a fence has its verbs, and shows nothing internal", () => {
  const visible = Object.getOwnPropertyNames(Object.getPrototypeOf(Fence).prototype).sort();
  assert.equal(visible.join(), "adopted,close,constructor,guard,keepRow,lead,lease");
  assert.deepEqual(Object.keys(fence.adopted("job", 3)), ["name", "token", "guard"]);
});

test("arguments are checked, and an error names the wrong one", async () => {
  const began = () => assert.fail("it began");
  // As sql.reserve gives it.
  const reserved = Object.assign(async () => [], { unsafe() {}, typed() {}, release() {} });
  const wrong: [RegExp, () => unknown][] = [
    [/^TypeError: the name/, () => fence.lease(7 as any)],
    [/^TypeError: a token/, async () => fence.adopted("job", 2 ** 60)],
    [/^RangeError: ttl/, () => fence.lease("job", { ttl: { milliseconds: 50 } })],
    [/^TypeError: reclaim/, () => fence.lease("job", { reclaim: true })],
    [/^TypeError: several/, () => fence.lease(["a", "b"], { shared: true })],
    [/^TypeError: a guard takes a lease/, () => fence.guard(on, [], began)],
    [/^TypeError: a guard takes/, () => fence.adopted("a", 1).guard(fence as any, began)],
    [/^TypeError: a key/, () => fence.keepRow("runs", 1 as any, 1)],
    [/^TypeError: a key.*null/, () => fence.keepRow("runs", { part: null, id: 1 } as any, 1)],
    [/^TypeError: release/, () => fence.adopted("a", 1).guard(on, began, { release: "no" } as any)],
    [/^TypeError: a guard takes/, () => fence.adopted("a", 1).guard(reserved as any, began)],
    [/^TypeError: .* no rows/, () => fence.adopted("a", 1).guard(async () => {}, began)],
    [/own fence/, () => new Fence(URL).lease("x", {}, (x) => fence.guard(on, [x], began))],
    [/relation "nowhere" does not exist/, () => fence.keepRow("nowhere", { id: 1 }, 1)],
    [/^Refused: .* bigint: "a"/, () => fence.keepRow("runs", { part: "a", id: "a" }, 1)],
  ];
  for (const [error, call] of wrong) await assert.rejects(call as any, error);
  const paste = { shared: "false,1); CREATE TABLE pasted ()" };
  for (const one of [
    { holder: 7 },
    { metadata() {} },
    { ttl: 30 },
    { ttl: { second: 1 } },
    { atMost: NaN },
    paste,
  ])
    await assert.rejects(() => fence.lease("a", one as any), TypeError);
  const sqlOfBun = Object.assign(async () => [], { unsafe() {}, options: {} });
  for (const source of [7, null, admin, fence, new Date(), sqlOfBun]) {
    assert.throws(() => new Fence(source), /^TypeError: a fence takes a connection string/);
  }
});

test("a fence takes each kind of source", async () => {
  const open = () => (ON_PG ? new pg.Client(URL).connect() : postgres(URL, { max: 1, transform }));
  // The first of the hosts refuses. pg takes only one host.
  const hosts = ON_PG ? URL : `postgres://${host}:1,${host}:${port}/${database}?user=${user}`;
  for (const source of [URL, new globalThis.URL(URL), hosts, as(`${user}`), on, open]) {
    await using made = new Fence(source, { schema: "public" });
    await made.lease("job", { session: true }, async (lease) => assert.ok(lease.held));
  }
  const odd = { holder: `it's \\ "me", {NULL}`, metadata: { run: "7'" } };
  await fence.lease('a "quoted", {name}\\', odd, async ({ names: [name = ""] }) => {
    assert.equal((await errorOf(() => fence.lease(name))).holder, odd.holder);
  });
});

test("a function may give a pool's clients, and a query_timeout ends no wait", async (t) => {
  if (!ON_PG) return t.skip();
  const small = new pg.Pool({ connectionString: URL, max: 2, query_timeout: 500 });
  t.after(() => small.end());
  await using _ = await fence.lease("order:7", LONG);
  await using made = new Fence(() => small.connect());
  for (let round = 0; round < 3; round++) await made.lease("job", {}, async () => {});
  const wait = { seconds: 1 };
  await assert.rejects(made.lease("order:7", { wait }), /^LeaseTaken/);
  const cut = `SELECT pg_terminate_backend(pid, 1000) FROM ${SESSIONS} AND query ~ 'lease_'`;
  for (let round = 0; round < 3; round++)
    await made.lease("job", {}, () => value(cut).then(() => sleep(50)));
});

test("a function that returns nothing, or a connection in a transaction, serves no fence", async () => {
  const begun = async () => {
    const client = ON_PG ? await new pg.Client(URL).connect() : postgres(URL, { max: 1 });
    return run(client, "BEGIN").then(() => client);
  };
  for (const source of [begun, async () => undefined]) {
    await using made = new Fence(source);
    await assert.rejects(made.lease("job"), /^NoConnection: .* a fence's function returns/);
  }
  const isOpen = `SELECT count(*)::int FROM ${SESSIONS} AND state ~ '^idle in'`;
  for (let tries = 0; (await value(isOpen)) > 0; tries++) {
    assert.ok(tries < 100, "the connection stays open");
    await sleep(100);
  }
});

test("a guard leaves alone a transaction that postgres knows nothing of", async (t) => {
  if (ON_PG) return t.skip();
  const one = postgres(URL, { max: 1 });
  t.after(() => one.end({ timeout: 5 }));
  await using lease = await fence.lease("order:7", LONG);
  const pay = (tx: any) => run(tx, PAY);
  await one.unsafe("BEGIN; UPDATE orders SET status = 'sent' WHERE id = 8");
  await assert.rejects(lease.guard(one as any, pay), /^TypeError: .* is in a transaction/);
  await one.unsafe("ROLLBACK");
  await lease.guard(one as any, pay);
  assert.equal(await status(), "paid");
});

test("work that ends a guard's savepoint leaves the connection to postgres", async (t) => {
  if (ON_PG) return t.skip();
  const one = postgres(URL, { max: 1, onnotice() {} });
  t.after(() => one.end({ timeout: 5 }));
  await using lease = await fence.lease("order:7", LONG);
  for (const end of ["ROLLBACK TO SAVEPOINT mine", "COMMIT"]) {
    const begun = one.begin(async (tx) => {
      await tx.unsafe("SAVEPOINT mine");
      await lease.guard(tx as any, (inner) => run(inner, end));
    });
    await assert.rejects(begun, /^TransactionLost/);
    await one.unsafe("SELECT 1");
  }
});

test("an error of another realm is an outage, too", async (t) => {
  if (!ON_PG) return t.skip();
  let opened = 0;
  const refused = "Object.assign(new Error(), { code: 'ECONNREFUSED', syscall: 'connect' })";
  await using made = new Fence(async () => {
    if (++opened === 2) throw runInNewContext(refused);
    return new pg.Client(URL).connect();
  });
  await made.lease("job", { ttl: { seconds: 1 } }, async (lease) => {
    await value(`SELECT pg_terminate_backend(pid, 1000) FROM ${SESSIONS} AND query ~ 'lease_'`);
    await sleep(1500);
    lease.check();
  });
  assert.ok(opened > 2);
});

test("a renewal without an answer is logged as that", async (t) => {
  if (!ON_PG) return t.skip();
  const open = async () => {
    const client: any = await new pg.Client(URL).connect();
    const query = client.query.bind(client);
    client.query = (one: any) =>
      one.text.includes("lease_keep") ? new Promise(() => {}) : query(one);
    return client;
  };
  await using made = new Fence(open);
  await using _ = await made.lease("job", { ttl: { milliseconds: 900 } });
  const [{ message }] = await once(process, "warning");
  assert.match(message, /tried again: no answer$/);
});

test("a failed acquire says why, at once if no retry can open a connection", async (t) => {
  await admin.query(`CREATE ROLE "Nobody's" LOGIN`);
  t.after(() => admin.query(`DROP ROLE "Nobody's"`));
  const fails = () => Promise.reject(new Error("no secret"));
  const cases: [RegExp, unknown][] = [
    [/^NotGranted: .*fence_grant\('"Nobody''s"'\)/, as("Nobody's")],
    [/^NoConnection: .*does not exist/, { ...as(`${user}`), database: "nowhere" }],
    [/^NoConnection: .*no secret/, fails],
  ];
  if (ON_PG) cases.push([/^NoConnection: .*not support SSL/, { ...as(`${user}`), ssl: true }]);
  for (const [message, source] of cases) {
    await using made = new Fence(source);
    const [wait, stop] = [{ minutes: 1 }, AbortSignal.timeout(30_000)];
    await assert.rejects(made.lease("job", { wait, signal: stop }), message);
    await assert.rejects(made.lead("job", fails, { stop }), message);
  }
  await assert.rejects(new Fence(on, { schema: "elsewhere" }).lease("job"), /^NotInstalled: /);
});

test("several leases guard one transaction, and its last statement releases them", async () => {
  const [one, two] = [await fence.lease("order:7", LONG), await fence.lease(["a", "b"], LONG)];
  const late = await errorOf(() =>
    fence.guard(on, [two, one], (tx) => run(tx, PAY).then(() => revoke()), { release: true }),
  );
  assert.deepEqual([late.reason, late.inDoubt, late.names], ["gone", false, ["order:7"]]);
  const refused = await errorOf(() => two.guard(on, (tx) => run(tx, PAY)));
  assert.deepEqual([refused.detail.lease, refused.cause.code], ["order:7", "PF004"]);
  const own = new Error("the program's own", { cause: refused });
  assert.equal(await errorOf(() => two.guard(on, () => Promise.reject(own))), own);
  await two.guard(on, async () => {}, { release: true });
  assert.ok(!two.held && (await status()) === "new");
  await fence.lease("a", LONG, async () => {});
});

test("numbers of other systems are exact, and a guard returns the result of its work", async () => {
  const adopted = fence.adopted("elsewhere", 2n ** 60n);
  assert.equal(await adopted.guard(on, async () => 42), 42);
  assert.equal(await value("SELECT token FROM lease_info('elsewhere')"), String(2n ** 60n));
  await adopted.guard(on, async () => {}, { release: true });
  await admin.query("SELECT lease_forget('elsewhere')");
});

test("a claimed row is kept, written under its lease, and released", async () => {
  const claim = `UPDATE runs SET held_until = clock_timestamp() + '1 min' WHERE held_until IS NULL
    RETURNING fence`;
  const released = "SELECT state FROM runs WHERE held_until IS NULL";
  const [key, token] = [{ part: "a", id: 1 }, await value(claim)];
  const finish = (tx: any) => run(tx, "UPDATE runs SET state = 'done'");
  const result = await fence.keepRow("runs", key, token, LONG, (lease) =>
    lease.guard(on, finish, { release: true }).then(() => value(released)),
  );
  assert.equal(result, "done");
  const lost = await errorOf(() => fence.keepRow("runs", key, token));
  assert.ok(lost instanceof LeaseLost && lost.reason === "gone", String(lost));
  const other = await fence.keepRow("public.runs", key, await value(claim), LONG);
  await other.release();
  assert.ok(!other.held && (await value(released)));
  await using named = new Fence(on, { schema: "public" });
  const own = await named.keepRow("runs", key, await value(claim), LONG);
  await own.guard(on, async () => {}, { release: true });
  assert.ok(await value(released));
});

test("a session that ends is no loss, and leaves the pool as it was", async () => {
  await using lease = await fence.lease("order:7", LONG);
  const backend = `SELECT pid FROM ${SESSIONS} AND state = 'idle in transaction'`;
  const error = await errorOf(() =>
    lease.guard(on, async (tx) => {
      await run(tx, PAY);
      await admin.query(`SELECT pg_terminate_backend((${backend}), 10000)`);
      await sleep(200);
    }),
  );
  assert.ok(error instanceof TransactionLost && !error.inDoubt && lease.held, String(error));
  for (let round = 0; round < 4; round++) await lease.guard(on, (tx) => run(tx, PAY));
  // The statement meets the end by itself, mostly as an ECONNRESET.
  for (let round = 0; round < 5; round++) {
    const ends = async (tx: any) => {
      await admin.query(`SELECT pg_terminate_backend((${backend}))`);
      await run(tx, PAY);
    };
    const lost = await errorOf(() => lease.guard(on, ends));
    assert.ok(lost instanceof TransactionLost, String(lost));
  }
  const each = Array.from({ length: 6 }, () => errorOf(() => lease.guard(on, assert.fail)));
  assert.notEqual(await Promise.race([Promise.all(each), sleep(5000)]), undefined, "it hangs");
  const other = Object.assign(new Error("reset"), { code: "ECONNRESET", syscall: "read" });
  assert.equal(await errorOf(() => lease.guard(on, () => Promise.reject(other))), other);
});

test("a connection that a guard cannot begin on is left as it was", { skip: !ON_PG }, async () => {
  await using lease = await fence.lease("order:7", LONG);
  const client = new pg.Client(URL);
  await assert.rejects(() => lease.guard(client, async () => {}), /^TypeError: .* connected/);
  await client.connect();
  await client.query("BEGIN; SAVEPOINT pg_fence");
  await errorOf(() => client.query("SELECT 1/0"));
  assert.equal((await errorOf(() => lease.guard(client, async () => {}))).code, "25P02");
  assert.equal(client.getTransactionStatus(), "E");
  await client.end();
});

test("a transaction that was left in a pool is nobody's", { skip: !ON_PG }, async (t) => {
  const one = new pg.Pool({ connectionString: URL, max: 1 });
  t.after(() => one.end());
  await fence.lease("order:7", LONG, async (lease) => {
    const pay = () => lease.guard(one, (tx) => run(tx, PAY));
    await one.query("BEGIN");
    await assert.rejects(pay(), /nobody would commit/);
    await pay();
    assert.equal(await status(), "paid");
  });
});

test("a commit that times out in the driver is in doubt", { skip: !ON_PG }, async (t) => {
  const impatient = new pg.Pool({ connectionString: URL, max: 1, query_timeout: 300 });
  t.after(() => impatient.end());
  await admin.query(`
    CREATE OR REPLACE FUNCTION is_slow() RETURNS trigger LANGUAGE plpgsql AS
    $$BEGIN PERFORM pg_sleep(1); RETURN NULL; END$$;
    CREATE CONSTRAINT TRIGGER is_slow AFTER UPDATE ON orders
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION is_slow()`);
  await fence.lease("order:7", LONG, async (lease) => {
    const pays = lease.guard(impatient, (tx) => run(tx, PAY));
    await assert.rejects(pays, (error) => error instanceof TransactionLost && error.inDoubt);
  });
});

test("a pooler may end a session with a code of its own", { skip: !ON_PG }, async (t) => {
  await using lease = await fence.lease("order:7", LONG);
  const client: any = await new pg.Client(URL).connect();
  t.after(() => client.end());
  const query = client.query.bind(client);
  const fatal = Object.assign(new Error("no data"), { code: "XX000", severity: "FATAL" });
  client.query = (...of: any[]) =>
    /COMMIT/.test(String(of[0])) ? Promise.reject(fatal) : query(...of);
  const lost = await errorOf(() => lease.guard(client, async () => {}));
  assert.ok(lost instanceof TransactionLost && lost.inDoubt, String(lost));
});

test("the end of a transaction is noticed in a session that presents the token itself", async () => {
  await using lease = await fence.lease("order:7", LONG);
  const ends = `SET pg_fence.token = ${lease.token}; COMMIT; BEGIN; ${PAY}`;
  const lost = await errorOf(() => lease.guard(on, (tx) => run(tx, ends)));
  assert.ok(lost instanceof TransactionLost && lost.inDoubt, String(lost));
  assert.equal(await status(), "new");
});

test("an error of the program's own at the commit is left as it is", async (t) => {
  t.after(() => admin.query("DROP FUNCTION fails CASCADE"));
  await using lease = await fence.lease("order:7", LONG);
  await admin.query(`
    CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM nothing(); END';
    CREATE CONSTRAINT TRIGGER late AFTER UPDATE ON orders DEFERRABLE INITIALLY DEFERRED
      FOR EACH ROW EXECUTE FUNCTION fails()`);
  assert.equal((await errorOf(() => lease.guard(on, (tx) => run(tx, PAY)))).code, "42883");
});

test("a loss ends work that hangs, and aborts the signal", async () => {
  const lost = await errorOf(() =>
    fence.lease("order:7", { ttl: { seconds: 6 } }, async (lease) => {
      const { signal } = lease;
      let late: any;
      const hangs = errorOf(() => lease.guard(on, (tx) => new Promise(() => (late = tx))));
      const waits = errorOf(() => sleep(60_000, undefined, { signal }));
      setTimeout(revoke, 100);
      assert.deepEqual([(await hangs).reason, (await waits).cause.reason], ["gone", "gone"]);
      // Its connection is opened again for others, and their transactions.
      await Promise.all([1, 2, 3].map(() => run(on, "SELECT pg_sleep(0.2)")));
      await assert.rejects(async () => run(late, "SELECT 1"));
      await sleep(1, undefined, { signal });
    }),
  );
  assert.ok(lost instanceof LeaseLost && lost.reason === "gone", "and not the timer's AbortError");
});

test("the end of a block throws an unseen loss, and replaces no error", async () => {
  const unseen = await errorOf(async () => {
    await using _ = await fence.lease("order:7", LONG);
    await revoke();
  });
  const seen = await errorOf(async () => {
    await using lease = await fence.lease("order:7", LONG);
    await revoke();
    await lease.guard(on, () => assert.fail("it began"));
  });
  // Neither is a SuppressedError.
  for (const error of [unseen, seen]) assert.ok(error instanceof LeaseLost, error);
});

test("events come in their order, to a handler that may fail", async () => {
  const events: string[] = [];
  const onEvent = ({ kind, reason }: LeaseEvent) => {
    events.push(kind + (reason ?? ""));
    throw new Error("a handler may fail");
  };
  await using watched = new Fence(on, { onEvent });
  const work = async (lease: onPg.Lease) =>
    events.length > 1 ? 7 : revoke().then(() => lease.check());
  assert.equal(await watched.lead("order:7", work, LONG), 7);
  assert.equal(events.join(), "acquired,lostgone,interrupted,acquired,released");
});

test("a statement left running is canceled by the process that the server tells", async () => {
  await using lease = await fence.lease("order:7", LONG);
  const own: any = ON_PG ? new pg.Client(URL) : ownOfPostgres();
  if (ON_PG) await own.connect();
  const other = errorOf(() => admin.query("SELECT pg_sleep(60)"));
  // A pooler gives each client a number of its own, which may be that of another session.
  const { processID: pid } = admin as any;
  if (ON_PG) own.processID = pid;
  else Object.assign((await own`SELECT 1`).state, { pid });
  const ended = await errorOf(() =>
    lease.guard(own, async (tx) => {
      void Promise.resolve(run(tx, "SELECT pg_sleep(120) AS left")).catch(() => {});
      throw new Error("the work fails");
    }),
  );
  assert.match(String(ended), /the work fails/);
  const left = `SELECT FROM ${SESSIONS} AND state = 'active' AND query ~ 'AS left$'`;
  while ((await pool.query(left)).rowCount !== 0)
    assert.equal(await Promise.race([other, sleep(50)]), undefined);
  await pool.query("SELECT pg_cancel_backend($1)", [pid]);
  assert.equal((await other).code, "57014");
  await (ON_PG ? own.end().catch(() => {}) : own.end({ timeout: 1 }));
});

/** `postgres` with one connection, which is not as in `pg` the guard's own until it is released. */
const ownOfPostgres = () =>
  postgres(URL, { max: 1, fetch_types: false, connect_timeout: 2, onnotice: () => {} });

test("a loss while another has the connection begins no guard", { skip: ON_PG }, async () => {
  const lease = await fence.lease("order:7", { atMost: { milliseconds: 500 } });
  const own = ownOfPostgres();
  const busy = own.unsafe("SELECT pg_sleep(1)").execute();
  const begins = () => assert.fail("it began");
  const first = await Promise.race([busy, errorOf(() => lease.guard(own as any, begins))]);
  assert.ok(first instanceof LeaseLost && first.reason === "at_most", String(first));
  // An unhandled rejection would fail this test.
  await busy;
  assert.equal((await own`SELECT 1 AS n`)[0]?.n, 1);
  await own.end();
});

test("a loss at the end of a guard leaves its connection to others", { skip: ON_PG }, async () => {
  const lease = await fence.lease("order:7", LONG);
  const { signal } = lease;
  const own = ownOfPostgres();
  const begin: any = own.begin;
  // The loss comes with the end of the transaction, just before the client sees that end.
  own.begin = (scope: unknown): any => {
    const whole = begin(scope);
    whole.catch(() => signal.dispatchEvent(new Event("abort")));
    return whole;
  };
  const ended = await errorOf(() => lease.guard(own as any, (tx) => run(tx, "ROLLBACK")));
  assert.ok(ended instanceof TransactionLost, String(ended));
  assert.equal((await own`SELECT 1 AS n`)[0]?.n, 1);
  await own.end();
  await lease.release();
});

test("a warning names the leases that are lost", async () => {
  const lease = await fence.lease(["order:7", "order:8"], LONG);
  const warned = once(process, "warning");
  await revoke();
  await lease.release();
  const [{ message }] = await warned;
  assert.equal(message, "leases are lost (gone): 1 (order:7, order:8)");
});

test("a leader of a closed fence does not try again", async () => {
  const events: string[] = [];
  const made = new Fence(on, { onEvent: ({ kind }: LeaseEvent) => events.push(kind) });
  const work = (lease: onPg.Lease) => made.close().then(() => lease.check());
  const error = await errorOf(() => made.lead("job", work, LONG));
  assert.ok(error instanceof LeaseLost && error.reason === "released", String(error));
  assert.equal(events.join(), "acquired,released");
});

test("a handler may be asynchronous, and fail by no Error", async () => {
  const symbol = () => {
    throw Symbol("odd");
  };
  const bare = () => Promise.reject(Object.create(null));
  for (const onEvent of [symbol, bare, () => Promise.reject(new Error("late"))]) {
    await using watched = new Fence(on, { onEvent });
    assert.equal(await watched.lease("job", LONG, async () => 7), 7);
  }
});

test("a process does not end while it waits for a loss", async () => {
  const module = import.meta.resolve(ON_PG ? "pg_fence/pg" : "pg_fence/postgres");
  const program = `
    import { Fence } from ${JSON.stringify(module)};
    const fence = new Fence(${JSON.stringify(URL)});
    const { signal } = await fence.lease("kept", { atMost: { milliseconds: 500 } });
    await new Promise((resolve) => signal.addEventListener("abort", resolve));
    console.log(signal.reason.reason);`;
  const flags = ["--input-type=module", "-e", program];
  assert.equal((await promisify(execFile)(process.execPath, flags)).stdout, "at_most\n");
});

test("a lease that nothing refers to is released, unless work uses a part of it", async () => {
  setFlagsFromString("--expose-gc");
  const gc = runInNewContext("gc");
  const stop = new AbortController();
  const end = once(stop.signal, "abort");
  const use = <T,>(name: string, take: (lease: onPg.Lease) => T) =>
    fence.lease(name, LONG).then(take);
  const signal = await use("by signal", ({ signal }) => signal);
  const guard = await use("by guard", ({ guard }) => guard);
  const works = [
    use("in its guard", ({ guard }) => guard(on, () => end)),
    use("one of several", (lease) => fence.guard(on, [lease], () => end)),
    fence.lease("in a block", LONG, () => end),
  ];
  const warnings: string[] = [];
  process.on("warning", ({ message }) => warnings.push(message));
  await use("forgotten", () => {});
  for (let after = 0; after < 20; after += warnings.length) await sleep(20, gc());
  await guard(on, async () => {});
  stop.abort();
  await Promise.all(works);
  const expected = ["the lease forgotten was forgotten, and not released"];
  assert.deepEqual([warnings, signal.aborted], [expected, false]);
});

// Each ORM begins a transaction, and passes on a function that runs a query in it. The results of
// such queries differ from ORM to ORM.

type Begin = (work: (query: Query) => any) => any;
type Orm = [begin: Begin, close: () => unknown];

const ORMS: Record<string, () => Orm | Promise<Orm>> = {
  async typeorm() {
    const db = await new DataSource({ type: "postgres", url: URL }).initialize();
    const begin: Begin = (work) => db.transaction((tx) => work((text) => tx.query(text)));
    return [begin, () => db.destroy()];
  },
  sequelize() {
    const at: any = { host, port, database, username: user, logging: false };
    const db = new Sequelize({ ...at, dialect: "postgres" });
    const begin: Begin = (work) =>
      db.transaction((transaction) => work((text) => db.query(text, { transaction })));
    return [begin, () => db.close()];
  },
  kysely() {
    const dialect = new PostgresDialect({ pool: new pg.Pool({ connectionString: URL }) });
    const db = new Kysely({ dialect });
    const begin: Begin = (work) =>
      db.transaction().execute((tx) => work((text) => kyselySql.raw(text).execute(tx)));
    return [begin, () => db.destroy()];
  },
  drizzle() {
    const own = postgres(URL);
    const db: any = ON_PG ? drizzleOnPg(pool) : drizzleOnPostgres(own);
    const begin: Begin = (work) =>
      db.transaction((tx: any) => work((text) => tx.execute(drizzleSql.raw(text))));
    return [begin, () => own.end()];
  },
  prisma() {
    // Prisma's client is generated.
    const { PrismaClient } = createRequire(import.meta.url)("./prisma/index.js");
    const db = new PrismaClient({ adapter: new PrismaPg({ host, port, user, database }) });
    const begin: Begin = (work) =>
      db.$transaction((tx: any) => work((text) => tx.$queryRawUnsafe(text)));
    return [begin, () => db.$disconnect()];
  },
};

test("the name of the schema may have a dollar and a digit", async () => {
  const texts: string[] = [];
  const query = async (text: string) => [{ n: texts.push(text), pid: 1 }];
  await new Fence(on, { schema: 'my "$1"' }).adopted("job", 1).guard(query, async () => {});
  assert.match(texts.join(), /"my ""\$1"""\.lease_guard\(x\.name/);
});

for (const [name, open] of Object.entries(ORMS)) {
  test(`${name}: a lease guards its transaction, and is released if that commits`, async (t) => {
    const [begin, close] = await open();
    t.after(close);
    await using lease = await fence.lease("order:7", LONG);
    await using other = await fence.lease("other", LONG);
    const pay = (guarding: onPg.Lease, release: boolean, then = async () => {}) =>
      begin(async (query) => {
        await guarding.guard(query, async () => query(PAY), { release });
        await then();
      });
    const [own, fail] = [new Error("own"), async () => assert.fail(own)];
    assert.equal(await errorOf(() => pay(lease, true, fail)), own);
    assert.equal((await errorOf(() => pay(other, false))).sqlstate, "PF004");
    await sleep(500);
    assert.ok(lease.held && (await status()) === "new", "it stays held");
    // The end of this block throws no loss.
    await pay(lease, true);
    assert.equal(await status(), "paid");
    const work = () => revoke("other");
    const gone = () => begin((query) => other.guard(query, work, { release: true }));
    await assert.rejects(async () => gone(), /^LeaseLost: .*gone/);
  });
}
