#!/bin/bash
# cross-process-lock 2.2.0 (npm): the lock file names its holder's process, but nobody asks whether it lives.
#
# Guess: a lock file with a pid in it is there so that a killed holder's lock can be taken over at once.
# Seen: the pid serves only to let the same process in again. A killed holder's lock stays for lockTimeout, 20
#   minutes by default, counted from when it began to *wait* for the lock; others give up after 10 s.
. "$(dirname "$0")/lib.sh"
npm_install cross-process-lock@2.2.0
node > "$work/seen" <<'END' || true
import fs from "node:fs"
import { spawnSync } from "node:child_process"
import { lock } from "cross-process-lock"
fs.writeFileSync("state.json", "{}")
const holder = spawnSync(process.execPath, ["-e",
  'require("cross-process-lock").lock("state.json").then(() => process.kill(process.pid, "SIGKILL"))'])
console.log("the holder ended by", holder.signal)
const { pID } = JSON.parse(fs.readFileSync("state.json.lock"))
try { process.kill(pID, 0) } catch (e) { console.log("the pid in its lock file:", e.code) }
const began = Date.now()
try { await lock("state.json") } catch (e) {
  console.log(e.constructor.name, "after", Math.round((Date.now() - began) / 1000), "s")
}
await lock("state.json", { lockTimeout: 1000 })
console.log("with lockTimeout of 1 s: granted")
END
still <<'END'
the holder ended by SIGKILL
the pid in its lock file: ESRCH
LockError after 10 s
with lockTimeout of 1 s: granted
END
