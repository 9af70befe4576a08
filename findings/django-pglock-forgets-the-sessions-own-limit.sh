#!/bin/bash
# django-pglock 1.8.0 (PyPI): after one advisory lock with a timeout the session's own lock_timeout is gone.
#
# Guess: "nested invocations will successfully apply and rollback the timeout to the previous value", so a
#   lock_timeout that the application has SET for its session is back after the block.
# Seen: the previous value is looked up in pglock's own thread-local note, not in the session. At the end, even
#   before the body of the with block runs, lock_timeout becomes the server's default: no limit. A project that
#   sets it on connection_created loses it at its first timed lock, and waits for row locks without end.
. "$(dirname "$0")/lib.sh"
pip_install django-pglock==1.8.0 django==5.1.3 typing-extensions==4.12.2 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import os, django
from django.conf import settings
settings.configure(INSTALLED_APPS=["pglock", "pgactivity"], USE_TZ=True, DATABASES={"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres",
    "HOST": os.environ["PGHOST"], "PORT": os.environ["PGPORT"]}})
django.setup()
import pglock
from django.db import connection
def sql(text, rows=False):
    with connection.cursor() as c:
        c.execute(text)
        return c.fetchone()[0] if rows else None
sql("SET lock_timeout = '7s'")
print("the session's own:", sql("SHOW lock_timeout", True))
with pglock.advisory("untimed"):
    print("in a lock without a timeout:", sql("SHOW lock_timeout", True))
with pglock.advisory("job", timeout=1) as got:
    print("granted:", got, "and in the block:", sql("SHOW lock_timeout", True))
print("after it:", sql("SHOW lock_timeout", True))
END
still <<'END'
the session's own: 7s
in a lock without a timeout: 7s
granted: True and in the block: 0
after it: 0
END
