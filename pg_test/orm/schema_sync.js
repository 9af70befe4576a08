// What TypeORM's synchronize and Sequelize's sync would do to the fence, or have done.

const assert = require("assert");
const { DataSource, EntitySchema } = require("typeorm");
const { DataTypes, Sequelize } = require("sequelize");

const [port, database] = process.argv.slice(2);
const columns = { id: { type: "int", primary: true }, v: { type: "int" }, version: { type: "int", default: 1 } };
/** As TypeORM maps a column that is the database's alone. */
const fence = { type: "bigint", nullable: true, select: false, insert: false, update: false };

/** The statements that `synchronize` would run. */
const proposed = async (columns) => {
  const Order = new EntitySchema({ name: "Order", tableName: "orders", columns });
  const source = new DataSource({
    type: "postgres", host: "127.0.0.1", port: Number(port), username: "postgres", database, entities: [Order],
  });
  await source.initialize();
  const { upQueries } = await source.driver.createSchemaBuilder().log();
  await source.destroy();
  return upQueries.map(({ query }) => query).filter((query) => /fence/.test(query)).join("; ") || "nothing";
};

(async () => {
  assert.equal(await proposed(columns), 'ALTER TABLE "orders" DROP COLUMN "fence"');
  assert.equal(await proposed({ ...columns, fence }), 'COMMENT ON COLUMN "orders"."fence" IS NULL');

  const run = [];
  const db = new Sequelize({
    dialect: "postgres", host: "127.0.0.1", port, database, username: "postgres", logging: (text) => run.push(text),
  });
  const integer = { type: DataTypes.INTEGER, allowNull: false };
  db.define("orders", { id: { ...integer, primaryKey: true }, v: integer, version: integer }, { timestamps: false });
  const fences = async () => {
    const [[row]] = await db.query(`
      SELECT (SELECT count(*) FROM pg_attribute WHERE attrelid = 'orders'::regclass AND attname = 'fence')::int AS columns,
             (SELECT count(*) FROM pg_trigger WHERE tgrelid = 'orders'::regclass AND tgname LIKE 'fenced%')::int AS triggers`);
    return `columns ${row.columns}, triggers ${row.triggers > 0 ? "some" : "none"}`;
  };
  await db.sync();
  assert.equal(await fences(), "columns 1, triggers some");
  await db.sync({ alter: { drop: false } });
  assert.equal(await fences(), "columns 1, triggers some");
  await db.sync({ alter: true });
  assert.equal(await fences(), "columns 0, triggers some");
  await db.sync({ force: true });
  assert.equal(await fences(), "columns 0, triggers none");
  await db.close();
})().catch((error) => { console.error(error); process.exit(1); });
