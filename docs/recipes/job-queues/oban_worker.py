import asyncio
import os
import socket
import sys
import urllib.request
from datetime import timedelta

import psycopg
from oban import Oban, Snooze, worker
from oban.schema import install

import pg_fence

database, *arguments = sys.argv[1:]
seconds = int(os.environ.get("LEASE_SECONDS", "30"))
ttl = timedelta(seconds=seconds)
fence = pg_fence.Fence(database)


def total(job, url):
    # A late run raises here: Oban refuses its report as well.
    with fence.lease(f"job:{job}", ttl=ttl) as lease, psycopg.connect(database) as connection:
        if connection.execute("SELECT FROM totals WHERE job_id = %s", [job]).rowcount:
            return
        connection.commit()
        with urllib.request.urlopen(url) as answer:
            amount = int(answer.read())
        with lease.guard(connection):
            connection.execute("INSERT INTO totals (job_id, amount) VALUES (%s, %s)", [job, amount])


@worker(queue="default")
class Total:
    async def process(self, job):
        try:
            await asyncio.to_thread(total, str(job.id), job.args["url"])
        except pg_fence.LeaseTaken:
            return Snooze(seconds)      # counts no attempt


async def main():
    pool = await Oban.create_pool(database)
    match arguments:
        case ["setup"]:
            await install(pool)
        case [url]:
            await Oban(pool=pool).enqueue(Total.new({"url": url}))
        case []:
            rescue_after = int(os.environ.get("EXPIRE_SECONDS", "300"))
            node = f"{socket.gethostname()}-{os.getpid()}"
            async with Oban(pool=pool, queues={"default": 1}, node=node, lifeline={"rescue_after": rescue_after}):
                await asyncio.Event().wait()
    await pool.close()


asyncio.run(main())
