#!/bin/bash
# pals 0.4.0 (PyPI): one lock taken over the application's own engine gives its pool a lock_timeout.
#
# Guess: create_engine_callable is there to share the application's engine; after the with block the connection
#   goes back to the pool as it came, as pals itself takes care to drop all advisory locks at that moment.
# Seen: the wait is limited by set_config('lock_timeout', ..., false), and nobody sets it back: from then on the
#   application's own statements on that connection give up on row locks after 30 s, or what the lock's limit was.
. "$(dirname "$0")/lib.sh"
pip_install pals==0.4.0 sqlalchemy==2.0.36 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import os, pals
from sqlalchemy import create_engine, text
engine = create_engine(os.environ["DATABASE_URL"], pool_size=1, max_overflow=0)
def show(when):
    with engine.connect() as c:
        print(when, c.execute(text("SHOW lock_timeout")).scalar())
show("before:")
with pals.Locker("app", create_engine_callable=lambda: engine).lock("job"):
    pass
show("after the block:")
with engine.begin() as c:
    c.execute(text("CREATE TABLE t AS SELECT 1 AS n"))
with pals.Locker("app", create_engine_callable=lambda: engine).lock("job", acquire_timeout=500):
    pass
with engine.dialect.dbapi.connect(os.environ["DATABASE_URL"]) as other, engine.connect() as c:
    other.cursor().execute("UPDATE t SET n = 2")
    try:
        c.execute(text("UPDATE t SET n = 3"))
    except Exception as e:
        print("the application's UPDATE:", type(e.orig).__name__)
END
still <<'END'
before: 0
after the block: 30s
the application's UPDATE: LockNotAvailable
END
