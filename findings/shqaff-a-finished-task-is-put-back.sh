#!/bin/bash
# shqaff 0.0.3 (PyPI, queue in PostgreSQL): with two workers a task that was finished is put back, and runs again.
#
# Guess: a batch is claimed by FOR UPDATE SKIP LOCKED "so concurrent workers never claim the same task": each task of
#   it is its worker's until it was run.
# Seen: the commit that marks the first task as begun unlocks the others. Another worker runs the second one
#   meanwhile; the first worker then finds it done, takes that for a failure of its own, and makes it pending.
. "$(dirname "$0")/lib.sh"
pip_install shqaff==0.0.3 psycopg2-binary==2.9.13
postgres
export SHAQAFF_DB_HOST=$PGHOST SHAQAFF_DB_PORT=$PGPORT SHAQAFF_DB_NAME=$PGDATABASE
python > "$work/seen" <<'END' || true
import threading
from shqaff.consumer import Consumer
from shqaff.db import SessionLocal, init_db
from shqaff.event_loop import process_once
from shqaff.producer import create_task
from shqaff.registry import register_consumer
from shqaff.repository import TaskRepository

first_runs, first_may_end = threading.Event(), threading.Event()

class Prints(Consumer):
    name = "prints"
    def run(self, payload):
        print("run:", payload["task"])
        if payload["task"] == "first":
            first_runs.set()
            first_may_end.wait()

register_consumer(Prints)
init_db()
db = SessionLocal()
def states():
    db.expire_all()
    return {task.task_name: task.status for task in TaskRepository(db).list()}
for name in "first", "second":
    create_task(db, name, "prints", {"task": name})
one = threading.Thread(target=lambda: process_once(SessionLocal()))
one.start()
first_runs.wait()
process_once(db)
print("the second worker is through:", states())
first_may_end.set()
one.join()
print("the first worker is through:", states())
process_once(db)
END
still <<'END'
run: first
run: second
the second worker is through: {'first': 'in_progress', 'second': 'done'}
the first worker is through: {'first': 'done', 'second': 'pending'}
run: second
END
