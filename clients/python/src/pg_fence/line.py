"""A connection of the fence's own, and handles that end what hangs on a connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from .asked import Call
from .errors import FenceError, session_ended
from .source import Opener


class Handle:
    """A second handle on a connection's socket, to end what hangs on it from another thread."""

    def __init__(self, connection: Any):
        # Its own: the number of the connection's may be another file's by the time of the cut.
        self._socket = socket.fromfd(_fileno(connection), socket.AF_INET, socket.SOCK_STREAM)
        self.was_cut = False

    def cut(self) -> None:
        self.was_cut = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _fileno(connection: Any) -> int:
    if hasattr(connection, "fileno"):
        return int(connection.fileno())
    # asyncpg shows its socket nowhere else.
    return int(connection._transport.get_extra_info("socket").fileno())


#: Cuts a handle in so many seconds, unless the block has ended by then.
Alarm = Callable[[Handle, float], "contextlib.AbstractContextManager[None]"]


class Line:
    """Opened when it is needed, for one call at a time, each of which is broken off when it takes too long."""

    def __init__(self, open: Opener, alarm: Alarm):
        self._open, self._alarm = open, alarm
        self._free = threading.Condition()
        self._is_busy, self._urgent = False, 0
        self._connection: psycopg.Connection[Any] | None = None
        #: The role, for errors.
        self.role: str | None = None
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
        connection = self._ready(limit)
        handle = Handle(connection)
        try:
            # What the connection makes of rows is the program's.
            with self._alarm(handle, limit), connection.cursor(row_factory=tuple_row) as cursor:
                return cursor.execute(*call).fetchall()  # type: ignore[arg-type]
        except psycopg.Error as error:
            if handle.was_cut:
                raise FenceError(f"the server has not answered within {limit:.1f} s") from error
            raise
        finally:
            handle.close()
            if connection.closed or connection.info.transaction_status is not TransactionStatus.IDLE:
                self.close()

    def value(self, call: Call, limit: float, repeats: bool = False) -> Any:
        """The first value of the only row."""
        return self.rows(call, limit, repeats=repeats)[0][0]

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self.session += 1
            connection.close()

    def look(self) -> None:
        """Closes it where the server has ended it, unless it is in use."""
        with self._free:
            if self._is_busy or self._connection is None:
                return
            self._is_busy = True
        try:
            self._end_if_ended(self._connection)
        finally:
            self._leave()

    def abandon(self) -> None:
        """In a process that was forked: the session is the parent's, and goes on."""
        _of_the_parent.append(self._connection)
        self._connection = None

    def _ready(self, limit: float) -> psycopg.Connection[Any]:
        if self._connection is not None:
            self._end_if_ended(self._connection)
        if self._connection is None:
            self._connection = self._open(limit)
            self.role = self._connection.info.user
        return self._connection

    def _end_if_ended(self, connection: psycopg.Connection[Any]) -> None:
        try:
            # The reason, then the end.
            connection.pgconn.consume_input()
            connection.pgconn.consume_input()
        except psycopg.Error:
            self.close()

    @contextlib.contextmanager
    def _turn(self, urgent: bool) -> Iterator[None]:
        with self._free:
            self._urgent += urgent
            try:
                while self._is_busy or (self._urgent and not urgent):
                    self._free.wait()
            finally:
                self._urgent -= urgent
            self._is_busy = True
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._free:
            self._is_busy = False
            self._free.notify_all()


#: Kept, so that nobody closes them in a process that was forked.
_of_the_parent: list[Any] = []
