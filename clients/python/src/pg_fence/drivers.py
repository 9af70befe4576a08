"""How each kind of connection begins and ends a transaction and runs a statement, synchronous or not."""

from __future__ import annotations

import contextlib
import enum
import inspect
import re
import weakref
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from .clock import in_thread
from .errors import sqlstate_of
from .source import kind_of


class State(enum.Enum):
    """Where a transaction is when its block ends."""

    OPEN, FAILED, ENDED = range(3)


async def settled(value: Any) -> Any:
    """Of a synchronous connection it is there already."""
    return await value if inspect.isawaitable(value) else value


class Driver:
    """A connection's transaction: one of our own, or one within a transaction that is somebody else's to end
    (`is_inner`). A transaction that the driver has begun by itself is ours."""

    def __init__(self, connection: Any, is_async: bool):
        self.connection, self.is_async, self.is_inner = connection, is_async, False
        #: The block that the transaction is.
        self.block: Any = None

    async def begin(self, register: Callable[[Any], None]) -> None:
        """`register` is told the driver's own connection before anything is waited for."""
        raise NotImplementedError

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        raise NotImplementedError

    async def state(self) -> State:
        return _state_of(self.raw())

    async def commit(self) -> None:
        await self._leave(None)

    async def rollback(self, error: BaseException) -> bool:
        """Whether the error has done its part by that."""
        return bool(await self._leave(error))

    async def flush(self) -> None:
        """Sends what an ORM has kept back."""

    async def abort(self) -> None:
        with contextlib.suppress(Exception):
            await settled(self.connection.close())

    def raw(self) -> Any:
        """The driver's own connection."""
        return self.connection

    def is_closed(self) -> bool:
        closed = getattr(self.raw(), "closed", False)
        return bool(closed)

    def is_open(self) -> bool:
        """Whether a transaction is there still that should have ended."""
        status = _status_of(self.raw())
        return not self.is_inner and not self.is_closed() and status not in (None, TransactionStatus.IDLE)

    def role(self) -> str | None:
        return getattr(getattr(self.raw(), "info", None), "user", None)

    async def blocking(self, call: Callable[[], None]) -> None:
        future = in_thread(call)
        if self.is_async:
            import asyncio

            await asyncio.wrap_future(future)
        else:
            future.result()

    async def _enter(self, block: Any) -> None:
        await settled(block.__aenter__() if hasattr(block, "__aenter__") else block.__enter__())
        self.block = block

    async def _leave(self, error: BaseException | None) -> Any:
        block, self.block = self.block, None
        if block is not None:
            raised = (None, None, None) if error is None else (type(error), error, error.__traceback__)
            return await settled(block.__aexit__(*raised) if hasattr(block, "__aexit__") else block.__exit__(*raised))


def _status_of(driver: Any) -> TransactionStatus | None:
    """As libpq has it, in psycopg 3 and 2."""
    if hasattr(driver, "get_transaction_status"):
        return TransactionStatus(driver.get_transaction_status())
    status: TransactionStatus | None = getattr(getattr(driver, "info", None), "transaction_status", None)
    return status


def _state_of(driver: Any) -> State:
    states = {TransactionStatus.INERROR: State.FAILED, TransactionStatus.IDLE: State.ENDED}
    status = _status_of(driver)
    return State.OPEN if status is None else states.get(status, State.OPEN)


class Psycopg(Driver):
    async def begin(self, register: Callable[[Any], None]) -> None:
        register(self.connection)
        in_transaction = self.connection.info.transaction_status is not TransactionStatus.IDLE
        # A statement before this block has begun it, for the connection is not in autocommit.
        self._began_by_itself = in_transaction and not (self.connection.autocommit or self.connection._num_transactions)
        self.is_inner = in_transaction and not self._began_by_itself
        await self._enter(self.connection.transaction())

    async def commit(self) -> None:
        await self._leave(None)
        if self._began_by_itself:
            await settled(self.connection.commit())

    async def rollback(self, error: BaseException) -> bool:
        done = bool(await self._leave(error))
        if self._began_by_itself and not self.connection.closed:
            await settled(self.connection.rollback())
        return done

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        kind: Any = psycopg.AsyncCursor if self.is_async else psycopg.Cursor
        cursor = kind(self.connection, row_factory=tuple_row)
        await settled(cursor.execute(sql, arguments))
        row = await settled(cursor.fetchone())
        return None if row is None else row[0]

    async def abort(self) -> None:
        with contextlib.suppress(Exception):
            if self.connection.info.transaction_status is TransactionStatus.ACTIVE:
                # An exception of a signal has left it in the middle of a statement, which holds what it has locked.
                await settled(self.connection.cancel_safe(timeout=2))
        await super().abort()


class Asyncpg(Driver):
    async def begin(self, register: Callable[[Any], None]) -> None:
        register(self.connection)
        self.is_inner = self.connection.is_in_transaction()
        await self._enter(self.connection.transaction())

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        numbers = iter(range(1, len(arguments) + 1))
        return await self.connection.fetchval(re.sub("%s", lambda _: f"${next(numbers)}", sql), *arguments)

    async def state(self) -> State:
        return await _asked(self.connection)

    async def abort(self) -> None:
        with contextlib.suppress(Exception):
            self.connection.terminate()

    def is_closed(self) -> bool:
        return bool(self.connection.is_closed())

    def is_open(self) -> bool:
        return not self.is_inner and not self.is_closed() and bool(self.connection.is_in_transaction())


async def _asked(connection: Any) -> State:
    """asyncpg does not tell a transaction that has failed."""
    if not connection.is_in_transaction():
        return State.ENDED
    try:
        await connection.execute("SELECT 1")
    except Exception as error:
        if sqlstate_of(error) == "25P02":
            return State.FAILED
        raise
    return State.OPEN


