#!/bin/bash
# @ster5/global-mutex 3.3.0 (npm), its own provider: a holder that was frozen ends by removing its successor's lock.
#
# Guess: after "stale" the lock passes to the next; the old one is told when it wakes up (onCompromised), or at
#   least removes only what is its own.
# Seen: the lock is a directory without a name in it. The late holder, told nothing, finishes and removes the
#   directory, which is now the second one's. A third gets in beside the second.
. "$(dirname "$0")/lib.sh"
npm_install @ster5/global-mutex@3.3.0
cat > "$work/member.mjs" <<'END'
import fs from "node:fs"
import { withLock } from "@ster5/global-mutex"
const [name, ms] = process.argv.slice(2)
const onCompromised = () => name === "first" && console.log(name, "is told of its loss")
await withLock({ fileToLock: "job", stale: 1000, onCompromised }, async () => {
  console.log(name, "begins"); fs.writeFileSync(name, "")
  await new Promise(done => setTimeout(done, ms))
  console.log(name, "ends")
})
END
cd "$work"
{
  program=$(type -P node)
  until_begun() { for _ in $(seq 200); do [ -e "$1" ] && return; sleep 0.1; done; }
  "$program" member.mjs first 500 & first=$!
  until_begun first; kill -STOP "$first"
  "$program" member.mjs second 6000 &
  until_begun second; kill -CONT "$first"; wait "$first"
  "$program" member.mjs third 10
  wait
} > "$work/seen" 2>&1
still <<'END'
first begins
second begins
first ends
third begins
third ends
second ends
END
