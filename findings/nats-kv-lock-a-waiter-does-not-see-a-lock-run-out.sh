#!/bin/bash
# nats-kv-lock 0.0.1 (PyPI, locks in NATS JetStream): whoever waits never gets a lock that ran out; a newcomer does.
#
# Guess: in a bucket with a time to live of three seconds the lock of a dead holder is free after three seconds, and
#   whoever waits for it then has it. "timeout" is the longest wait: False after eight seconds.
# Seen: a waiter tries again only when it is told of a deletion, and nobody is told when a key runs out. It goes on
#   waiting for a lock that is free, and one who comes later gets it at once. That is news of the key, from which the
#   eight seconds are counted anew: the waiter is refused after more than twelve.
. "$(dirname "$0")/lib.sh"
apt_unpack nats-server=2.9.10-1+b3
pip_install nats-kv-lock==0.0.1 nats-py==2.12.0
cd "$work"
PORT=$(free_ports 1)
export PORT
nats-server -a 127.0.0.1 -p "$PORT" -js -sd "$work/nats" > nats.log 2>&1 &
wait_for_port "$PORT"
cat > lock.py <<'END'
import asyncio, os, sys, time, nats
from nats_kv_lock import NatsKvLock
async def lock(timeout):
    stream = (await nats.connect("nats://127.0.0.1:" + os.environ["PORT"])).jetstream()
    try:
        bucket = await stream.key_value("locks")
    except nats.js.errors.BucketNotFoundError:
        bucket = await stream.create_key_value(bucket="locks", ttl=3)
    began = time.monotonic()
    granted = await NatsKvLock(bucket, "report").acquire(timeout=timeout)
    return granted, time.monotonic() - began
END
{
  { "$work/python/bin/python" -c 'if True:
    from lock import *
    print("A:", asyncio.run(lock(1))[0], "and is killed", flush=True)
    os.kill(os.getpid(), 9)' || true; } 2> killed
  python <<'END' || true
import sys
sys.path.insert(0, ".")
from lock import *
async def main():
    waiter = asyncio.create_task(lock(8))
    await asyncio.sleep(5)
    granted, took = await lock(1)
    print("C, who comes five seconds later:", granted, "at once" if took < 1 else "late")
    granted, took = await waiter
    print("B, who waits since then:", granted, "after more than eight seconds:", took > 9)
asyncio.run(main())
END
} > seen
still <<'END'
A: True and is killed
C, who comes five seconds later: True at once
B, who waits since then: False after more than eight seconds: True
END
