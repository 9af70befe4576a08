#!/bin/bash
# postgresql-lock 0.1.9 (PyPI): a try that got nothing is counted as a hold.
#
# Guess: acquire(block=False) that returns False leaves the object as it was; the next one that returns True
#   is given back by one release(), which says True.
# Seen: each lost try adds a reference. After one lost and one won try, release() unlocks in the server, says
#   False, and the object believes that it is still locked: the next acquire() raises, though the lock is free.
. "$(dirname "$0")/lib.sh"
pip_install postgresql-lock==0.1.9 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import psycopg2
from postgresql_lock import Lock
mine, other = psycopg2.connect(""), psycopg2.connect("")
lock, rival = Lock(mine, "job"), Lock(other, "job")
rival.acquire()
print("lost try:", lock.acquire(block=False), "references:", lock.ref_count)
rival.release()
print("won try:", lock.acquire(block=False), "references:", lock.ref_count)
print("release:", lock.release(), "locked:", lock.locked)
with other.cursor() as cursor:
    cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
    print("locks in the server:", cursor.fetchone()[0])
try:
    lock.acquire(block=False)
except Exception as e:
    print(type(e).__name__, e)
END
still <<'END'
lost try: False references: 1
won try: True references: 2
release: False locked: True
locks in the server: 0
AcquireError Lock for 'job' is already held by this session scope
END
