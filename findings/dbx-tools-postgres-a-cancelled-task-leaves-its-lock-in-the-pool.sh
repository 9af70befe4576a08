#!/bin/bash
# dbx-tools-postgres 0.9.40 (PyPI, advisory locks by SQLAlchemy): a task that is cancelled leaves its lock locked.
#
# Guess: "async with advisory_lock_async(engine, key)" unlocks whatever ends the block: by its page it keeps one
#   connection for all of the block. A try after a timeout (asyncio.wait_for) is granted.
# Seen: the unlock follows an "except Exception", and a cancelled task ends with CancelledError, which is none. The
#   connection goes back to the pool with the session's lock on it, and SQLAlchemy's pool only rolls back. After one
#   timeout all other processes are refused, with nobody at work, for as long as the pool keeps that connection.
. "$(dirname "$0")/lib.sh"
pip_install pythonmonkey==1.4.1 sqlalchemy==2.0.43 greenlet==3.2.4 asyncpg==0.30.0
"$work/python/bin/pip" install -q --disable-pip-version-check --no-deps dbx-tools-postgres==0.9.40
postgres
python > "$work/seen" <<'END' || true
import asyncio, os
from dbx_tools.postgres.advisory_lock import advisory_lock_async, try_advisory_lock_async
from sqlalchemy.ext.asyncio import create_async_engine
url = os.environ["DATABASE_URL"].replace("postgresql:", "postgresql+asyncpg:")
async def main():
    this, other = create_async_engine(url), create_async_engine(url)
    async def granted(engine):
        async with try_advisory_lock_async(engine, "report") as connection:
            return connection is not None
    async def work(error):
        async with advisory_lock_async(this, "report"):
            if error:
                raise error
            await asyncio.sleep(60)
    for error in ValueError("no such file"), None:
        try:
            await asyncio.wait_for(work(error), timeout=1)
        except Exception as e:
            print("the work ends with", type(e).__name__, "| another process is granted it:", await granted(other))
    print("this process is granted it:", await granted(this))
    await this.dispose()
    print("its pool is closed | another process is granted it:", await granted(other))
    await other.dispose()
asyncio.run(main())
END
still <<'END'
the work ends with ValueError | another process is granted it: True
the work ends with TimeoutError | another process is granted it: False
this process is granted it: True
its pool is closed | another process is granted it: True
END
