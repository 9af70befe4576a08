#!/bin/bash
# pals 0.4.0 (PyPI, advisory locks by SQLAlchemy): acquire_timeout=0 in acquire() waits the object's own timeout.
#
# Guess: 0 means "do not wait", or Postgres's own "no limit"; it is said, so it counts.
# Seen: 0 is taken for "not said": the wait is what lock(..., acquire_timeout=...) said, by default 30 s. Only
#   blocking=False does not wait. (The same 0 given to lock() goes to lock_timeout as it is: no limit at all.)
. "$(dirname "$0")/lib.sh"
pip_install pals==0.4.0 sqlalchemy==2.0.36 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import os, time, pals
url = os.environ["DATABASE_URL"]
held = pals.Locker("app", url).lock("job")
held.acquire()
late = pals.Locker("app", url).lock("job", acquire_timeout=3000)
def wait(**how):
    began = time.monotonic()
    got = late.acquire(**how)
    print(how, got, "after", round(time.monotonic() - began), "s")
wait(acquire_timeout=0)
wait(acquire_timeout=1)
wait(blocking=False)
held.release(), late.release()
END
still <<'END'
{'acquire_timeout': 0} False after 3 s
{'acquire_timeout': 1} False after 0 s
{'blocking': False} False after 0 s
END
