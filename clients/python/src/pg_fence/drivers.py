"""How each kind of connection begins and ends a transaction and runs a statement, synchronous or not."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import inspect
import re
import weakref
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus as Status
from psycopg.rows import tuple_row

from .errors import sqlstate_of
from .line import in_thread
from .source import kind_of


class State(enum.Enum):
    """Where a transaction is when its block ends."""

    OPEN, FAILED, ENDED = range(3)


async def settled(value: Any) -> Any:
    """Of a synchronous connection it is there already."""
    return await value if inspect.isawaitable(value) else value


class Driver:
    """A transaction of a connection. One that the driver has begun by itself, for a mere SELECT, is ours; within one that
    somebody else ends (`is_inner`), it is a savepoint."""

    def __init__(self, connection: Any, is_async: bool):
        self.connection, self.is_async, self.is_inner = connection, is_async, False
        self._began_by_itself = False
        #: The driver's own connection.
        self.raw: Any = connection
        self._block: Any = None

    async def begin(self, register: Callable[[Any], None]) -> None:
        """`register` is told the driver's own connection before anything is waited for."""
        raise NotImplementedError

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        raise NotImplementedError

    async def state(self) -> State:
        states = {Status.INERROR: State.FAILED, Status.IDLE: State.ENDED}
        return states.get(self._status(), State.OPEN)

    async def commit(self) -> None:
        await self._leave(None)
        if self._began_by_itself:
            await settled(self.connection.commit())

    async def rollback(self, error: BaseException) -> bool:
        """Whether the error has done its part by that."""
        done = bool(await self._leave(error))
        if self._began_by_itself and not self.is_closed():
            await settled(self.connection.rollback())
        return done

    async def flush(self) -> None:
        """Sends what an ORM has kept back."""

    async def abort(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(Exception):
            await settled(self.connection.close())

    def is_closed(self) -> bool:
        return bool(self.raw.is_closed() if hasattr(self.raw, "is_closed") else getattr(self.raw, "closed", False))

    def is_open(self) -> bool:
        """Whether a transaction is there still that should have ended."""
        return not self.is_inner and not self.is_closed() and self._status() is not Status.IDLE

    def role(self) -> str | None:
        return getattr(getattr(self.raw, "info", None), "user", None)

    async def blocking(self, call: Callable[[], None]) -> None:
        future = in_thread(call)
        await asyncio.wrap_future(future) if self.is_async else future.result()

    def _status(self) -> Status:
        """As libpq has it, in psycopg 3 and 2."""
        if hasattr(self.raw, "get_transaction_status"):
            return Status(self.raw.get_transaction_status())
        status: Status = self.raw.info.transaction_status
        return status

    async def _enter(self, block: Any) -> None:
        await settled(block.__aenter__() if self.is_async else block.__enter__())
        self._block = block

    async def _leave(self, error: BaseException | None) -> Any:
        block, self._block = self._block, None
        if block is not None:
            raised = (None, None, None) if error is None else (type(error), error, error.__traceback__)
            return await settled(block.__aexit__(*raised) if self.is_async else block.__exit__(*raised))


class Psycopg(Driver):
    async def begin(self, register: Callable[[Any], None]) -> None:
        register(self.raw)
        is_begun = self._status() is not Status.IDLE
        self._began_by_itself = is_begun and not (self.raw.autocommit or self.raw._num_transactions)
        self.is_inner = is_begun and not self._began_by_itself
        await self._enter(self.raw.transaction())

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        # Not as the program would have its cursors and rows.
        kind: Any = psycopg.AsyncCursor if self.is_async else psycopg.Cursor
        cursor = kind(self.raw, row_factory=tuple_row)
        await settled(cursor.execute(sql, arguments))
        return (await settled(cursor.fetchone()))[0]

    async def abort(self) -> None:
        with contextlib.suppress(Exception):
            if self._status() is Status.ACTIVE:
                # An exception of a signal has left it in the middle of a statement, which holds what it has locked.
                await settled(self.raw.cancel_safe(timeout=2))
        await super().abort()


class Asyncpg(Driver):
    async def begin(self, register: Callable[[Any], None]) -> None:
        register(self.raw)
        self.is_inner = self.raw.is_in_transaction()
        await self._enter(self.raw.transaction())

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        numbers = iter(range(1, len(arguments) + 1))
        return await self.raw.fetchval(re.sub("%s", lambda _: f"${next(numbers)}", sql), *arguments)

    async def state(self) -> State:
        return await _asked(self.raw)

    async def abort(self) -> None:
        with contextlib.suppress(Exception):
            self.raw.terminate()

    def _status(self) -> Status:
        return Status.INTRANS if self.raw.is_in_transaction() else Status.IDLE


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
        names = ("sync_session", "sync_connection") if self.is_async else ()
        self._sync: Any = next(filter(None, (getattr(self.connection, n, None) for n in names)), self.connection)
        self._is_session = hasattr(self._sync, "get_bind")
        # To ask a session for its connection begins a transaction, so look before.
        is_begun = self._sync.in_transaction()
        self.is_inner = is_begun and not self._is_the_drivers(self._sync.get_transaction())
        if not is_begun:
            await settled(self.connection.begin())
        inner: Any = await settled(self.connection.connection()) if self._is_session else self.connection
        pooled = getattr(inner, "sync_connection", inner).connection
        if getattr(pooled.dbapi_connection, "autocommit", False):
            await settled(self.connection.rollback())
            raise TypeError("the engine's isolation level is AUTOCOMMIT: there is no transaction to guard")
        self.raw, self._root = pooled.driver_connection, self._sync.get_transaction()
        _ours.add(self._root)
        register(self.raw)
        if self.is_inner:
            nested = self.connection.begin_nested()
            self._block = await nested if self.is_async else nested

    def _is_the_drivers(self, transaction: Any) -> bool:
        """Whether a mere query, or a look at an attribute, has begun it. Nobody else will end it."""
        if self._is_session:
            began = getattr(getattr(transaction, "origin", None), "name", "") == "AUTOBEGIN"
        else:
            began = self._sync._trans_context_manager is None
        return began and transaction not in _ours

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        from sqlalchemy import text

        # As SQLAlchemy writes it, for its drivers differ.
        numbers = iter(range(len(arguments)))
        bound = text(re.sub("%s", lambda _: f":a{next(numbers)}", sql.replace("::", "\\:\\:")))
        of = await settled(self.connection.connection()) if self._is_session else self.connection
        return (await settled(of.execute(bound, {f"a{n}": one for n, one in enumerate(arguments)}))).scalar()

    async def state(self) -> State:
        if self._sync.get_transaction() is not self._root:
            return State.ENDED
        if not self._root.is_active or (self._block is not None and not self._block.is_active):
            return State.FAILED
        return await _asked(self.raw) if hasattr(self.raw, "is_in_transaction") else await super().state()

    async def commit(self) -> None:
        block, self._block = self._block, None
        await settled((block if self.is_inner else self.connection).commit())

    async def rollback(self, error: BaseException) -> bool:
        block, self._block = self._block, None
        if block is not None or not self.is_inner:
            await settled((block or self.connection).rollback())
        return False

    async def flush(self) -> None:
        if self._is_session:
            await settled(self.connection.flush())

    async def abort(self) -> None:
        with contextlib.suppress(Exception):
            await settled(self.connection.invalidate())

    def is_open(self) -> bool:
        return False


#: Transactions of SQLAlchemy that a guard has begun, or taken over.
_ours: weakref.WeakSet[Any] = weakref.WeakSet()


class Django(Driver):
    async def begin(self, register: Callable[[Any], None]) -> None:
        from django.db import transaction

        self.connection.ensure_connection()
        self.raw = self.connection.connection
        if transaction.get_connection(self.connection.alias).connection is not self.raw:
            # A copy: the transaction, and with it the guard, would be on the one that is named so.
            raise TypeError("not the connection of that alias in this thread, on which Django begins transactions")
        register(self.raw)
        self.is_inner = self.connection.in_atomic_block
        self._began_by_itself = not self.is_inner and not self.connection.get_autocommit()
        await self._enter(transaction.atomic(using=self.connection.alias))

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, arguments)
            return cursor.fetchone()[0]

    async def state(self) -> State:
        return State.FAILED if self.connection.needs_rollback else await super().state()


_KINDS: list[tuple[str, type[Driver], bool, str]] = [
    ("psycopg.", Psycopg, False, "transaction"),
    ("asyncpg.", Asyncpg, True, "is_in_transaction"),
    ("sqlalchemy.ext.asyncio", SQLAlchemy, True, "in_transaction"),
    ("sqlalchemy.", SQLAlchemy, False, "in_transaction"),
    ("django.", Django, False, "ensure_connection"),
]


def driver_of(connection: Any) -> Driver:
    """How that kind of connection does it. Raises TypeError where it is none."""
    modules = [kind.__module__ for kind in type(connection).__mro__]
    for package, kind, is_async, attribute in _KINDS:
        # A pool, an engine or a maker of sessions has none of these.
        if any(module.startswith(package) for module in modules) and hasattr(connection, attribute):
            return kind(connection, is_async or isinstance(connection, psycopg.AsyncConnection))
    takes = "a connection of psycopg 3, asyncpg or Django, or a connection or session of SQLAlchemy"
    raise TypeError(f"this takes {takes}, and not {kind_of(connection)}; of a pool or an engine, take a connection")
