"""Where leases come from, and how they are held. The work of both classes is here, in coroutines; those of synchronous
programs never wait."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, suppress
from datetime import timedelta
from typing import Any, Generic, Self, TypeVar

from . import asked as statements
from .asked import Asked, checked, holder_of, list_of_names, ttl_of
from .errors import FenceError, LeaseLost, LeaseTaken, Refused, TransactionLost, session_ended, sqlstate_of
from .guard import C, Guard, under
from .keeper import Event, Keeper
from .keeping import Grant
from .line import GivenUp, at_once, in_thread, opener, outcome

_T = TypeVar("_T")
#: The result of a verb that has nothing to say: None, or an awaitable of it.
Done = TypeVar("Done")
L = TypeVar("L", bound="Held[Any]")
HALF_A_MINUTE = timedelta(seconds=30)


class Held(Generic[Done]):
    """The part that leases of both kinds have in common."""

    _is_async = False

    def __init__(self, keeper: Keeper, of: Asked | Grant):
        self._keeper, self._asked, self.names = keeper, of, of.names
        self._grant: Grant | None = None
        if isinstance(of, Grant):
            self._hold(of)

    def _hold(self, grant: Grant) -> None:
        self._grant, grant.on_end = grant, self._ended
        # It may have ended before.
        self._ended()

    def _ended(self) -> None:
        """In whatever thread that happens."""

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

    def release(self) -> Done:
        """Gives it back before the end of its block. No error where that fails: then it ends at its ttl."""
        return run(self._release(), self._is_async)

    async def _release(self) -> None:
        grants = [self._granted()]
        await outcome(in_thread(lambda: self._keeper.release(grants)), self._is_async)

    async def _enter(self, stopped: GivenUp = lambda: False) -> None:
        asked = self._asked
        if self._grant is None and isinstance(asked, Asked):
            acquire = lambda given_up: [self._keeper.acquire(asked, lambda: given_up() or stopped())]
            for grant in await granted(self._keeper, acquire, self._is_async):
                self._hold(grant)

    async def _leave(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._release()
        if error is None and self._granted().is_lost:
            raise self._granted().lost()


def run(work: Any, is_async: bool) -> Any:
    """Has a coroutine be awaited by the caller, where that is asynchronous."""
    return work if is_async else at_once(work)


async def granted(keeper: Keeper, call: Callable[[GivenUp], list[Grant]], is_async: bool) -> list[Grant]:
    """A lease that comes when nobody waits any more, after a signal's exception or a cancellation, is given back."""
    given_up = threading.Event()
    future = in_thread(lambda: call(given_up.is_set))
    try:
        return await outcome(future, is_async)
    except BaseException as error:
        if not future.done() or future.exception() is not error:
            given_up.set()
            future.add_done_callback(lambda done: done.exception() or in_thread(lambda: keeper.release(done.result())))
        raise


class Claimed(list[L]):
    """Leases that are held. As a block, of the fence's kind, it releases what is left of them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        at_once(self.__aexit__())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for lease in self:
            await lease._release()


class Adopted:
    """A lease that somebody else grants, under the number that it has there."""

    def __init__(self, keeper: Keeper, name: str, token: int):
        self._keeper, self.name, self.token = keeper, name, token

    def guard(self, connection: C, *, release: bool = False) -> Guard[C]:
        """The same as a lease's. With `release` the number is refused from then on."""
        begin = self._keeper.call(statements.GUARD_ADOPTED, self.name, self.name, self.token)
        end = self._keeper.call(statements.RELEASE, [self.name], [self.token]) if release else None
        return Guard(self._keeper, [], begin, end, connection)


#: The result of a claim.
Claims = TypeVar("Claims")


class Leases(Generic[L, Claims, Done]):
    """The part that fences of both kinds have in common. `source` is a connection string, a URL, a function that opens a
    psycopg connection, SQLAlchemy's engine or Django's connection; `schema` the extension's, where that is not in the
    search path. `on_event` is told what becomes of leases."""

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
        return self._kind(self._keeper, Asked(names, ttl, wait, holder, metadata, slots, **flags))

    def guard(self, connection: C, leases: Iterable[L], *, release: bool = False) -> Guard[C]:
        """A transaction that is guarded by several leases at once."""
        return under(self._keeper, [lease._granted() for lease in leases], release, connection)

    def adopted(self, name: str, token: int) -> Adopted:
        """A lease that somebody else grants (etcd, ZooKeeper, Redis, another database), under its number there."""
        return Adopted(self._keeper, checked("the name of a lease", name, str), checked("a token", token, int))

    def claim(
        self, names: Sequence[str], *, n: int = 1, ttl: timedelta = HALF_A_MINUTE, holder: str | None = None
    ) -> Claims:
        """The first `n` of these that are free, in their order."""
        return run(self._claim(list_of_names(names), checked("n", n, int), ttl_of(ttl), holder_of(holder)), self._kind._is_async)

    def close(self) -> Done:
        """Gives everything back, and ends all waits."""
        close: Any = self._keeper.close
        done: Any = outcome(in_thread(close), True) if self._kind._is_async else close()
        return done

    async def _claim(self, names: tuple[str, ...], n: int, ttl: float, holder: str) -> Claimed[L]:
        claim = lambda given_up: self._keeper.claim(names, n, ttl, holder, given_up)
        return Claimed(self._kind(self._keeper, grant) for grant in await granted(self._keeper, claim, self._kind._is_async))

    async def _lead(self, name: str, work: Callable[[L], Any], stop: threading.Event | asyncio.Event, ttl: timedelta) -> Any:
        # If the answer to an acquire was lost, its own holder takes the grant over.
        holder, pause = holder_of(None), ttl_of(ttl) / 12
        while not stop.is_set():
            lease = self.lease(name, ttl=ttl, wait=timedelta.max, holder=holder, reclaim=True)
            try:
                async with AsyncExitStack() as block:
                    await lease._enter(stop.is_set)
                    block.push_async_exit(lease._leave)
                    result = work(lease)
                    return await result if lease._is_async else result
            except Exception as error:
                if self._keeper.is_closed or not goes_on(error, lease._grant):
                    raise
                if isinstance(stop, threading.Event):
                    stop.wait(pause)
                else:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(stop.wait(), pause)
        return None


