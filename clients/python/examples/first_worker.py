import sys
import time
from datetime import timedelta

import psycopg

import pg_fence

with pg_fence.Fence(sys.argv[1]) as fence, psycopg.connect(sys.argv[1]) as conn:
    try:
        with fence.lease("order:7", ttl=timedelta(seconds=30)) as lease:
            print("order:7 is ours, under token", lease.token)
            time.sleep(3)  # Whatever takes long goes here: a heartbeat keeps the lease meanwhile.
            with lease.guard(conn):
                conn.execute("UPDATE orders SET status = 'paid' WHERE id = 7")
            print("order 7 is paid")
    except pg_fence.LeaseTaken as taken:
        print("somebody else is at it:", taken)
    except pg_fence.LeaseLost as loss:
        print("stop, and report no failure:", loss)
