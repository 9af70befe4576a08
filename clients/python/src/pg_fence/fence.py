"""Where leases come from, and how they are held. The work of both classes is here, in coroutines;
those of synchronous programs never wait."""

import asyncio
import json
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
from .errors import (
    FenceError,
    LeaseLost,
    LeaseTaken,
    Refused,
    TransactionLost,
    session_ended,
    sqlstate_of,
)
from .heartbeat import Event, Heartbeat, Holding, now, span
from .lease_state import TRY_AGAIN, Leader, passes
from .statements import RowTable, row_key
from .transaction import C, Guard

_T = TypeVar("_T")
#: The result of a verb that has nothing to say: None, or an awaitable of it.
Done = TypeVar("Done")
L = TypeVar("L", bound="Held[Any]")
F = TypeVar("F")
HALF_A_MINUTE, NO_TIME = timedelta(seconds=30), timedelta(0)
#: A shorter ttl leaves no time for a renewal.
SHORTEST_TTL = timedelta(milliseconds=100)
#: In seconds.
TO_SEE_THE_END = 0.5


class Held(Generic[Done]):
    """The part that leases of both kinds have in common."""

    _is_async = False

    def __init__(self, heartbeat: Heartbeat, holding: Holding):
        self._heartbeat, self._holding, self.names = heartbeat, holding, holding.told_names
        #: The acquire's: it serves for as long as the lease is held.
        self.token = holding.token

    @property
    def held(self) -> bool:
        """Whether it is ours at this moment, by our own clock."""
        return self.remaining > NO_TIME

    @property
    def remaining(self) -> timedelta:
        """How long it is ours if no renewal comes through any more."""
        return span(self._holding.remaining(now()))

    def check(self) -> None:
        """Raises LeaseLost once it is ours no more. For long steps, and before each call to the
        outside."""
        self._holding.check()

    def guard(self, connection: C, *, release: bool = False) -> Guard[C]:
        """A transaction, entered by `with` or, on an asynchronous connection, by `async with`: on
        psycopg, asyncpg, Django, or a Connection or Session of SQLAlchemy. With `release` it gives
        the lease back; within a transaction of yours, when that has committed. Of a row lease it
        writes the row first, so that nobody else gets it before the end of the transaction."""
        return Guard(self._heartbeat, [self._holding], release, connection)

    def release(self) -> Done:
        """Gives it back before the end of its block. No error if that fails: it ends at its ttl."""
        return run(self._heartbeat.release(self._holding, self._is_async), self._is_async)


class Lease(Held[None]):
    """A lease for as long as a block runs: `with fence.lease(…) as lease:`, or of `keep_row`."""

    def __init__(self, heartbeat: Heartbeat, holding: Holding):
        super().__init__(heartbeat, holding)
        #: Set at a loss.
        self.lost = holding.lost


class AsyncLease(Held[Awaitable[None]]):
    """A lease for as long as a block runs: `async with fence.lease(…) as lease:`. At a loss the
    task that entered it is cancelled, and the block raises LeaseLost."""

    _is_async = True


