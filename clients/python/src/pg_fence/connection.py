"""The clock, and connections that can be broken off from another thread."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg.rows import tuple_row

from .errors import not_installed

if TYPE_CHECKING:
    from .watch import Watch

_T = TypeVar("_T")


def now() -> float:
    """Seconds on a clock that nobody can set, and that goes on while the machine sleeps where there is one."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


#: How long a statement that was cancelled may take to end, in seconds.
CANCEL_AGAIN = 1.0

#: What a setting in milliseconds holds: the server refuses more.
LONGEST_TIMEOUT_MS = 2**31 - 1


def milliseconds(seconds: float) -> str:
    """As a setting of the server has it."""
    return str(min(max(1, int(seconds * 1000)), LONGEST_TIMEOUT_MS))


class Handle:
    """A second handle on a connection's socket, to end what hangs on it from another thread."""

    def __init__(self, connection: Any):
        # A handle of its own: the number of the connection's may be another file's by the time of the cut.
        self._socket = socket.fromfd(_fileno(connection), socket.AF_INET, socket.SOCK_STREAM)

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _fileno(connection: Any) -> int:
    if hasattr(connection, "fileno"):
        return int(connection.fileno())
    # asyncpg shows its socket nowhere else.
    return int(connection._transport.get_extra_info("socket").fileno())


class OwnConnection:
    """A connection of the client's own: opened when it is needed, used by one thread. The watch breaks a call off that
    takes longer than it may. To open it may take `open_limit` seconds."""

    def __init__(self, open: Callable[[float], psycopg.Connection[Any]], open_limit: float, watch: Watch):
        self._open = open
        self.open_limit = open_limit
        self._watch = watch
        self._lock = threading.Lock()
        self._connection: psycopg.Connection[Any] | None = None
        self._handle: Handle | None = None
        #: When the call that is under way is to be broken off, and whether the last one was.
        self.cut_at = math.inf
        self.was_cut = False
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

    def rows(self, limit: float, lock_limit: float, sql: str, arguments: list[Any]) -> list[tuple[Any, ...]]:
        """A transaction of one statement. The server ends it, too, where it takes longer than `limit`, or waits longer
        for a lock than `lock_limit`."""
        with self._connected(limit) as connection, connection.transaction():
            # For this transaction only: behind a pooler the session is others', too.
            timeouts = "SELECT set_config('statement_timeout', %s, true), set_config('lock_timeout', %s, true)"
            with connection.cursor(row_factory=tuple_row) as cursor:
                cursor.execute(timeouts, [milliseconds(limit), milliseconds(lock_limit)])
                # What a claim is asked for is the caller's text.
                return cursor.execute(sql, arguments).fetchall()  # type: ignore[arg-type]

    def value(self, limit: float, lock_limit: float, sql: str, arguments: list[Any]) -> Any:
        """The same; the only value of its only row."""
        return self.rows(limit, lock_limit, sql, arguments)[0][0]

    @contextlib.contextmanager
    def _connected(self, limit: float) -> Iterator[psycopg.Connection[Any]]:
        self.was_cut = False
        if self._connection is None:
            connection = self._open(self.open_limit)
            with self._lock:
                self._connection, self._handle = connection, Handle(connection)
        connection = self._connection
        assert connection is not None
        try:
            self.cut_at = now() + limit
            self._watch.add_call(self)
            yield connection
        except psycopg.Error as error:
            if connection.closed or connection.broken:
                self.close()
            told = not_installed(error)
            if told is not None:
                raise told from error
            raise
        except BaseException:
            if connection.closed or connection.broken:
                self.close()
            raise
        finally:
            self.cut_at = math.inf
            self._watch.remove_call(self)

    def cut(self) -> None:
        """Ends what hangs on it."""
        with self._lock:
            self.cut_at, self.was_cut = math.inf, True
            if self._handle is not None:
                self._handle.cut()

    def has_ended(self) -> bool:
        """Reads what the server has sent unasked. Whether the session is over; nobody else uses it."""
        connection = self._connection
        if connection is None or connection.closed:
            return True
        try:
            connection.pgconn.consume_input()
        except psycopg.Error:
            return True
        return False

    def fileno(self) -> int:
        """That of its socket; -1 where it is closed."""
        connection = self._connection
        return -1 if connection is None or connection.closed else connection.fileno()

    def cancel(self) -> None:
        """Asks the server to end the `call` that is under way, whose answer then comes."""
        with self._cancelling:
            if self._cancellable is not None:
                self._is_cancelled = True
                with contextlib.suppress(psycopg.Error):
                    self._cancellable.cancel_safe(timeout=5)

    def cancel_until(self, is_over: Callable[[], bool], lock: threading.Condition) -> None:
        """The same, until that comes true, of which the lock is notified."""
        over = False
        while not over:
            self.cancel()
            with lock:
                # A request that comes before the statement does is lost, hence more than one.
                over = lock.wait_for(is_over, CANCEL_AGAIN)

    def close(self) -> None:
        with self._lock:
            connection, handle = self._connection, self._handle
            self._connection = self._handle = None
        if handle is not None:
            handle.close()
        if connection is not None:
            connection.close()

    def abandon(self) -> None:
        """In a process that was forked: the session is the parent's, and goes on."""
        _of_the_parent.append((self._connection, self._handle))
        self._lock, self._cancelling = threading.Lock(), threading.Lock()
        self._connection = self._handle = self._cancellable = None


#: Kept, so that nobody closes them in a process that was forked.
_of_the_parent: list[Any] = []


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
        except BaseException as raised:  # noqa: BLE001
            error = raised
        # The loop may be closed by then.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="pg_fence call", daemon=True).start()
    return await outcome
