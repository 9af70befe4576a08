"""Where leases come from, and how they are held, in synchronous programs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Generic, Self, TypeVar

from . import asked as statements
from .asked import Asked, checked, json_of, list_of_names, ttl_of, unique_holder
from .errors import FenceError, LeaseLost, LeaseTaken, Refused, TransactionLost, session_ended, sqlstate_of
from .guard import C, Guard, under
from .keeper import Event, Grant, Keeper
from .line import in_thread
from .source import opener

_T = TypeVar("_T")
HALF_A_MINUTE = timedelta(seconds=30)


class Held:
    """What leases of both kinds have."""

    def __init__(self, keeper: Keeper, asked: Asked | None, grant: Grant | None):
        self._keeper, self._asked, self._grant = keeper, asked, grant
        self.names = asked.names if grant is None and asked is not None else self._granted().names

    def _granted(self) -> Grant:
        if self._grant is None:
            raise RuntimeError("the lease is not held yet: enter it")
        return self._grant

    @property
    def token(self) -> int:
        """The acquire's: it serves for as long as the lease is held."""
        return self._granted().token

    @property
    def held(self) -> bool:
        """Whether it is ours at this moment, by our own clock."""
        return self._grant is not None and self._grant.remaining > timedelta(0)

    @property
    def remaining(self) -> timedelta:
        """How long it is ours if no renewal comes through any more."""
        return self._granted().remaining

    def check(self) -> None:
        """Raises LeaseLost once it is ours no more. For long steps, and before each call to the outside."""
        self._keeper.check(self._granted())

    def guard(self, connection: C, *, release: bool = False) -> Guard[C]:
        """A transaction, entered by `with` or, on an asynchronous connection, by `async with`: on psycopg, asyncpg,
        Django, or a Connection or Session of SQLAlchemy. With `release` it gives the lease back."""
        return under(self._keeper, [self._granted()], release, connection)

    def _end(self, error: BaseException | None) -> None:
        if error is None and self._granted().is_lost:
            raise self._granted().lost()

    def __del__(self) -> None:
        keeper, grant = self._keeper, self._grant
        if grant is not None and grant.reason is None:
            told = f"the lease {', '.join(self.names)} was forgotten, and not released"
            warnings.warn(told, ResourceWarning, source=self)
            in_thread(lambda: keeper.release([grant]))


L = TypeVar("L", bound=Held)


class Adopted:
    """A lease that somebody else grants, under the number that it has there."""

    def __init__(self, keeper: Keeper, name: str, token: int):
        self._keeper, self.name, self.token = keeper, name, token

    def guard(self, connection: C, *, release: bool = False) -> Guard[C]:
        """The same as a lease's. With `release` the number is refused from then on."""
        begins = [statements.guard_adopted(self._keeper.prefix, self.name, self.token)]
        ends = [statements.release(self._keeper.prefix, [self.name], self.token)] if release else []
        return Guard(self._keeper, [], begins, ends, connection)


class Leases(Generic[L]):
    """What fences of both kinds have. `source` is a connection string, a URL, a function that opens a psycopg
    connection, SQLAlchemy's engine or Django's connection; `schema` the extension's, where that is not in the search
    path. `on_event` is told what becomes of leases."""

    _kind: type[L]

    def __init__(self, source: Any, *, schema: str | None = None, on_event: Callable[[Event], object] | None = None):
        prefix = "" if schema is None else '"' + schema.replace('"', '""') + '".'
        self._keeper = Keeper(opener(source), prefix, on_event)

    def lease(
        self,
        names: str | Sequence[str],
        *,
        ttl: timedelta = HALF_A_MINUTE,
        wait: timedelta = timedelta(0),
        holder: str | None = None,
        reclaim: bool = False,
        session: bool = False,
        shared: bool = False,
        slots: int = 1,
        metadata: Any = None,
    ) -> L:
        """A lease of one name, or of several at once, all or none. Entering it raises LeaseTaken."""
        flags = {"reclaim": reclaim, "session": session, "shared": shared}
        for what, flag in flags.items():
            checked(what, flag, bool)
        if len(list_of_names(names)) > 1 and (shared or slots != 1 or reclaim):
            raise ValueError("several names at once are exclusive: no shared, slots or reclaim")
        if reclaim and holder is None:
            raise ValueError("reclaim takes a holder: whose lease is it?")
        if checked("wait", wait, timedelta) < timedelta(0):
            raise ValueError(f"wait is not negative: {wait!r}")
        who, width = _holder(holder), checked("slots", slots, int)
        asked = Asked(list_of_names(names), ttl_of(ttl), wait.total_seconds(), who, json_of(metadata), slots=width, **flags)
        return self._kind(self._keeper, asked, None)

    def guard(self, connection: C, leases: Iterable[L], *, release: bool = False) -> Guard[C]:
        """A transaction that is guarded by several leases at once."""
        return under(self._keeper, [lease._granted() for lease in leases], release, connection)

    def adopted(self, name: str, token: int) -> Adopted:
        """A lease that somebody else grants (etcd, ZooKeeper, Redis, another database), under its number there."""
        return Adopted(self._keeper, checked("the name of a lease", name, str), checked("a token", token, int))

    def _claim(self, names: Sequence[str], n: int, ttl: timedelta, holder: str | None) -> Callable[[], list[L]]:
        wanted = list_of_names(names), checked("n", n, int), ttl_of(ttl), _holder(holder)
        return lambda: [self._kind(self._keeper, None, grant) for grant in self._keeper.claim(*wanted)]


