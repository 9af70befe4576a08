"""Leases with fencing tokens of the PostgreSQL extension pg_fence, on psycopg 3.

    fence = pg_fence.Fence("dbname=shop")
    with fence.lease("order:7", ttl=timedelta(seconds=30)) as lease:
        with lease.guard(conn):
            conn.execute("UPDATE orders SET status = 'paid' WHERE id = 7")

`with` and `async with` both work, on psycopg's connections, SQLAlchemy's and Django's. What the verbs promise, and
each one's SQL, is said once for the clients of all languages, in the README of the directory `clients`.
"""

from .adopted import Adopted
from .claimed import Claimed
from .errors import (
    AcquireTimeout,
    CannotBeFenced,
    FenceError,
    LeaseLost,
    LeaseTaken,
    NeverIssued,
    NotInstalled,
    NoToken,
    NotSpeaking,
    StaleToken,
    TransactionLost,
    classify,
)
from .fence import Fence
from .guarded import Guarded
from .holding import Holding
from .lease import Lease
from .observer import Leader, Observer
from .presenting import attach, options

__all__ = [
    "AcquireTimeout",
    "Adopted",
    "CannotBeFenced",
    "Claimed",
    "Fence",
    "FenceError",
    "Guarded",
    "Holding",
    "Leader",
    "Lease",
    "LeaseLost",
    "LeaseTaken",
    "NeverIssued",
    "NoToken",
    "NotInstalled",
    "NotSpeaking",
    "Observer",
    "StaleToken",
    "TransactionLost",
    "attach",
    "classify",
    "options",
]
