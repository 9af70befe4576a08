#!/bin/bash
# django-pg-queue 0.8.2 (PyPI, queue in PostgreSQL for Django): a job that begins late has all its retries at once.
#
# Guess: "@task(queue, max_retries=5)" runs a job that fails again after half a minute, a minute and so on: "5th retry
#   will take half hour". So a service that is away for ten minutes costs no job, whenever its job had been enqueued.
# Seen: the delay is added to the time at which the job was due, not to now. If the workers were away for two hours,
#   each job of that time fails six times within a second, while the log says "Retrying in" so many seconds, and is
#   gone. A job that was enqueued just now runs once and waits, as one would think.
. "$(dirname "$0")/lib.sh"
pip_install django-pg-queue==0.8.2 Django==4.2.16 psycopg2-binary==2.9.10
postgres
cd "$work"
python > seen <<'END' || true
import datetime, logging, os
import django
from django.conf import settings
settings.configure(INSTALLED_APPS=["django.contrib.postgres", "pgq"], USE_TZ=True, DATABASES={"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres", "HOST": "127.0.0.1",
    "PORT": os.environ["PGPORT"]}})
django.setup()
logging.disable()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from django.utils import timezone
from pgq.decorators import task
from pgq.models import Job
from pgq.queue import AtLeastOnceQueue
queue = AtLeastOnceQueue(tasks={})
runs = 0
@task(queue, max_retries=5)
def report(queue, job, args, meta):
    global runs
    runs += 1
    raise ConnectionError("the service is away")
def work(what):
    global runs
    runs, began = 0, timezone.now()
    while queue.run_once(): pass
    took = timezone.now() - began
    print(f"{what}: runs {runs}, within two seconds {took.total_seconds() < 2}, jobs that wait {Job.objects.count()}")
report.enqueue({})
work("a job of now")
Job.objects.all().delete()
report.enqueue({})
Job.objects.update(execute_at=timezone.now() - datetime.timedelta(hours=2))
work("a job of two hours ago")
END
still <<'END'
a job of now: runs 1, within two seconds True, jobs that wait 1
a job of two hours ago: runs 6, within two seconds True, jobs that wait 0
END
