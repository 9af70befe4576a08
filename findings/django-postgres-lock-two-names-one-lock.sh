#!/bin/bash
# django-postgres-lock 0.3 (PyPI): different names can be the same lock, two plain English words among them.
#
# Guess: a name becomes a 64-bit key of a good hash, as Postgres's advisory locks have room for.
# Seen: the key is the name's CRC-32. "plumless" and "buckeroo" exclude each other, and of the names that
#   this script makes up, one each second, the first pair would be met within four hours.
. "$(dirname "$0")/lib.sh"
pip_install django-postgres-lock==0.3 django==5.1.3 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import os, django
from django.conf import settings
one = {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres",
       "HOST": os.environ["PGHOST"], "PORT": os.environ["PGPORT"]}
settings.configure(DATABASES={"default": one, "other": dict(one)})
django.setup()
from postgres_lock.lock import PostgresLock
with PostgresLock("plumless"):
    with PostgresLock("buckeroo", try_=True, using="other") as got:
        print("buckeroo, while another session has plumless:", got)
    with PostgresLock("buckaroo", try_=True, using="other") as got:
        print("buckaroo:", got)
seen, lock = {}, PostgresLock("any")
for n in range(1, 10**6):
    name = f"report:{n}-{n * n}"
    key = lock.get_lock_id(name)
    if key in seen:
        print(f"{seen[key]} and {name} are one, after {n} names")
        break
    seen[key] = name
END
still <<'END'
buckeroo, while another session has plumless: False
buckaroo: True
report:4595-21114025 and report:11749-138039001 are one, after 11749 names
END
