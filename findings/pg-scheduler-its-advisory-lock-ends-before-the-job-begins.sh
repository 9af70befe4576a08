#!/bin/bash
# pg-scheduler 0.2.3 (PyPI, periodic jobs in PostgreSQL): use_advisory_lock=True keeps nobody out.
#
# Guess: a periodic job with use_advisory_lock=True, which its page has for what one node alone may run, holds
#   its lock while it runs. A node that comes up in the meantime and finds the job due again skips it.
# Seen: the lock is taken through the pool, on a connection that goes straight back to it, and asyncpg unlocks all
#   advisory locks of a connection that is given back. No lock is held when the job begins: the second node, started
#   while the first one is at work, is granted the same lock and runs the job beside it.
. "$(dirname "$0")/lib.sh"
pip_install pg-scheduler==0.2.3 asyncpg==0.30.0 croniter==6.0.0
postgres
cat > "$work/node.py" <<'END'
import asyncio, asyncpg, logging, os, sys
from datetime import timedelta
from pg_scheduler import PollingConfig, Scheduler, periodic
logging.disable()
name, work = sys.argv[1], os.environ["WORK"]
pool = None
@periodic(every=timedelta(seconds=2), use_advisory_lock=True)
async def maintenance():
    held = await pool.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
    if not os.path.exists(f"{work}/{name}"):
        print(f"node {name} is at work, advisory locks held: {held}", flush=True)
        open(f"{work}/{name}", "w").close()
    while not os.path.exists(f"{work}/end"):
        await asyncio.sleep(0.1)
async def main():
    global pool
    pool = await asyncpg.create_pool(os.environ["DATABASE_URL"], min_size=1)
    # A node takes one job at a time, so that the next one is for the other node.
    scheduler = Scheduler(pool, max_concurrent_jobs=1, vacuum_enabled=False)
    await scheduler.start()
    while not os.path.exists(f"{work}/end"):
        await asyncio.sleep(0.1)
    os._exit(0)
asyncio.run(main())
END
export WORK=$work
: > "$work/seen"
for name in 1 2; do
  timeout -k 5 60 "$work/python/bin/python" "$work/node.py" $name >> "$work/seen" 2>&1 &
  for _ in $(seq 300); do if [ -e "$work/$name" ]; then break; fi; sleep 0.1; done
done
touch "$work/end"
still <<'END'
node 1 is at work, advisory locks held: 0
node 2 is at work, advisory locks held: 0
END
