import asyncio
import os
import sys
import urllib.request
from datetime import timedelta

import psycopg
from pgqueuer import PgQueuer
from pgqueuer.db import PsycopgDriver
from pgqueuer.errors import RetryRequested
from pgqueuer.queries import Queries

import pg_fence

database, *arguments = sys.argv[1:]
seconds = float(os.environ.get("LEASE_SECONDS", "30"))
ttl = timedelta(seconds=seconds)


def leave(loss):
    """The job is another's by now: neither a result nor a failure of ours may reach the queue."""
    print("the job is another's now:", repr(loss), file=sys.stderr, flush=True)
    os._exit(1)


fence = pg_fence.Fence(database, on_event=lambda event: event.kind == "lost" and leave(event))


def total(job, url):
    try:
        with fence.lease(f"job:{job}", ttl=ttl, wait=ttl) as lease:
            with urllib.request.urlopen(url) as answer:
                amount = int(answer.read())
            with psycopg.connect(database) as connection, lease.guard(connection):
                done = connection.execute("SELECT FROM totals WHERE job_id = %s", [job])
                if done.rowcount == 0:
                    connection.execute("INSERT INTO totals (job_id, amount) VALUES (%s, %s)", [job, amount])
    except pg_fence.LeaseTaken:
        raise RetryRequested(delay=ttl)                # any other error is final
    except (pg_fence.LeaseLost, pg_fence.Refused) as loss:
        leave(loss)


async def main():
    connection = await psycopg.AsyncConnection.connect(database, autocommit=True)
    driver = PsycopgDriver(connection)
    match arguments:
        case ["setup"]:
            await Queries(driver).install()
        case [url]:
            await Queries(driver).enqueue("total", url.encode())
        case []:
            queuer = PgQueuer(driver)

            @queuer.entrypoint("total")
            async def run(job):
                await asyncio.to_thread(total, str(job.id), job.payload.decode())

            await queuer.run(batch_size=1, heartbeat_timeout=timedelta(
                seconds=float(os.environ.get("EXPIRE_SECONDS", "90"))))


asyncio.run(main())
