"""The classes of the public interface: fences and leases. Their methods are coroutines, which never
wait in a synchronous program."""

import asyncio
import os
import socket
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar

from .connection import Block, opener, run, settled
from .errors import FenceError, code_of
from .heartbeat import Event, Heartbeat, Holding, now, span
from .lease_state import RETRY_INTERVAL, LeadState
from .statements import RowTable, as_json, quoted, row_key
from .transaction import C, Guard

_T = TypeVar("_T")
#: The result of a method without a value: None, or an awaitable of it.
Done = TypeVar("Done")
L = TypeVar("L", bound="LeaseBase[Any]")
F = TypeVar("F")
HALF_A_MINUTE, NO_TIME = timedelta(seconds=30), timedelta(0)
#: A shorter ttl leaves no time for a renewal.
SHORTEST_TTL = timedelta(milliseconds=100)
#: How long a guard may take to notice that a loss has cut its connection, in seconds.
CUT_NOTICED = 0.5


class LeaseBase(Generic[Done]):
    """The common part of Lease and AsyncLease."""

    _is_async = False

    def __init__(self, heartbeat: Heartbeat, holding: Holding):
        self._heartbeat, self._holding, self.names = heartbeat, holding, holding.display_names
        #: The token of the acquire, which is valid for as long as the lease is held.
        self.token = holding.token

    @property
    def held(self) -> bool:
        """True if the lease is held now, by this computer's clock."""
        return self.remaining > NO_TIME

    @property
    def remaining(self) -> timedelta:
        """How long the lease is held if no renewal succeeds any more."""
        return span(self._holding.remaining(now()))

    def check(self) -> None:
        """Raises LeaseLost if the lease is not held. Call it during long steps, and before each
        call to another system."""
        self._holding.check()

    def guard(self, connection: C, *, release: bool = False) -> Guard[C]:
        """Returns a transaction that is guarded by the lease, for `with` or, on an asynchronous
        connection, for `async with`. `connection` is one of psycopg, asyncpg or Django, or a
        Connection or Session of SQLAlchemy. With `release` the transaction also releases the lease;
        within a transaction of yours, when that has committed. The guard of a row lease writes the
        row first, so that nobody else can claim it before the transaction ends."""
        return Guard(self._heartbeat, [self._holding], release, connection)

    def release(self) -> Done:
        """Releases the lease before the end of its block. If that fails no error is raised, and the
        lease ends at its ttl."""
        return run(self._heartbeat.release(self._holding, self._is_async), self._is_async)


class Lease(LeaseBase[None]):
    """A lease that is held while a block runs: `with fence.lease(…) as lease:`, or `keep_row`."""

    def __init__(self, heartbeat: Heartbeat, holding: Holding):
        super().__init__(heartbeat, holding)
        #: A threading.Event that is set at the loss.
        self.lost = holding.lost


class AsyncLease(LeaseBase[Awaitable[None]]):
    """A lease that is held while a block runs: `async with fence.lease(…) as lease:`. At a loss the
    task that entered the block is cancelled, and the block raises LeaseLost."""

    _is_async = True


