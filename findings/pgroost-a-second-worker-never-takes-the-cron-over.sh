#!/bin/bash
# pgroost 0.1.1 (PyPI, job queue in PostgreSQL with cron): when the worker with the cron lock ends, cron ends with it.
#
# Guess: an advisory lock lets one of the workers enqueue what is due. When that worker ends or dies, its lock is free,
#   and one of the others has it within a minute, as each looks every minute.
# Seen: a worker that finds the lock taken when it starts gives up for good. It goes on with jobs, but after the first
#   worker has ended nobody enqueues what is due, until some worker is started anew. A rolling deployment that starts
#   the new workers before it stops the old ones is left without cron. (To be quick, this one looks every second.)
. "$(dirname "$0")/lib.sh"
pip_install pgroost==0.1.1 asyncpg==0.31.0
postgres
export ROOST_DSN=$DATABASE_URL
cd "$work"
cat > work.py <<'END'
import asyncio, functools, os, roost.worker
from roost import cron, job
roost.worker.run_scheduler = functools.partial(roost.worker.run_scheduler, interval_seconds=1)
@cron("* * * * * *")
def tick():
    pass
@job("letter")
def letter():
    pass
if __name__ == "__main__":
    asyncio.run(roost.worker.Worker(os.environ["ROOST_DSN"]).run())
END
cat > look.py <<'END'
import asyncio, asyncpg, os, roost, time
from work import letter
async def main():
    connection = await asyncpg.connect(os.environ["ROOST_DSN"])
    ticks = lambda: connection.fetchval("SELECT count(*) FROM roost.jobs WHERE task = 'tick'")
    done = lambda: connection.fetchval("SELECT count(*) FROM roost.jobs WHERE task = 'letter' AND state = 'completed'")
    ticks_before, done_before, end = await ticks(), await done(), time.monotonic() + 30
    await roost.AsyncRoost(os.environ["ROOST_DSN"]).enqueue(letter)
    await asyncio.sleep(3)
    while await done() == done_before and time.monotonic() < end:
        await asyncio.sleep(0.1)
    print("a job is done:", await done() > done_before, "| cron goes on:", await ticks() > ticks_before)
asyncio.run(main())
END
python/bin/roost init --apply > init.log
start() {
  timeout 100 python/bin/python work.py > "$1.log" 2>&1 &
  for _ in $(seq 200); do if grep -qs "cron\.[ls]" "$1.log"; then return; fi; sleep 0.1; done
}
look() { echo "$1, $(python/bin/python look.py)" >> seen; }
start 1
first=$!
start 2
look "two workers"
kill "$first"
wait "$first" || true
look "the first has ended"
start 3
look "a third was started"
still <<'END'
two workers, a job is done: True | cron goes on: True
the first has ended, a job is done: True | cron goes on: False
a third was started, a job is done: True | cron goes on: True
END
