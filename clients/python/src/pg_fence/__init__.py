"""Leases with fencing tokens of the PostgreSQL extension pg_fence.

    with pg_fence.Fence("dbname=shop") as fence, fence.lease("order:7") as lease:
        with lease.guard(connection):
            connection.execute("UPDATE orders SET status = 'paid' WHERE id = 7")
"""

from .aio import AsyncFence, AsyncLease
from .errors import FenceError, LeaseLost, LeaseTaken, NotGranted, NotInstalled, Refused, TransactionLost
from .fence import Fence, Lease, options
from .keeper import Event

__all__ = [
    "AsyncFence",
    "AsyncLease",
    "Event",
    "Fence",
    "FenceError",
    "Lease",
    "LeaseLost",
    "LeaseTaken",
    "NotGranted",
    "NotInstalled",
    "Refused",
    "TransactionLost",
    "options",
]
