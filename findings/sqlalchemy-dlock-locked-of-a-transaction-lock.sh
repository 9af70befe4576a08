#!/bin/bash
# sqlalchemy-dlock 0.9.0 (PyPI): "locked" of a transaction-level lock is wrong at both ends.
#
# Guess: with xact=True the lock ends with the transaction, and "locked" follows: True until then, False after.
# Seen: it is the object's own note. After the with block it says False, while the lock is held until the commit;
#   after a rollback it says True, of a lock that somebody else may have, and acquire() refuses with ValueError.
. "$(dirname "$0")/lib.sh"
pip_install sqlalchemy-dlock==0.9.0 sqlalchemy==2.0.36 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import os
from sqlalchemy import create_engine
from sqlalchemy_dlock import create_sadlock
url = os.environ["DATABASE_URL"]
with create_engine(url).connect() as mine, create_engine(url).connect() as other:
    def free():
        lock = create_sadlock(other, "job")
        got = lock.acquire(block=False)
        if got: lock.release()
        return got
    with create_sadlock(mine, "job", xact=True) as lock:
        print("in the block: locked", lock.locked, "another gets it:", free())
    print("after the block: locked", lock.locked, "another gets it:", free())
    mine.commit()
    lock = create_sadlock(mine, "job", xact=True)
    lock.acquire()
    mine.rollback()
    print("after a rollback: locked", lock.locked, "another gets it:", free())
    try:
        print("acquire:", lock.acquire(block=False))
    except ValueError as e:
        print("acquire: ValueError", e)
END
still <<'END'
in the block: locked True another gets it: False
after the block: locked False another gets it: False
after a rollback: locked True another gets it: True
acquire: ValueError invoked on a locked lock
END
