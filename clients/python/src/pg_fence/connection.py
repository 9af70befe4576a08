"""The heartbeat's connections, each with a thread; and the helpers by which the same coroutines serve
synchronous and asynchronous programs."""

import asyncio
import contextlib
import inspect
import math
import queue
import re
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Generic, TypeVar

import psycopg
from psycopg import conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from .statements import Statement

_T = TypeVar("_T")

#: Opens a connection within the given seconds.
Opener = Callable[[float], Any]


def opener(source: Any) -> Opener:
    """Returns what opens connections of a connection string, a URL, a function, SQLAlchemy's engine
    or Django's connection. Raises TypeError for any other source."""
    url: Any = getattr(source, "url", None)
    text: Any = source
    if hasattr(url, "translate_connect_args"):
        # SQLAlchemy's text of the URL has a plus for a space, which libpq does not decode.
        parts = url.translate_connect_args(username="user", database="dbname")
        text = conninfo.make_conninfo(**{**parts, **url.query})
    if isinstance(text, str):
        # SQLAlchemy writes the driver into the URL: postgresql+psycopg://…
        text = re.sub(r"^(postgres(?:ql)?)\+\w+://", r"\1://", text)
        given = conninfo.conninfo_to_dict(text)
    elif hasattr(source, "get_connection_params"):
        # Django's parameters include some that libpq does not know.
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
        # connect_timeout is for each host, in whole seconds, and libpq makes 1 of it 2.
        timeout = max(2, math.ceil(limit / hosts))
        params = {"connect_timeout": timeout, "client_encoding": "utf8", **given}
        return psycopg.connect(**found_in_time(params, limit / hosts))

    return open


def found_in_time(params: dict[str, Any], limit: float) -> dict[str, Any]:
    """Returns the parameters without the hosts whose lookup takes longer than the given seconds:
    psycopg looks up all hosts before it connects to the first one."""
    hosts = str(params.get("host") or "").split(",")
    if len(hosts) == 1 or params.get("hostaddr"):
        return params
    lookups = [in_thread(partial(socket.getaddrinfo, host, None)) for host in hosts]
    wait(lookups, limit)
    found = [at for at, lookup in enumerate(lookups) if lookup.done()]
    if not found:
        raise psycopg.OperationalError(f"none of the hosts {', '.join(hosts)} was found in time")
    ports = str(params.get("port") or "").split(",")
    of_hosts = {"host": hosts, **({"port": ports} if len(ports) == len(hosts) else {})}
    kept = {key: ",".join(values[at] for at in found) for key, values in of_hosts.items()}
    return {**params, **kept}


class Connection:
    """A connection and its thread, for one call at a time. A call ends with its answer, or when the
    connection is cut."""

    def __init__(self, number: int, open: Opener):
        self.number, self._open = number, open
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._connection: psycopg.Connection[Any] | None = None
        self._handle: socket.socket | None = None
        self._is_cut = False
        #: The login role.
        self.role = ""

    def enqueue(self, job: Callable[[], object]) -> None:
        """Queues a job for the connection's thread."""
        self._jobs.put(job)
        if self._thread is None:
            try:
                self._thread = started(self._work, "pg_fence connection")
            except RuntimeError:
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
        # Behind a pooler in transaction mode the next transaction may run on a server that does not
        # know the prepared statement.
        connection.prepare_threshold = None
        self._handle = handle_of(connection)
        if self._is_cut:
            cut(self._handle)
        if connection.info.encoding == "ascii":
            # For SQL_ASCII psycopg returns texts as bytes.
            connection.execute("SET client_encoding = utf8")

    def rows(self, statement: Statement) -> list[tuple[Any, ...]]:
        """Returns the rows of a statement in autocommit."""
        assert self._connection
        # The program may have set other factories of cursors and rows.
        with psycopg.Cursor(self._connection, row_factory=tuple_row) as cursor:
            # psycopg reads binary numbers faster than their texts.
            return cursor.execute(*statement, binary=True).fetchall()  # type: ignore[arg-type]

    def has_ended(self) -> bool:
        """True if the server has ended the connection."""
        assert self._connection
        with contextlib.suppress(psycopg.Error):
            # The first read has the server's reason, the second one the end of the stream.
            for _ in range(2):
                self._connection.pgconn.consume_input()
            return self._connection.closed
        return True

    def is_broken(self) -> bool:
        """True if the connection cannot run another statement."""
        on = self._connection
        return on is None or on.info.transaction_status is not TransactionStatus.IDLE

    def cut(self) -> None:
        """Ends the connection at once, also while a call hangs on it."""
        self._is_cut = True
        if self._handle is not None:
            cut(self._handle)
        self.hang_up()

    def hang_up(self) -> None:
        """Ends the connection after its queued jobs."""
        if self._thread is None:
            self.close()
        self._jobs.put(None)

    def close(self) -> None:
        if self._connection is not None:
            # Of a pool with close_returns, close() would return the connection open.
            self._connection.pgconn.finish()
            self._connection.close()
            # A connection occupies a place in its pool until it is put back.
            if pool := getattr(self._connection, "_pool", None):
                with contextlib.suppress(Exception):
                    pool.putconn(self._connection)
        if self._handle is not None:
            self._handle.close()


def handle_of(connection: Any) -> socket.socket:
    """Returns a second handle on a connection's socket, by which another thread can cut it."""
    # asyncpg has its socket only there.
    has_number = hasattr(connection, "fileno")
    socket_of = connection if has_number else connection._transport.get_extra_info("socket")
    # A duplicate: by the time of the cut the connection's own file descriptor may be another file.
    return socket.fromfd(socket_of.fileno(), socket.AF_INET, socket.SOCK_STREAM)


def cut(handle: socket.socket) -> None:
    with contextlib.suppress(OSError):
        handle.shutdown(socket.SHUT_RDWR)


# Helpers for synchronous and asynchronous programs.


def uncancellable() -> Future[Any]:
    """Returns a future that a waiter cannot cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def started(work: Callable[[], object], name: str) -> threading.Thread:
    """Starts a thread. Raises RuntimeError if there are too many threads, or the process is ending."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def in_thread(call: Callable[[], _T]) -> Future[_T]:
    """Runs a blocking call in a thread, where no signal handler's exception interrupts it and no
    event loop waits for it."""
    future = uncancellable()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)

    started(run, "pg_fence call")
    return future


async def settled(value: Any) -> Any:
    """Returns the value, awaited if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


async def outcome(future: Future[_T], is_async: bool) -> _T:
    return await asyncio.wrap_future(future) if is_async else future.result()


def run(work: Coroutine[Any, Any, _T], is_async: bool) -> Any:
    """Returns the coroutine for an asynchronous caller to await. For a synchronous one it runs the
    coroutine, which must not wait, and returns the result."""
    if is_async:
        return work
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a synchronous call waited")


class Block(Generic[_T]):
    """A context manager made of two coroutines, for `with` or for `async with`."""

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
            raise RuntimeError("this block is in use already: take another lease, guard or fence")
        self._is_entered = True
        try:
            return await self._enter()
        except BaseException:
            self._is_entered = False
            raise
