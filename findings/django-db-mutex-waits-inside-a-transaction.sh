#!/bin/bash
# django-db-mutex 3.1.0 (PyPI): in a request's transaction, a taken mutex is waited for instead of refused.
#
# Guess: a mutex that is taken raises DBMutexError at once, as its page shows; it has no way to wait.
# Seen: the mutex is a row under a unique key. If the holder is inside a transaction (ATOMIC_REQUESTS), the row is
#   not committed, so the second INSERT waits for that transaction's end. By then the row was deleted again: no
#   error, the second one is granted, and the job that was to run once runs twice, one after the other.
. "$(dirname "$0")/lib.sh"
pip_install django-db-mutex==3.1.0 django==4.2.16 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import os, threading, time, django
from django.conf import settings
settings.configure(INSTALLED_APPS=["db_mutex"], USE_TZ=True, DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres",
    "HOST": os.environ["PGHOST"], "PORT": os.environ["PGPORT"]}})
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from contextlib import nullcontext
from django.db import connection, transaction
from db_mutex.exceptions import DBMutexError
from db_mutex.db_mutex import db_mutex
def holder(context, inside):
    with context, db_mutex("nightly"):
        inside.set()
        time.sleep(3)
    connection.close()
for name, context in ("no transaction", nullcontext()), ("a transaction", transaction.atomic()):
    inside = threading.Event()
    thread = threading.Thread(target=holder, args=(context, inside))
    thread.start(); inside.wait()
    began = time.monotonic()
    try:
        with db_mutex("nightly"):
            answer = "granted"
    except DBMutexError:
        answer = "DBMutexError"
    print(f"the holder in {name}: {answer}", "after waiting" if time.monotonic() - began > 1.5 else "at once")
    thread.join()
END
still <<'END'
the holder in no transaction: DBMutexError at once
the holder in a transaction: granted after waiting
END
