#!/bin/bash
# plainjob 0.0.14 (npm, job queue in SQLite): a job whose schedule was changed still waits for the old schedule's time.
#
# Guess: schedule("report", { cron }) with another cron expression, as after a deployment, counts from then on: what ran
#   each January and shall run each second now runs within a second or two.
# Seen: the new expression is stored, and read when the job comes due the next time, which is as the old one said:
#   next January. Nothing says so; the schedule that the queue lists is the new one. And a job that is scheduled for the
#   first time runs at once, whatever its expression says.
. "$(dirname "$0")/lib.sh"
export npm_config_build_from_source=true
npm_install plainjob@0.0.14 better-sqlite3@11.10.0
node > "$work/seen" <<'END' || true
import Database from "better-sqlite3";
import { better, defineQueue, defineWorker } from "plainjob";
const logger = { error: console.error, warn() {}, info() {}, debug() {} };
const queue = defineQueue({ connection: better(new Database("jobs.db")), logger });
const runs = { report: 0, invoices: 0 };
const workers = Object.keys(runs).map((type) =>
  defineWorker(type, async () => { runs[type]++; }, { queue, logger, pollIntervall: 100 }));
for (const worker of workers) worker.start();
async function after(what) {
  await new Promise((resolve) => setTimeout(resolve, 5000));
  const schedules = queue.getScheduledJobs().map(({ type, cronExpression }) => `${type} ${cronExpression}`);
  console.log(`${what}: ${schedules.join(", ")}`);
  for (const type in runs) console.log(`  ${type} ran ${runs[type] > 3 ? "more than 3" : runs[type]} times`);
}
queue.schedule("report", { cron: "0 0 0 1 1 *" });
await after("5 seconds with a yearly schedule");
queue.schedule("report", { cron: "* * * * * *" });
queue.schedule("invoices", { cron: "* * * * * *" });
await after("5 seconds with a schedule for each second");
for (const worker of workers) await worker.stop();
queue.close();
END
still <<'END'
5 seconds with a yearly schedule: report 0 0 0 1 1 *
  report ran 1 times
  invoices ran 0 times
5 seconds with a schedule for each second: report * * * * * *, invoices * * * * * *
  report ran 1 times
  invoices ran more than 3 times
END
