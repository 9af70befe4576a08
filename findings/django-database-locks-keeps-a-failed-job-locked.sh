#!/bin/bash
# django-database-locks 0.5 (PyPI): if the work raises, a thread keeps renewing its lock for good.
#
# Guess: "with lock(...)" gives the lock back when the block is left, by an exception as well; at worst it stays
#   until lock_ttl is over.
# Seen: the block has no "finally". The exception goes on to the caller, the lock stays, and its renewing thread
#   goes on: a web or queue worker that survives one failed job keeps it locked for as long as it lives.
. "$(dirname "$0")/lib.sh"
pip_install django-database-locks==0.5 django==4.2.16 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import os, threading, time, django
from django.conf import settings
settings.configure(INSTALLED_APPS=["database_locks"], USE_TZ=True, DATABASES={"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres",
    "HOST": os.environ["PGHOST"], "PORT": os.environ["PGPORT"]}})
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from database_locks.locks import DBLock, lock
try:
    with lock("job", lock_ttl=2, lock_ttl_renew=1):
        raise KeyError("one bad row")
except KeyError as e:
    print("the caller is told:", e)
time.sleep(7)
print("7 s later, with a ttl of 2 s, another worker gets it:", DBLock("job", locked_by="another").acquire(2))
print("renewing threads:", sum(t is not threading.main_thread() for t in threading.enumerate()))
END
still <<'END'
the caller is told: 'one bad row'
7 s later, with a ttl of 2 s, another worker gets it: False
renewing threads: 1
END
