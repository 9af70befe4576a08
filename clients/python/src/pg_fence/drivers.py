"""How each kind of connection begins and ends a transaction and runs a statement, synchronous or not."""

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus as Status
from psycopg.rows import tuple_row

from .line import in_thread, settled


def status_of(raw: Any) -> Status:
    """Where a transaction of the driver's own connection is, as libpq has it."""
    if hasattr(raw, "is_in_transaction"):
        # asyncpg does not tell one that has failed.
        return Status.INTRANS if raw.is_in_transaction() else Status.IDLE
    return Status(raw.info.transaction_status)


def numbered(sql: str) -> str:
    """With the placeholders of asyncpg."""
    numbers = iter(range(1, sql.count("%s") + 1))
    return re.sub("%s", lambda _: f"${next(numbers)}", sql)


class Driver:
    """A transaction of a connection; as it stands here, on psycopg. One that the driver has begun by itself, for a mere
    SELECT, is ours; within one that somebody else ends (`is_inner`), it is a savepoint."""

    def __init__(self, connection: Any, is_async: bool):
        self.connection, self.is_async, self.is_inner = connection, is_async, False
        self._began_by_itself = False
        #: The driver's own connection. A pool's of asyncpg tells nothing any more once it has ended.
        self.raw: Any = getattr(connection, "_con", connection)
        self._block: Any = None

    async def begin(self, register: Callable[[Any], None]) -> None:
        """`register` is told the driver's own connection before anything is waited for."""
        is_begun = status_of(self.raw) is not Status.IDLE
        # asyncpg begins none.
        self._began_by_itself = is_begun and not (getattr(self.raw, "autocommit", True) or self.raw._num_transactions)
        self.is_inner = is_begun and not self._began_by_itself
        register(self.raw)
        await self._enter(self.raw.transaction())

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        if hasattr(self.raw, "fetchval"):
            return await self.raw.fetchval(numbered(sql), *arguments)
        # Not as the program would have its cursors and rows.
        kind: Any = psycopg.AsyncCursor if self.is_async else psycopg.Cursor
        is_psycopg_3 = isinstance(self.raw, (psycopg.Connection, psycopg.AsyncConnection))
        cursor = kind(self.raw, row_factory=tuple_row) if is_psycopg_3 else self.raw.cursor()
        await settled(cursor.execute(sql, arguments))
        return (await settled(cursor.fetchone()))[0]

    async def status(self) -> Status:
        """Before the commit, when an ORM has sent what it had kept back."""
        return status_of(self.raw)

    async def commit(self) -> None:
        await self._leave(None)
        if self._began_by_itself:
            await settled(self.connection.commit())

    async def rollback(self, error: BaseException) -> None:
        """Where it leaves a transaction open, the connection ends."""
        await self._leave(error)
        if self._began_by_itself and not self.is_closed():
            await settled(self.connection.rollback())
        if not self.is_inner and not self.is_closed() and status_of(self.raw) is not Status.IDLE:
            await self.abort()

    async def abort(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(Exception):
            if hasattr(self.raw, "cancel_safe") and status_of(self.raw) is Status.ACTIVE:
                # An exception of a signal has left it in the middle of a statement, which holds what it has locked. Where
                # libpq is older than 17, psycopg ignores the timeout, and on a cut cable the call never returns.
                if self.is_async:
                    await asyncio.wait_for(self.raw.cancel_safe(timeout=2), 3)
                else:
                    in_thread(lambda: self.raw.cancel_safe(timeout=2)).result(3)
        with contextlib.suppress(Exception):
            ends = (getattr(self.connection, name, None) for name in ("terminate", "invalidate", "close"))
            await settled(next(filter(None, ends))())

    def is_closed(self) -> bool:
        return bool(self.raw.is_closed() if hasattr(self.raw, "is_closed") else getattr(self.raw, "closed", False))

    async def _run(self, call: Callable[[], Any]) -> Any:
        return await settled(call())

    async def _enter(self, block: Any) -> None:
        await settled((getattr(block, "__aenter__", None) or block.__enter__)())
        self._block = block

    async def _leave(self, error: BaseException | None) -> None:
        block, self._block = self._block, None
        if block is not None:
            leave = getattr(block, "__aexit__", None) or block.__exit__
            raised = (None, None, None) if error is None else (type(error), error, error.__traceback__)
            await self._run(lambda: leave(*raised))


class SQLAlchemy(Driver):
    """A Connection or a Session, or their asynchronous ones."""

    async def begin(self, register: Callable[[Any], None]) -> None:
        sync = getattr(self.connection, "sync_session", None) or getattr(self.connection, "sync_connection", self.connection)
        self._sync, is_begun = sync, sync.in_transaction()
        # One that a mere query, or a look at an attribute, has begun is ours: nobody else will end it.
        origin = getattr(sync.get_transaction(), "origin", None)
        self.is_inner = sync._trans_context_manager is not None or (origin is not None and origin.name != "AUTOBEGIN")
        if not is_begun:
            await self._run(sync.begin)
        self._core = sync.connection if hasattr(sync, "get_bind") else lambda: sync
        pooled = (await self._run(self._core)).connection
        self.raw, self._root = pooled.driver_connection, sync.get_transaction()
        register(self.raw)
        await self._enter(await self._run(sync.begin_nested) if self.is_inner else self._root)
        if getattr(pooled.dbapi_connection, "autocommit", False):
            raise TypeError("the engine's isolation level is AUTOCOMMIT: there is no transaction to guard")

    async def _run(self, call: Callable[[], Any]) -> Any:
        return await self.connection.run_sync(lambda _: call()) if self.is_async else call()

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        sent = numbered(sql) if hasattr(self.raw, "is_in_transaction") else sql
        return await self._run(lambda: self._core().exec_driver_sql(sent, tuple(arguments)).scalar())

    async def status(self) -> Status:
        if self._sync.get_transaction() is not self._root:
            return Status.IDLE
        if not (self._root.is_active and self._block.is_active):
            return Status.INERROR
        if hasattr(self._sync, "flush"):
            await self._run(self._sync.flush)
        return await super().status()

    async def rollback(self, error: BaseException) -> None:
        # Afterwards the driver's own connection is its pool's.
        await self._leave(error)


class Django(Driver):
    async def begin(self, register: Callable[[Any], None]) -> None:
        from django.db import transaction

        self.connection.ensure_connection()
        self.raw = self.connection.connection
        if transaction.get_connection(self.connection.alias).connection is not self.raw:
            # A copy: the transaction, and with it the guard, would be on the one that is named so.
            raise TypeError("not the connection of that alias in this thread, on which Django begins transactions")
        self.is_inner = self.connection.in_atomic_block
        self._began_by_itself = not self.is_inner and not self.connection.get_autocommit()
        register(self.raw)
        await self._enter(transaction.atomic(using=self.connection.alias))

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
    """How that kind of connection does it. Raises TypeError where it is none."""
    modules = [kind.__module__ for kind in type(connection).__mro__]
    for package, kind, is_async, attribute in _KINDS:
        # A pool, an engine or a maker of sessions has none of these.
        if any(module.startswith(package) for module in modules) and hasattr(connection, attribute):
            return kind(connection, is_async or isinstance(connection, psycopg.AsyncConnection))
    takes = "a connection of psycopg 3, asyncpg or Django, or a connection or session of SQLAlchemy"
    raise TypeError(f"this takes {takes}, and not {type(connection)}; of a pool or an engine, take a connection")
