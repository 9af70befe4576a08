import pg from "pg";
import { classify, Fence, LeaseLost } from "pg_fence/pg";

const pool = new pg.Pool({ connectionString: process.argv[2] });
const fence = new Fence(pool);
try {
  await using lease = await fence.lease("order:7", { ttl: { seconds: 30 } });
  if (lease === null) {
    console.log("somebody else is at it");
  } else {
    // Whatever takes long goes here: a heartbeat keeps the lease meanwhile.
    await lease.guard(pool, (client) => client.query("UPDATE orders SET status = 'paid' WHERE id = 7"));
  }
} catch (error) {
  if (!(classify(error) instanceof LeaseLost)) throw error;
  console.log("stop, and report no failure:", error);
}
await pool.end();
