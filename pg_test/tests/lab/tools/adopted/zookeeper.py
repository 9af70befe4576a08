import os
import sys

import psycopg
from kazoo.client import KazooClient

LEASE = "report-writer"
database, servers, file = sys.argv[1:]
client = KazooClient(hosts=servers, timeout=float(os.environ.get("LEASE_SECONDS", "10")))
client.start()
lock = client.Lock(f"/locks/{LEASE}", os.uname().nodename)

with lock:
    node = client.exists(f"/locks/{LEASE}/{lock.node}")
    if node is None:
        sys.exit("the session has expired, and the lock with it")
    number = node.czxid
    try:
        with psycopg.connect(database, autocommit=True) as connection:
            # Before the first read on which a write depends.
            adopt = "SELECT lease_adopt(%s, %s, wait => '1 min')"
            [adopted] = connection.execute(adopt, [LEASE, number]).fetchone()
            if adopted is None:
                sys.exit("somebody still writes under an older number")
            with open(file) as work:   # which takes its time
                body = work.read()
            with connection.transaction():
                connection.execute("SELECT lease_guard(%s, lease_adopt(%s, %s))", [LEASE, LEASE, number])
                connection.execute("UPDATE reports SET body = %s WHERE id = 1", [body])
                connection.execute("SELECT lease_release(%s, %s)", [LEASE, number])
    except psycopg.Error as error:
        sys.exit(f"{error.sqlstate}: {error}")
client.stop()
