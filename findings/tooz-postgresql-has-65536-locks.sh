#!/bin/bash
# tooz 9.1.0 (PyPI, OpenStack), its postgresql driver: all lock names share 65,536 locks.
#
# Guess: a name becomes a key of 64 bits, or two of 32, which is what pg_advisory_lock takes.
# Seen: it becomes two keys of *one byte* each, of an MD5. Among a few hundred names like "instance-N" two are
#   the same lock; taken one inside the other by different members they wait for each other's work, or deadlock.
. "$(dirname "$0")/lib.sh"
pip_install tooz==9.1.0 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import os
from tooz import coordination
url = f"postgresql://postgres@127.0.0.1:{os.environ['PGPORT']}?dbname=postgres"
one, two = (coordination.get_coordinator(url, name) for name in (b"one", b"two"))
one.start(), two.start()
seen = {}
for n in range(100000):
    name = f"instance-{n}".encode()
    key = one.get_lock(name).key
    if key in seen:
        break
    seen[key] = name
print(f"of the first {n + 1} names, the same key:", seen[key].decode(), name.decode())
held = one.get_lock(seen[key])
print("one holds", seen[key].decode(), held.acquire())
print("two gets", name.decode(), two.get_lock(name).acquire(blocking=False))
other = two.get_lock(b"instance-1")
print("two gets instance-1:", other.acquire(blocking=False), "and gives it back:", other.release())
held.release()
END
still <<'END'
of the first 225 names, the same key: instance-218 instance-224
one holds instance-218 True
two gets instance-224 False
two gets instance-1: True and gives it back: True
END
