#!/bin/bash
# pglease 0.0.4 (PyPI, leases as rows in PostgreSQL): a lease that was given back in order is reported as lost.
#
# Guess: on_lease_lost is called when a heartbeat finds that the lease is gone, as its page says, whose example ends
#   the process there. Who calls release() has nothing to lose any more, so nothing is called.
# Seen: release() deletes the row first and stops the heartbeat afterwards. A heartbeat that falls due while the
#   DELETE waits (here for another session that has locked the row) comes next, finds no row and reports the lease as
#   lost, although release() returns True. With the page's handler a worker that has done its job is aborted.
. "$(dirname "$0")/lib.sh"
pip_install pglease==0.0.4 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import logging, os, threading, time, psycopg2
from pglease import PGLease
logging.disable()
url = os.environ["DATABASE_URL"]
lost = []
for locked in False, True:
    worker = PGLease(url, heartbeat_interval=2, on_lease_lost=lost.append)
    print("acquired:", worker.try_acquire("report", ttl=60))
    if locked:
        other = psycopg2.connect(url)
        other.cursor().execute("SELECT * FROM pglease_leases FOR UPDATE")
        threading.Timer(4, other.commit).start()
    print("the row locked by another session:", locked, "| release():", worker.release("report"), "| lost:", lost)
    worker.close()
END
still <<'END'
acquired: True
the row locked by another session: False | release(): True | lost: []
acquired: True
the row locked by another session: True | release(): True | lost: ['report']
END
