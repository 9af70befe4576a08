#!/bin/bash
# pgtq 0.5.0 (PyPI, queue in PostgreSQL): one task that always fails keeps a worker from all that came after it.
#
# Guess: a task that fails is tried again some times, with a pause or behind the others, and is failed then.
# Seen: the worker puts it back at once, at its old place, without limit: it is the oldest one, so it is claimed
#   next, and again, and the task behind it never runs. (fail() has max_retries; the worker does not use it.)
. "$(dirname "$0")/lib.sh"
pip_install pgtq==0.5.0 'psycopg[binary]==3.3.9'
postgres
python > "$work/seen" <<'END' || true
import os
from pgtq import PGTQ
queue = PGTQ(os.environ["DATABASE_URL"])
queue.install()
@queue.task("report")
def report(number):
    print("report", number)
    if number == 1:
        raise ValueError("its file is gone")
for number in 1, 2:
    queue.enqueue("report", {"number": number})
listen = queue.listen()
for _ in range(5):
    queue.run_task(next(listen))
END
still <<'END'
report 1
report 1
report 1
report 1
report 1
END
