"""Where leases come from, and leading."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import psycopg
from psycopg import conninfo

from .acquiring import Asked, unique_holder
from .adopted import Adopted
from .claimed import Claimed, claim
from .connection import in_thread
from .errors import LeaseLost, LeaseTaken, NotSpeaking, StaleToken, is_permanent
from .guarded import Guarded, kind_of
from .keeper import Keeper
from .lease import Lease
from .observer import Leader, Observer

_log = logging.getLogger("pg_fence")
_T = TypeVar("_T")

#: A shorter ttl leaves no time for a renewal.
SHORTEST_TTL = timedelta(milliseconds=100)


class Fence:
    """Where leases come from: a connection string, or a function that opens a psycopg connection.

    All its leases are kept by one thread, on one connection, while there are any. A session lease has one more
    connection, and so has an acquire while it waits. `schema` is the extension's, where that is not in the search path.
    """

    def __init__(self, connect: str | Callable[[], psycopg.Connection[Any]], *, schema: str | None = None):
        if not isinstance(connect, str) and not callable(connect):
            takes = "a fence takes a connection string, or a function that opens a psycopg.Connection"
            raise TypeError(f"{takes}, and no {kind_of(connect)}")
        self._source = connect
        self._prefix = "" if schema is None else '"' + schema.replace('"', '""') + '".'
        self._keeper = self._make_keeper()

    # The laboratory plants its faults in these.

    def _make_keeper(self) -> Keeper:
        return Keeper(self._open, self._prefix)

    def _make(self, asked: Asked) -> Lease:
        return Lease(self._keeper, asked)

    def _adopted(self, name: str, token: int, holder: str, metadata: Any) -> Adopted:
        return Adopted(self._keeper, name, token, holder, metadata)

    def lease(
        self,
        *names: str | Sequence[str],
        ttl: timedelta = timedelta(seconds=30),
        wait: timedelta = timedelta(0),
        holder: str | None = None,
        metadata: Any = None,
        shared: bool = False,
        slots: int = 1,
        session: bool = False,
        reclaim: bool = False,
        hold_at_most: timedelta | None = None,
        hold_at_least: timedelta | None = None,
        on_lost: Callable[[LeaseLost], None] | None = None,
    ) -> Lease:
        """A lease of one name, or of several at once (also as one list), to be entered by `with` or `async with`.

        `hold_at_most`: so long after the acquire it is renewed no more, and lost at its deadline: for a loop that may
        be stuck. `hold_at_least`: a release before that lets it end by itself then. `on_lost` is called in a thread of
        its own, at the deadline at the latest."""
        all_names = _names(names)
        if len(all_names) > 1 and (shared or slots != 1 or reclaim):
            raise ValueError("several names at once are exclusive: no shared, slots or reclaim")
        if session and hold_at_least is not None:
            raise ValueError("a session lease ends with its session: no hold_at_least")
        asked = Asked(
            all_names, _ttl(ttl), _span("wait", wait), holder, metadata, shared, slots, session, reclaim, on_lost
        )
        asked.hold_at_most = hold_at_most and _span("hold_at_most", hold_at_most)
        asked.hold_at_least = hold_at_least and _span("hold_at_least", hold_at_least)
        return self._make(asked)

    def resume(
        self,
        name: str,
        token: int,
        *,
        ttl: timedelta = timedelta(seconds=30),
        on_lost: Callable[[LeaseLost], None] | None = None,
    ) -> Lease:
        """A lease that another process has acquired, and detached, under its token. It is renewed when it is entered,
        or by `acquire`; which raises LeaseLost where it is over."""
        if not isinstance(token, int):
            raise TypeError(f"a token is an int, and no {token!r}")
        return self._make(Asked(_names((name,)), _ttl(ttl), on_lost=on_lost, token=token))

    def claim(
        self,
        query: str,
        parameters: Sequence[Any] = (),
        *,
        n: int = 1,
        ttl: timedelta = timedelta(seconds=30),
        holder: str | None = None,
        metadata: Any = None,
        on_lost: Callable[[LeaseLost], None] | None = None,
    ) -> Claimed:
        """The first `n` leases that are free, of those that a query's rows name in their first column, in its order: a
        list of leases that are held, each with its `row`. As a block it releases what is left of them.

            with fence.claim("SELECT 'job:' || id, id FROM jobs WHERE done_at IS NULL ORDER BY id", n=10) as jobs:
        """

        def make(name: str) -> Lease:
            return self._make(Asked((name,), _ttl(ttl), holder=holder, metadata=metadata, on_lost=on_lost))

        return claim(self._keeper, make, query, parameters, n, _ttl(ttl), holder or unique_holder(), metadata)

    async def aclaim(self, query: str, parameters: Sequence[Any] = (), **options: Any) -> Claimed:
        """As `claim`, in asyncio."""
        return await in_thread(lambda: self.claim(query, parameters, **options))

    def guard(self, connection: Any, leases: Iterable[Lease], *, release: bool = False) -> Guarded:
        """A transaction that is guarded by several leases at once, as `Lease.guard` by one."""
        all_leases = list(leases)
        if not all_leases or not all(isinstance(lease, Lease) for lease in all_leases):
            raise TypeError("this takes one lease or more: an adopted one guards by itself")
        return Guarded(all_leases, connection, guards=True, release=release)

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
        adopted = self._adopted(_name(name), token, holder or unique_holder(), metadata)
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
        adopted = self._adopted(_name(name), token, holder or unique_holder(), metadata)
        await adopted.aadopt(_span("wait", wait))
        return adopted

    def observe(self, name: str, on_leader: Callable[[Leader], None]) -> Observer:
        """Tells who holds a lease, now and whenever that changes, by looking each second. `on_leader` is called in a
        thread of its own, until the observer is closed (`close`, or the end of its block)."""
        return Observer(self._keeper, _name(name), on_leader)

    def lead(
        self,
        name: str,
        work: Callable[[Lease], _T],
        *,
        ttl: timedelta = timedelta(seconds=30),
        stop: threading.Event | None = None,
        on_leader: Callable[[Leader], None] | None = None,
    ) -> _T | None:
        """Runs `work(lease)` while leading, again after each loss, and returns what it returned once it came to its
        end; None when `stop` was set. The work sees a loss as an exception at its next step.

        `stop` also ends a wait, and the lease of the work: its next step raises LeaseLost, and the lease is released as
        soon as no transaction is open under it. `on_leader` is told who leads, as by `observe`."""
        stop = stop or threading.Event()
        again = self._leadership(name, ttl)
        with contextlib.ExitStack() as stack:
            if on_leader is not None:
                stack.enter_context(self.observe(name, on_leader))
            while not stop.is_set():
                lease = again()
                try:
                    with _stopped_by(stop, lease), lease:
                        return work(lease)
                except LeaseTaken:
                    continue
                except Exception as error:
                    if stop.is_set() and isinstance(error, LeaseLost):
                        break
                    if not _goes_on(lease, error):
                        raise
                    stop.wait(ttl.total_seconds() / 12)
        return None

    async def alead(
        self,
        name: str,
        work: Callable[[Lease], Awaitable[_T]],
        *,
        ttl: timedelta = timedelta(seconds=30),
        on_leader: Callable[[Leader], None] | None = None,
    ) -> _T:
        """As `lead`, in asyncio: on a loss the work is cancelled. Cancel the caller to end it."""
        again = self._leadership(name, ttl)
        observer = None if on_leader is None else self.observe(name, _in_loop(on_leader))
        try:
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
        finally:
            if observer is not None:
                await in_thread(observer.close)

    def _leadership(self, name: str, ttl: timedelta) -> Callable[[], Lease]:
        # If the answer to an acquire was lost, the unique name takes the grant over. It waits in portions, so
        # that it notices soon when it is to stop.
        portion = min(max(_ttl(ttl) / 3, timedelta(seconds=1)), timedelta(seconds=10))
        holder = unique_holder()
        return lambda: self.lease(name, ttl=ttl, wait=portion, holder=holder, reclaim=True)

    def _open(self, limit: float) -> psycopg.Connection[Any]:
        """A new connection, for the client's own use; it may take `limit` seconds."""
        if callable(self._source):
            connection = self._source()
            if not isinstance(connection, psycopg.Connection):
                takes = "a fence takes a function that opens a psycopg.Connection"
                raise TypeError(f"{takes}, and this one returns a {kind_of(connection)}")
            connection.autocommit = True
        else:
            options: dict[str, Any] = dict(conninfo.conninfo_to_dict(self._source))
            # libpq counts in whole seconds, two at least.
            options.setdefault("connect_timeout", max(2, math.ceil(min(limit, 3600.0))))
            connection = psycopg.connect(**options, autocommit=True)
        # A pooler in transaction mode hands each transaction to a server that may not know the statement.
        connection.prepare_threshold = None
        return connection


