#!/bin/bash
# cross-process-lock 2.2.0 (npm): withLock(file, async callback) unlocks at the callback's first await.
#
# Guess: withLock returns a promise and takes asynchronous work, so the lock is held until that work's promise
#   settles, as everywhere else.
# Seen: the callback's promise is returned without being awaited, and "finally" runs at once. The lock file is
#   gone while the work goes on; only synchronous callbacks are guarded.
. "$(dirname "$0")/lib.sh"
npm_install cross-process-lock@2.2.0
node > "$work/seen" <<'END' || true
import fs from "node:fs"
import { setTimeout as sleep } from "node:timers/promises"
import { withLock } from "cross-process-lock"
fs.writeFileSync("state.json", "{}")
const locked = () => fs.existsSync("state.json.lock")
await withLock("state.json", () => console.log("synchronous work, locked:", locked()))
await withLock("state.json", async () => {
  console.log("asynchronous work begins, locked:", locked())
  await sleep(300)
  console.log("asynchronous work ends, locked:", locked())
})
END
still <<'END'
synchronous work, locked: true
asynchronous work begins, locked: true
asynchronous work ends, locked: false
END