class LeaseBlock(Block[_T]):
    """The block that holds a lease. `request` makes the acquire with a given id."""

    def __init__(
        self, heartbeat: Heartbeat, kind: type[LeaseBase[Any]], request: Callable[[str], Holding]
    ):
        self._heartbeat, self._kind, self._request = heartbeat, kind, request
        self._is_async = kind._is_async
        #: None before it is acquired.
        self._holding: Holding | None = None
        #: Ends the wait of a leader.
        self._stop: threading.Event | asyncio.Event | None = None
        #: The asyncio.Timeout that cancels the task which has entered the block.
        self._timeout: Any = None

    async def _enter(self) -> Any:
        if self._is_async:
            # This raises outside of a task, so it comes before the acquire.
            self._timeout = await asyncio.timeout(None).__aenter__()
        holding = self._request(uuid.uuid4().hex)
        try:
            self._heartbeat.acquire(holding)
            await self._answer(holding.granted)
            self._holding = holding
        except BaseException as error:
            if not holding.granted.done() or holding.granted.exception() is not error:
                # A signal handler's exception or a cancellation has ended the wait: a late grant is
                # released.
                self._heartbeat.give_up(holding.id)
            raise
        if self._is_async:
            loop = asyncio.get_running_loop()
            later = loop.call_soon_threadsafe
            # A guard has some time to notice that its connection was cut: psycopg answers a
            # cancellation by a cancel request, which never returns there with a libpq before 17.
            delay = lambda: CUT_NOTICED if holding.sockets else 0.0
            cancel = partial(_cancel, self._timeout)
            holding.on_loss = lambda: later(loop.call_later, delay(), cancel)
            # The loss may have come before `on_loss` was set.
            if holding.lost.is_set():
                cancel()
        return self._kind(self._heartbeat, holding)

    async def _answer(self, granted: Future[None]) -> None:
        """Waits for the result of the acquire, or until the leader is to stop."""
        waits = asyncio.wrap_future(granted) if self._is_async else granted
        try:
            while self._stop and not waits.done():
                if self._stop.is_set():
                    raise FenceError("nobody waits for the answer any more")
                if isinstance(waits, asyncio.Future):
                    await asyncio.wait([waits], timeout=RETRY_INTERVAL / 1000)
                else:
                    wait([waits], RETRY_INTERVAL / 1000)
            await waits if isinstance(waits, asyncio.Future) else waits.result()
        finally:
            # The event loop would report an error that nothing waits for.
            waits.cancel()

    async def _leave(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._timeout:
                await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            # The loss has cancelled the task, and nothing else has.
            error = None
        if (holding := self._holding) is None:
            return
        await self._heartbeat.release(holding, self._is_async)
        if error is None and holding.is_lost:
            raise holding.loss()


def _cancel(timeout: asyncio.Timeout) -> None:
    # The timeout raises RuntimeError if it has expired or ended.
    with suppress(RuntimeError):
        timeout.reschedule(0.0)


class Adopted:
    """A lease of another system, under the number that it has there."""

    def __init__(self, heartbeat: Heartbeat, name: str, token: int, holder: str | None):
        self._heartbeat, self.name, self.token, self._holder = heartbeat, name, token, holder

    def guard(self, connection: C, *, release: bool = False) -> Guard[C]:
        """Returns a guarded transaction, as Lease.guard does. It raises LeaseTaken while a
        transaction guards an older number, and if another holder has adopted this number. After a
        commit with `release` the number is refused."""
        holder = self._holder or holder_of_process(os.getpid())
        return Guard(self._heartbeat, [], release, connection, (self.name, self.token, holder))


class FenceBase(Block[F], Generic[F, L, Done]):
    """The common part of Fence and AsyncFence. `source` is a connection string, a URL, a function
    that opens a psycopg connection, SQLAlchemy's engine or Django's connection. `schema` is the
    extension's schema, if that is not in the search path. `on_event` is called with each Event."""

    _kind: type[L]

    def __init__(
        self,
        source: Any,
        *,
        schema: str | None = None,
        on_event: Callable[[Event], object] | None = None,
    ):
        prefix = "" if schema is None else quoted(schema).replace("%", "%%") + "."
        self._heartbeat = Heartbeat(opener(source), prefix, on_event)
        self._is_async = self._kind._is_async

    def lease(
        self,
        names: str | Sequence[str],
        *,
        ttl: timedelta = HALF_A_MINUTE,
        wait: timedelta = NO_TIME,
        holder: str | None = None,
        reclaim: bool = False,
        session: bool = False,
        shared: bool = False,
        slots: int = 1,
        metadata: Any = None,
        at_most: timedelta | None = None,
    ) -> LeaseBlock[L]:
        """Returns the block that holds the lease of one name, or of all of several names. Entering
        it raises LeaseTaken. Several names have no queue: they are tried four times a second until
        `wait` is over, and may starve beside waiters for each name. The lease is lost `at_most`
        after it was acquired, whatever its heartbeat does, which ends work that hangs."""
        for what, flag in {"reclaim": reclaim, "session": session, "shared": shared}.items():
            checked(what, flag, bool)
        if reclaim and holder is None:
            raise ValueError("reclaim requires a holder")
        all_names = list_of_names(names)
        checked("slots", slots, int)
        if len(all_names) > 1 and (shared or reclaim or slots != 1):
            raise ValueError("several names at once are exclusive: no shared, slots or reclaim")
        request = partial(
            Holding,
            names=all_names,
            ttl=ttl_of(ttl),
            wait=ms("wait", wait),
            # The holder of a leader is the same for all its acquires, any other is unique.
            holder=holder_of(holder),
            named=holder is not None,
            reclaim=reclaim,
            session=session,
            shared=shared,
            slots=slots,
            at_most=most_of(at_most),
            metadata=None if metadata is None else as_json(metadata),
        )
        return LeaseBlock(self._heartbeat, self._kind, request)

    def keep_row(
        self,
        table: str | Sequence[str],
        key: Mapping[str, Any],
        token: int,
        ttl: timedelta,
        *,
        fence: str = "fence",
        deadline: str = "held_until",
        at_most: timedelta | None = None,
    ) -> LeaseBlock[L]:
        """Returns the block that keeps a row lease, which your UPDATE has claimed and committed, with
        the token that it returned. Entering it renews the lease for `ttl`, and raises LeaseLost if
        another worker has claimed the row since. Finish the row in a guard with `release`; the end
        of the block releases a row that is not finished.

        `table` is a name, with a schema ("app.runs") if one is needed, or the parts of it; `key` is
        its columns and their values. `fence` and `deadline` are the columns of the token and the
        deadline."""
        names = tuple(table.split(".")) if isinstance(table, str) else tuple(table)
        for what, given in {"a table": names, "a column": (*key, fence, deadline)}.items():
            for name in given:
                checked(what, name, str)
        request = partial(
            Holding,
            names=(row_key(key),),
            ttl=ttl_of(ttl),
            named=True,
            at_most=most_of(at_most),
            table=RowTable(names, tuple(key), fence, deadline),
            token=checked("a token", token, int),
        )
        return LeaseBlock(self._heartbeat, self._kind, request)

    def guard(self, connection: C, leases: Iterable[L], *, release: bool = False) -> Guard[C]:
        """Returns a transaction that is guarded by all of the leases, as Lease.guard does."""
        given = [checked("a lease of a guard", one, self._kind) for one in leases]
        if any(one._heartbeat is not self._heartbeat for one in given):
            raise ValueError("a guard takes leases of its own fence")
        return Guard(self._heartbeat, [one._holding for one in given], release, connection)

    def adopted(self, name: str, token: int, *, holder: str | None = None) -> Adopted:
        """Returns a lease of another system (etcd, ZooKeeper, Redis, another database) by the number
        that it has there. The number belongs to one `holder`, which is this process by default."""
        of = checked("the name of a lease", name, str), checked("a token", token, int)
        return Adopted(self._heartbeat, *of, holder if holder is None else holder_of(holder))

    def close(self) -> Done:
        """Releases all leases, and ends all waits. It takes at most 5 seconds."""
        return run(self._heartbeat.close(self._is_async), self._is_async)

    async def _enter(self) -> Any:
        return self

    async def _leave(self, *_: object) -> None:
        await settled(self.close())

    async def _lead(
        self,
        name: str,
        work: Callable[[L], Any],
        stop: threading.Event | asyncio.Event,
        ttl: timedelta,
    ) -> Any:
        # If the answer to an acquire was lost, the next one with this holder takes the grant over.
        leased = self.lease(name, ttl=ttl, wait=timedelta.max, holder=holder_of(None), reclaim=True)
        leased._stop, leader = stop, LeadState(ttl_of(ttl), self._heartbeat.states.jitter)
        while not stop.is_set():
            leased._holding = None
            try:
                async with AsyncExitStack() as block:
                    lease = await leased._enter()
                    leader.granted(now())
                    block.push_async_exit(leased._leave)
                    return await settled(work(lease))
            except Exception as error:
                holding, failed = leased._holding, (_type_of(error), code_of(error))
                is_lost, is_closed = bool(holding and holding.is_lost), self._heartbeat.is_closed
                *effects, then = leader.failed(now(), *failed, is_lost, stop.is_set(), is_closed)
                if then.get("code") == "stopped":
                    return None
                if then["lead"] == "end":
                    raise
                for effect in effects:
                    self._heartbeat.interrupted(name, effect.get("log"), error)
                pause = then["pause"] / 1000
                is_async = isinstance(stop, asyncio.Event)
                with suppress(TimeoutError):
                    await settled(
                        asyncio.wait_for(stop.wait(), pause) if is_async else stop.wait(pause)
                    )


def _type_of(error: Exception) -> str:
    """Returns the type of an error as LeadState takes it."""
    if type(error) is FenceError:
        return "NoAnswer"
    return type(error).__name__ if isinstance(error, FenceError) else ""


def options(lease: LeaseBase[Any] | Adopted) -> str:
    """Returns connection options for code that does not use this package: with
    `psycopg.connect(…, options=options(lease))` all transactions of the connection present the
    token. A pooler in transaction mode does not keep them."""
    return f"-c pg_fence.token={lease.token}"


class Fence(FenceBase["Fence", Lease, None]):
    """The source of leases, one for a process. `with Fence(…)` closes it at the end."""

    _kind = Lease

    def lead(
        self,
        name: str,
        work: Callable[[Lease], _T],
        *,
        stop: threading.Event | None = None,
        ttl: timedelta = HALF_A_MINUTE,
    ) -> _T | None:
        """Runs `work(lease)` while this process leads, and returns its result, or None if `stop` was
        set before. When `stop` is set the work must return by itself. An error of the work ends
        `lead`. After a loss of the lease, the server, the connection or the transaction it acquires
        again, with a growing pause; an outage writes one line to the log, and emits one event."""
        return run(self._lead(name, work, stop or threading.Event(), ttl), is_async=False)


class AsyncFence(FenceBase["AsyncFence", AsyncLease, Awaitable[None]]):
    """The source of leases for asyncio, one for a process. `async with AsyncFence(…)` closes it at
    the end. The connection of its heartbeat is one of psycopg, as Fence's is."""

    _kind = AsyncLease

    async def lead(
        self,
        name: str,
        work: Callable[[AsyncLease], Awaitable[_T]],
        *,
        stop: asyncio.Event | None = None,
        ttl: timedelta = HALF_A_MINUTE,
    ) -> _T | None:
        """Does what Fence.lead does, with `work` as a coroutine function."""
        return await self._lead(name, work, stop or asyncio.Event(), ttl)


# Arguments are checked before anything is sent.


def holder_of(holder: str | None) -> str:
    """Returns the holder, which by default is unique for each call."""
    unique = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
    return unique if holder is None else checked("holder", holder, str)


@lru_cache(maxsize=1)
def holder_of_process(pid: int) -> str:
    """Returns the default holder of adopted leases, which is the same for all fences of a process. A
    forked process has another one."""
    return holder_of(None)


def list_of_names(names: str | Sequence[str]) -> tuple[str, ...]:
    given: list[Any] = list(names) if isinstance(names, (list, tuple)) else [names]
    return tuple(checked("the name of a lease", name, str) for name in given)


def checked(what: str, value: Any, kind: type) -> Any:
    """Returns the value, or raises a TypeError with its name. A bool is not accepted as an int."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        unit = ", for a bare number has no unit" if kind is timedelta else ""
        raise TypeError(f"{what} is a {kind.__name__}{unit}: not {value!r}")
    return value


def ms(what: str, span: timedelta) -> int:
    return checked(what, span, timedelta) // timedelta(milliseconds=1)


def ttl_of(ttl: timedelta) -> int:
    if checked("ttl", ttl, timedelta) < SHORTEST_TTL:
        least = SHORTEST_TTL.total_seconds()
        raise ValueError(f"ttl is {least} s or more, for it is renewed meanwhile: not {ttl!r}")
    return ms("ttl", ttl)


def most_of(at_most: timedelta | None) -> int:
    return 0 if at_most is None else max(1, ms("at_most", at_most))