def _names(given: Sequence[str | Sequence[str]]) -> tuple[str, ...]:
    """Several names, or one list of them."""
    names: list[Any] = []
    for one in given:
        names.extend(one if isinstance(one, (list, tuple)) else [one])
    if not names:
        raise ValueError("a lease needs a name")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"the name of a lease is a str, and no {name!r}")
    return tuple(names)


def _name(name: str) -> str:
    return _names((name,))[0]


def _span(what: str, span: timedelta) -> timedelta:
    if not isinstance(span, timedelta):
        raise TypeError(f"{what} is a timedelta, for a bare number has no unit: not {span!r}")
    return span


def _ttl(ttl: timedelta) -> timedelta:
    if _span("ttl", ttl) < SHORTEST_TTL:
        raise ValueError(f"ttl is {SHORTEST_TTL.total_seconds()} s or more, for it is renewed meanwhile: not {ttl!r}")
    return ttl


@contextlib.contextmanager
def _stopped_by(stop: threading.Event, lease: Lease) -> Iterator[None]:
    """Ends the lease, or its wait, when `stop` is set within this block."""
    is_over = threading.Event()

    def wait() -> None:
        while not is_over.is_set():
            # An Event has nothing else to wait for it by, beside something else.
            if stop.wait(0.1):
                lease._stop()
                return

    thread = threading.Thread(target=wait, name="pg_fence stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _in_loop(on_leader: Callable[[Leader], None]) -> Callable[[Leader], None]:
    """The same, from another thread."""
    loop = asyncio.get_running_loop()

    def tell(leader: Leader) -> None:
        # The loop may be closed by then.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(on_leader, leader)

    return tell


def _goes_on(lease: Lease, error: Exception) -> bool:
    """Does the leader try again? It does when the lease was lost, or the server could not be reached to acquire it."""
    _log.warning("leading %s has ended: %s", lease.names[0], error)
    if lease.loss is not None or isinstance(error, (LeaseLost, StaleToken, NotSpeaking)):
        return True
    could_not_be_asked = isinstance(error, (psycopg.OperationalError, TimeoutError))
    return lease.token is None and could_not_be_asked and not is_permanent(error)
