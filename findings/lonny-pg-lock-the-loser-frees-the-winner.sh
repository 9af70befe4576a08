#!/bin/bash
# lonny-pg-lock 1.5 (PyPI, locks as rows): a guard that was not granted deletes the row of the one that was.
#
# Guess: "with lock.guard(slug) as got" yields False to the loser and leaves the holder's row alone.
# Seen: the row is deleted at the end of each block, got or not, by name only. One visitor that looks in and
#   politely goes away frees the lock, so the third one is granted while the first is still at work.
. "$(dirname "$0")/lib.sh"
pip_install setuptools==75.6.0 psycopg2-binary==2.9.13
"$work/python/bin/pip" install -q --disable-pip-version-check lonny-pg-lock==1.5 lonny-pg==1.5 lonny-sql==1.3
postgres
python > "$work/seen" <<'END' || true
import os
from lonny_pg import Connection
from lonny_pg_lock import Lock
url = os.environ["DATABASE_URL"]
first, second, third = Connection(url), Connection(url), Connection(url)
Lock.setup(first)
with Lock(first).guard("nightly") as got:
    print("first:", got)
    with Lock(second).guard("nightly") as got:
        print("second:", got)
    with Lock(third).guard("nightly") as got:
        print("third, the first still at work:", got)
END
still <<'END'
first: True
second: False
third, the first still at work: True
END
