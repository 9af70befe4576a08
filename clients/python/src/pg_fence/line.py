"""A connection of the fence's own; handles that end what hangs on a connection; and calls in threads of their own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from .asked import Call
from .errors import FenceError, session_ended, told_of_call
from .source import Opener

_T = TypeVar("_T")


class Handle:
    """A second handle on a connection's socket, to end what hangs on it from another thread."""

    def __init__(self, connection: Any):
        # asyncpg shows its socket nowhere else.
        socket_of = connection if hasattr(connection, "fileno") else connection._transport.get_extra_info("socket")
        # Its own: the number of the connection's may be another file's by the time of the cut.
        self._socket = socket.fromfd(socket_of.fileno(), socket.AF_INET, socket.SOCK_STREAM)
        self.was_cut = False

    def cut(self) -> None:
        self.was_cut = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


#: Cuts a handle in so many seconds, unless the block has ended by then.
Alarm = Callable[[Handle, float], "contextlib.AbstractContextManager[None]"]


class Line:
    """Opened when it is needed, for one call at a time, each of which is broken off when it takes too long."""

    def __init__(self, open: Opener, alarm: Alarm):
        self._open, self._alarm = open, alarm
        self._free = threading.Condition()
        self._is_busy, self._urgent = False, 0
        self._connection: psycopg.Connection[Any] | None = None
        #: Which connection it is: another number after each.
        self.session = 0

    def rows(self, call: Call, limit: float, urgent: bool = False, repeats: bool = False) -> list[tuple[Any, ...]]:
        """A statement in autocommit, which may take that many seconds beside opening the connection. What is urgent
        goes first. What may be run twice is, where it only shows that the connection has ended since the last time."""
        with self._turn(urgent):
            session = self.session if self._connection is not None else None
            try:
                return self._rows(call, limit)
            except psycopg.Error as error:
                if not repeats or session in (None, self.session) or not session_ended(error):
                    raise
                return self._rows(call, limit)

    def _rows(self, call: Call, limit: float) -> list[tuple[Any, ...]]:
        self._end_if_ended()
        connection = self._connection = self._connection or self._open(limit)
        handle = Handle(connection)
        try:
            # What the connection makes of rows is the program's.
            with self._alarm(handle, limit), connection.cursor(row_factory=tuple_row) as cursor:
                return cursor.execute(*call).fetchall()  # type: ignore[arg-type]
        except psycopg.Error as error:
            if handle.was_cut:
                raise FenceError(f"the server has not answered within {limit:.1f} s") from error
            told = told_of_call(error, connection.info.user)
            if told is error:
                raise
            raise told from error
        finally:
            handle.close()
            if connection.closed or connection.info.transaction_status is not TransactionStatus.IDLE:
                self.close()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self.session += 1
            connection.close()

    def look(self) -> None:
        """Closes it where the server has ended it, unless it is in use."""
        if self._free.acquire(blocking=False):
            try:
                if not self._is_busy:
                    self._end_if_ended()
            finally:
                self._free.release()

    def _end_if_ended(self) -> None:
        try:
            # The reason, then the end.
            for _ in range(2 if self._connection else 0):
                self._connection.pgconn.consume_input()  # type: ignore[union-attr]
        except psycopg.Error:
            self.close()

    @contextlib.contextmanager
    def _turn(self, urgent: bool) -> Iterator[None]:
        with self._free:
            self._urgent += urgent
            try:
                self._free.wait_for(lambda: not self._is_busy and (urgent or not self._urgent))
            finally:
                self._urgent -= urgent
            self._is_busy = True
        try:
            yield
        finally:
            with self._free:
                self._is_busy = False
                self._free.notify_all()

    def abandon(self) -> None:
        """In a process that was forked: the session is the parent's, and goes on."""
        _of_the_parent.append(self._connection)
        self._connection = None


#: Kept, so that nobody closes them in a process that was forked.
_of_the_parent: list[Any] = []


def in_thread(call: Callable[[], _T]) -> Future[_T]:
    """Runs a call that blocks where no signal's exception can interrupt it, and no loop waits for it."""
    future: Future[_T] = Future()
    # Nobody who gives up takes the outcome away.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="pg_fence call", daemon=True).start()
    return future
