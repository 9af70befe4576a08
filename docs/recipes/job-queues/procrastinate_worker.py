import os
import sys
import urllib.request

import procrastinate
import psycopg

import pg_fence

database, *arguments = sys.argv[1:]
seconds = float(os.environ.get("EXPIRE_SECONDS", "30"))
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=database))
fence = pg_fence.Fence(database)


@app.task(name="total", pass_context=True, retry=5)
def total(context, url):
    job = str(context.job.id)
    run = fence.adopted(f"job:{job}", context.job.attempts + 1)
    try:
        with psycopg.connect(database) as connection, run.guard(connection):
            if connection.execute("SELECT FROM totals WHERE job_id = %s", [job]).rowcount:
                return
        with urllib.request.urlopen(url) as answer:
            amount = int(answer.read())
        with psycopg.connect(database) as connection, run.guard(connection, release=True):
            connection.execute("INSERT INTO totals (job_id, amount) VALUES (%s, %s)", [job, amount])
    except pg_fence.Refused as late:
        # The job is another's by now: neither a result nor a failure of ours may reach the queue.
        print("the job is another's now:", repr(late), file=sys.stderr, flush=True)
        os._exit(1)


@app.periodic(cron="* * * * * */5")
@app.task(name="rescue", queueing_lock="rescue")
async def rescue(timestamp):
    for job in await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=seconds):
        await app.job_manager.retry_job(job)


match arguments:
    case ["setup"]:
        with app.open():
            app.schema_manager.apply_schema()
    case [url]:
        with app.open():
            total.defer(url=url)
    case []:
        app.run_worker(update_heartbeat_interval=seconds / 3, stalled_worker_timeout=seconds)
