"""Connections of the fence's own, and what opens them; what ends a call that hangs on one; and calls in threads of their own."""

import asyncio
import contextlib
import inspect
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import psycopg
from psycopg import conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from .asked import Call
from .errors import FenceError, session_ended, told

_T = TypeVar("_T")

#: Whether nobody waits for an acquire any more.
GivenUp = Callable[[], bool]
#: Opens a connection, which may take that many seconds.
Opener = Callable[[float], Any]


def opener(source: Any) -> Opener:
    """Of a connection string, a URL, a function, an engine of SQLAlchemy's, or a connection of Django's."""
    url: Any = getattr(source, "url", None)
    text = url.render_as_string(hide_password=False) if hasattr(url, "render_as_string") else source
    if isinstance(text, str):
        # As SQLAlchemy writes it: postgresql+psycopg://…
        given = conninfo.conninfo_to_dict(re.sub(r"^(postgres(?:ql)?)\+\w+://", r"\1://", text))
    elif hasattr(source, "get_connection_params"):
        # Django's has some that are not libpq's.
        known = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}
        given = {key: value for key, value in source.get_connection_params().items() if key in known}
    elif callable(source):
        return lambda _: source()
    else:
        takes = "a connection string, a URL, a function that opens a psycopg.Connection, an engine, or Django's connection"
        raise TypeError(f"a fence takes {takes}, and not {type(source)}")
    # libpq counts in whole seconds, two at least.
    return lambda limit: psycopg.connect(**{"connect_timeout": max(2, math.ceil(limit)), "client_encoding": "utf8", **given})


def now() -> float:
    """On such a clock, which goes on while the machine sleeps where there is one."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


def handle_of(connection: Any) -> socket.socket:
    """A second handle on a connection's socket, to end what hangs on it from another thread."""
    # asyncpg shows its socket nowhere else.
    socket_of = connection if hasattr(connection, "fileno") else connection._transport.get_extra_info("socket")
    # Its own: the number of the connection's may be another file's by the time of the cut.
    return socket.fromfd(socket_of.fileno(), socket.AF_INET, socket.SOCK_STREAM)


def cut(handle: socket.socket) -> None:
    with contextlib.suppress(OSError):
        handle.shutdown(socket.SHUT_RDWR)


class Line:
    """Opened when it is needed, for one call at a time."""

    def __init__(self, open: Opener):
        self._open = open
        #: Of all calls; and of those that can be given up, one of which at a time is among the others.
        self._turn, self._calm = threading.RLock(), threading.Lock()
        #: When the call that is under way is given up.
        self._until = 0.0
        self.connection: psycopg.Connection[Any] | None = None

    def rows(self, call: Call, limit: float, given_up: GivenUp | None = None) -> list[tuple[Any, ...]]:
        """A statement in autocommit, which may take that many seconds beside opening the connection. One that can be given up
        is behind all others, which may be run twice, and is not sent where nobody waits for it any more."""
        with self._calm if given_up else contextlib.nullcontext(), self._turn:
            if given_up and given_up():
                raise FenceError("nobody waits for the answer any more")
            before = self.connection
            try:
                return self._rows(call, limit)
            except psycopg.Error as error:
                # It may only show that the connection has ended since the last time.
                if given_up or before in (None, self.connection) or not session_ended(error):
                    raise
                return self._rows(call, limit)

    def _rows(self, call: Call, limit: float) -> list[tuple[Any, ...]]:
        connection = self.connection = self.look() or self._opened(limit)
        self._until = now() + limit
        try:
            # The connection's row factory is the program's.
            with connection.cursor(row_factory=tuple_row) as cursor:
                return cursor.execute(*call).fetchall()  # type: ignore[arg-type]
        except psycopg.Error as error:
            meant = told(error, connection)
            if meant is error:
                raise
            raise meant from error
        finally:
            if connection.closed or connection.info.transaction_status is not TransactionStatus.IDLE:
                self.close()

    def _opened(self, limit: float) -> psycopg.Connection[Any]:
        connection: Any = self._open(limit)
        if not isinstance(connection, psycopg.Connection):
            raise TypeError(f"the function of a fence opens a psycopg.Connection, and not {type(connection)}")
        connection.autocommit = True
        # A pooler in transaction mode hands each transaction to a server that may not know the statement.
        connection.prepare_threshold = None
        wait = connection.wait
        connection.wait = lambda steps, **options: wait(self._in_time(steps), **options)  # type: ignore[assignment]
        return connection

    def _in_time(self, steps: Generator[Any, Any, _T]) -> Generator[Any, Any, _T]:
        """The steps of a call, as psycopg has them; it goes on with them ten times a second, whatever hangs."""
        try:
            waits_for = next(steps)
            while now() < self._until:
                waits_for = steps.send((yield waits_for))
        except StopIteration as end:
            return end.value
        raise FenceError("the server has not answered in time")

    def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    def look(self) -> psycopg.Connection[Any] | None:
        """The connection, which is closed where the server has ended it."""
        with self._turn:
            try:
                # The reason, then the end.
                for _ in range(2 if self.connection else 0):
                    self.connection.pgconn.consume_input()  # type: ignore[union-attr]
            except psycopg.Error:
                self.close()
            return self.connection


def in_thread(call: Callable[[], _T]) -> Future[_T]:
    """Runs a call that blocks where no signal's exception can interrupt it, and no loop waits for it."""
    future: Future[_T] = Future()
    # Nobody who gives up takes the outcome away.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)

    threading.Thread(target=run, name="pg_fence call", daemon=True).start()
    return future


async def settled(value: Any) -> Any:
    """Of what is not asynchronous it is there already."""
    return await value if inspect.isawaitable(value) else value


async def aside(call: Callable[[], _T], is_async: bool) -> _T:
    return await outcome(in_thread(call), is_async)


async def outcome(future: Future[_T], is_async: bool) -> _T:
    return await asyncio.wrap_future(future) if is_async else future.result()


def run(work: Coroutine[Any, Any, _T], is_async: bool) -> Any:
    """Has a coroutine be awaited by the caller, where that is asynchronous. Any other never waits."""
    if is_async:
        return work
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise RuntimeError("a synchronous call waited")


class Block(Generic[_T]):
    """Entered by `with` or, where it is asynchronous, by `async with`. It is made of coroutines in both cases."""

    _is_async: bool
    _enter: Callable[[], Coroutine[Any, Any, _T]]
    _leave: Callable[..., Coroutine[Any, Any, bool | None]]

    def __enter__(self) -> _T:
        return run(self._enter_by("with"), False)

    def __exit__(self, *raised: object) -> None:
        run(self._leave(*raised), False)

    async def __aenter__(self) -> _T:
        return await self._enter_by("async with")

    async def __aexit__(self, *raised: object) -> None:
        await self._leave(*raised)

    async def _enter_by(self, word: str) -> _T:
        if word != ("async with" if self._is_async else "with"):
            raise TypeError("`async with` for an asynchronous connection or fence, and `with` for any other")
        return await self._enter()
