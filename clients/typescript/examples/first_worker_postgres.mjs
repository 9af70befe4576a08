import { setTimeout as sleep } from "node:timers/promises";
import postgres from "postgres";
import { Fence, LeaseLost, LeaseTaken } from "pg_fence/postgres";

const sql = postgres(process.argv[2] ?? "");
const fence = new Fence(sql);
try {
  await fence.lease("order:7", { ttl: { seconds: 30 } }, async (lease) => {
    console.log("order:7 is ours, under token", lease.token);
    await sleep(3000); // Whatever takes long goes here: a heartbeat keeps the lease meanwhile.
    await lease.guard(sql, (tx) => tx`UPDATE orders SET status = 'paid' WHERE id = 7`);
    console.log("order 7 is paid");
  });
} catch (error) {
  if (error instanceof LeaseTaken) console.log("somebody else is at it:", error.message);
  else if (error instanceof LeaseLost) console.log("stop, and report no failure:", error.message);
  else throw error;
} finally {
  await fence.close();
  await sql.end({ timeout: 5 });
}