class Leased(Block[_T]):
    """A lease for as long as it runs. `asks` makes an acquire of that id."""

    def __init__(self, heartbeat: Heartbeat, kind: type[Held[Any]], asks: Callable[[str], Holding]):
        self._heartbeat, self._kind, self._asks = heartbeat, kind, asks
        self._is_async = kind._is_async
        #: None before it is acquired.
        self._holding: Holding | None = None
        #: Ends a wait: of a leader.
        self._stop: threading.Event | asyncio.Event | None = None
        #: Cancels the task that has entered it: an asyncio.Timeout.
        self._timeout: Any = None

    async def _enter(self) -> Any:
        if self._is_async:
            # Before anything is acquired, for it raises outside of a task.
            self._timeout = await asyncio.timeout(None).__aenter__()
        holding = self._asks(uuid.uuid4().hex)
        try:
            self._heartbeat.acquire(holding)
            await self._answer(holding.granted)
            self._holding = holding
        except BaseException as error:
            if not holding.granted.done() or holding.granted.exception() is not error:
                # After a signal's exception, or a cancellation, what comes all the same is given
                # back.
                self._heartbeat.give_up(holding.id)
            raise
        if self._is_async:
            loop = asyncio.get_running_loop()
            later = loop.call_soon_threadsafe
            # A guard may see first that its link was shut down: psycopg answers a cancellation
            # by a cancel request, which never returns on a cut link if libpq is older than 17.
            patience = lambda: TO_SEE_THE_END if holding.sockets else 0.0
            cancel = partial(_cancel, self._timeout)
            holding.on_loss = lambda: later(loop.call_later, patience(), cancel)
            # It may have been before.
            if holding.lost.is_set():
                cancel()
        return self._kind(self._heartbeat, holding)

    async def _answer(self, granted: Future[None]) -> None:
        """Waits for it, or until a leader is to stop."""
        waits = asyncio.wrap_future(granted) if self._is_async else granted
        try:
            while self._stop and not waits.done():
                if self._stop.is_set():
                    raise FenceError("nobody waits for the answer any more")
                if isinstance(waits, asyncio.Future):
                    await asyncio.wait([waits], timeout=TRY_AGAIN / 1000)
                else:
                    wait([waits], TRY_AGAIN / 1000)
            await waits if isinstance(waits, asyncio.Future) else waits.result()
        finally:
            # Else the event loop reports an error that comes when nobody waits any more.
            waits.cancel()

    async def _leave(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._timeout:
                await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            # It was we who cancelled it, and nobody else.
            error = None
        if (holding := self._holding) is None:
            return
        await self._heartbeat.release(holding, self._is_async)
        if error is None and holding.is_lost:
            raise holding.loss()


def _cancel(timeout: asyncio.Timeout) -> None:
    # Only once, and not after the end.
    with suppress(RuntimeError):
        timeout.reschedule(0.0)


class Adopted:
    """A lease that somebody else grants, under the number that it has there."""

    def __init__(self, heartbeat: Heartbeat, name: str, token: int, holder: str | None):
        self._heartbeat, self.name, self.token, self._holder = heartbeat, name, token, holder

    def guard(self, connection: C, *, release: bool = False) -> Guard[C]:
        """The same as a lease's. Raises LeaseTaken while a transaction guards an older number, and
        if another holder has adopted this one. With `release` the number is refused afterwards."""
        holder = self._holder or holder_of_process(os.getpid())
        return Guard(self._heartbeat, [], release, connection, (self.name, self.token, holder))


class Leases(Block[F], Generic[F, L, Done]):
    """The part that fences of both kinds have in common. `source` is a connection string, a URL, a
    function that opens a psycopg connection, SQLAlchemy's engine or Django's connection; `schema`
    the extension's, if that is not in the search path. `on_event` is told what becomes of
    leases."""

    _kind: type[L]

    def __init__(
        self,
        source: Any,
        *,
        schema: str | None = None,
        on_event: Callable[[Event], object] | None = None,
    ):
        quoted = (schema or "").replace('"', '""').replace("%", "%%")
        prefix = "" if schema is None else f'"{quoted}".'
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
    ) -> Leased[L]:
        """A lease of one name, or of several at once, all or none. Entering it raises LeaseTaken.
        Several names have no queue: they are tried each quarter of a second, and may starve beside
        waiters for each, until `wait` is over. `at_most` after it was acquired it is lost, whatever
        its heartbeat does: for work that hangs."""
        for what, flag in {"reclaim": reclaim, "session": session, "shared": shared}.items():
            checked(what, flag, bool)
        if reclaim and holder is None:
            raise ValueError("reclaim takes a holder: whose lease is it?")
        all_names = list_of_names(names)
        checked("slots", slots, int)
        if len(all_names) > 1 and (shared or reclaim or slots != 1):
            raise ValueError("several names at once are exclusive: no shared, slots or reclaim")
        asks = partial(
            Holding,
            names=all_names,
            ttl=ttl_of(ttl),
            wait=ms("wait", wait),
            # Whoever leads has one holder; for others it is unique for each acquire.
            holder=holder_of(holder),
            named=holder is not None,
            reclaim=reclaim,
            session=session,
            shared=shared,
            slots=slots,
            at_most=most_of(at_most),
            metadata=None if metadata is None else json.dumps(metadata),
        )
        return Leased(self._heartbeat, self._kind, asks)

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
    ) -> Leased[L]:
        """A lease in a row, which an UPDATE of your own has claimed and committed, under the token
        that it returned. Entering it renews it for `ttl`, and raises LeaseLost if somebody else has
        the row by now. Finish the row in a guard with `release`; the end of the block gives up a
        row that is not finished.

        `table` is a name, with a schema ("app.runs") if one is needed, or the parts of it; `key` is
        its columns and their values. `fence` and `deadline` are the columns of the token and the
        deadline."""
        names = tuple(table.split(".")) if isinstance(table, str) else tuple(table)
        for what, given in {"a table": names, "a column": (*key, fence, deadline)}.items():
            for name in given:
                checked(what, name, str)
        asks = partial(
            Holding,
            names=(row_key(key),),
            ttl=ttl_of(ttl),
            named=True,
            at_most=most_of(at_most),
            table=RowTable(names, tuple(key), fence, deadline),
            token=checked("a token", token, int),
        )
        return Leased(self._heartbeat, self._kind, asks)

    def guard(self, connection: C, leases: Iterable[L], *, release: bool = False) -> Guard[C]:
        """A transaction that is guarded by several leases at once."""
        given = [checked("a lease of a guard", one, self._kind) for one in leases]
        if any(one._heartbeat is not self._heartbeat for one in given):
            raise ValueError("a guard takes leases of its own fence")
        return Guard(self._heartbeat, [one._holding for one in given], release, connection)

    def adopted(self, name: str, token: int, *, holder: str | None = None) -> Adopted:
        """A lease that somebody else grants (etcd, ZooKeeper, Redis, another database), under its
        number there, which is that of one `holder`: of this process, unless another is named."""
        of = checked("the name of a lease", name, str), checked("a token", token, int)
        return Adopted(self._heartbeat, *of, holder if holder is None else holder_of(holder))

    def close(self) -> Done:
        """Gives everything back, and ends all waits."""
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
        # If the answer to an acquire was lost, its own holder takes the grant over.
        leased = self.lease(name, ttl=ttl, wait=timedelta.max, holder=holder_of(None), reclaim=True)
        leased._stop, leader = stop, Leader(ttl_of(ttl), self._heartbeat.states.spread)
        while not stop.is_set():
            leased._holding = None
            try:
                async with AsyncExitStack() as block:
                    lease = await leased._enter()
                    leader.granted(now())
                    block.push_async_exit(leased._leave)
                    return await settled(work(lease))
            except Exception as error:
                holding = leased._holding
                cause = cause_of(error, holding is None)
                if holding:
                    *told, then = leader.work_failed(now(), cause, holding.is_lost)
                elif stop.is_set():
                    return None
                else:
                    *told, then = leader.not_granted(now(), cause)
                if self._heartbeat.is_closed or "pause" not in then:
                    raise
                for effect in told:
                    self._heartbeat.interrupted(name, effect.get("log"), error)
                pause = then["pause"] / 1000
                is_async = isinstance(stop, asyncio.Event)
                with suppress(TimeoutError):
                    await settled(
                        asyncio.wait_for(stop.wait(), pause) if is_async else stop.wait(pause)
                    )


