#!/bin/bash
# pg-mutex 1.0.2 (PyPI): a failed statement in the block is reported as another error, and the lock stays.
#
# Guess: "with mutex(connection, keys)" lets the error of the block through and unlocks in its "finally".
# Seen: the unlock is one more statement of the transaction that has just failed. So it fails too: the caller
#   sees InFailedSqlTransaction instead of the unique violation, and after the caller's rollback() the
#   session, which a pool keeps for hours, still holds the advisory lock.
. "$(dirname "$0")/lib.sh"
pip_install pg-mutex==1.0.2 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import psycopg2
from mutex import mutex
mine, other = psycopg2.connect(""), psycopg2.connect("")
with mine.cursor() as c:
    c.execute("CREATE TABLE invoice (id int PRIMARY KEY); INSERT INTO invoice VALUES (7)")
mine.commit()
try:
    with mutex(mine, ["invoice", 7]), mine.cursor() as c:
        c.execute("INSERT INTO invoice VALUES (7)")
except Exception as e:
    print("the caller sees:", type(e).__name__)
mine.rollback()
try:
    with mutex(other, ["invoice", 7], wait=False):
        print("another session: granted")
except Warning as e:
    print("another session, after the rollback:", e)
END
still <<'END'
the caller sees: InFailedSqlTransaction
another session, after the rollback: The previous task has not done.
END
