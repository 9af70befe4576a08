#!/bin/bash
# django-concurrency-safe 0.0.2 (PyPI): with timeout=0 a free lock is never granted.
#
# Guess: "maximum time to wait" of 0 is one try: granted if it is free, refused at once if not.
# Seen: the loop asks "is there time left?" before its first try, so no statement is sent at all, and the
#   decorator with on_conflict="return_none" skips every call in silence.
. "$(dirname "$0")/lib.sh"
pip_install django-concurrency-safe==0.0.2 django==5.1.3 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import os, django
from django.conf import settings
settings.configure(DATABASES={"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres",
    "HOST": os.environ["PGHOST"], "PORT": os.environ["PGPORT"]}})
django.setup()
from concurrency_safe import concurrency_safe, lock
with lock("stock:1", timeout=0.001):
    print("timeout=0.001: granted")
try:
    with lock("stock:1", timeout=0):
        print("timeout=0: granted")
except Exception as e:
    print(type(e).__name__, e)
@concurrency_safe(key="stock:{sku}", timeout=0, on_conflict="return_none")
def buy(sku):
    return "bought"
print("decorated:", buy(1))
END
still <<'END'
timeout=0.001: granted
LockAcquireTimeout Failed to acquire lock for key='stock:1' within timeout=0s
decorated: None
END
