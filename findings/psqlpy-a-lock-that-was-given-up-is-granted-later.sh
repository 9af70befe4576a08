#!/bin/bash
# psqlpy 0.13.1 (PyPI, asyncio driver in Rust): a wait for a lock that was given up goes on, and is granted the lock.
#
# Guess: asyncio.wait_for() around execute() ends the statement: it is cancelled on the server, as by asyncpg and
#   psycopg, or its connection is closed. Nobody is granted a lock that he has given up.
# Seen: the coroutine ends and the statement does not. The connection goes back to the pool with the wait on it; when
#   the holder unlocks, the lock is granted to that idle connection. No code knows of it, and everybody else is refused
#   for as long as that connection lives. An INSERT that timed out in the same way is committed later.
. "$(dirname "$0")/lib.sh"
pip_install psqlpy==0.13.1
postgres
python > "$work/seen" <<'END' || true
import asyncio, os, psqlpy, sys
def new_pool():
    return psqlpy.ConnectionPool(dsn=os.environ["DATABASE_URL"], max_db_pool_size=2)
async def main():
    pool = new_pool()
    holder, other = await new_pool().connection(), await new_pool().connection()
    async def work(statement):
        async with pool.acquire() as connection:
            await connection.execute(statement)
    async def given_up(statement):
        try:
            await asyncio.wait_for(work(statement), timeout=1)
        except TimeoutError:
            print("given up after a second:", statement)
    async def value(statement):
        return await other.fetch_val(statement)
    async def until(statement):
        for _ in range(300):
            if await value(statement):
                return
            await asyncio.sleep(0.1)
    await holder.execute("SELECT pg_advisory_lock(1)")
    await given_up("SELECT pg_advisory_lock(1)")
    waiting = await value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
    print("sessions that wait for the lock:", waiting)
    await holder.execute("SELECT pg_advisory_unlock(1)")
    await until("SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted)")
    print("the holder has unlocked. Another process is granted it:", await value("SELECT pg_try_advisory_lock(1)"))
    await other.execute("CREATE TABLE letters (text text)")
    await given_up("INSERT INTO letters SELECT 'hello' FROM pg_sleep(5)")
    print("rows:", await value("SELECT count(*) FROM letters"))
    await until("SELECT EXISTS (SELECT FROM letters)")
    print("rows, some seconds later:", await value("SELECT count(*) FROM letters"))
asyncio.run(main())
sys.stdout.flush()
os._exit(0)  # the driver's threads would meet an interpreter that is going down
END
still <<'END'
given up after a second: SELECT pg_advisory_lock(1)
sessions that wait for the lock: 1
the holder has unlocked. Another process is granted it: False
given up after a second: INSERT INTO letters SELECT 'hello' FROM pg_sleep(5)
rows: 0
rows, some seconds later: 1
END
