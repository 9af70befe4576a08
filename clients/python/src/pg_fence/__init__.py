"""Leases with fencing tokens of the PostgreSQL extension pg_fence.

with pg_fence.Fence("dbname=shop") as fence, fence.lease("order:7") as lease:
    with lease.guard(connection):
        connection.execute("UPDATE orders SET status = 'paid' WHERE id = 7")
"""

from .errors import FenceError as FenceError
from .errors import LeaseLost as LeaseLost
from .errors import LeaseTaken as LeaseTaken
from .errors import NotGranted as NotGranted
from .errors import NotInstalled as NotInstalled
from .errors import Refused as Refused
from .errors import TransactionLost as TransactionLost
from .fence import AsyncFence as AsyncFence
from .fence import AsyncLease as AsyncLease
from .fence import Fence as Fence
from .fence import Lease as Lease
from .fence import options as options
from .heartbeat import Event as Event
