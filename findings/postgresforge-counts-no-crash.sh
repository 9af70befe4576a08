#!/bin/bash
# postgresforge 1.0.2 (PyPI, leases on jobs): max_attempts does not hold for a job that kills its worker.
#
# Guess: a job with max_attempts=2 is claimed twice at most; attempts goes up with each claim, after all.
# Seen: only a reported failure is compared with max_attempts. A lease that expires puts the job back whatever
#   the count: the job that exhausts its worker's memory takes down one worker after the other, for good.
. "$(dirname "$0")/lib.sh"
pip_install postgresforge==1.0.2 asyncpg==0.30.0
postgres
python > "$work/seen" <<'END' || true
import asyncio, asyncpg
from datetime import timedelta
import postforge, postforge.queue as queue
async def main():
    c = await asyncpg.connect()
    await c.execute(open(postforge.__path__[0] + "/schema.sql").read())
    await queue.enqueue(c, "mail", "send", {}, max_attempts=2)
    for _ in range(4):
        job = await queue.claim(c, "mail", timedelta(seconds=1))
        print("claimed, attempt", job.attempts, "of", job.max_attempts)
        await asyncio.sleep(1.5)
        await queue.recover_expired(c, "mail", 10)
asyncio.run(main())
END
still <<'END'
claimed, attempt 1 of 2
claimed, attempt 2 of 2
claimed, attempt 3 of 2
claimed, attempt 4 of 2
END
