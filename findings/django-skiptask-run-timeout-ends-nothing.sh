#!/bin/bash
# django-skiptask 0.1.1 (PyPI, SKIP LOCKED): run_timeout does not cut a task off; it makes a finished one a failure.
#
# Guess: after run_timeout seconds the worker is free for the next task, and the attempt is marked as failed.
# Seen: the task runs in a thread, and the worker waits for that thread to its end. Only then is the attempt put
#   down as an error, though the work is done; with reattempts it is done all over again, each time in full.
. "$(dirname "$0")/lib.sh"
pip_install django-skiptask==0.1.1 django==5.1.3 pytz==2024.2 psycopg2-binary==2.9.13
postgres
cat > "$work/jobs.py" <<'END'
import time
done = []
def slow():
    time.sleep(3)
    done.append("done")
END
PYTHONPATH=$work python > "$work/seen" <<'END' || true
import os, time, django, logging
from django.conf import settings
settings.configure(INSTALLED_APPS=["django_skiptask"], USE_TZ=True, DATABASES={"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres",
    "HOST": os.environ["PGHOST"], "PORT": os.environ["PGPORT"]}})
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
import jobs
from django_skiptask.handlers import enqueue_callable
from django_skiptask.models import Attempt
from django_skiptask.processing import process_tasks
enqueue_callable(jobs.slow, run_timeout=1, reattempts=1)
began = time.monotonic()
process_tasks()
print("the worker is free after", round(time.monotonic() - began), "s, with a run_timeout of 1 s")
print("the work was done:", len(jobs.done), "times")
print("attempts:", [a.get_status_display() for a in Attempt.objects.order_by("id")])
END
still <<'END'
the worker is free after 6 s, with a run_timeout of 1 s
the work was done: 2 times
attempts: ['Errored', 'Errored']
END
