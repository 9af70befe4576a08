#!/bin/bash
# tooz 9.1.0 (PyPI, OpenStack), its postgresql driver: a lock object whose session was ended is held for good, it says.
#
# Guess: once the session is gone, so is the lock; "acquired" or the next call says so, and the object can be
#   acquired anew.
# Seen: acquired stays True, release() raises each time, and acquire(blocking=False) answers False, "taken", of a
#   lock that nobody has, for the object takes itself for the holder. Only a new object gets it.
. "$(dirname "$0")/lib.sh"
pip_install tooz==9.1.0 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import os, psycopg2
from tooz import coordination
url = f"postgresql://postgres@127.0.0.1:{os.environ['PGPORT']}?dbname=postgres"
member = coordination.get_coordinator(url, b"one")
member.start()
lock = member.get_lock(b"job")
print("acquire:", lock.acquire(blocking=False))
with psycopg2.connect("") as admin, admin.cursor() as c:
    c.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
print("its session was ended; acquired:", lock.acquired)
for _ in range(2):
    try:
        print("release:", lock.release())
    except Exception as e:
        print("release:", type(e).__name__, "acquired:", lock.acquired)
print("acquire again:", lock.acquire(blocking=False))
other = member.get_lock(b"job")
print("another object:", other.acquire(blocking=False), other.release())
lock.acquired = False
END
still <<'END'
acquire: True
its session was ended; acquired: True
release: ToozError acquired: True
release: ToozError acquired: True
acquire again: False
another object: True True
END
