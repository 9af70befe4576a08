#!/bin/bash
# @nicnocquee/dataqueue 1.24.0 (npm, jobs in PostgreSQL): a job whose worker was killed in its last try stays pending.
#
# Guess: reclaimStuckJobs is for workers that crashed. It hands their jobs to the next worker, and one that has had all
#   its tries becomes failed, so that somebody sees it; that is how a job ends that throws in its last try.
# Seen: it makes every such job pending and counts it as reclaimed, and no worker takes one without tries left. So it is
#   pending for ever: not run, not failed, without an error in its history. With maxAttempts 1, which is what one takes
#   for what must not be done twice, the first killed worker is enough.
. "$(dirname "$0")/lib.sh"
npm_install @nicnocquee/dataqueue@1.24.0 --ignore-scripts
postgres
for file in "$work"/node_modules/@nicnocquee/dataqueue/migrations/*.sql; do
  sed '/Down Migration/,$d' "$file" | psql -Xq
done
cat > "$work/queue.mjs" <<'END'
import { initJobQueue } from "@nicnocquee/dataqueue"
export const queue = initJobQueue({ databaseConfig: { connectionString: process.env.DATABASE_URL } })
END
cat > "$work/killed.mjs" <<'END'
import { queue } from "./queue.mjs"
await queue.createProcessor({
  report: async () => process.kill(process.pid, "SIGKILL"),
}, { batchSize: 1 }).start()
END
node > "$work/seen" <<'END' || true
import { spawnSync } from "node:child_process"
import { setTimeout } from "node:timers/promises"
import { queue } from "./queue.mjs"
console.error = () => {}
const throws = await queue.addJob({ jobType: "mail", payload: {}, maxAttempts: 1 })
const killed = await queue.addJob({ jobType: "report", payload: {}, maxAttempts: 1 })
const handlers = {
  mail: async () => { throw new Error("no answer") },
  report: async () => console.log("the report is made"),
}
const state = async () => {
  for (const [name, id] of [["throws", throws], ["killed", killed]]) {
    const job = await queue.getJob(id)
    const tries = `${job.attempts} of ${job.maxAttempts}`
    console.log(`  ${name}: ${job.status}, tries ${tries}, errors ${job.errorHistory.length}`)
  }
}
await queue.createProcessor({ mail: handlers.mail }, { jobType: "mail" }).start()
console.log("the worker of the report ended by", spawnSync("node", ["killed.mjs"]).signal)
await state()
await setTimeout(500)
console.log("reclaimed:", await queue.reclaimStuckJobs(0))
for (const worker of ["a second worker", "a third worker"])
  console.log(`${worker} was handed`, await queue.createProcessor(handlers).start())
await state()
console.log("reclaimed:", await queue.reclaimStuckJobs(0))
await queue.getPool().end()
END
still <<'END'
the worker of the report ended by SIGKILL
  throws: failed, tries 1 of 1, errors 1
  killed: processing, tries 1 of 1, errors 0
reclaimed: 1
a second worker was handed 0
a third worker was handed 0
  throws: failed, tries 1 of 1, errors 1
  killed: pending, tries 1 of 1, errors 0
reclaimed: 0
END