def goes_on(error: Exception, grant: Grant | None) -> bool:
    """Whether to lead again: after a loss of the lease, the transaction, the connection or the server."""
    if grant is None and sqlstate_of(error).startswith(("25", "40", "53", "55P03", "57", "58")):
        # It has no time or place now, or is a standby still.
        return True
    is_stale = isinstance(error, Refused) and error.sqlstate in {"PF001", "PF004"}
    is_loss = isinstance(error, (LeaseLost, LeaseTaken, TransactionLost)) or type(error) is FenceError
    return is_stale or is_loss or session_ended(error) or (grant is not None and grant.is_lost)


def options(lease: Held[Any] | Adopted) -> str:
    """For code that knows nothing of fences: `psycopg.connect(…, options=options(lease))` presents the token in all its
    transactions. Not through a pooler in transaction mode."""
    return f"-c pg_fence.token={lease.token}"


class Lease(Held[None]):
    """A lease for as long as a block runs: `with fence.lease(…) as lease:`."""

    def __init__(self, keeper: Keeper, of: Asked | Grant):
        #: Set at a loss.
        self.lost = threading.Event()
        super().__init__(keeper, of)

    def _ended(self) -> None:
        if self._granted().is_lost:
            self.lost.set()

    def __enter__(self) -> Self:
        at_once(self._enter())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        at_once(self._leave(kind, error, trace))


class Fence(Leases[Lease, Claimed[Lease], None], AbstractContextManager["Fence"]):
    """Where leases come from: one for a process. As a block it is closed at the end."""

    _kind = Lease

    def lead(
        self, name: str, work: Callable[[Lease], _T], *, stop: threading.Event | None = None, ttl: timedelta = HALF_A_MINUTE
    ) -> _T | None:
        """Runs `work(lease)` whenever this process leads, and returns what it returned; None when `stop` was set
        first, at which the work is to return by itself."""
        result: _T | None = at_once(self._lead(name, work, stop or threading.Event(), ttl))
        return result

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncLease(Held[Awaitable[None]]):
    """A lease for as long as a block runs: `async with fence.lease(…) as lease:`. At a loss the task that entered it is
    cancelled, and the block raises LeaseLost."""

    _is_async = True
    #: An asyncio.Timeout, which cancels the task; it is begun, ended and looked at on that loop.
    _block: Any = None
    _loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._leave(kind, error, trace)

    async def _enter(self, stopped: GivenUp = lambda: False) -> None:
        await super()._enter(stopped)
        self._block = await asyncio.timeout(None).__aenter__()
        self._loop = asyncio.get_running_loop()
        # It may have ended before.
        self._ended()

    def _ended(self) -> None:
        # The loop may be closed by then.
        with suppress(RuntimeError):
            if self._loop is not None and self._granted().is_lost:
                self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        # Only once.
        with suppress(RuntimeError):
            if self._block is not None:
                self._block.reschedule(0.0)

    async def _leave(self, kind: object, error: BaseException | None, trace: object) -> None:
        block, self._block = self._block, None
        try:
            if block is not None:
                await block.__aexit__(kind, error, trace)
        except TimeoutError:
            # It was we who cancelled it, and nobody else.
            error = None
        await super()._leave(kind, error, trace)


class AsyncFence(Leases[AsyncLease, Awaitable[Claimed[AsyncLease]], Awaitable[None]], AbstractAsyncContextManager["AsyncFence"]):
    """Where leases come from: one for a process. As a block it is closed at the end. Its connection is psycopg's, too."""

    _kind = AsyncLease

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
        result: _T | None = await self._lead(name, work, stop or asyncio.Event(), ttl)
        return result

    async def __aexit__(self, *_: object) -> None:
        await self.close()
