#!/bin/bash
# django-database-locks 0.5 (PyPI): two locks of one name in one process both hold, and the first to end frees both.
#
# Guess: a second DBLock("job") of the same process, in another thread, say, is refused like anybody's; or, if
#   it is reentrant, it counts, and the lock is free after the last release.
# Seen: the owner is "host.pid" for every object. Both get it, nothing is counted, and one release() hands the
#   lock to another process while the other half is still at work.
. "$(dirname "$0")/lib.sh"
pip_install django-database-locks==0.5 django==4.2.16 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import os, threading, django
from django.conf import settings
settings.configure(INSTALLED_APPS=["database_locks"], USE_TZ=True, DATABASES={"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres",
    "HOST": os.environ["PGHOST"], "PORT": os.environ["PGPORT"]}})
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from database_locks.locks import DBLock
first, second = DBLock("job"), DBLock("job")
print("first:", first.acquire(60))
def another_thread():
    print("second, in another thread:", second.acquire(60))
    second.release()
thread = threading.Thread(target=another_thread)
thread.start(); thread.join()
print("another process, the first not released:", DBLock("job", locked_by="another.1").acquire(60))
END
still <<'END'
first: True
second, in another thread: True
another process, the first not released: True
END
