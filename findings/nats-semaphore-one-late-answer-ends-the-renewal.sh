#!/bin/bash
# nats-semaphore 0.0.3 (PyPI, semaphores in NATS JetStream): one renewal that fails is the last one, and nobody says so.
#
# Guess: "locks are renewed periodically while held", here every three seconds of ten. The server does not answer for
#   six and a half, and goes on while the slot is still held. So do the renewals; if they could not, the holder would
#   learn it.
# Seen: a renewal waits five seconds for its answer, and the one that did not get it was the last, with a line in the
#   log. The slot runs out, another one gets it, and the holder is told nothing, not even by its release().
. "$(dirname "$0")/lib.sh"
apt_unpack nats-server=2.9.10-1+b3
pip_install nats-semaphore==0.0.3 nats-py==2.12.0
cd "$work"
PORT=$(free_ports 1)
export PORT
nats-server -a 127.0.0.1 -p "$PORT" -js -sd "$work/nats" > nats.log 2>&1 &
SERVER=$!
export SERVER
wait_for_port "$PORT"
python > seen <<'END' || true
import asyncio, logging, os, signal, nats
from nats_semaphore import NatsSemaphoreContext, SemaphoreBucketConfig
logging.disable()
async def semaphore():
    server = await nats.connect("nats://127.0.0.1:" + os.environ["PORT"])
    return NatsSemaphoreContext(server, bucket=SemaphoreBucketConfig()).semaphore("report", 1)
def tell(sign):
    os.kill(int(os.environ["SERVER"]), sign)
async def main():
    a, b = await semaphore(), await semaphore()
    lock = await a.acquire(timeout=1, renew_interval=3)
    print("A has the slot")
    await asyncio.sleep(2)
    tell(signal.SIGSTOP)
    try:
        await asyncio.sleep(6.5)
    finally:
        tell(signal.SIGCONT)
    print("the server has stood still for six seconds and a half, and goes on")
    try:
        await b.acquire(timeout=5)
        print("B, within five seconds: granted")
    except asyncio.TimeoutError:
        print("B, within five seconds: refused")
    await asyncio.sleep(8)
    await b.acquire(timeout=1)
    print("B, eight seconds later: granted")
    print("A's release() answers", await lock.release())
asyncio.run(main())
END
still <<'END'
A has the slot
the server has stood still for six seconds and a half, and goes on
B, within five seconds: refused
B, eight seconds later: granted
A's release() answers None
END
