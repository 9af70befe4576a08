#!/bin/bash
# tpq 1.7 (PyPI, queue in PostgreSQL): an empty item is deleted, and the worker is told that the queue is empty.
#
# Guess: put({}) queues a job without arguments, and get() returns {}. If an item cannot be returned, it stays queued.
# Seen: get() deletes the row, asks whether its data is true in Python's sense, and takes {} (or 0, or []) for "no
#   row". The transaction is committed, the item is gone, and QueueEmpty is raised while other items wait behind it. A
#   worker that ends at QueueEmpty leaves them there.
. "$(dirname "$0")/lib.sh"
pip_install tpq==1.7 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import os, tpq
with tpq.Queue("jobs", host=os.environ["PGHOST"], dbname="postgres", user="postgres") as queue:
    queue.create()
    for item in {"report": 1}, {}, {"report": 2}:
        queue.put(item)
    while len(queue):
        waiting = len(queue)
        try:
            with queue.get() as item:
                got = item
        except tpq.QueueEmpty:
            got = "QueueEmpty"
        print(f"{waiting} queued, get(): {got}, {len(queue)} left")
END
still <<'END'
3 queued, get(): {'report': 1}, 2 left
2 queued, get(): QueueEmpty, 1 left
1 queued, get(): {'report': 2}, 0 left
END
