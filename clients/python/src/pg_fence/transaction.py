"""A transaction that is guarded by leases, and how each kind of connection begins it, runs a statement
and ends it."""

import contextlib
import itertools
import re
from collections.abc import AsyncIterator, Callable, Sequence
from socket import socket
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus as Status
from psycopg.rows import tuple_row

from . import statements
from .connection import Block, handle_of, in_thread, outcome, settled
from .errors import (
    FenceError,
    LeaseLost,
    LeaseTaken,
    TransactionLost,
    code_of,
    is_fatal,
    is_of_driver,
    refusal,
    sqlstate_of,
    typed,
)
from .heartbeat import Heartbeat, Holding, now
from .lease_state import Effect, guard_failed
from .statements import Statement

C = TypeVar("C")


def status_of(raw: Any) -> Status:
    """Returns the transaction status of the driver's connection."""
    if hasattr(raw, "is_in_transaction"):
        # asyncpg does not distinguish a transaction that has failed.
        return Status.INTRANS if raw.is_in_transaction() else Status.IDLE
    return Status(raw.info.transaction_status)


def numbered(sql: str) -> str:
    """Returns the statement with asyncpg's placeholders."""
    numbers = itertools.count(1)
    return re.sub("%([s%])", lambda of: f"${next(numbers)}" if of[1] == "s" else "%", sql)


