#!/bin/bash
# lapinq 1.3.0 (PyPI, task queue in PostgreSQL): a long task is run again beside itself, in spite of its heartbeats.
#
# Guess: a worker renews the heartbeat of what it runs. A task is put back when its heartbeat stays away, or at the
#   task timeout, which `lapinq worker --task-timeout` sets.
# Seen: each worker puts back what has been running for longer than LAPINQ_STALE_RECOVERY_INTERVAL (300 s, not on its
#   page), and looks only at the start. Heartbeats are written and never read. With a task timeout above that (here 60
#   and 6 s) a healthy long task is handed out again while it runs, whatever max_retries says.
. "$(dirname "$0")/lib.sh"
pip_install lapinq==1.3.0 asyncpg==0.31.0
postgres
cd "$work"
cat > tasks.py <<'END'
import os, time
def report():
    with open("runs", "a") as runs:
        print(os.getppid(), file=runs)
    while not os.path.exists("end"):
        time.sleep(0.1)
END
export LAPINQ_STALE_RECOVERY_INTERVAL=6 LAPINQ_HEARTBEAT_INTERVAL=1 LAPINQ_MAX_IDLE_BACKOFF=1 PYTHONPATH=$work
for number in 1 2; do
  python/bin/python -m lapinq worker --concurrency 1 --task-timeout 60 > "$number.log" 2>&1 &
  for _ in $(seq 200); do if grep -qs starting "$number.log"; then break; fi; sleep 0.1; done
done
python > seen <<'END' || true
import asyncio, logging, os, time
from lapinq.storage import Storage
logging.disable()
async def main():
    storage = await Storage.create(os.environ["DATABASE_URL"])
    await storage.enqueue("report", "default", "tasks", max_retries=1)
    runs, late, end = [], False, time.monotonic() + 40
    while len(runs) < 2 and time.monotonic() < end:
        await asyncio.sleep(0.2)
        late |= await storage.pool.fetchval("""
            SELECT count(*) > 0 FROM lapinq_tasks
            WHERE status = 'running' AND last_heartbeat < now() - interval '5 s'""")
        if os.path.exists("runs"):
            runs = open("runs").read().split()
    print("a heartbeat was late:", late)
    print("runs side by side:", len(runs), "| by different workers:", len(set(runs)) > 1)
asyncio.run(main())
END
touch end
still <<'END'
a heartbeat was late: False
runs side by side: 2 | by different workers: True
END
