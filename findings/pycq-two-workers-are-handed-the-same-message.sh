#!/bin/bash
# pycq 0.4.2 (PyPI, FIFO queue in CockroachDB or PostgreSQL): on PostgreSQL two workers are handed the same message.
#
# Guess: by its page each message is handled once: it goes to one of the workers that ask, and the other one gets the
#   next message or None.
# Seen: get() is a SELECT that locks nothing and a DELETE by id that nobody counts. It relies on the serializable
#   isolation that CockroachDB has by default; PostgreSQL's default is read committed. Two workers that have both read
#   the message (here while a CREATE INDEX holds up their DELETE) both return it.
. "$(dirname "$0")/lib.sh"
pip_install --no-deps pycq==0.4.2 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import os, time, psycopg2
from concurrent.futures import ThreadPoolExecutor
from pycq import CQ
url = os.environ["DATABASE_URL"]
admin = psycopg2.connect(url)
cursor = admin.cursor()
cursor.execute("""CREATE TABLE queue (
    id serial PRIMARY KEY, queue text NOT NULL, data jsonb NOT NULL, enqueued_at timestamp DEFAULT now())""")
admin.commit()
CQ(psycopg2.connect(url)).put("mail", {"letter": 1})
cursor.execute("CREATE INDEX ON queue (queue, enqueued_at)")
with ThreadPoolExecutor() as workers:
    got = [workers.submit(CQ(psycopg2.connect(url)).get, "mail") for _ in range(2)]
    for _ in range(50):
        time.sleep(0.1)
        cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
        if cursor.fetchone() == (2,):
            break
    admin.commit()
for number, future in enumerate(got, 1):
    print(f"worker {number}:", (future.result() or {}).get("data"))
print("a third one:", CQ(psycopg2.connect(url)).get("mail"))
END
still <<'END'
worker 1: {'letter': 1}
worker 2: {'letter': 1}
a third one: None
END
