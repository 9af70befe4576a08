import pg from "pg";
import PgBoss from "pg-boss";
import { Fence, LeaseLost, Refused } from "pg_fence/pg";

const [connectionString, url] = process.argv.slice(2);
const ttl = { seconds: Number(process.env.LEASE_SECONDS ?? 30) };
const pool = new pg.Pool({ connectionString });
pool.on("error", (error) => console.error(error));     // an idle connection broke; the pool makes another
const fence = new Fence(pool);

/** The job is another's by now: neither a result nor a failure of ours may reach the queue. */
function leave(loss) {
  console.error("the job is another's now:", loss);
  process.exit(1);
}

async function total([{ id, data }]) {
  // The job's last worker may be frozen: its lease ends within its ttl. If it does not, LeaseTaken has the queue try later.
  const lease = await fence.lease(`job:${id}`, { ttl, wait: ttl });
  lease.signal.addEventListener("abort", () => leave(lease.signal.reason));
  try {
    const amount = Number(await (await fetch(data.url)).text());
    await lease.guard(pool, async (client) => {
      const done = await client.query("SELECT FROM totals WHERE job_id = $1", [id]);
      if (done.rowCount > 0) return;
      await client.query("INSERT INTO totals (job_id, amount) VALUES ($1, $2)", [id, amount]);
    });
  } catch (error) {
    if (error instanceof LeaseLost || (error instanceof Refused && /PF00[14]/.test(error.sqlstate))) leave(error);
    throw error;
  } finally {
    await lease.release();
  }
}

const boss = new PgBoss({ connectionString, maintenanceIntervalSeconds: 5 });
boss.on("error", console.error);
await boss.start();
// Much longer than the ttl: a worker that thaws then hears of its loss before it hears of its lateness.
const expireInSeconds = Number(process.env.EXPIRE_SECONDS ?? 600);
await boss.createQueue("total", { expireInSeconds, retryLimit: 5 });
if (url !== undefined) {
  await boss.send("total", { url });
  await boss.stop();
  await pool.end();
} else {
  await boss.work("total", { pollingIntervalSeconds: 1 }, total);
}
