#!/bin/bash
# named-mutex 1.0.4 (npm, flock): an object that was unlocked once is granted for ever after, without a lock.
#
# Guess: tryLock(), unLock(), tryLock() takes the lock a second time.
# Seen: unLock() gives the lock back but not the object's note of it, so every later tryLock() or lock() says
#   true at once, whoever has the lock, and unLock() never complains. Only the first critical section is one.
. "$(dirname "$0")/lib.sh"
npm_install named-mutex@1.0.4
node > "$work/seen" <<'END' || true
import { spawnSync } from "node:child_process"
import NamedMutex from "named-mutex"
const name = process.cwd() + "/job"
const another = () => spawnSync(process.execPath, ["-e",
  `console.log(new (require("named-mutex"))(${JSON.stringify(name)}).tryLock())`], { encoding: "utf8" }).stdout.trim()
const mutex = new NamedMutex(name)
for (const time of ["first", "second"]) {
  console.log(time, "time:", mutex.tryLock(), "another process meanwhile:", another())
  mutex.unLock()
}
END
still <<'END'
first time: true another process meanwhile: false
second time: true another process meanwhile: true
END
