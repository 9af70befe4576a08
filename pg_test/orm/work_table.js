// Object mappers on a table of work, with the mappings of docs/tutorial/orms.md: each saves a run that it has claimed, one that
// was swept up since, and one that was claimed since. It fails where something else comes of it than the page says.

const assert = require("assert");
const path = require("path");
const { Client } = require("pg");

const [port, database] = process.argv.slice(2);
const place = { host: "127.0.0.1", port: Number(port), user: "postgres", database };
const client = new Client(place);

// `import` does not look in NODE_PATH.
const esm = (file) => import(path.join(process.env.NODE_PATH, file));

const ask = async (sql, ...given) => Object.values((await client.query(sql, given)).rows[0] ?? {})[0];
const claim = () =>
  ask("UPDATE runs SET state = 'running', held_until = clock_timestamp() + '1 h' WHERE id = 1 RETURNING fence");
const giveUp = (token) => ask("UPDATE runs SET state = 'ready', held_until = NULL, fence = $1 WHERE id = 1", token);
const result = () => ask("SELECT result FROM runs WHERE id = 1");

/** `tells` reads from an error what it is. */
const play = async (mapper, load, save, tells) => {
  const comes = async (given, what, wanted) => {
    let came = "done";
    try {
      await save(given, what);
    } catch (error) {
      came = tells(error);
    }
    assert.equal(came, wanted, `${mapper}, ${what}`);
  };
  const token = await claim();
  const [given, sweptUp, older] = [await load(), await load(), await load()];
  await comes(given, "holds it", "done");
  assert.equal(await result(), "holds it", mapper);
  await comes(given, "writes again", "done");
  assert.equal(await result(), "writes again", mapper);
  await giveUp(token);
  await comes(sweptUp, "swept up", "PF004");
  const newer = await claim();
  await comes(older, "claimed since", "PF001");
  assert.equal(await result(), "writes again", mapper);
  await giveUp(newer);
};

const typeorm = async () => {
  const { DataSource, EntitySchema } = require("typeorm");
  const columns = {
    id: { type: "bigint", primary: true },
    result: { type: "text", nullable: true },
    fence: { type: "bigint", nullable: true },
  };
  const Run = new EntitySchema({ name: "Run", tableName: "runs", columns });
  const { user: username, ...rest } = place;
  const source = await new DataSource({ type: "postgres", ...rest, username, entities: [Run] }).initialize();
  const runs = source.getRepository(Run);
  const save = (run, what) => runs.update({ id: run.id }, { result: what, fence: run.fence });
  await play("TypeORM", () => runs.findOneByOrFail({ id: "1" }), save, (error) => error.code);
  await source.destroy();
};

const mikro = async () => {
  const { DriverException } = await esm("@mikro-orm/core/index.js");
  const { MikroORM, EntitySchema } = await esm("@mikro-orm/postgresql/index.js");
  const Run = new EntitySchema({
    name: "Run",
    tableName: "runs",
    properties: {
      id: { type: "bigint", primary: true },
      result: { type: "text", nullable: true },
      fence: { type: "bigint", nullable: true },
    },
    hooks: { beforeUpdate: [(a) => { a.changeSet.payload.fence ??= a.entity.fence; }] },
  });
  const { database: dbName, ...rest } = place;
  const orm = await MikroORM.init({ ...rest, dbName, entities: [Run] });
  const load = async () => {
    const em = orm.em.fork();
    return { em, run: await em.findOneOrFail(Run, "1") };
  };
  const save = async ({ em, run }, what) => {
    run.result = what;
    await em.flush();
  };
  await play("MikroORM", load, save, (error) => {
    assert(error instanceof DriverException, String(error));
    return error.code;
  });
  await orm.close();
};

const sequelize = async () => {
  const { Sequelize, DataTypes, DatabaseError } = require("sequelize");
  const { user: username, ...rest } = place;
  const source = new Sequelize({ dialect: "postgres", ...rest, username, logging: false });
  const columns = {
    id: { type: DataTypes.BIGINT, primaryKey: true },
    result: DataTypes.TEXT,
    fence: DataTypes.BIGINT,
  };
  const hooks = {
    beforeUpdate: (i, o) => {
      i.changed("fence", true);
      if (!o.fields.includes("fence")) o.fields.push("fence");
    },
  };
  const Run = source.define("Run", columns, { tableName: "runs", timestamps: false, hooks });
  const save = (run, what) => run.set({ result: what }).save();
  await play("Sequelize", () => Run.findByPk("1"), save, (error) => {
    assert(error instanceof DatabaseError, String(error));
    return error.original.code;
  });
  await source.close();
};

const drizzle = async () => {
  const { drizzle: open } = require("drizzle-orm/node-postgres");
  const { pgTable, bigint, text } = require("drizzle-orm/pg-core");
  const { eq } = require("drizzle-orm");
  const runs = pgTable("runs", {
    id: bigint({ mode: "bigint" }).primaryKey(),
    result: text(),
    fence: bigint({ mode: "bigint" }),
  });
  const db = open(client);
  const load = async () => (await db.select().from(runs).where(eq(runs.id, 1n)))[0];
  const save = (run, what) => db.update(runs).set({ result: what, fence: run.fence }).where(eq(runs.id, run.id));
  await play("Drizzle", load, save, (error) => error.cause.code);
};

const kysely = async () => {
  const { Kysely, PostgresDialect } = await esm("kysely/dist/index.js");
  const { Pool } = require("pg");
  const db = new Kysely({ dialect: new PostgresDialect({ pool: new Pool(place) }) });
  const load = () => db.selectFrom("runs").selectAll().where("id", "=", "1").executeTakeFirstOrThrow();
  const save = (run, what) =>
    db.updateTable("runs").set({ result: what, fence: run.fence }).where("id", "=", run.id).execute();
  await play("Kysely", load, save, (error) => error.code);
  await db.destroy();
};

const objection = async () => {
  const knex = require("knex")({ client: "pg", connection: place });
  const { Model } = require("objection");
  class Run extends Model {
    static tableName = "runs";
  }
  Run.knex(knex);
  const save = (run, what) => run.$query().patch({ result: what, fence: run.fence });
  await play("Objection", () => Run.query().findById("1"), save, (error) => error.code);
  await knex.destroy();
};

(async () => {
  await client.connect();
  for (const mapper of [typeorm, mikro, sequelize, drizzle, kysely, objection]) await mapper();
  await client.end();
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
