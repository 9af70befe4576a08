#!/bin/bash
# postgres-tq 1.2.1 (PyPI): the lease of a dead worker's task does not end by itself, and get() does not end it.
#
# Guess: after lease_timeout the task is there again for the next get(), as its page says of tasks that expire.
# Seen: get() looks only at tasks that nobody has started. A task is put back by is_empty() alone, which sounds
#   like a question: workers that loop over get() never meet it, and a look at a dashboard sets it free.
. "$(dirname "$0")/lib.sh"
pip_install postgres-tq==1.2.1 "psycopg[binary,pool]==3.2.3"
postgres
python > "$work/seen" <<'END' || true
import os, time
from postgrestq import TaskQueue
queue = TaskQueue(os.environ["DATABASE_URL"], queue_name="mail", table_name="task", create_table=True)
queue.add({"to": "someone"}, lease_timeout=1)
print("a worker that dies gets:", queue.get()[0])
time.sleep(3)
print("3 s later, lease of 1 s:", queue.get()[0])
print("is_empty:", queue.is_empty())
print("and now:", queue.get()[0])
END
still <<'END'
a worker that dies gets: {'to': 'someone'}
3 s later, lease of 1 s: None
is_empty: False
and now: {'to': 'someone'}
END