class Driver:
    """A transaction of a connection of psycopg or asyncpg, and the base class of the others. The
    guard takes over a transaction that the driver has begun for a mere SELECT. Within one that the
    program ends (`is_inner`) it is a savepoint."""

    #: True after the commit, while hooks of the program may still fail.
    has_committed = False

    def __init__(self, connection: Any, is_async: bool):
        self.connection, self.is_async, self.is_inner = connection, is_async, False
        self._began_by_itself = False
        #: The driver's connection. That of asyncpg's pool raises once it has ended, and its pool has
        #: taken it back.
        self.raw: Any = getattr(connection, "_con", None) or connection
        self._block: Any = None

    async def begin(self, register: Callable[[Any], None]) -> None:
        """Begins the transaction. `register` is called with the driver's connection before the
        first statement."""
        if hasattr(self.raw, "fetchval") and self.is_closed():
            # This raises asyncpg's own error. Its status would be an AttributeError.
            await self.raw.fetchval("SELECT 1")
        is_begun = status_of(self.raw) is not Status.IDLE
        # asyncpg never begins one by itself.
        is_ours = getattr(self.raw, "autocommit", True) or self.raw._num_transactions
        self._began_by_itself = is_begun and not is_ours
        self.is_inner = is_begun and not self._began_by_itself
        if is_begun and getattr(self.raw, "_top_xact", self) is None:
            # asyncpg would raise the error that it raises for a connection that has ended.
            raise TypeError(
                "the transaction was begun as text: begin it by connection.transaction()"
            )
        register(self.raw)
        await self._enter(self.raw.transaction())

    async def value(self, sql: str, arguments: Sequence[Any]) -> Any:
        if hasattr(self.raw, "fetchval"):
            return await self.raw.fetchval(numbered(sql), *arguments)
        # The program may have set other factories of cursors and rows.
        kind: Any = psycopg.AsyncCursor if self.is_async else psycopg.Cursor
        is_psycopg_3 = isinstance(self.raw, (psycopg.Connection, psycopg.AsyncConnection))
        cursor = kind(self.raw, row_factory=tuple_row) if is_psycopg_3 else self.raw.cursor()
        await settled(cursor.execute(sql, arguments))
        return (await settled(cursor.fetchone()))[0]

    async def status(self) -> Status:
        """Returns the status before the commit, after an ORM has flushed its pending writes."""
        return status_of(self.raw)

    async def commit(self) -> None:
        await self._leave(None)
        if self._began_by_itself:
            await settled(self.connection.commit())

    async def rollback(self, error: BaseException) -> None:
        """Rolls back. If a transaction is still open then, the connection is ended."""
        if not (self._block or self.is_inner or self.is_closed()) and hasattr(self.raw, "fetchval"):
            # asyncpg learns how a BEGIN that was cancelled has ended with its next statement.
            await self.raw.fetchval("SELECT 1")
        await self._leave(error)
        if self._began_by_itself and not self.is_closed():
            await settled(self.connection.rollback())
        if not self.is_inner and not self.is_closed() and status_of(self.raw) is not Status.IDLE:
            await self.abort()

    async def abort(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(Exception):
            if isinstance(self.raw, psycopg.Connection) and status_of(self.raw) is Status.ACTIVE:
                # A signal handler's exception has interrupted a statement, which keeps its locks
                # until it is cancelled. With a libpq before 17 psycopg ignores the timeout, and on
                # a dead network the call never returns. (In asyncio psycopg cancels by itself.)
                in_thread(lambda: self.raw.cancel_safe(timeout=2)).result(3)
        with contextlib.suppress(Exception):
            for name in ("terminate", "invalidate", "close"):
                if end := getattr(self.connection, name, None):
                    await settled(end())
                    break

    def is_closed(self) -> bool:
        raw = self.raw
        if getattr(raw, "_con", raw) is None:
            return True
        return bool(raw.is_closed() if hasattr(raw, "is_closed") else getattr(raw, "closed", False))

    def _mark_committed(self, *_: object) -> None:
        self.has_committed = True

    async def _run(self, call: Callable[[], Any]) -> Any:
        return await settled(call())

    async def _enter(self, block: Any) -> None:
        await settled((getattr(block, "__aenter__", None) or block.__enter__)())
        self._block = block

    async def _leave(self, error: BaseException | None) -> None:
        block, self._block = self._block, None
        if block is not None:
            leave = getattr(block, "__aexit__", None) or block.__exit__
            raised = (type(error), error, error.__traceback__) if error else (None, None, None)
            await self._run(lambda: leave(*raised))


class SQLAlchemy(Driver):
    """A Connection or a Session, or an AsyncConnection or an AsyncSession."""

    #: True while the transaction is open and has no block yet.
    _has_begun = False

    async def commit(self) -> None:
        if not hasattr(self._sync, "get_bind"):
            await super().commit()
            return
        from sqlalchemy import event

        # It comes before the program's own listeners.
        event.listen(self._sync, "after_commit", self._mark_committed, insert=True)
        try:
            await super().commit()
        finally:
            event.remove(self._sync, "after_commit", self._mark_committed)

    async def begin(self, register: Callable[[Any], None]) -> None:
        of_session = getattr(self.connection, "sync_session", None)
        sync = of_session or getattr(self.connection, "sync_connection", self.connection)
        self._sync, is_begun = sync, sync.in_transaction()
        # The guard takes over a transaction that autobegin has begun for a query or an attribute.
        origin = getattr(sync.get_transaction(), "origin", None)
        was_asked_for = origin is not None and origin.name != "AUTOBEGIN"
        self.is_inner = sync._trans_context_manager is not None or was_asked_for
        if not is_begun:
            await self._run(sync.begin)
            self._has_begun = True
        self._core = sync.connection if hasattr(sync, "get_bind") else lambda: sync
        core = await self._run(self._core)
        pooled, is_nested = core.connection, self.is_inner
        self.raw, self._root = pooled.driver_connection, sync.get_transaction()
        if of_connections := getattr(self._root, "_connections", None):
            # A session that has joined a transaction of its connection does not commit that.
            _, joined, commits, _ = of_connections[core]
            self.is_inner = is_nested or not commits or joined is not core.get_transaction()
        register(self.raw)
        await self._enter(await self._run(sync.begin_nested) if is_nested else self._root)
        self._has_begun = False
        if getattr(pooled.dbapi_connection, "autocommit", False):
            raise TypeError(
                "the engine's isolation level is AUTOCOMMIT: there is no transaction to guard"
            )

    async def _run(self, call: Callable[[], Any]) -> Any:
        return await self.connection.run_sync(lambda _: call()) if self.is_async else call()

    async def value(self, sql: str, arguments: Sequence[Any]) -> Any:
        sent = numbered(sql) if hasattr(self.raw, "is_in_transaction") else sql
        return await self._run(
            lambda: self._core().exec_driver_sql(sent, tuple(arguments)).scalar()
        )

    async def status(self) -> Status:
        if self._sync.get_transaction() is not self._root:
            return Status.IDLE
        if not (self._root.is_active and self._block.is_active):
            return Status.INERROR
        if hasattr(self._sync, "flush"):
            await self._run(self._sync.flush)
        return await super().status()

    async def rollback(self, error: BaseException) -> None:
        # Afterwards the driver's connection belongs to its pool.
        await self._leave(error)
        if self._has_begun:
            # The session has no connection yet, or the lease was lost while it waited for one. If
            # the transaction stayed open, the next guard would be a savepoint in it.
            self._has_begun = False
            await self._run(self._sync.rollback)


class Django(Driver):
    async def begin(self, register: Callable[[Any], None]) -> None:
        from django.db import transaction

        self.connection.ensure_connection()
        self.raw = self.connection.connection
        if transaction.get_connection(self.connection.alias).connection is not self.raw:
            # It is a copy: atomic() would begin the transaction on the connection of that alias.
            raise TypeError(
                "not the connection of that alias in this thread, on which Django begins"
            )
        self.is_inner = self.connection.in_atomic_block
        self._began_by_itself = not self.is_inner and not self.connection.get_autocommit()
        register(self.raw)
        await self._enter(transaction.atomic(using=self.connection.alias))
        # It comes before the program's own hooks.
        transaction.on_commit(self._mark_committed, using=self.connection.alias)

    async def status(self) -> Status:
        return Status.INERROR if self.connection.needs_rollback else await super().status()


_KINDS: list[tuple[str, type[Driver], bool, str]] = [
    ("psycopg.", Driver, False, "transaction"),
    ("asyncpg.", Driver, True, "is_in_transaction"),
    ("sqlalchemy.ext.asyncio", SQLAlchemy, True, "in_transaction"),
    ("sqlalchemy.", SQLAlchemy, False, "in_transaction"),
    ("django.", Django, False, "ensure_connection"),
]


def driver_of(connection: Any) -> Driver:
    """Returns the driver of a connection. Raises TypeError if its kind is not supported."""
    modules = [kind.__module__ for kind in type(connection).__mro__]
    if any(one.startswith("sqlalchemy.") and one.endswith(".scoping") for one in modules):
        # A scoped_session, as Flask's db.session, returns the session of its scope.
        return driver_of(connection())
    for package, kind, is_async, attribute in _KINDS:
        # A pool, an engine and a sessionmaker do not have this attribute.
        if hasattr(connection, attribute) and any(one.startswith(package) for one in modules):
            return kind(connection, is_async or isinstance(connection, psycopg.AsyncConnection))
    takes = "a connection of psycopg 3, asyncpg or Django, or a connection or session of SQLAlchemy"
    of = "of a pool or an engine, take a connection"
    raise TypeError(f"this takes {takes}, and not {type(connection)}; {of}")


#: How a transaction was lost, by the code.
_LOST = {
    "25P02": "a statement of the transaction has failed: all of it is rolled back",
    "no transaction": "the work has ended the transaction itself: what it did after that was not"
    " guarded",
}


class _NotOpen(Exception):
    """The transaction has failed (25P02), or is not open any more (`no transaction`)."""

    def __init__(self, code: str):
        super().__init__(code)
        self.sqlstate = code


class Guard(Block[C]):
    """A transaction that is guarded by leases, for `with` or, on an asynchronous connection, for
    `async with`."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        holdings: list[Holding],
        release: bool,
        connection: C,
        adopted: tuple[str, int, str] | None = None,
    ):
        """`adopted`: the name, the number and the holder of an adopted lease."""
        if not (holdings or adopted):
            raise ValueError("a guard takes a lease")
        named = [(name, one) for one in holdings if not one.table for name in one.names]
        self._names, tokens = [name for name, _ in named], [one.token for _, one in named]
        adopted_by = None
        if adopted:
            self._names, tokens, adopted_by = [adopted[0]], [adopted[1]], adopted[2]
        self._begin = statements.guard([self._names, tokens], adopted_by)
        self._last = statements.RELEASE_IN_GUARD, [self._names, tokens]
        self._heartbeat, self._holdings = heartbeat, holdings
        self._rows = [one for one in holdings if one.table]
        self._releases, self._has_row_locks = release, False
        #: The leases whose loss ends the transaction. A row lease whose window is over is none of
        #: them if it is released: the table's trigger checks its last write.
        self._held = [
            one
            for one in holdings
            if not (release and one.table and one.end_reason(now()) == "deadline")
        ]
        self._connection, self._driver = connection, driver_of(connection)
        self._is_async = self._driver.is_async
        self._socket: socket | None = None
        self._role: str | None = None

    async def _enter(self) -> C:
        self._transaction = self._around()
        return await self._transaction.__aenter__()

    async def _leave(self, *raised: Any) -> bool | None:
        return await self._transaction.__aexit__(*raised)

    @contextlib.asynccontextmanager
    async def _around(self) -> AsyncIterator[C]:
        for holding in self._held:
            holding.check()
        # The same guard may be entered again.
        self._driver.has_committed = False
        stage, last_stage = "open", "rolled back"
        to_release = self._holdings if self._releases else []
        try:
            await self._driver.begin(self._register)
            stage = "begin"
            try:
                await self._present()
            except Exception as error:
                if not self._failure(error, stage)["again"]:
                    raise
                # After a failover a token is valid only after a renewal.
                await self._roll_back(error)
                self._end_row_locks()
                await self._heartbeat.renew(self._holdings, self._is_async)
                await self._driver.begin(self._register)
                await self._present()
            stage = "work"
            yield self._connection
            stage = "check"
            # From here on the heartbeat does not renew the leases that are being released.
            await self._heartbeat.last_transaction(to_release, "begins", self._is_async)
            await self._refuse_if_not_open()
            stage = "release"
            if self._releases:
                await self._release()
            stage = "commit"
            await self._driver.commit()
            self._driver.has_committed = True
        except BaseException as error:
            if self._driver.has_committed:
                # A hook of the program has failed.
                raise
            failure = self._failure(error, stage)
            last_stage = failure["last"]
            if stage == "commit" and not isinstance(error, Exception):
                last_stage = "in doubt"
                for holding in self._holdings:
                    holding.in_doubt = True
            try:
                typed_error = self._error_of(error, failure)
            finally:
                # A rollback may hang: then the loss at the deadline cuts the connection.
                self._end_row_locks()
                await self._roll_back(error)
            if failure["suspect"]:
                self._heartbeat.suspect(self._holdings)
            if typed_error is error:
                raise
            raise typed_error from error
        finally:
            self._unregister()
            if self._driver.has_committed:
                last_stage = "inner" if self._driver.is_inner else "committed"
            if stage in {"check", "release", "commit"}:
                await self._heartbeat.last_transaction(to_release, last_stage, self._is_async)
            self._end_row_locks()

    async def _present(self) -> None:
        for holding in self._rows:
            if await self._guard(statements.guard_row(holding)) is None:
                self._heartbeat.suspect([holding])
                raise LeaseLost("gone", holding.display_names)
        self._has_row_locks = bool(self._rows)
        if self._has_row_locks:
            await outcome(self._heartbeat.row_locks(self._rows, begins=True), self._is_async)
        if self._names:
            await self._guard(self._begin)

    async def _guard(self, statement: Statement) -> Any:
        return await self._value(statements.with_setting(statement, self._driver.is_inner))

    async def _value(self, statement: Statement) -> Any:
        return await self._driver.value(*self._heartbeat.of_schema(statement))

    def _end_row_locks(self) -> None:
        if self._has_row_locks:
            self._has_row_locks = False
            # This does not wait: the input may end the lease, which cancels this task, and the
            # commit would then be reported as in doubt.
            self._heartbeat.row_locks(self._rows, begins=False)

    async def _release(self) -> None:
        for holding in self._rows:
            await self._value(statements.release_row(holding))
        lost = await self._value(self._last) if self._names else None
        if lost is not None:
            raise LeaseLost("gone", (self._names[lost - 1],))

    def _register(self, connection: Any) -> None:
        """From here on a loss cuts the connection, also while a statement hangs on it."""
        self._role = getattr(getattr(connection, "info", None), "user", None)
        self._socket = handle_of(connection)
        for holding in self._held:
            holding.sockets.add(self._socket)
            holding.check()

    def _unregister(self) -> None:
        if self._socket is not None:
            for holding in self._holdings:
                holding.sockets.discard(self._socket)
            self._socket.close()

    async def _refuse_if_not_open(self) -> None:
        """Raises _NotOpen if the work has swallowed an error, after which a COMMIT would roll back
        without an error, or if it has ended the transaction."""
        status = await self._driver.status()
        if status is Status.INERROR:
            raise _NotOpen("25P02")
        # The driver or the work may have begun another transaction.
        is_open = statements.is_open(self._driver.is_inner)
        if status is Status.IDLE or not await self._value(is_open):
            raise _NotOpen("no transaction")

    async def _roll_back(self, error: BaseException) -> None:
        """Rolls back, or ends the connection if that fails or is interrupted. Afterwards a loss does
        not cut the connection."""
        try:
            await self._driver.rollback(error)
        except BaseException as failed:
            await self._driver.abort()
            # Otherwise the caller raises the error that led here.
            if not isinstance(failed, Exception):
                raise
        self._unregister()

    def _failure(self, error: BaseException, stage: str) -> Effect:
        raw = self._driver.raw
        code = code_of(error)
        if stage == "commit" and isinstance(error, TimeoutError) and hasattr(raw, "fetchval"):
            # asyncpg's command_timeout: there is no answer.
            code = "ended"
        # SQLAlchemy ends the connection after an error of the program, as of a signal handler.
        is_closed = self._driver.is_closed() and (code != "" or is_of_driver(error))
        return guard_failed(
            stage,
            code,
            is_fatal(error),
            "closed" if is_closed else "open",
            "names" if self._holdings and self._names else "rows" if self._rows else "adopted",
            self._driver.is_inner,
            any(holding.is_lost for holding in self._held),
        )

    def _error_of(self, error: BaseException, failure: Effect) -> BaseException:
        """Returns the error to raise."""
        kind, in_doubt = failure["error"], failure["in_doubt"]
        if isinstance(error, FenceError) or not isinstance(error, Exception):
            return error
        if kind == "LeaseLost":
            lost = next(holding.loss() for holding in self._held if holding.is_lost)
            lost.in_doubt = lost.in_doubt or in_doubt
            return lost
        if kind == "TransactionLost":
            ended = f"the session ended under the transaction: {error}"
            return TransactionLost(_LOST.get(sqlstate_of(error), ended), in_doubt)
        if kind == "LeaseTaken":
            return LeaseTaken(self._names, refusal(error).detail.get("holder"))
        return typed(error, kind, self._role, of_table=not self._names) if kind else error
