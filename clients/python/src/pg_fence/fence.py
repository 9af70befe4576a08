"""Where leases come from, and leading."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar

import psycopg
from psycopg import conninfo

from .adopted import Adopted
from .errors import LeaseLost, LeaseTaken, NotSpeaking, StaleToken, is_permanent
from .lease import Lease, unique_holder

_log = logging.getLogger("pg_fence")
_T = TypeVar("_T")


class Fence:
    """Where leases come from: a connection string, or a function that opens a psycopg connection.

    Each lease has one connection of its own while it is held. `schema` is the extension's, where that is not in
    the search path.
    """

    def __init__(self, connect: str | Callable[[], psycopg.Connection[Any]], *, schema: str | None = None):
        self._source = connect
        self._schema = "" if schema is None else '"' + schema.replace('"', '""') + '".'

    def lease(
        self,
        *names: str,
        ttl: timedelta = timedelta(seconds=30),
        wait: timedelta = timedelta(0),
        holder: str | None = None,
        metadata: Any = None,
        shared: bool = False,
        slots: int = 1,
        session: bool = False,
        reclaim: bool = False,
        on_lost: Callable[[LeaseLost], None] | None = None,
    ) -> Lease:
        """A lease of one name, or of several at once, to be entered by `with` or `async with`.

        `on_lost` is called from another thread, at the deadline at the latest."""
        if not names:
            raise ValueError("a lease needs a name")
        if len(names) > 1 and (shared or slots != 1 or reclaim):
            raise ValueError("several names at once are exclusive: no shared, slots or reclaim")
        kind = {"shared": shared, "slots": slots, "session": session, "reclaim": reclaim}
        return self._make(names, _span("ttl", ttl), _span("wait", wait), holder, metadata, kind, on_lost)

    def _make(self, *arguments: Any) -> Lease:
        return Lease(self.open, self.sql, *arguments)

    def adopt(
        self,
        name: str,
        token: int,
        *,
        wait: timedelta = timedelta(0),
        holder: str | None = None,
        metadata: Any = None,
    ) -> Adopted:
        """Makes a lease known that somebody else has granted (etcd, ZooKeeper, Redis, another database), under the
        number that it has there.

        Raises StaleToken where the name has had a greater number, or this one was released; and LeaseTaken where a
        transaction guards an older one, and did so for `wait`: then that one has ended all the same, and it is to be
        tried again."""
        adopted = self._adopted(name, token, holder or unique_holder(), metadata)
        adopted.adopt(_span("wait", wait))
        return adopted

    async def aadopt(
        self,
        name: str,
        token: int,
        *,
        wait: timedelta = timedelta(0),
        holder: str | None = None,
        metadata: Any = None,
    ) -> Adopted:
        """As `adopt`, in asyncio."""
        adopted = self._adopted(name, token, holder or unique_holder(), metadata)
        await adopted.aadopt(_span("wait", wait))
        return adopted

    def _adopted(self, *arguments: Any) -> Adopted:
        return Adopted(self.open, self.sql, *arguments)

    def lead(
        self,
        name: str,
        work: Callable[[Lease], _T],
        *,
        ttl: timedelta = timedelta(seconds=30),
        stop: threading.Event | None = None,
    ) -> _T | None:
        """Runs `work(lease)` while leading, again after each loss, and returns what it returned once it came to its
        end; None when `stop` was set. The work sees a loss as an exception at its next step."""
        stop = stop or threading.Event()
        again = self._leadership(name, ttl)
        while not stop.is_set():
            lease = again()
            try:
                with lease:
                    return work(lease)
            except LeaseTaken:
                continue
            except Exception as error:
                if not _goes_on(lease, error):
                    raise
                stop.wait(ttl.total_seconds() / 12)
        return None

    async def alead(
        self, name: str, work: Callable[[Lease], Awaitable[_T]], *, ttl: timedelta = timedelta(seconds=30)
    ) -> _T:
        """As `lead`, in asyncio: on a loss the work is cancelled. Cancel the caller to end it."""
        again = self._leadership(name, ttl)
        while True:
            lease = again()
            try:
                async with lease:
                    return await work(lease)
            except LeaseTaken:
                continue
            except Exception as error:
                if not _goes_on(lease, error):
                    raise
                await asyncio.sleep(ttl.total_seconds() / 12)

    def _leadership(self, name: str, ttl: timedelta) -> Callable[[], Lease]:
        # Whoever never saw the answer to an acquire takes the grant over by its own unique name. It waits in
        # portions, so that it notices soon when it is to stop.
        portion = min(max(_span("ttl", ttl) / 3, timedelta(seconds=1)), timedelta(seconds=10))
        holder = unique_holder()
        return lambda: self.lease(name, ttl=ttl, wait=portion, holder=holder, reclaim=True)

    def open(self, limit: float) -> psycopg.Connection[Any]:
        """A new connection, for a lease; it may take `limit` seconds."""
        if callable(self._source):
            connection = self._source()
            connection.autocommit = True
        else:
            options: dict[str, Any] = dict(conninfo.conninfo_to_dict(self._source))
            # libpq counts in whole seconds, two at least.
            options.setdefault("connect_timeout", max(2, math.ceil(limit)))
            connection = psycopg.connect(**options, autocommit=True)
        # A pooler in transaction mode hands each transaction to a server that may not know the statement.
        connection.prepare_threshold = None
        return connection

    def sql(self, call: str) -> str:
        return f"SELECT {self._schema}{call}"


def _span(what: str, span: timedelta) -> timedelta:
    if not isinstance(span, timedelta):
        raise TypeError(f"{what} is a timedelta, for a bare number has no unit: not {span!r}")
    return span


def _goes_on(lease: Lease, error: Exception) -> bool:
    """Whether whoever leads tries again: the lease was lost, or the server could not be reached to acquire it."""
    _log.warning("leading %s has ended: %s", lease.names[0], error)
    if lease.loss is not None or isinstance(error, (LeaseLost, StaleToken, NotSpeaking)):
        return True
    return lease.token is None and isinstance(error, psycopg.OperationalError) and not is_permanent(error)
