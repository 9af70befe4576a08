// TypeORM on managed tables: it fails where something else comes of a step than it says.

const assert = require("assert");
const { DataSource, EntitySchema } = require("typeorm");

const [port, database] = process.argv.slice(2);
const columns = {
  id: { type: "int", primary: true, generated: true },
  v: { type: "int" },
  fence: { type: "bigint", nullable: true },
};
const Order = new EntitySchema({
  name: "Order", tableName: "orders", columns: { ...columns, id: { type: "int", primary: true } },
});
const Job = new EntitySchema({ name: "Job", tableName: "jobs", columns });
const source = new DataSource({
  type: "postgres", host: "127.0.0.1", port: Number(port), username: "postgres", database,
  entities: [Order, Job],
});

const call = async (name, ...values) => {
  const places = values.map((_, i) => `$${i + 1}`).join(", ");
  return (await source.query(`SELECT ${name}(${places}) AS answer`, values))[0].answer;
};

/** In a transaction of its own, under a token if there is one; that must come of it. */
const step = async (what, work, token, comes = "done") => {
  let came = "done";
  try {
    await source.transaction(async (manager) => {
      if (token) await manager.query("SELECT set_config('pg_fence.token', $1, true)", [token]);
      await work(manager);
    });
  } catch (error) {
    if (!error.driverError) throw error;
    came = error.driverError.code;
  }
  assert.equal(came, comes, `${what}: ${came}`);
};

const first = (kind) => source.getRepository(kind).findOneOrFail({ where: {}, order: { id: "ASC" } });
const saves = (kind, row, v) => (manager) => { row.v = v; return manager.save(kind, row); };
const refreshes = (kind, v) => async (manager) => {
  const row = await manager.findOneOrFail(kind, { where: {}, order: { id: "ASC" } });
  row.v = v;
  await manager.save(kind, row);
};
const writesAll = (kind, row, v) => (manager) => manager.update(kind, { id: row.id }, { ...row, v });
const upserts = (row) => (manager) => manager.upsert(Order, row, ["id"]);
const deletes = (manager) => manager.delete(Order, { id: 1 });

(async () => {
  await source.initialize();
  // A row whose key the database makes is created without a lease, by the shop.
  await step("the shop creates a job", (m) => m.save(Job, { v: 1 }));
  await step("it creates several", (m) => m.save(Job, [{ v: 2 }, { v: 3 }]));
  await step("it brings a fence", (m) => m.save(Job, { v: 4, fence: "7" }), null, "PF002");
  const fences = (await source.getRepository(Job).find()).map((job) => job.fence);
  assert.deepEqual([...new Set(fences)], [null]);

  const token = await call("lease_acquire", "order:1", "first");
  const [row, other] = [await first(Order), await first(Order)];
  await step("the holder saves", saves(Order, row, 1), token);
  await step("it saves the same object again", saves(Order, row, 2), token);
  await step("it refreshes and saves", refreshes(Order, 3), token);
  await step("an object read before all that", saves(Order, other, 4), token);
  await step("it writes every column", writesAll(Order, other, 5), token);
  await step("it upserts", upserts({ id: 1, v: 5, fence: null }), token);
  const reader = await first(Order);
  assert.equal(reader.fence, token);

  await step("who has only read saves", saves(Order, await first(Order), 9), null, "PF002");
  await step("who has only read writes every column", writesAll(Order, reader, 9), null, "PF002");
  await step("who has only read upserts", upserts({ ...reader, v: 9 }), null, "PF002");
  await step("who has only read deletes", deletes, null, "PF002");

  await call("lease_revoke", "order:1");
  const newer = await call("lease_acquire", "order:1", "second");
  await step("before the next one the stale worker refreshes and saves", refreshes(Order, 9), token, "PF004");
  await step("the next holder saves", saves(Order, reader, 6), newer);
  await step("the stale worker saves", saves(Order, row, 9), token, "PF001");
  await step("the stale worker refreshes and saves", refreshes(Order, 9), token, "PF001");
  await step("the stale worker writes every column", writesAll(Order, await first(Order), 9), token, "PF001");
  await step("the stale worker upserts", upserts({ ...(await first(Order)), v: 9 }), token, "PF004");
  await step("the stale worker deletes", deletes, token, "PF001");
  await step("the next holder saves again", saves(Order, reader, 7), newer);

  // Row by row, without a lease: the order of the tokens decides.
  const job = await first(Job);
  await step("a worker claims a job", saves(Job, job, 10), newer);
  await step("it saves the job again", saves(Job, job, 11), newer);
  await step("a stale worker refreshes and saves the job", refreshes(Job, 99), token, "PF001");
  await step("who has only read the job saves", saves(Job, await first(Job), 99), null, "PF002");
  assert.deepEqual([(await first(Order)).v, (await first(Job)).v], [7, 11]);
  await source.destroy();
})().catch((error) => { console.error(error); process.exit(1); });
