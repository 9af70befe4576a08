"""The clock, and connections that can be broken off from another thread."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import psycopg
from psycopg.rows import tuple_row

_T = TypeVar("_T")


def now() -> float:
    """Seconds on a clock that nobody can set, and that goes on while the machine sleeps where there is one."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


#: Waits do not count the time that the machine slept; so they look at the clock again after so many seconds.
LOOK_AGAIN = 1.0

#: How long a statement that was cancelled may take to end, in seconds.
CANCEL_AGAIN = 1.0

#: What a setting in milliseconds holds: the server refuses more.
LONGEST_TIMEOUT_MS = 2**31 - 1


class Handle:
    """A second handle on a connection's socket, to end what hangs on it from another thread."""

    def __init__(self, connection: Any):
        # A handle of its own: the number of the connection's may be another file's by the time of the cut.
        self._socket = socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM)

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class OwnConnection:
    """A lease's own connection: opened when it is needed, used by one thread. Another thread breaks it off when a
    call takes longer than it may. `lock` is notified when there is a new time to do so. To open it may take
    `open_limit` seconds."""

    def __init__(
        self, open: Callable[[float], psycopg.Connection[Any]], open_limit: float, lock: threading.Condition
    ):
        self._open = open
        self._open_limit = open_limit
        self._lock = lock
        self._connection: psycopg.Connection[Any] | None = None
        self._handle: Handle | None = None
        #: When the call that is under way is to be broken off.
        self.cut_at = math.inf
        # Held while the server is asked to cancel: the connection must not be closed meanwhile.
        self._cancelling = threading.Lock()
        self._cancellable: psycopg.Connection[Any] | None = None
        self._is_cancelled = False

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def call(self, limit: float, sql: str, arguments: list[Any]) -> Any:
        """One statement, a transaction of its own. It can be cancelled."""
        try:
            with self._connected(limit) as connection:
                self._cancellable = connection
                return value(connection, sql, arguments)
        finally:
            with self._cancelling:
                self._cancellable, is_cancelled, self._is_cancelled = None, self._is_cancelled, False
            if is_cancelled:
                # A request that is late would hit the next statement: the release of a grant that came all the same.
                self.close()

    def call_within(self, limit: float, sql: str, arguments: list[Any]) -> Any:
        """The same, where the server does not let it go on for ever either."""
        with self._connected(limit) as connection, connection.transaction():
            # For this transaction only: behind a pooler the session is others', too.
            timeout = str(min(max(1, int(limit * 1000)), LONGEST_TIMEOUT_MS))
            value(connection, "SELECT set_config('statement_timeout', %s, true)", [timeout])
            return value(connection, sql, arguments)

    @contextlib.contextmanager
    def _connected(self, limit: float) -> Iterator[psycopg.Connection[Any]]:
        if self._connection is None:
            connection = self._open(self._open_limit)
            with self._lock:
                self._connection, self._handle = connection, Handle(connection)
        connection = self._connection
        assert connection is not None
        try:
            with self._lock:
                self.cut_at = now() + limit
                self._lock.notify_all()
            yield connection
        except BaseException:
            if connection.closed or connection.broken:
                self.close()
            raise
        finally:
            with self._lock:
                self.cut_at = math.inf

    def cut(self) -> None:
        """Ends what hangs on it. The lock is held."""
        self.cut_at = math.inf
        if self._handle is not None:
            self._handle.cut()

    def cancel(self) -> None:
        """Asks the server to end the `call` that is under way, whose answer then comes."""
        with self._cancelling:
            if self._cancellable is not None:
                self._is_cancelled = True
                with contextlib.suppress(psycopg.Error):
                    self._cancellable.cancel_safe(timeout=5)

    def cancel_until(self, is_over: Callable[[], bool]) -> None:
        """The same, until that comes true, of which the lock is notified."""
        over = False
        while not over:
            self.cancel()
            with self._lock:
                # A request that comes before the statement does is lost, hence more than one.
                over = self._lock.wait_for(is_over, CANCEL_AGAIN)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Breaks off what takes too long in this block: for a lease that has no watch of its own."""
        is_over = False

        def watch() -> None:
            with self._lock:
                while not is_over:
                    if now() >= self.cut_at:
                        self.cut()
                    self._lock.wait(max(0.0, min(self.cut_at - now(), LOOK_AGAIN)))

        thread = threading.Thread(target=watch, name="pg_fence watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._lock:
                is_over = True
                self._lock.notify_all()
            thread.join()

    def close(self) -> None:
        with self._lock:
            connection, handle = self._connection, self._handle
            self._connection = self._handle = None
        if handle is not None:
            handle.close()
        if connection is not None:
            connection.close()


def value(connection: psycopg.Connection[Any], sql: Any, arguments: list[Any]) -> Any:
    """The only value of the only row."""
    with connection.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(sql, arguments).fetchone()
        return None if row is None else row[0]


async def in_thread(call: Callable[[], _T]) -> _T:
    """Waits for a call that blocks, in a thread that ends with it: asyncio's own stay for ever."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_T] = loop.create_future()

    def tell(result: _T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:
            error = raised
        # The loop may be closed by then.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="pg_fence call", daemon=True).start()
    return await outcome
