import { setTimeout as sleep } from "node:timers/promises";
import pg from "pg";
import { Fence, LeaseLost, LeaseTaken } from "pg_fence/pg";

const pool = new pg.Pool({ connectionString: process.argv[2] });
pool.on("error", console.warn); // An idle connection that ends would end the process, too.
const fence = new Fence(pool);
try {
  await fence.lease("order:7", { ttl: { seconds: 30 } }, async (lease) => {
    console.log("order:7 is ours, under token", lease.token);
    await sleep(3000); // Whatever takes long goes here: a heartbeat keeps the lease meanwhile.
    await lease.guard(pool, (client) =>
      client.query("UPDATE orders SET status = 'paid' WHERE id = 7"),
    );
    console.log("order 7 is paid");
  });
} catch (error) {
  if (error instanceof LeaseTaken) console.log("somebody else is at it:", error.message);
  else if (error instanceof LeaseLost) console.log("stop, and report no failure:", error.message);
  else throw error;
} finally {
  await fence.close();
  await pool.end();
}
