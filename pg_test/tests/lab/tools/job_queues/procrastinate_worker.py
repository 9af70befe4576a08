import os
import sys
import urllib.request
from datetime import timedelta

import procrastinate
import psycopg

import pg_fence

database, *arguments = sys.argv[1:]
ttl = timedelta(seconds=float(os.environ.get("LEASE_SECONDS", "30")))
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=database))


def leave(loss):
    """The job is another's by now: neither a result nor a failure of ours may reach the queue."""
    print("the job is another's now:", repr(loss), file=sys.stderr, flush=True)
    os._exit(1)


# As soon as it is lost, whatever the work hangs in.
fence = pg_fence.Fence(database, on_event=lambda event: event.kind == "lost" and leave(event))


@app.task(name="total", pass_context=True, retry=5)
def total(context, url):
    job = str(context.job.id)
    try:
        # The job's last worker may be frozen: its lease ends within its ttl.
        with fence.lease(f"job:{job}", ttl=ttl, wait=ttl) as lease:
            with urllib.request.urlopen(url) as answer:
                amount = int(answer.read())
            with psycopg.connect(database) as connection, lease.guard(connection):
                done = connection.execute("SELECT FROM totals WHERE job_id = %s", [job])
                if done.rowcount == 0:
                    connection.execute("INSERT INTO totals (job_id, amount) VALUES (%s, %s)", [job, amount])
    except (pg_fence.LeaseLost, pg_fence.Refused) as loss:
        leave(loss)
        raise


@app.periodic(cron="* * * * * */5")
@app.task(name="rescue", queueing_lock="rescue")
async def rescue(timestamp):
    """Hands over the jobs of workers whose heartbeat has ceased."""
    for job in await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=ttl.total_seconds()):
        await app.job_manager.retry_job(job)


match arguments:
    case ["setup"]:
        with app.open():
            app.schema_manager.apply_schema()
    case [url]:
        with app.open():
            total.defer(url=url)
    case []:
        seconds = ttl.total_seconds()
        app.run_worker(update_heartbeat_interval=seconds / 3, stalled_worker_timeout=seconds)
