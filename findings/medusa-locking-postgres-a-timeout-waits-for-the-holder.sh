#!/bin/bash
# @medusajs/locking-postgres 2.21.2 (npm, the locks of the shop Medusa): a wait of one second ends when the holder does.
#
# Guess: execute(key, job, { timeout: 1 }) gives up after a second: its error comes then, and the caller does without.
# Seen: the timer fires and leads to a ROLLBACK on the connection that waits for the lock, behind that wait. So the
#   error comes when the holder has ended, an hour later, say. At that moment the caller has the lock, and gives it
#   back unused. All that time each caller keeps a connection of the pool.
. "$(dirname "$0")/lib.sh"
npm_install --legacy-peer-deps @medusajs/locking-postgres@2.21.2 @medusajs/framework@2.21.2
postgres
node > "$work/seen" <<'END' || true
import { createRequire } from "node:module"
const require = createRequire(import.meta.url)
const { mikroOrmCreateConnection } = require("@medusajs/framework/utils")
const { PostgresAdvisoryLockProvider } = require("@medusajs/locking-postgres/dist/services/advisory-lock.js")
const orm = await mikroOrmCreateConnection({ clientUrl: process.env.DATABASE_URL }, [], "")
const locks = new PostgresAdvisoryLockProvider({ manager: orm.em.fork() })
const sleep = (seconds) => new Promise(done => setTimeout(done, 1000 * seconds))
let begun, end
const begins = new Promise(done => begun = done), ends = new Promise(done => end = done)
const first = locks.execute("order", async () => { begun(); await ends; console.log("first: its job has ended") })
await begins
const second = locks.execute("order", async () => console.log("second: its job runs"), { timeout: 1 })
  .catch(e => console.log("second:", e.message))
for (const seconds of [1.5, 3, 4.5]) {
  await sleep(1.5)
  const state = await Promise.race([second.then(() => "has its answer"), sleep(0).then(() => "waits")])
  console.log(`${seconds} seconds later, second:`, state)
}
end()
await Promise.all([first, second])
await orm.close(true)
END
still <<'END'
1.5 seconds later, second: waits
3 seconds later, second: waits
4.5 seconds later, second: waits
first: its job has ended
second: Timed-out acquiring lock.
END