class SQLAlchemy(Driver):
    """A Connection or a Session, or their asynchronous ones."""

    async def begin(self, register: Callable[[Any], None]) -> None:
        self._sync = self.connection
        if self.is_async:
            self._sync = getattr(self.connection, "sync_session", None) or self.connection.sync_connection
        # To ask a session for its connection begins a transaction, so look before.
        self.is_inner = self._sync.in_transaction() and not self._began_by_itself()
        if not self._sync.in_transaction():
            await settled(self.connection.begin())
        inner: Any = self._sync.connection() if not self.is_async and self._is_session() else self.connection
        if self.is_async:
            inner = (await self.connection.connection() if self._is_session() else self.connection).sync_connection
        self._inner = inner
        if getattr(inner.connection.dbapi_connection, "autocommit", False):
            await settled(self.connection.rollback())
            raise TypeError("the engine's isolation level is AUTOCOMMIT: there is no transaction to guard")
        self._raw = inner.connection.driver_connection
        self._root = self._sync.get_transaction()
        _ours.add(self._root)
        register(self._raw)
        if self.is_inner:
            nested = self.connection.begin_nested()
            self.block = await nested if self.is_async else nested

    def _is_session(self) -> bool:
        return hasattr(self._sync, "get_bind")

    def _began_by_itself(self) -> bool:
        """Whether a mere query, or a look at an attribute, has begun it. Nobody else will end it."""
        transaction = self._sync.get_transaction()
        if transaction in _ours:
            return False
        if self._is_session():
            return getattr(getattr(transaction, "origin", None), "name", "") == "AUTOBEGIN"
        return self._sync._trans_context_manager is None

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        from sqlalchemy import text

        # As SQLAlchemy writes it, for its drivers differ.
        numbers = iter(range(len(arguments)))
        bound = re.sub("%s", lambda _: f":a{next(numbers)}", sql.replace("::", "\\:\\:"))
        parameters = {f"a{number}": argument for number, argument in enumerate(arguments)}
        of = await settled(self.connection.connection()) if self._is_session() else self.connection
        return (await settled(of.execute(text(bound), parameters))).scalar()

    async def state(self) -> State:
        if self._sync.get_transaction() is not self._root:
            return State.ENDED
        if not self._root.is_active or (self.block is not None and not self.block.is_active):
            return State.FAILED
        is_asyncpg = type(self._raw).__module__.startswith("asyncpg")
        return await _asked(self._raw) if is_asyncpg else _state_of(self._raw)

    async def commit(self) -> None:
        block, self.block = self.block, None
        await settled((block if self.is_inner else self.connection).commit())

    async def rollback(self, error: BaseException) -> bool:
        block, self.block = self.block, None
        if block is not None or not self.is_inner:
            await settled((block or self.connection).rollback())
        return False

    async def flush(self) -> None:
        if self._is_session():
            await settled(self.connection.flush())

    async def abort(self) -> None:
        with contextlib.suppress(Exception):
            await settled(self.connection.invalidate())

    def raw(self) -> Any:
        return getattr(self, "_raw", None)

    def is_closed(self) -> bool:
        closed = getattr(self.raw(), "is_closed", None)
        return bool(closed()) if closed is not None else super().is_closed()

    def is_open(self) -> bool:
        return False


#: Transactions that a guard has begun, or taken over.
_ours: weakref.WeakSet[Any] = weakref.WeakSet()


class Django(Driver):
    async def begin(self, register: Callable[[Any], None]) -> None:
        from django.db import transaction

        self.connection.ensure_connection()
        if transaction.get_connection(self.connection.alias).connection is not self.connection.connection:
            # A copy: the transaction, and with it the guard, would be on the one that is named so.
            raise TypeError("not the connection of that alias in this thread, on which Django begins transactions")
        register(self.connection.connection)
        self._began_by_itself = not self.connection.in_atomic_block and not self.connection.get_autocommit()
        self.is_inner = self.connection.in_atomic_block
        await self._enter(transaction.atomic(using=self.connection.alias))

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, arguments)
            return cursor.fetchone()[0]

    async def state(self) -> State:
        return State.FAILED if self.connection.needs_rollback else _state_of(self.connection.connection)

    async def commit(self) -> None:
        await self._leave(None)
        if self._began_by_itself:
            self.connection.commit()

    async def rollback(self, error: BaseException) -> bool:
        done = await self._leave(error)
        if self._began_by_itself:
            self.connection.rollback()
        return bool(done)

    def raw(self) -> Any:
        return self.connection.connection


_KINDS: list[tuple[str, type[Driver], bool, str]] = [
    ("asyncpg.", Asyncpg, True, "is_in_transaction"),
    ("sqlalchemy.ext.asyncio", SQLAlchemy, True, "in_transaction"),
    ("sqlalchemy.", SQLAlchemy, False, "in_transaction"),
    ("django.", Django, False, "ensure_connection"),
]


def driver_of(connection: Any) -> Driver:
    """How that kind of connection does it. Raises TypeError where it is none."""
    if isinstance(connection, (psycopg.Connection, psycopg.AsyncConnection)):
        return Psycopg(connection, isinstance(connection, psycopg.AsyncConnection))
    modules = [kind.__module__ for kind in type(connection).__mro__]
    for package, kind, is_async, attribute in _KINDS:
        # A pool, an engine or a maker of sessions has none of these.
        if any(module.startswith(package) for module in modules) and hasattr(connection, attribute):
            return kind(connection, is_async)
    takes = "a connection of psycopg 3, asyncpg or Django, or a connection or session of SQLAlchemy"
    raise TypeError(f"this takes {takes}, and not {kind_of(connection)}; of a pool or an engine, take a connection")
