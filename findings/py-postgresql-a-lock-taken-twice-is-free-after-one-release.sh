#!/bin/bash
# py-postgresql 1.2.1+git20180803 (Python, Debian 12): the end of an inner block frees the lock of the outer one.
#
# Guess: by its page a lock of postgresql.alock is like threading.RLock: it can be acquired again, and it is free when
#   it was released as many times.
# Seen: only the first acquire asks the server, but each release does. After the inner block another session is granted
#   the lock, while the outer block goes on, and locked() says True there. The release of the outer block finds nothing
#   to release: the server warns, and nothing is raised. (1.3.1 on PyPI has the same release().)
. "$(dirname "$0")/lib.sh"
apt_unpack python3-postgresql=1.2.1+git20180803.ef7b9a9-4+b3
postgres
export PYTHONPATH="$work/debian/usr/lib/python3/dist-packages"
timeout 100 python3 -W ignore - > "$work/seen" 2> "$work/warnings" <<END || true
import postgresql, postgresql.sys
from postgresql.alock import ExclusiveLock
postgresql.sys.libpath.append("$work/debian/usr/share/python3-postgresql/")
first, second = (postgresql.open("pq://postgres@127.0.0.1:$PGPORT/postgres") for _ in range(2))
lock, others = ExclusiveLock(first, 1), ExclusiveLock(second, 1)
def show(where):
    granted = others.acquire(blocking=False)
    if granted:
        others.release()
    print(f"{where}: locked() is {lock.locked()}, another session is granted it: {granted}")
with lock:
    show("in the outer block")
    with lock:
        show("in the inner block")
    show("in the outer block again")
show("after it")
END
grep -o "you don't own a lock.*" "$work/warnings" | head -1 >> "$work/seen"
still <<'END'
in the outer block: locked() is True, another session is granted it: False
in the inner block: locked() is True, another session is granted it: False
in the outer block again: locked() is True, another session is granted it: True
after it: locked() is False, another session is granted it: True
you don't own a lock of type ExclusiveLock
END
