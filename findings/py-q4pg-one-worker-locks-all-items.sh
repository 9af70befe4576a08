#!/bin/bash
# py-q4pg 0.2.0 (PyPI, queue in PostgreSQL): one busy worker can lock all items, and the second finds an empty queue.
#
# Guess: dequeue() takes an advisory lock on the one item that it returns. A second worker is given the next item
#   while the first is still at work.
# Seen: pg_try_advisory_lock() stands in the WHERE of a query with ORDER BY id LIMIT 1. If PostgreSQL reads by the
#   index, it locks one row. If the table is small and was analyzed, as autovacuum does by itself, PostgreSQL reads and
#   locks every row of the tag, then sorts them. The planner decides how many workers can work at once: of eight items
#   one worker holds all, of a hundred just one.
. "$(dirname "$0")/lib.sh"
pip_install py-q4pg==0.2.0 psycopg2-binary==2.9.13 sqlalchemy==2.0.36
postgres
python > "$work/seen" <<'END' || true
import os, psycopg2
from q4pg import QueueManager
dsn = "host={PGHOST} port={PGPORT} user={PGUSER} dbname={PGDATABASE}".format(**os.environ)
first, second = QueueManager(dsn=dsn), QueueManager(dsn=dsn)
first.create_table()
def put(items):
    for number in range(items):
        first.enqueue("mail", number)
def analyze():
    with psycopg2.connect(dsn) as connection:
        connection.cursor().execute("ANALYZE mq")
def side_by_side(when):
    with first.dequeue("mail") as one, second.dequeue("mail") as other:
        print(f"{when}: the first worker has item {one}, the second has {other}")
put(10)
side_by_side("new table")
analyze()
side_by_side("8 items, analyzed")
print("left:", first.count("mail"))
put(100)
analyze()
side_by_side("107 items, analyzed")
END
still <<'END'
new table: the first worker has item 0, the second has 1
8 items, analyzed: the first worker has item 2, the second has None
left: 7
107 items, analyzed: the first worker has item 3, the second has 4
END
