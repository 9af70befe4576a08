import os
import sys
import threading
import urllib.request
from datetime import timedelta

import psycopg
from dbos import DBOS, DBOSClient

import pg_fence

database, *arguments = sys.argv[1:]
ttl = timedelta(seconds=float(os.environ.get("LEASE_SECONDS", "30")))
fence = pg_fence.Fence(database)


# An error of a workflow is final: wait for as long as a job may take, and begin once more after a loss.
@DBOS.step(retries_allowed=True, max_attempts=5)
def write(job, url):
    with fence.lease(f"job:{job}", ttl=ttl, wait=timedelta(hours=1)) as lease, psycopg.connect(database) as connection:
        if connection.execute("SELECT FROM totals WHERE job_id = %s", [job]).rowcount:
            return
        connection.commit()
        with urllib.request.urlopen(url) as answer:
            amount = int(answer.read())
        with lease.guard(connection):
            connection.execute("INSERT INTO totals (job_id, amount) VALUES (%s, %s)", [job, amount])


@DBOS.workflow(name="total")
def total(url):
    write(DBOS.workflow_id, url)


if arguments:
    DBOSClient(system_database_url=database).enqueue({"queue_name": "totals", "workflow_name": "total"}, arguments[0])
else:
    DBOS(config={
        "name": "totals", "system_database_url": database, "application_version": "1",
        "executor_id": os.environ.get("EXECUTOR_ID", "worker-1"),
    })
    DBOS.launch()
    DBOS.register_queue("totals")
    threading.Event().wait()
