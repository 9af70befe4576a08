import { setTimeout as sleep } from "node:timers/promises";
import pg from "pg";
import { classify, Fence, LeaseLost } from "pg_fence/pg";

const pool = new pg.Pool({ connectionString: process.argv[2] });
const fence = new Fence(pool);
const lease = await fence.lease("order:7", { ttl: { seconds: 30 } });
try {
  if (lease === null) {
    console.log("somebody else is at it");
  } else {
    console.log("order:7 is ours, under token", lease.token);
    await sleep(3000); // Whatever takes long goes here: a heartbeat keeps the lease meanwhile.
    await lease.guard(pool, (client) => client.query("UPDATE orders SET status = 'paid' WHERE id = 7"));
    console.log("order 7 is paid");
  }
} catch (error) {
  if (!(classify(error) instanceof LeaseLost)) throw error;
  console.log("stop, and report no failure:", error);
} finally {
  await lease?.release();
  await pool.end();
}