def _holder(holder: str | None) -> str:
    return unique_holder() if holder is None else checked("holder", holder, str)


class Lease(Held):
    """A lease for as long as a block runs: `with fence.lease(…) as lease:`."""

    def __init__(self, keeper: Keeper, asked: Asked | None, grant: Grant | None):
        super().__init__(keeper, asked, grant)
        #: Set at a loss.
        self.lost = threading.Event()
        self._follow()

    def _follow(self) -> None:
        grant, lost = self._grant, self.lost
        if grant is not None:
            grant.on_end = lambda: grant.is_lost and lost.set()

    def release(self) -> None:
        """Gives it back before the end of its block. No error where that fails: then it ends at its ttl."""
        grants = [self._granted()]
        in_thread(lambda: self._keeper.release(grants)).result()

    def __enter__(self) -> Self:
        if self._grant is None and self._asked is not None:
            self._grant = acquired(self._keeper, self._asked, threading.Event())
            self._follow()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.release()
        self._end(error)


class Claimed(list[Lease]):
    """Leases that are held. As a block it releases what is left of them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for lease in self:
            lease.release()


def acquired(keeper: Keeper, asked: Asked, given_up: threading.Event) -> Grant:
    future = in_thread(lambda: keeper.acquire(asked, given_up))
    try:
        return future.result()
    except BaseException as error:
        if not future.done() or future.exception() is not error:
            # An exception of a signal. A grant that comes all the same is given back.
            given_up.set()
            future.add_done_callback(lambda done: done.exception() or in_thread(lambda: keeper.release([done.result()])))
        raise


class Fence(Leases[Lease]):
    """Where leases come from: one for a process. As a block it is closed at the end."""

    _kind = Lease

    def claim(
        self, names: Sequence[str], *, n: int = 1, ttl: timedelta = HALF_A_MINUTE, holder: str | None = None
    ) -> Claimed:
        """The first `n` of these that are free, in their order."""
        return Claimed(in_thread(self._claim(names, n, ttl, holder)).result())

    def lead(
        self, name: str, work: Callable[[Lease], _T], *, stop: threading.Event | None = None, ttl: timedelta = HALF_A_MINUTE
    ) -> _T | None:
        """Runs `work(lease)` whenever this process leads, and returns what it returned; None when `stop` was set
        first, at which the work is to return by itself."""
        stop = stop or threading.Event()
        asked = leading(name, ttl)
        while not stop.is_set():
            grant = None
            try:
                grant = acquired(self._keeper, asked, stop)
                with Lease(self._keeper, asked, grant) as lease:
                    return work(lease)
            except Exception as error:
                if self._keeper.is_closed or not goes_on(error, grant):
                    raise
                stop.wait(asked.ttl / 12)
        return None

    def close(self) -> None:
        """Gives everything back, and ends all waits."""
        self._keeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def leading(name: str, ttl: timedelta) -> Asked:
    """If the answer to an acquire was lost, its own holder takes the grant over."""
    return Asked(list_of_names(name), ttl_of(ttl), float("inf"), unique_holder(), reclaim=True)


def goes_on(error: Exception, grant: Grant | None) -> bool:
    """Whether to lead again: after a loss of the lease, the transaction, the connection or the server."""
    is_stale = isinstance(error, Refused) and error.sqlstate in {"PF001", "PF004"}
    is_loss = isinstance(error, (LeaseLost, LeaseTaken, TransactionLost)) or type(error) is FenceError
    if grant is None and sqlstate_of(error).startswith(("25", "40", "53", "55P03", "57", "58")):
        # It has no time or place now, or is a standby still.
        return True
    return is_stale or is_loss or session_ended(error) or (grant is not None and grant.is_lost)


def options(lease: Held | Adopted) -> str:
    """For code that knows nothing of fences: `psycopg.connect(…, options=options(lease))` presents the token in all its
    transactions. Not through a pooler in transaction mode."""
    return f"-c pg_fence.token={lease.token}"
