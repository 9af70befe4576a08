#!/bin/bash
# asyncpg-queue 0.1.0 (PyPI, task queue in PostgreSQL): on SIGTERM a worker gives its task away and goes on with it.
#
# Guess: a worker told to stop finishes the task at hand and then ends; or it drops the task, which is done again.
# Seen: neither or both. A task that is a plain function runs in a thread, which nothing can cancel. SIGTERM cancels
#   only what waits for it and rolls back the transaction that holds the task. The next worker takes the task while
#   the stopped one, which does not end before its thread does, is still at it: each deployment does some work twice.
. "$(dirname "$0")/lib.sh"
pip_install asyncpg-queue==0.1.0 asyncpg==0.27.0
postgres
cat > "$work/worker.py" <<'END'
import asyncio, os, sys, time
from asyncpg_queue import Worker
def report():
    print(f"worker {sys.argv[1]} begins", flush=True)
    while not os.path.exists("done"):
        time.sleep(0.1)
    print(f"worker {sys.argv[1]} ends the report", flush=True)
async def main():
    await Worker(os.environ["DATABASE_URL"], tasks={"report": report}).run()
asyncio.run(main())
END
python <<'END'
import asyncio, asyncpg, os
from asyncpg_queue import bootstrap, queue
async def main():
    connection = await asyncpg.connect(os.environ["DATABASE_URL"])
    await bootstrap(connection)
    await queue.put(connection, "report", None)
asyncio.run(main())
END
cd "$work"
worker() { timeout -k 5 60 "$work/python/bin/python" worker.py "$1" >> "$1.log" 2> /dev/null & }
says() { for _ in $(seq 200); do if grep -q "$2" "$1.log" 2> /dev/null; then return; fi; sleep 0.1; done; }
worker 1
says 1 begins
kill -TERM $!
worker 2
says 2 begins
cat 1.log 2.log > seen
touch done
says 1 ends
says 2 ends
sort <(tail -1 1.log) <(tail -1 2.log) >> seen
still <<'END'
worker 1 begins
worker 2 begins
worker 1 ends the report
worker 2 ends the report
END
