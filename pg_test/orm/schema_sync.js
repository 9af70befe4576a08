// TypeORM's synchronize and Sequelize's sync on fenced tables: prints what each would do to the fence, or has done.

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
  console.log("TypeORM, not mapped:", await proposed(columns));
  console.log("TypeORM, mapped:", await proposed({ ...columns, fence }));

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
  console.log("Sequelize, sync:", await fences());
  await db.sync({ alter: { drop: false } });
  console.log("Sequelize, sync with alter, without drop:", await fences());
  await db.sync({ alter: true });
  console.log("Sequelize, sync with alter:", await fences());
  await db.sync({ force: true });
  console.log("Sequelize, sync with force:", await fences());
  await db.close();
})().catch((error) => { console.error(error); process.exit(1); });
