#!/bin/bash
# asyncpg-lock 0.0.3 (PyPI): "run(key, func)" calls func again the moment it returns or raises, and never returns.
#
# Guess: run() takes the lock, runs the coroutine function once, gives the lock back, and returns or raises what
#   the function did.
# Seen: func is called in a loop for as long as the session lives. Errors go to the log, none to the caller, and
#   there is no pause between calls: work that fails at once fails thousands of times a second, under the lock.
. "$(dirname "$0")/lib.sh"
pip_install asyncpg-lock==0.0.3 asyncpg==0.30.0
postgres
python > "$work/seen" <<'END' || true
import asyncio, logging, asyncpg
from asyncpg_lock import AdvisoryLockGuard
logging.disable()
async def main():
    calls = 0
    async def nightly():
        nonlocal calls
        calls += 1
        await asyncio.sleep(0)
        raise ValueError("no such file")
    guard = AdvisoryLockGuard(connect=asyncpg.connect, after_acquire_delay=0.5)
    try:
        await asyncio.wait_for(guard.run(1, nightly), timeout=2.5)
        print("run returned")
    except (ValueError, TimeoutError, asyncio.TimeoutError) as e:
        print("the caller sees after 2.5 s:", type(e).__name__)
    print("calls of a function that raises: more than 1000:", calls > 1000)
asyncio.run(main())
END
still <<'END'
the caller sees after 2.5 s: TimeoutError
calls of a function that raises: more than 1000: True
END