def cause_of(error: Exception, is_of_acquire: bool) -> str:
    """What a leader is told of an error. One of the work's own is `own`."""
    state = sqlstate_of(error)
    if is_of_acquire and passes(state):
        return "passing"
    if isinstance(error, (LeaseLost, LeaseTaken, TransactionLost)):
        return type(error).__name__
    if isinstance(error, Refused) and error.sqlstate in {"PF001", "PF004"}:
        # The next renewal tells whether it is lost.
        return "LeaseLost"
    if type(error) is FenceError:
        return "NoAnswer"
    return "ConnectionLost" if session_ended(error) else "own"


def options(lease: Held[Any] | Adopted) -> str:
    """For code that knows nothing of fences: `psycopg.connect(…, options=options(lease))` presents
    the token in all its transactions. Not through a pooler in transaction mode."""
    return f"-c pg_fence.token={lease.token}"


class Fence(Leases["Fence", Lease, None]):
    """Where leases come from: one for a process. As a block it is closed at the end."""

    _kind = Lease

    def lead(
        self,
        name: str,
        work: Callable[[Lease], _T],
        *,
        stop: threading.Event | None = None,
        ttl: timedelta = HALF_A_MINUTE,
    ) -> _T | None:
        """Runs `work(lease)` whenever this process leads, and returns what it returned; None if
        `stop` was set first, at which the work is to return by itself. An error of the work's own
        ends it; after the loss of the lease, the server, the connection or the transaction it leads
        again: that is a line of the log and an event, once an outage, with a growing pause."""
        return run(self._lead(name, work, stop or threading.Event(), ttl), is_async=False)


class AsyncFence(Leases["AsyncFence", AsyncLease, Awaitable[None]]):
    """Where leases come from: one for a process. As a block it is closed at the end. Its connection
    is psycopg's, too."""

    _kind = AsyncLease

    async def lead(
        self,
        name: str,
        work: Callable[[AsyncLease], Awaitable[_T]],
        *,
        stop: asyncio.Event | None = None,
        ttl: timedelta = HALF_A_MINUTE,
    ) -> _T | None:
        """The same as Fence.lead, with work that is awaited."""
        return await self._lead(name, work, stop or asyncio.Event(), ttl)


# What is asked for is looked over before anything is sent.


def holder_of(holder: str | None) -> str:
    """By default one that is unique for each call."""
    unique = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
    return unique if holder is None else checked("holder", holder, str)


@lru_cache(maxsize=1)
def holder_of_process(pid: int) -> str:
    """The holder that adopts if none is named: all fences of this process are one. A forked process
    has another."""
    return holder_of(None)


def list_of_names(names: str | Sequence[str]) -> tuple[str, ...]:
    given: list[Any] = list(names) if isinstance(names, (list, tuple)) else [names]
    return tuple(checked("the name of a lease", name, str) for name in given)


def checked(what: str, value: Any, kind: type) -> Any:
    """The value, or a TypeError that names it. A bool is no int."""
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
