import sys
from datetime import timedelta

import pg_fence
import psycopg

fence = pg_fence.Fence(sys.argv[1])
try:
    with fence.lease("order:7", ttl=timedelta(seconds=30)) as lease:
        with psycopg.connect(sys.argv[1], autocommit=True) as conn:
            # Whatever takes long goes here: a heartbeat keeps the lease meanwhile.
            with lease.guard(conn):
                conn.execute("UPDATE orders SET status = 'paid' WHERE id = 7")
except pg_fence.LeaseTaken:
    print("somebody else is at it")
except pg_fence.LeaseLost as loss:
    print("stop, and report no failure:", loss)
