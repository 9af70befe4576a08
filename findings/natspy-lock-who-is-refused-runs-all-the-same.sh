#!/bin/bash
# natspy-lock 0.2.0 (PyPI, locks in NATS JetStream): the block of its page runs without the lock, once the wait is over.
#
# Guess: "async with NatsLock.get_lock(name, 1): work" waits a second for the lock and then raises: a block under a lock
#   is not entered without it. Its page shows just that form, and no question to ask within.
# Seen: the refused one enters the block as well, beside the holder. Only locked() of what "as" gives would have told,
#   and the page neither uses nor names it.
. "$(dirname "$0")/lib.sh"
apt_unpack nats-server=2.9.10-1+b3
pip_install natspy-lock==0.2.0 nats-py==2.12.0
cd "$work"
PORT=$(free_ports 1)
export PORT
nats-server -a 127.0.0.1 -p "$PORT" -js -sd "$work/nats" > nats.log 2>&1 &
wait_for_port "$PORT"
cat > worker.py <<'END'
import asyncio, os, sys, nats
from natspy_lock import NatsLock
async def main(name):
    server = await nats.connect("nats://127.0.0.1:" + os.environ["PORT"])
    await NatsLock.init(server, "locks", 60)
    await asyncio.sleep(1)
    async with NatsLock.get_lock("report", 1) as lock:
        print(f"{name} begins its work", flush=True)
        await asyncio.sleep(8)
        print(f"{name} ends its work, locked() is {lock.locked()}", flush=True)
    await server.drain()
asyncio.run(main(sys.argv[1]))
END
worker() { timeout 60 "$work/python/bin/python" worker.py "$1"; }
{
  worker A &
  sleep 3
  worker B
} > seen 2>&1
still <<'END'
A begins its work
B begins its work
A ends its work, locked() is True
B ends its work, locked() is False
END
