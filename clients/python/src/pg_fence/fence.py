"""Where leases come from, and how they are held. The work of both classes is here, in coroutines; those of synchronous
programs never wait."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from typing import Any, Generic, TypeVar

from .asked import Asked, checked, holder_of, ttl_of
from .errors import FenceError, LeaseLost, LeaseTaken, Refused, TransactionLost, session_ended, sqlstate_of
from .guard import C, Guard
from .keeper import Event, Grant, Keeper
from .line import Block, GivenUp, aside, in_thread, opener, outcome, run, settled
from .rows import row_of

_T = TypeVar("_T")
#: The result of a verb that has nothing to say: None, or an awaitable of it.
Done = TypeVar("Done")
L = TypeVar("L", bound="Held[Any]")
R = TypeVar("R", bound="RowHeld[Any]")
F = TypeVar("F")
HALF_A_MINUTE = timedelta(seconds=30)
#: In seconds.
TO_SEE_THE_END = 0.5


class Kept(Generic[Done]):
    """The part that leases of all kinds have in common."""

    _is_async = False

    def __init__(self, keeper: Keeper, grant: Grant):
        self._keeper, self._grant, self.names = keeper, grant, grant.names
        #: The acquire's: it serves for as long as the lease is held.
        self.token = grant.token

    @property
    def held(self) -> bool:
        """Whether it is ours at this moment, by our own clock."""
        return self._grant.remaining > timedelta(0)

    @property
    def remaining(self) -> timedelta:
        """How long it is ours if no renewal comes through any more."""
        return self._grant.remaining

    def check(self) -> None:
        """Raises LeaseLost once it is ours no more. For long steps, and before each call to the outside."""
        self._keeper.check(self._grant)

    def _end(self) -> Done:
        return run(aside(lambda: self._keeper.release([self._grant]), self._is_async), self._is_async)


class Held(Kept[Done]):
    """The part that leases by name have in common."""

    def guard(self, connection: C, *, release: bool = False) -> Guard[C]:
        """A transaction, entered by `with` or, on an asynchronous connection, by `async with`: on psycopg, asyncpg,
        Django, or a Connection or Session of SQLAlchemy. With `release` it gives the lease back."""
        return Guard(self._keeper, [self._grant], release, connection)

    def release(self) -> Done:
        """Gives it back before the end of its block. No error where that fails: then it ends at its ttl."""
        return self._end()


class RowHeld(Kept[Done]):
    """The part that leases in rows have in common."""

    def stop(self) -> Done:
        """Ends the heartbeat before the end of its block. Nothing is written: the row is given back by an UPDATE of your own."""
        return self._end()


class Lease(Held[None]):
    """A lease for as long as a block runs: `with fence.lease(…) as lease:`."""

    def __init__(self, keeper: Keeper, grant: Grant):
        super().__init__(keeper, grant)
        #: Set at a loss.
        self.lost = grant.lost


class AsyncLease(Held[Awaitable[None]]):
    """A lease for as long as a block runs: `async with fence.lease(…) as lease:`. At a loss the task that entered it is
    cancelled, and the block raises LeaseLost."""

    _is_async = True


class RowLease(RowHeld[None]):
    """A lease in a row for as long as a block runs: `with fence.keep_row(…) as lease:`."""

    def __init__(self, keeper: Keeper, grant: Grant):
        super().__init__(keeper, grant)
        #: Set at a loss.
        self.lost = grant.lost


class AsyncRowLease(RowHeld[Awaitable[None]]):
    """A lease in a row for as long as a block runs: `async with fence.keep_row(…) as lease:`. At a loss the task that entered it
    is cancelled, and the block raises LeaseLost."""

    _is_async = True


class Leased(Block[_T]):
    """A lease for as long as it runs."""

    def __init__(self, keeper: Keeper, kind: type[Kept[Any]], acquire: Callable[[GivenUp], Grant]):
        self._keeper, self._kind, self._acquire = keeper, kind, acquire
        self._is_async = kind._is_async
        #: None before it is acquired.
        self._grant: Grant | None = None
        self._is_stopped: GivenUp = lambda: False
        #: Cancels the task that has entered it: an asyncio.Timeout.
        self._timeout: Any = None

    async def _enter(self) -> Any:
        if self._is_async:
            # Before anything is acquired, for it raises outside of a task.
            self._timeout = await asyncio.timeout(None).__aenter__()
        given_up = threading.Event()
        future = in_thread(lambda: self._acquire(lambda: given_up.is_set() or self._is_stopped()))
        try:
            grant = self._grant = await outcome(future, self._is_async)
        except BaseException as error:
            if not future.done() or future.exception() is not error:
                # After a signal's exception, or a cancellation, what comes all the same is given back.
                given_up.set()
                future.add_done_callback(lambda done: done.exception() or in_thread(lambda: self._keeper.release([done.result()])))
            raise
        if self._is_async:
            loop = asyncio.get_running_loop()
            grant.on_loss = lambda: loop.call_soon_threadsafe(loop.call_later, self._patience(grant), self._cancel)
            # It may have been before.
            if grant.is_lost:
                self._cancel()
        return self._kind(self._keeper, grant)

    def _patience(self, grant: Grant) -> float:
        """How long a guard of it may take to see that its connection was shut down, before its task is cancelled: psycopg
        answers that by a cancel request, which never returns on a cut cable where libpq is older than 17."""
        return TO_SEE_THE_END if grant.handles else 0.0

    def _cancel(self) -> None:
        # Only once, and not after the end.
        with suppress(RuntimeError):
            self._timeout.reschedule(0.0)

    async def _leave(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._timeout:
                await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            # It was we who cancelled it, and nobody else.
            error = None
        if (grant := self._grant) is None:
            return
        await aside(lambda: self._keeper.release([grant]), self._is_async)
        if error is None and grant.is_lost:
            raise grant.loss()


class Adopted:
    """A lease that somebody else grants, under the number that it has there."""

    def __init__(self, keeper: Keeper, name: str, token: int, holder: str | None):
        self._keeper, self.name, self.token, self._holder = keeper, name, token, holder

    def guard(self, connection: C, *, release: bool = False) -> Guard[C]:
        """The same as a lease's. Raises LeaseTaken while a transaction guards an older number, and where another holder has
        adopted this one. With `release` the number is refused from then on."""
        return Guard(self._keeper, [], release, connection, (self.name, self.token, self._holder))


class Leases(Block[F], Generic[F, L, R, Done]):
    """The part that fences of both kinds have in common. `source` is a connection string, a URL, a function that opens a
    psycopg connection, SQLAlchemy's engine or Django's connection; `schema` the extension's, where that is not in the
    search path. `on_event` is told what becomes of leases."""

    _kind: type[L]
    _row_kind: type[R]

    def __init__(self, source: Any, *, schema: str | None = None, on_event: Callable[[Event], object] | None = None):
        prefix = "" if schema is None else '"' + schema.replace('"', '""') + '".'
        self._keeper, self._is_async = Keeper(opener(source), prefix, on_event), self._kind._is_async

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
    ) -> Leased[L]:
        """A lease of one name, or of several at once, all or none. Entering it raises LeaseTaken."""
        asked = Asked(names, ttl, wait, holder, metadata, slots, reclaim=reclaim, session=session, shared=shared)
        return Leased(self._keeper, self._kind, lambda given_up: self._keeper.acquire(asked, given_up))

    def keep_row(
        self,
        table: str | Sequence[str],
        key: Mapping[str, Any],
        token: int,
        ttl: timedelta,
        *,
        fence: str = "fence",
        deadline: str = "held_until",
    ) -> Leased[R]:
        """A lease in a row, which an UPDATE of your own has claimed and committed, under the token that it returned. Entering
        it renews it for `ttl`, and raises LeaseLost where somebody else has the row by now. The end of the block ends the
        heartbeat, and writes nothing: an UPDATE of your own finishes the row.

        `table` is a name, with a schema ("app.runs") where one is needed, or the parts of it; `key` is its columns and their
        values. `fence` and `deadline` are the columns of the token and the deadline."""
        row, number = row_of(table, key, fence, deadline), checked("a token", token, int)
        seconds = ttl_of(ttl)
        return Leased(self._keeper, self._row_kind, lambda _: self._keeper.keep_row(row, number, seconds))

    def guard(self, connection: C, leases: Iterable[L], *, release: bool = False) -> Guard[C]:
        """A transaction that is guarded by several leases at once."""
        grants = [checked("a lease of a guard", lease, self._kind)._grant for lease in leases]
        return Guard(self._keeper, grants, release, connection)

    def adopted(self, name: str, token: int, *, holder: str | None = None) -> Adopted:
        """A lease that somebody else grants (etcd, ZooKeeper, Redis, another database), under its number there. The number is
        that of one `holder`: of this process, unless another one is named."""
        of = checked("the name of a lease", name, str), checked("a token", token, int)
        return Adopted(self._keeper, *of, holder if holder is None else holder_of(holder))

    def close(self) -> Done:
        """Gives everything back, and ends all waits."""
        done: Any = aside(self._keeper.close, True) if self._is_async else self._keeper.close()
        return done

    async def _enter(self) -> Any:
        return self

    async def _leave(self, *_: object) -> None:
        await settled(self.close())

    async def _lead(self, name: str, work: Callable[[L], Any], stop: threading.Event | asyncio.Event, ttl: timedelta) -> Any:
        # If the answer to an acquire was lost, its own holder takes the grant over.
        leased, pause = self.lease(name, ttl=ttl, wait=timedelta.max, holder=holder_of(None), reclaim=True), ttl_of(ttl) / 12
        leased._is_stopped = stop.is_set
        while not stop.is_set():
            leased._grant = None
            try:
                async with AsyncExitStack() as block:
                    lease = await leased._enter()
                    block.push_async_exit(leased._leave)
                    return await settled(work(lease))
            except Exception as error:
                if self._keeper.is_closed or not goes_on(error, leased._grant):
                    raise
                with suppress(TimeoutError):
                    waiting = stop.wait(pause) if isinstance(stop, threading.Event) else asyncio.wait_for(stop.wait(), pause)
                    await settled(waiting)


def goes_on(error: Exception, grant: Grant | None) -> bool:
    """Whether to lead again: after a loss of the lease, the transaction, the connection or the server."""
    if grant is None and sqlstate_of(error).startswith(("25", "40", "53", "55P03", "57", "58")):
        # It has no time or place now, or is a standby still.
        return True
    is_stale = isinstance(error, Refused) and error.sqlstate in {"PF001", "PF004"}
    is_loss = isinstance(error, (LeaseLost, LeaseTaken, TransactionLost)) or type(error) is FenceError
    return is_stale or is_loss or session_ended(error) or (grant is not None and grant.is_lost)


def options(lease: Kept[Any] | Adopted) -> str:
    """For code that knows nothing of fences: `psycopg.connect(…, options=options(lease))` presents the token in all its
    transactions. Not through a pooler in transaction mode."""
    return f"-c pg_fence.token={lease.token}"


class Fence(Leases["Fence", Lease, RowLease, None]):
    """Where leases come from: one for a process. As a block it is closed at the end."""

    _kind = Lease
    _row_kind = RowLease

    def lead(
        self, name: str, work: Callable[[Lease], _T], *, stop: threading.Event | None = None, ttl: timedelta = HALF_A_MINUTE
    ) -> _T | None:
        """Runs `work(lease)` whenever this process leads, and returns what it returned; None when `stop` was set
        first, at which the work is to return by itself."""
        return run(self._lead(name, work, stop or threading.Event(), ttl), is_async=False)


class AsyncFence(Leases["AsyncFence", AsyncLease, AsyncRowLease, Awaitable[None]]):
    """Where leases come from: one for a process. As a block it is closed at the end. Its connection is psycopg's, too."""

    _kind = AsyncLease
    _row_kind = AsyncRowLease

    async def lead(
        self,
        name: str,
        work: Callable[[AsyncLease], Awaitable[_T]],
        *,
        stop: asyncio.Event | None = None,
        ttl: timedelta = HALF_A_MINUTE,
    ) -> _T | None:
        """Runs `work(lease)` whenever this process leads, and returns what it returned; None when `stop` was set
        first, at which the work is to return by itself."""
        return await self._lead(name, work, stop or asyncio.Event(), ttl)
