#!/bin/bash
# pqrun 0.0.2 (PyPI): a running job that was cancelled is run again when its handler then fails.
#
# Guess: CANCELLED is final; what the worker reports afterwards changes nothing, or is refused.
# Seen: the reports go by the job's number alone. A handler that fails because of the cancellation, say, puts the
#   job back to READY; one that ends well makes DONE of it.
. "$(dirname "$0")/lib.sh"
pip_install pqrun==0.0.2 asyncpg==0.30.0
postgres
python > "$work/seen" <<'END' || true
import asyncio, logging, os, pqrun
from datetime import timedelta
from pqrun import PgJobStore
logging.disable()
async def main():
    store = PgJobStore(dsn=os.environ["DATABASE_URL"])
    await store.start()
    async with store.connection() as c:
        await c.execute(open(pqrun.__path__[0] + "/ddl.sql").read())
    async def status(job):
        async with store.connection() as c:
            return await c.fetchval("SELECT status::text FROM jobs WHERE id = $1", job)
    for end in "fails", "ends well":
        job = await store.enqueue("report", {})
        await store.pickup(worker_id="w1")
        await store.cancel(job)
        before = await status(job)
        if end == "fails":
            await store.mark_error(job, "its file is gone", retry_after=timedelta(0))
        else:
            await store.mark_done(job)
        print(f"cancelled: {before}; then the handler {end}: {await status(job)}")
        again = await store.pickup(worker_id="w2")
        print("picked up again:", again is not None and again.id == job)
        if again: await store.mark_done(job)
    await store.close()
asyncio.run(main())
END
still <<'END'
cancelled: CANCELLED; then the handler fails: READY
picked up again: True
cancelled: CANCELLED; then the handler ends well: DONE
picked up again: False
END
