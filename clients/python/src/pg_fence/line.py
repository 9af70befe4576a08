"""Connections of the fence's own, and what opens them; what ends a call that hangs on one; and calls in threads of their own."""

import asyncio
import contextlib
import math
import re
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

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
Opener = Callable[[float], "psycopg.Connection[Any]"]


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
        return lambda _: _ready(source())
    else:
        takes = "a connection string, a URL, a function that opens a psycopg.Connection, an engine, or Django's connection"
        raise TypeError(f"a fence takes {takes}, and not {kind_of(source)}")
    # libpq counts in whole seconds, two at least.
    return lambda limit: _ready(
        psycopg.connect(**{"connect_timeout": max(2, math.ceil(limit)), "client_encoding": "utf8", **given})
    )


def _ready(connection: Any) -> psycopg.Connection[Any]:
    if not isinstance(connection, psycopg.Connection):
        raise TypeError(f"the function of a fence opens a psycopg.Connection, and not {kind_of(connection)}")
    connection.autocommit = True
    # A pooler in transaction mode hands each transaction to a server that may not know the statement.
    connection.prepare_threshold = None
    return connection


def kind_of(thing: object) -> str:
    """Its type, for an error."""
    return f"a {type(thing).__module__}.{type(thing).__qualname__}"


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
    """Opened when it is needed, for one call at a time. `alarm` breaks a connection off in so many seconds, unless its
    block has ended by then."""

    def __init__(self, open: Opener, alarm: Callable[[Any, float], contextlib.AbstractContextManager[None]]):
        self._open, self._alarm = open, alarm
        self._free, self._is_busy = threading.Condition(), False
        #: So many wait that go first.
        self._urgent = 0
        self.connection: psycopg.Connection[Any] | None = None

    def rows(self, call: Call, limit: float, given_up: GivenUp | None = None) -> list[tuple[Any, ...]]:
        """A statement in autocommit, which may take that many seconds beside opening the connection. One that can be given up
        lets all others go first, which may be run twice, and is not sent where nobody waits for it any more."""
        is_urgent = given_up is None
        with self._free:
            self._urgent += is_urgent
            try:
                self._free.wait_for(lambda: not self._is_busy and (is_urgent or self._urgent == 0))
            finally:
                self._urgent -= is_urgent
            self._is_busy = True
        try:
            if given_up is not None and given_up():
                raise FenceError("nobody waits for the answer any more")
            before = self.connection
            try:
                return self._rows(call, limit)
            except psycopg.Error as error:
                # It may only show that the connection has ended since the last time.
                if not is_urgent or before in (None, self.connection) or not session_ended(error):
                    raise
                return self._rows(call, limit)
        finally:
            with self._free:
                self._is_busy = False
                self._free.notify_all()

    def _rows(self, call: Call, limit: float) -> list[tuple[Any, ...]]:
        self.look()
        connection = self.connection = self.connection or self._open(limit)
        try:
            # The connection's row factory is the program's.
            with self._alarm(connection, limit), connection.cursor(row_factory=tuple_row) as cursor:
                return cursor.execute(*call).fetchall()  # type: ignore[arg-type]
        except psycopg.Error as error:
            meant = told(error, connection)
            if meant is error:
                raise
            raise meant from error
        finally:
            if connection.closed or connection.info.transaction_status is not TransactionStatus.IDLE:
                self.close()

    def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    def look_if_free(self) -> None:
        with self._free:
            if not self._is_busy:
                self.look()

    def look(self) -> None:
        """Closes it where the server has ended it."""
        try:
            # The reason, then the end.
            for _ in range(2 if self.connection else 0):
                self.connection.pgconn.consume_input()  # type: ignore[union-attr]
        except psycopg.Error:
            self.close()


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


async def outcome(future: Future[_T], is_async: bool) -> _T:
    return await asyncio.wrap_future(future) if is_async else future.result()


def at_once(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs what never waits, because it is synchronous."""
    try:
        work.send(None)
    except StopIteration as end:
        value: _T = end.value
        return value
    work.close()
    raise RuntimeError("a synchronous call waited")
