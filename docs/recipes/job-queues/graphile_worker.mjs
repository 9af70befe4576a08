import { quickAddJob, run } from "graphile-worker";
import pg from "pg";
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

async function total({ url }, { job }) {
  // The job's last worker may be frozen: its lease ends within its ttl. If it does not, LeaseTaken has the queue try later.
  const lease = await fence.lease(`job:${job.id}`, { ttl, wait: ttl });
  lease.signal.addEventListener("abort", () => leave(lease.signal.reason));
  try {
    const amount = Number(await (await fetch(url)).text());
    await lease.guard(pool, async (client) => {
      const done = await client.query("SELECT FROM totals WHERE job_id = $1", [job.id]);
      if (done.rowCount > 0) return;
      await client.query("INSERT INTO totals (job_id, amount) VALUES ($1, $2)", [job.id, amount]);
    });
  } catch (error) {
    if (error instanceof LeaseLost || (error instanceof Refused && /PF00[14]/.test(error.sqlstate))) leave(error);
    throw error;
  } finally {
    await lease.release();
  }
}

/** Hands over the jobs that were locked before their lease ended, and are locked still. */
async function rescue(_, { query }) {
  await query(`
    SELECT graphile_worker.force_unlock_workers(array_agg(DISTINCT j.locked_by))
      FROM graphile_worker.jobs j, lease_info('job:' || j.id) AS i
     WHERE i.state = 'expired' AND j.locked_at < i.expires_at`);
}

if (url !== undefined) {
  await quickAddJob({ pgPool: pool }, "total", { url });
  await pool.end();
} else {
  await run({ pgPool: pool, concurrency: 1, taskList: { total, rescue }, crontab: "* * * * * rescue" });
}
