/**
 * The part that the scenarios of all clients do not show: the shape of the API, each kind of transaction, the ORMs, and
 * what is JavaScript's own.
 *
 *     DATABASE_URL=postgresql://… node tests/pg_fence.test.mjs pg    (or postgres)
 *
 * The database has the extension and is otherwise of no use: a table is made and dropped in it.
 */
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { once } from "node:events";
import { createRequire } from "node:module";
import { connect, createServer, type AddressInfo, type Socket } from "node:net";
import { after, before, beforeEach, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { bigint, pgTable, text } from "drizzle-orm/pg-core";
import { drizzle as drizzleOnPg } from "drizzle-orm/node-postgres";
import { drizzle as drizzleOnPostgres } from "drizzle-orm/postgres-js";
import { sql as drizzleSql } from "drizzle-orm";
import { Kysely, PostgresDialect, sql as kyselySql } from "kysely";
import pg from "pg";
import { PrismaPg } from "@prisma/adapter-pg";
import postgres from "postgres";
import { DataTypes, Sequelize } from "sequelize";
import { DataSource, EntitySchema } from "typeorm";

import * as pgFence from "../dist/index.js";
import { FenceError, LeaseLost, LeaseTaken, NotGranted, NotInstalled, options, Refused, TransactionLost } from "../dist/index.js";
import * as onPg from "../dist/pg.js";
import * as onPostgres from "../dist/postgres.js";

const URL = process.env["DATABASE_URL"] ?? "";
const ON_PG = (process.argv[2] ?? "pg") === "pg";
const LONG = { ttl: { minutes: 5 } };
const PAY = "UPDATE orders SET status = 'paid' WHERE id = 7";
const UNDONE = "UPDATE orders SET status = 'undone' WHERE id = 7";

const admin = new pg.Client(URL);
const pool = new pg.Pool({ connectionString: URL, max: 3 });
const sql = postgres(URL, { max: 3, onnotice() {} });
const { host, port, database, user } = admin as Required<pg.Client>;
/** As this driver's settings name them. */
const settings: any = ON_PG ? { host, port, database, user } : { host, port, database, username: user };

type AnyLease = pgFence.Query & onPg.Lease;
const Fence: new (source: any, options?: pgFence.FenceOptions) => onPg.Fence = ON_PG ? onPg.Fence : (onPostgres.Fence as any);
/** The source of transactions, and how the work runs a statement. */
const on: any = ON_PG ? pool : sql;
const run = (tx: any, statement: string): Promise<any> => (ON_PG ? tx.query(statement) : tx.unsafe(statement));
const fence = new Fence(on);

before(() => admin.connect());
after(() => Promise.all([fence.close(), admin.end(), pool.end(), sql.end({ timeout: 5 })]));

beforeEach(async () => {
  // The leftovers of a test that failed.
  await admin.query("SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity WHERE state ~ '^idle in' AND pid <> pg_backend_pid()");
  await admin.query(`
    DROP TABLE IF EXISTS orders;
    CREATE TABLE orders (id bigint PRIMARY KEY, status text);
    INSERT INTO orders VALUES (7, 'new');
    SELECT fence_protect('orders', lease => 'order:{id}');
  `);
  // What an acquire that was given up is granted, is given back a moment later.
  await comesTrue(async () => (await value("SELECT count(*)::int FROM fence.leases WHERE state = 'held'")) === 0);
});

async function value(statement: string): Promise<any> {
  return Object.values((await admin.query(statement)).rows[0] ?? {})[0];
}

const status = () => value("SELECT status FROM orders");
const isHeld = (name: string) => value(`SELECT EXISTS (SELECT FROM lease_info('${name}') WHERE state = 'held')`);

async function comesTrue(check: () => Promise<boolean>): Promise<void> {
  for (let round = 0; !(await check()); round++) {
    assert.ok(round < 1200, "it does not come true");
    await sleep(50);
  }
}

/** The error that it is rejected with. */
async function errorOf(work: () => PromiseLike<unknown>): Promise<any> {
  try {
    await work();
  } catch (error) {
    return error;
  }
  return assert.fail("nothing is thrown");
}

const withOrder = (work: (lease: onPg.Lease) => Promise<void>) => () => fence.lease("order:7", LONG, work);

test("what is shown are the verbs, and nothing internal", withOrder(async (lease) => {
  const shown = (thing: object) => {
    const names = [...Object.getOwnPropertyNames(thing), ...Object.getOwnPropertyNames(Object.getPrototypeOf(thing))];
    return names.filter((name) => name !== "constructor").sort();
  };
  assert.deepEqual(shown(lease), ["check", "guard", "held", "names", "release", "remaining", "signal", "token"]);
  const verbs = Object.getPrototypeOf(Object.getPrototypeOf(fence));
  assert.deepEqual(Object.getOwnPropertyNames(verbs).sort(), ["adopted", "close", "constructor", "guard", "lead", "lease"]);
  assert.deepEqual(Object.keys(fence.adopted("job", 3)), ["name", "token", "guard"]);
  const errors = ["FenceError", "LeaseLost", "LeaseTaken", "NotGranted", "NotInstalled", "Refused", "TransactionLost"];
  assert.deepEqual(Object.keys(pgFence).filter((name) => !/^(__esModule|default|module\.exports)$/.test(name)).sort(), [...errors, "options"]);
  const require = createRequire(import.meta.url);
  assert.equal(require("pg_fence/pg").Fence, onPg.Fence);
  assert.equal(require("pg_fence/postgres").LeaseLost, require("pg_fence").LeaseLost);
}));

test("the types are strict", withOrder(async (lease) => {
  const wrong = [
    // @ts-expect-error a bare number is no span
    () => fence.lease("job", { ttl: 30 }),
    // @ts-expect-error there is no such unit
    () => fence.lease("job", { ttl: { second: 30 } }),
    // @ts-expect-error a name is a text
    () => fence.lease(7),
    // @ts-expect-error a flag is a boolean
    () => fence.lease("job", { shared: "false,1,false,false); CREATE TABLE pasted ()" }),
    // @ts-expect-error a token is no text
    async () => fence.adopted("job", "3"),
  ];
  // @ts-expect-error work that nobody waits for
  void (() => lease.guard(pool, () => {}));
  const led: Promise<number | undefined> = fence.lead("chief", async ({ token }) => token);
  assert.ok(Number(await led) > 0);
  for (const call of wrong.slice(0, -1)) assert.ok((await errorOf(call)) instanceof TypeError, String(call));
  const none = await errorOf(() => fence.lease("job", { metadata: () => {} }));
  assert.match(none.message, /metadata/);
}));

test("what is wrong is named before anything is sent", async () => {
  const deaf = new Fence({ host: "127.0.0.1", port: 1 });
  const wrong: [RegExp, any, any?][] = [
    [/^RangeError: ttl/, "job", { ttl: { milliseconds: 50 } }], [/^RangeError: wait/, "job", { wait: { seconds: -1 } }],
    [/^TypeError: slots/, "job", { slots: "3" }], [/^TypeError: reclaim/, "job", { reclaim: true }],
    [/^TypeError: several/, ["a", "b"], { shared: true }], [/^TypeError.*name/, ["a", 7]], [/^TypeError.*name/, undefined],
  ];
  for (const [error, names, options] of wrong) await assert.rejects(() => deaf.lease(names, options), error);
  for (const names of ["x".repeat(600), []]) {
    const refused = await errorOf(() => fence.lease(names));
    assert.ok(refused instanceof Refused && refused.sqlstate === "22023");
  }
  const sqlOfBun = Object.assign(async () => [], { unsafe() {}, options: { adapter: "postgres" } });
  for (const source of [7, undefined, null, admin, fence, new Date(), sqlOfBun]) {
    assert.throws(() => new Fence(source), /^TypeError: a fence takes a connection string/);
  }
  await fence.lease("order:7", LONG, async (lease) => {
    for (const there of [ON_PG ? 7 : pool, undefined, "pool", fence, sqlOfBun] as any[]) {
      await assert.rejects(() => lease.guard(there, async () => {}), /^TypeError: a guard takes/);
    }
    await assert.rejects(() => fence.guard(on, [], async () => {}), /^TypeError: a guard takes a lease/);
  });
});

/** A connection for a fence. */
const one = async () => (ON_PG ? new pg.Client(settings).connect() : postgres({ ...settings, max: 1, transform: postgres.camel }));

test("what a fence is made from", async () => {
  const parts = new globalThis.URL(`postgresql://${user}@${host}:${port}/${database}`);
  for (const source of [URL, parts, parts.href, settings, on, one]) {
    await using made = new Fence(source);
    await made.lease("job", { session: true }, async (lease) => assert.ok(lease.held));
  }
  await fence.lease("job", { holder: "it's \\ \"me\", {NULL}", metadata: { run: "7'" } }, async () => {
    assert.equal(await value("SELECT holder || (metadata->>'run') FROM lease_info('job')"), `it's \\ "me", {NULL}7'`);
  });
  await fence.lease(['a "quoted", {name}', "b\\"], {}, async ({ names }) => assert.ok(await isHeld(names[0]!)));
});

test("by whom it is taken, and for how long", async () => {
  const both = await fence.lease(["a", "b"], { holder: "night shift" });
  const taken = await errorOf(() => fence.lease("b"));
  assert.ok(taken instanceof LeaseTaken && taken.holder === "night shift" && taken instanceof FenceError);
  assert.ok(taken.remaining!.milliseconds <= 30_000 && taken.remaining!.milliseconds > 0);
  assert.match(taken.message, /is taken by night shift, for \d+ s/);
  await both.release();
  assert.ok(!both.held && both.remaining.milliseconds === 0);
  assert.equal((await errorOf(async () => both.check())).reason, "released");
});

test("not installed and not granted", async () => {
  await assert.rejects(new Fence(on, { schema: "elsewhere" }).lease("job"), NotInstalled);
  await new Fence(on, { schema: "public" }).lease("job", {}, async () => {});
  await admin.query("DROP ROLE IF EXISTS nobody_in_particular; CREATE ROLE nobody_in_particular LOGIN");
  const other = new Fence({ ...settings, user: "nobody_in_particular", username: "nobody_in_particular" });
  const error = await errorOf(() => other.lease("job"));
  assert.ok(error instanceof NotGranted && error.message.includes("fence_grant('nobody_in_particular')"), String(error));
  await admin.query("DROP ROLE nobody_in_particular");
});

test("a lease of another role says how it is kept while login roles change", async () => {
  await admin.query("CREATE ROLE team; CREATE ROLE monday LOGIN IN ROLE team; CREATE ROLE tuesday LOGIN IN ROLE team");
  await admin.query("SELECT fence_grant('team')");
  try {
    for (const acts of [undefined, "-c role=team"]) {
      const as = (role: string): any => (ON_PG ? { ...settings, user: role, options: acts } : { ...settings, username: role, connection: acts && { options: acts } });
      await using mine = new Fence(as("monday"));
      await using lease = await mine.lease("job");
      const work: any = ON_PG ? new pg.Pool(as("tuesday")) : postgres(as("tuesday"));
      const told = await lease.guard(work, async () => "guarded").catch((error) => error);
      await work.end();
      if (acts) assert.equal(told, "guarded");
      else assert.ok(told instanceof NotGranted && /role tuesday .*another role; .*act as one role/.test(told.message), String(told));
      assert.doesNotMatch(String(told), /fence_grant/);
    }
  } finally {
    await admin.query("SELECT fence_revoke('team'); DROP ROLE team, monday, tuesday");
  }
});

test("a transaction commits, returns what its work returns, and rolls back what fails", withOrder(async (lease) => {
  assert.equal(await lease.guard(on, async (tx) => (await run(tx, PAY), 42)), 42);
  assert.equal(await status(), "paid");
  const mine = new Error("of the work");
  const fails = async (tx: unknown) => {
    await run(tx, UNDONE);
    throw mine;
  };
  assert.equal(await errorOf(() => lease.guard(on, fails)), mine);
  assert.equal(await errorOf(() => lease.guard(on, () => assert.fail(mine))), mine);
  assert.equal((await errorOf(() => lease.guard(on, (tx) => run(tx, "SELECT 1/0")))).code, "22012");
  assert.equal(await status(), "paid");
}));

test("refusals are types, with the driver's error as their cause", () => fence.lease("other", LONG, async (lease) => {
  const error = await errorOf(() => lease.guard(on, (tx) => run(tx, PAY)));
  assert.ok(error instanceof Refused && error.name === "Refused" && error.sqlstate === "PF004" && error.hint);
  assert.equal(error.detail["lease"], "order:7");
  assert.equal((error.cause as any).code, "PF004");
}));

test("what the work swallows or ends itself is told", withOrder(async (lease) => {
  const failed = await errorOf(() => lease.guard(on, (tx) => run(tx, "SELECT 1/0").catch(() => {})));
  assert.ok(failed instanceof TransactionLost && !failed.inDoubt, String(failed));
  const ended = await errorOf(() => lease.guard(on, async (tx) => (await run(tx, PAY), await run(tx, "COMMIT"))));
  assert.ok(ended instanceof TransactionLost && ended.inDoubt, String(ended));
  assert.equal(await status(), "paid");
  await lease.guard(on, (tx) => run(tx, PAY));
}));

test("an open transaction is left to the code that began it", withOrder(async (lease) => {
  const inner = async (tx: any, fails: boolean) => {
    const guard = lease.guard(tx, async (same) => {
      await run(same, fails ? UNDONE : PAY);
      if (fails) throw new Error("inner");
    });
    if (fails) await assert.rejects(guard, /inner/);
    await guard.catch(() => {});
  };
  const outer = async (tx: any, before = "new") => {
    await inner(tx, false);
    await inner(tx, true);
    await lease.guard(tx, (same) => lease.guard(same, (again) => run(again, "SELECT 1")));
    assert.equal(await status(), before);
  };
  if (ON_PG) {
    const client = await pool.connect();
    await client.query("BEGIN");
    await outer(client);
    await client.query("COMMIT");
    client.release();
  } else {
    await sql.begin((tx) => outer(tx));
  }
  assert.equal(await status(), "paid");
  await lease.guard(on, (tx) => outer(tx, "paid"));
}));

test("several leases guard one transaction, and the last write releases", async () => {
  const [one, two, three] = [await fence.lease("order:7", LONG), await fence.lease(["a", "b"], LONG), await fence.lease("b2", LONG)];
  await fence.guard(on, [three, two, one], (tx) => run(tx, PAY));
  await fence.guard(on, [three, two], async () => {}, { release: true });
  assert.ok(!two.held && !(await isHeld("a")) && !(await isHeld("b2")) && one.held);
  const late = await errorOf(() => one.guard(on, async (tx) => {
    await run(tx, UNDONE);
    await admin.query("SELECT lease_revoke('order:7')");
  }, { release: true }));
  assert.ok(late instanceof LeaseLost && late.reason === "gone" && !late.inDoubt, String(late));
  const lost = await errorOf(() => one.guard(on, () => assert.fail("it began"), { release: true }));
  assert.ok(lost instanceof LeaseLost && lost.reason === "gone", String(lost));
  assert.equal(await status(), "paid");
});

test("numbers of others are exact", async () => {
  const number = 2n ** 60n;
  await admin.query("INSERT INTO orders VALUES (9, 'new')").catch(() => {});
  await fence.adopted("elsewhere", number).guard(on, async () => {});
  assert.equal(await value("SELECT token FROM lease_info('elsewhere')"), String(number));
  const stale = await errorOf(() => fence.adopted("elsewhere", 3).guard(on, () => assert.fail("it began")));
  assert.ok(stale instanceof Refused && stale.sqlstate === "PF001");
  await fence.adopted("elsewhere", number).guard(on, async () => {}, { release: true });
  assert.throws(() => fence.adopted("elsewhere", 2 ** 60), TypeError);
  await admin.query("SELECT lease_forget('elsewhere')");
});

test("a number that another holder has adopted is taken", async () => {
  try {
    await fence.adopted("elsewhere", 7).guard(on, async () => {});
    await new Fence(on).adopted("elsewhere", 7).guard(on, async () => {});
    assert.match(await value("SELECT holder FROM lease_info('elsewhere')"), new RegExp(`/${process.pid}/`));
    const taken = await errorOf(() => fence.adopted("elsewhere", 7, { holder: "another" }).guard(on, () => assert.fail("it began")));
    assert.ok(taken instanceof LeaseTaken && (taken.cause as any).code === "PF004", String(taken));
    const { stdout } = await program(`
      const adopted = fence.adopted("elsewhere", 7).guard(on, async () => "it began").catch(({ name }) => name);
      console.log(await adopted, await on.end());`);
    assert.equal(stdout, "LeaseTaken undefined\n");
    await assert.rejects(async () => fence.adopted("elsewhere", 7, { holder: 7 as any }), /^TypeError: holder/);
  } finally {
    await admin.query("SELECT lease_revoke('elsewhere'), lease_forget('elsewhere')");
  }
});

test("a session that ends is no loss, and leaves the pool as it was", withOrder(async (lease) => {
  for (const then of [async () => {}, (tx: any) => run(tx, UNDONE)]) {
    const error = await errorOf(() => lease.guard(on, async (tx) => {
      await run(tx, UNDONE);
      const { rows = undefined, ...list } = await run(tx, "SELECT pg_backend_pid() AS pid");
      await admin.query(`SELECT pg_terminate_backend(${(rows ?? Object.values(list))[0].pid}, 10000)`);
      await sleep(200);
      await then(tx);
    }));
    assert.ok(error instanceof TransactionLost && !error.inDoubt, String(error));
  }
  assert.ok(lease.held);
  for (let round = 0; round < 4; round++) await lease.guard(on, (tx) => run(tx, `${PAY} -- ${round}`));
  const reset = Object.assign(new Error("read ECONNRESET"), { code: "ECONNRESET", syscall: "read" });
  assert.equal(await errorOf(() => lease.guard(on, () => Promise.reject(reset))), reset, "of another connection");
}));

test("a loss ends what hangs, and aborts the signal", async () => {
  const lost = await errorOf(() => fence.lease("order:7", { ttl: { seconds: 1 } }, async (lease) => {
    setTimeout(() => admin.query("SELECT lease_revoke('order:7')"), 100);
    const hangs = errorOf(() => lease.guard(on, async (tx) => {
      await run(tx, "SET client_connection_check_interval = 100");
      await run(tx, "SELECT pg_sleep(60)");
    }));
    const never = errorOf(() => lease.guard(on, () => new Promise(() => {})));
    assert.ok((await errorOf(() => sleep(60_000, undefined, { signal: lease.signal }))).cause instanceof LeaseLost);
    assert.equal(((await hangs) as LeaseLost).reason, "gone");
    assert.equal(((await never) as LeaseLost).reason, "gone");
    await sleep(1, undefined, { signal: lease.signal });
  }));
  assert.ok(lost instanceof LeaseLost && lost.reason === "gone", "and not the timer's AbortError");
});

test("a rollback that cannot be ends the connection, and the server's statement", withOrder(async (lease) => {
  const error = await errorOf(() => lease.guard(on, async (tx) => {
    await run(tx, UNDONE);
    run(tx, "SELECT pg_sleep(600)").catch(() => {});
    await sleep(50);
    throw new Error("mine");
  }));
  assert.equal(error.message, "mine");
  await lease.guard(on, (tx) => run(tx, PAY));
  assert.equal(await value("SELECT count(*)::int FROM pg_stat_activity WHERE query LIKE '%pg_sleep(600)%' AND pid <> pg_backend_pid()"), 0);
}));

test("the end of a block tells a loss that nothing has told, and replaces no error", async () => {
  const revoked = async () => void (await value("SELECT lease_revoke('order:7')"));
  assert.ok((await errorOf(() => fence.lease("order:7", LONG, revoked))) instanceof LeaseLost);
  const mine = new Error("mine");
  assert.equal(await errorOf(() => fence.lease("order:7", LONG, async () => (await revoked(), assert.fail(mine)))), mine);
  const untold = await errorOf(async () => {
    await using _ = await fence.lease("order:7", LONG);
    await revoked();
  });
  assert.ok(untold instanceof LeaseLost);
  const told = await errorOf(async () => {
    await using lease = await fence.lease("order:7", LONG);
    await revoked();
    await lease.guard(on, () => assert.fail("it began"));
  });
  assert.ok(told instanceof LeaseLost, "and no SuppressedError");
});

/** A connection on which that is done after each statement that says so. */
async function meddled(word: RegExp, meddle: (text: string) => Promise<void>): Promise<any> {
  const [connection, verb]: [any, string] = [await one(), ON_PG ? "query" : "unsafe"];
  const send = connection[verb].bind(connection);
  const later = async (text: string, answer: Promise<unknown>) => [await answer, await meddle(text)][0];
  connection[verb] = (...call: any[]) => {
    const [sent, text] = [send(...call), call[0].text ?? call[0]];
    if (!word.test(text)) return sent;
    return ON_PG ? later(text, sent) : { raw: () => later(text, sent.raw()) };
  };
  return connection;
}

test("an acquire whose lease is lost already, or whose renewal dies, leaves nothing behind", async () => {
  let dies = false;
  // The two pauses together are longer than a third of the ttl, so the lease is renewed before the acquire returns.
  const pause = () => sleep(1200);
  await using slow = new Fence(() => pause().then(() => meddled(/lease_acquire|lease_keep/, async (text) => {
    if (text.includes("lease_keep")) return dies ? Promise.reject("no error") : undefined;
    if (!dies) await admin.query("SELECT lease_revoke('b')");
    await pause();
  })));
  assert.ok((await errorOf(() => slow.lease("b", { ttl: { seconds: 6 } }))) instanceof LeaseLost);
  dies = true;
  assert.equal(await errorOf(() => slow.lease("a", { ttl: { seconds: 6 } })), "no error");
  assert.ok(!(await isHeld("a")) && !(await isHeld("b")));
});

test("leading ends with its work, its errors and its stop", async () => {
  assert.equal(await fence.lead("chief", async () => 7, LONG), 7);
  await assert.rejects(fence.lead("chief", () => Promise.reject(new Error("mine")), LONG), /mine/);
  const stop = new AbortController();
  await fence.lead("chief", async () => {
    const waits = fence.lead("chief", () => assert.fail("it leads"), { stop: stop.signal });
    await sleep(100);
    stop.abort();
    assert.equal(await waits, undefined);
  });
  await assert.rejects(new Fence(on, { schema: "elsewhere" }).lead("chief", async () => {}), NotInstalled);
  const codes = ["53300", "25006"];
  await using full = new Fence(async () => {
    const code = codes.shift();
    return code ? Promise.reject(Object.assign(new Error(code), { code })) : one();
  });
  assert.equal(await full.lead("chief", async () => 7, { ttl: { seconds: 1 } }), 7);
});

test("a caller that gives up gets its own reason, and nothing is left", withOrder(async () => {
  const signal = AbortSignal.timeout(300);
  assert.equal(await errorOf(() => fence.lease("order:7", { wait: { minutes: 5 }, signal })), signal.reason);
  assert.equal(await errorOf(() => fence.lease("other", { signal })), signal.reason);
  assert.equal(await isHeld("other"), false);
}));

test("the end of the last connection is no loss of the next one's session leases", async () => {
  for (const pause of [0, 1, 2, 5, 10, 20, 50]) {
    await fence.lease("job", { session: true }, () => sleep(pause));
  }
});

test("events", async () => {
  const events: string[] = [];
  await using watched = new Fence(on, { onEvent: ({ kind }) => assert.ok(events.push(kind) > 1, "a handler may fail") });
  await watched.lease("job", { ttl: { seconds: 1 } }, () => sleep(500));
  assert.deepEqual([events[0], events[1], events.at(-1)], ["acquired", "renewed", "released"]);
});

/** A server that hands on what it is sent, until it is silent. */
async function proxy(): Promise<{ port: number; be: (silent: boolean) => void; close: () => void }> {
  const sockets: Socket[] = [];
  let isSilent = false;
  const server = createServer((client) => {
    const behind = connect(port, host);
    sockets.push(client, behind);
    for (const [from, to] of [[client, behind], [behind, client]] as const) {
      from.on("data", (data) => isSilent || to.write(data)).on("error", () => {}).on("close", () => isSilent || to.destroy());
    }
  }).listen(0, "127.0.0.1");
  await once(server, "listening");
  const close = () => (server.close(), sockets.forEach((socket) => socket.destroy()));
  return { port: (server.address() as AddressInfo).port, be: (silent) => (isSilent = silent), close };
}

test("nothing hangs on a server that says nothing", async () => {
  const way = await proxy();
  const there = { ...settings, host: "127.0.0.1", port: way.port };
  const work: any = ON_PG ? new pg.Pool({ ...there, max: 1 }) : postgres({ ...there, max: 1, onnotice() {} });
  work.on?.("error", () => {});
  const cut = new Fence(there);
  const ttl = { ttl: { milliseconds: 900 } };
  const lost = await errorOf(() => cut.lease("order:7", ttl, async (lease) => {
    const [busy, idle] = [errorOf(() => lease.guard(work, async (tx) => {
      await run(tx, UNDONE);
      way.be(true);
      await run(tx, UNDONE);
    })), errorOf(() => lease.guard(work, () => assert.fail("the pool has no other client")))];
    for (const error of [await busy, await idle]) assert.ok(error instanceof LeaseLost && error.reason === "deadline", String(error));
    for (const more of [{}, { wait: { milliseconds: 50 } }, { session: true }]) {
      const error = await errorOf(() => cut.lease("other", { ...ttl, ...more }));
      assert.equal(error.constructor, FenceError, String(error));
    }
  }));
  assert.ok(lost instanceof LeaseLost, String(lost));
  await cut.close();
  assert.match(String(await errorOf(() => cut.lease("job"))), /the fence is closed/);
  way.close();
  await (ON_PG ? work.end() : work.end({ timeout: 0 }));
  await comesTrue(async () => !(await isHeld("order:7")));
});

test("the first worker ends by itself after a loss in the middle of its statement", async () => {
  const example = new globalThis.URL(`../examples/first_worker${ON_PG ? "" : "_postgres"}.mjs`, import.meta.url);
  // So the server ends a statement whose client is gone.
  await admin.query(`ALTER DATABASE "${database}" SET client_connection_check_interval = 100`);
  await admin.query("BEGIN; SELECT FROM orders FOR UPDATE");
  try {
    const works = promisify(execFile)(process.execPath, [fileURLToPath(example), URL]);
    const waits = "SELECT count(*)::int AS n FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'UPDATE orders%'";
    await comesTrue(async () => (await pool.query(waits)).rows[0].n === 1);
    await pool.query("SELECT lease_revoke('order:7')");
    assert.match((await works).stdout, /stop, and report no failure/);
  } finally {
    await admin.query("ROLLBACK");
    await admin.query(`ALTER DATABASE "${database}" RESET client_connection_check_interval`);
  }
});

/** A process of its own with that module as its program, and what it says. */
function program(body: string, ...flags: string[]): Promise<{ stdout: string; stderr: string }> {
  const source = `
    import { Fence } from ${JSON.stringify(new globalThis.URL(`../dist/${ON_PG ? "pg" : "postgres"}.js`, import.meta.url).href)};
    import driver from ${JSON.stringify(import.meta.resolve(ON_PG ? "pg" : "postgres"))};
    const url = ${JSON.stringify(URL)};
    const fence = new Fence(url);
    const on = ${ON_PG ? "new driver.Pool({ connectionString: url })" : "driver(url)"};
    ${body}`;
  return promisify(execFile)(process.execPath, [...flags, "--input-type=module", "-e", source]);
}

test("a process that ends normally releases, and one that waits for a loss does not end", async () => {
  for (const more of ["", ", session: true"]) {
    const { stdout, stderr } = await program(`console.log((await fence.lease("kept", { ttl: { minutes: 5 }${more} })).token)`);
    assert.match(stdout, /^\d+\n$/);
    assert.equal(stderr, "");
    assert.equal(await isHeld("kept"), false);
  }
  const waits = program(`
    const { signal } = await fence.lease("kept", { ttl: { seconds: 9 } });
    await new Promise((resolve) => signal.addEventListener("abort", resolve));
    console.log(signal.reason.reason);`);
  await comesTrue(() => isHeld("kept"));
  await value("SELECT lease_revoke('kept')");
  assert.equal((await waits).stdout, "gone\n");
});

test("a lease that nothing refers to is told, and released", async () => {
  const { stdout, stderr } = await program(`
    await (async () => void (await fence.lease("forgotten", { ttl: { minutes: 5 } })))();
    const collects = setInterval(() => gc(), 20);
    process.once("warning", ({ message }) => (clearInterval(collects), console.log(message)));`, "--expose-gc");
  assert.match(stdout, /the lease forgotten was forgotten, and not released/, stderr);
  await comesTrue(async () => !(await isHeld("forgotten")));
});

test("a lease is not forgotten while work goes by its signal, its guard or its block", async () => {
  const { stdout, stderr } = await program(`
    const [told, ttl, ends] = [[], { ttl: { minutes: 5 } }, {}];
    process.on("warning", ({ message }) => told.push(message));
    ends.promise = new Promise((resolve) => (ends.resolve = resolve));
    const use = (name, of) => fence.lease(name, ttl).then(of);
    const signal = await use("by signal", ({ signal }) => signal);
    const guard = await use("by guard", ({ guard }) => guard);
    const works = [
      use("in its guard", ({ guard }) => guard(on, () => ends.promise)),
      use("one of several", (lease) => fence.guard(on, [lease], () => ends.promise)),
      fence.lease("in a block", ttl, () => ends.promise),
    ];
    await use("forgotten", () => {});
    for (let after = 0; after < 20; after += told.length) await new Promise((go) => setTimeout(go, 20, gc()));
    await guard(on, async () => {});
    ends.resolve();
    await Promise.all(works);
    console.log(told.join(), signal.aborted);
    await Promise.all([fence.close(), on.end()]);`, "--expose-gc");
  assert.equal(stdout, "the lease forgotten was forgotten, and not released false\n", stderr);
});

test("code that knows nothing of leases is fenced by its connection", withOrder(async (lease) => {
  if (ON_PG) {
    const client = await new pg.Client({ connectionString: URL, options: options(lease) }).connect();
    await client.query(PAY).finally(() => client.end());
  } else {
    const one = postgres({ ...settings, connection: { options: options(lease) } });
    await one.unsafe(PAY).finally(() => one.end());
  }
  assert.equal(await status(), "paid");
}));

// The ORMs: a model saved as ever, that knows nothing of the fence, in the ORM's own transaction.

interface Orm {
  /** With `lease`, guarded by it; with `fails`, an error of the work's own follows. */
  save(status: string, lease?: AnyLease, fails?: Error): Promise<unknown>;
  close(): Promise<unknown>;
}

async function under(lease: AnyLease | undefined, query: pgFence.Query, save: () => PromiseLike<unknown>, fails?: Error): Promise<void> {
  const work = async () => {
    await save();
    if (fails) throw fails;
  };
  await (lease ? lease.guard(query, work) : work());
}

async function typeorm(): Promise<Orm> {
  const columns = { id: { type: "bigint", primary: true }, status: { type: "text" } } as const;
  const Order = new EntitySchema<{ id: string; status: string }>({ name: "Order", tableName: "orders", columns });
  const source = await new DataSource({ type: "postgres", url: URL, entities: [Order] }).initialize();
  return {
    save: (status, lease, fails) => source.transaction((manager) =>
      under(lease, (text) => manager.query(text), () => manager.save(Order, { id: "7", status }), fails)),
    close: () => source.destroy(),
  };
}

async function sequelize(): Promise<Orm> {
  const db = new Sequelize({ dialect: "postgres", host, port, database: database!, username: user!, logging: false });
  const columns = { id: { type: DataTypes.BIGINT, primaryKey: true }, status: DataTypes.TEXT };
  const Order = db.define("orders", columns, { timestamps: false });
  return {
    save: (status, lease, fails) => db.transaction((transaction) => under(
      lease, (text) => db.query(text, { transaction }), () => Order.update({ status }, { where: { id: 7 }, transaction }), fails)),
    close: () => db.close(),
  };
}

async function kysely(): Promise<Orm> {
  const dialect = new PostgresDialect({ pool: new pg.Pool({ connectionString: URL }) });
  const db = new Kysely<{ orders: { id: string; status: string } }>({ dialect });
  return {
    save: (status, lease, fails) => db.transaction().execute((trx) => under(lease, (text) => kyselySql.raw(text).execute(trx),
      () => trx.updateTable("orders").set({ status }).where("id", "=", "7").execute(), fails)),
    close: () => db.destroy(),
  };
}

async function drizzle(): Promise<Orm> {
  const orders = pgTable("orders", { id: bigint({ mode: "number" }).primaryKey(), status: text() });
  const db: any = ON_PG ? drizzleOnPg(pool) : drizzleOnPostgres(sql);
  return {
    save: (status, lease, fails) => db.transaction((tx: any) =>
      under(lease, (text) => tx.execute(drizzleSql.raw(text)), () => tx.update(orders).set({ status }), fails)),
    close: async () => {},
  };
}

async function prisma(): Promise<Orm> {
  // Its client is generated.
  const { PrismaClient } = createRequire(import.meta.url)("./prisma/index.js");
  const db = new PrismaClient({ adapter: new PrismaPg({ host, port, user, database }) });
  return {
    save: (status, lease, fails) => db.$transaction((tx: any) => under(lease, (text) => tx.$queryRawUnsafe(text),
      () => tx.orders.update({ where: { id: 7 }, data: { status } }), fails)),
    close: () => db.$disconnect(),
  };
}

for (const open of [typeorm, sequelize, kysely, drizzle, prisma]) {
  test(`${open.name}: a model is saved as ever under a lease, and only there`, async () => {
    const orm = await open();
    try {
      await fence.lease("order:7", LONG, async (lease) => {
        await orm.save("paid", lease as AnyLease);
        assert.ok((await errorOf(() => orm.save("without a lease"))));
        const mine = new Error("mine");
        assert.equal(await errorOf(() => orm.save("undone", lease as AnyLease, mine)), mine);
        assert.equal(await status(), "paid");
        await fence.lease("other", LONG, async (other) => {
          const refused = await errorOf(() => orm.save("late", other as AnyLease));
          assert.ok(refused instanceof Refused && refused.sqlstate === "PF004", String(refused));
        });
        await orm.save("paid again", lease as AnyLease);
      });
      assert.equal(await status(), "paid again");
    } finally {
      await orm.close();
    }
  });
}

test("a function that runs outside of a transaction is refused before the work", withOrder(async (lease) => {
  const error = await errorOf(() => lease.guard((text: string) => admin.query(text), () => assert.fail("it began")));
  assert.equal(error.code, "25P01");
}));
