import os
import sys
import urllib.request

import psycopg
from absurd_sdk import Absurd

import pg_fence

database, *arguments = sys.argv[1:]
app = Absurd(database)
fence = pg_fence.Fence(database)


@app.register_task(name="total")
def total(params, ctx):
    job = str(ctx.task_id)
    run = fence.adopted(f"job:{job}", ctx._task["attempt"])
    with psycopg.connect(database) as connection, run.guard(connection):
        if connection.execute("SELECT FROM totals WHERE job_id = %s", [job]).rowcount:
            return
    with urllib.request.urlopen(params["url"]) as answer:
        amount = int(answer.read())
    # A late run raises PF001 here: absurd refuses its report as well.
    with psycopg.connect(database) as connection, run.guard(connection, release=True):
        connection.execute("INSERT INTO totals (job_id, amount) VALUES (%s, %s)", [job, amount])


if arguments:
    app.spawn("total", {"url": arguments[0]})
else:
    app.start_worker(claim_timeout=int(os.environ.get("EXPIRE_SECONDS", "120")))
