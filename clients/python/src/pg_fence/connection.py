"""Connections of the heartbeat's own, each with a thread, and what opens and ends them; and how the
same code serves programs of both kinds, synchronous or not."""

import asyncio
import contextlib
import inspect
import math
import queue
import re
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import psycopg
from psycopg import conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from .statements import Statement

_T = TypeVar("_T")

#: Opens a connection, which may take that many seconds.
Opener = Callable[[float], Any]


def opener(source: Any) -> Opener:
    """Of a connection string, a URL, a function, SQLAlchemy's engine, or Django's connection."""
    url: Any = getattr(source, "url", None)
    text: Any = source
    if hasattr(url, "translate_connect_args"):
        # As text it has spaces where libpq takes none.
        parts = url.translate_connect_args(username="user", database="dbname")
        text = conninfo.make_conninfo(**{**parts, **url.query})
    if isinstance(text, str):
        # As SQLAlchemy writes it: postgresql+psycopg://…
        text = re.sub(r"^(postgres(?:ql)?)\+\w+://", r"\1://", text)
        given = conninfo.conninfo_to_dict(text)
    elif hasattr(source, "get_connection_params"):
        # Django's has some that are not libpq's.
        known = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}
        params = source.get_connection_params()
        given = {key: value for key, value in params.items() if key in known}
        if role := source.settings_dict["OPTIONS"].get("assume_role"):
            escaped = re.sub(r"([\\ ])", r"\\\1", role)
            given["options"] = f"{given.get('options', '')} -c role={escaped}"
    elif callable(source):
        return lambda _: source()
    else:
        takes = "a connection string, a URL, a function that opens a psycopg.Connection, an engine"
        raise TypeError(f"a fence takes {takes}, or Django's connection, and not {type(source)}")
    hosts = str(given.get("host") or given.get("hostaddr") or "").count(",") + 1

    def open(limit: float) -> psycopg.Connection[Any]:
        # For each host; libpq counts in whole seconds, two at least.
        timeout = max(2, math.ceil(limit / hosts))
        return psycopg.connect(**{"connect_timeout": timeout, "client_encoding": "utf8", **given})

    return open


class Connection:
    """A connection with a thread of its own, for one call at a time. A call goes on until it is
    answered or the connection is cut."""

    def __init__(self, number: int, open: Opener):
        self.number, self._open = number, open
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._connection: psycopg.Connection[Any] | None = None
        self._handle: socket.socket | None = None
        self._is_cut = False
        #: The one that logged in.
        self.role = ""

    def does(self, job: Callable[[], object]) -> None:
        """Has its thread do something, after what came before."""
        self._jobs.put(job)
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="pg_fence connection", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:
                # There are too many, or it is the end of the process.
                self._jobs.get()
                job()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self.close()

    def open(self, limit: float) -> None:
        connection: Any = self._open(limit)
        if not isinstance(connection, psycopg.Connection):
            takes = "the function of a fence opens a psycopg.Connection"
            raise TypeError(f"{takes}, and not {type(connection)}")
        self._connection, self.role = connection, connection.info.user
        connection.autocommit = True
        # A pooler in transaction mode hands each transaction to a server that may not know the
        # statement.
        connection.prepare_threshold = None
        self._handle = handle_of(connection)
        if self._is_cut:
            cut(self._handle)
        if connection.info.encoding == "ascii":
            # Of SQL_ASCII psycopg returns bytes.
            connection.execute("SET client_encoding = utf8")

    def rows(self, statement: Statement) -> list[tuple[Any, ...]]:
        """What a statement in autocommit returns."""
        assert self._connection
        # The connection's cursors and rows are the program's.
        with psycopg.Cursor(self._connection, row_factory=tuple_row) as cursor:
            return cursor.execute(*statement).fetchall()  # type: ignore[arg-type]

    def has_ended(self) -> bool:
        """Whether the server has ended it."""
        if self._connection is None:
            return False
        with contextlib.suppress(psycopg.Error):
            # The reason comes first, then the end.
            for _ in range(2):
                self._connection.pgconn.consume_input()
            return self._connection.closed
        return True

    def is_broken(self) -> bool:
        """Whether it is of no use for another statement."""
        if self._connection is None or self._connection.closed:
            return True
        return self._connection.info.transaction_status is not TransactionStatus.IDLE

    def cut(self) -> None:
        """Ends it at once, whatever hangs in it."""
        self._is_cut = True
        if self._handle is not None:
            cut(self._handle)
        self.hang_up()

    def hang_up(self) -> None:
        """Ends it after what it does."""
        if self._thread is None:
            self.close()
        self._jobs.put(None)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._handle is not None:
            self._handle.close()


def handle_of(connection: Any) -> socket.socket:
    """A second handle on a connection's socket, to end what hangs on it from another thread."""
    # asyncpg shows its socket nowhere else.
    has_number = hasattr(connection, "fileno")
    socket_of = connection if has_number else connection._transport.get_extra_info("socket")
    # Its own: the number of the connection's may be another file's by the time of the cut.
    return socket.fromfd(socket_of.fileno(), socket.AF_INET, socket.SOCK_STREAM)


def cut(handle: socket.socket) -> None:
    with contextlib.suppress(OSError):
        handle.shutdown(socket.SHUT_RDWR)


# For programs of both kinds.


def running() -> Future[Any]:
    """Nobody who gives up takes the outcome away."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def in_thread(call: Callable[[], _T]) -> Future[_T]:
    """Runs a call that blocks where no signal's exception interrupts it, and no loop waits."""
    future = running()

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


async def outcome(future: Future[_T], is_async: bool) -> _T:
    return await asyncio.wrap_future(future) if is_async else future.result()


def run(work: Coroutine[Any, Any, _T], is_async: bool) -> Any:
    """Has a coroutine be awaited by the caller, if that is asynchronous. Any other never waits."""
    if is_async:
        return work
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise RuntimeError("a synchronous call waited")


class Block(Generic[_T]):
    """It is entered by `with` or, if it is asynchronous, by `async with`; made of coroutines."""

    _is_async: bool
    _enter: Callable[[], Coroutine[Any, Any, _T]]
    _leave: Callable[..., Coroutine[Any, Any, bool | None]]

    _is_entered = False

    def __enter__(self) -> _T:
        return run(self._enter_by("with"), False)

    def __exit__(self, *raised: object) -> None:
        self._is_entered = False
        run(self._leave(*raised), False)

    async def __aenter__(self) -> _T:
        return await self._enter_by("async with")

    async def __aexit__(self, *raised: object) -> None:
        self._is_entered = False
        await self._leave(*raised)

    async def _enter_by(self, word: str) -> _T:
        if word != ("async with" if self._is_async else "with"):
            kind = "an asynchronous connection or fence"
            raise TypeError(f"`async with` for {kind}, and `with` for any other")
        if self._is_entered:
            raise RuntimeError("somebody is in this block: take another lease, guard or fence")
        self._is_entered = True
        try:
            return await self._enter()
        except BaseException:
            self._is_entered = False
            raise
