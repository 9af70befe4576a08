import pg from "pg";
import { PgBoss } from "pg-boss";
import { Fence } from "pg_fence/pg";

const [connectionString, url] = process.argv.slice(2);
const expireInSeconds = Number(process.env.EXPIRE_SECONDS ?? 900);
const pool = new pg.Pool({ connectionString });
pool.on("error", (error) => console.error(error));     // an idle connection broke; the pool makes another
const fence = new Fence(pool);

async function total([{ id, data, retryCount }]) {
  const run = fence.adopted(`job:${id}`, retryCount + 1);
  const isDone = async (client) => (await client.query("SELECT FROM totals WHERE job_id = $1", [id])).rowCount > 0;
  if (await run.guard(pool, isDone)) return;
  const amount = Number(await (await fetch(data.url)).text());
  await run.guard(pool, async (client) => {         // a late run raises PF001 here: pg-boss refuses its report as well
    if (await isDone(client)) return;
    await client.query("INSERT INTO totals (job_id, amount) VALUES ($1, $2)", [id, amount]);
  }, { release: true });
}

const boss = new PgBoss({ connectionString, superviseIntervalSeconds: 5 });
boss.on("error", console.error);
await boss.start();
await boss.createQueue("total", { expireInSeconds, retryLimit: 5 });
if (url !== undefined) {
  await boss.send("total", { url });
  await boss.stop();
  await pool.end();
} else {
  await boss.work("total", { pollingIntervalSeconds: 1, includeMetadata: true }, total);
}
