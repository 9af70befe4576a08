"""Transactions under a lease, on connections of psycopg, SQLAlchemy and Django."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import psycopg
from psycopg.rows import tuple_row

from .connection import Handle, in_thread, value
from .errors import LeaseLost, NotSpeaking, StaleToken, TransactionLost, classify

if TYPE_CHECKING:
    from .holding import Holding

_log = logging.getLogger("pg_fence")
_T = TypeVar("_T")


class Guarded:
    """A transaction under a lease, or an adopted one: what `guard` and `present` return, to be entered by `with` or
    `async with` as its connection asks."""

    def __init__(self, lease: Holding, connection: Any, guards: bool, release: bool):
        self.lease = lease
        self._way = _way_of(connection)
        self._guards = guards
        self._release = release
        self._handle: Handle | None = None

    def __enter__(self) -> Any:
        self._expect(is_async=False)
        return _at_once(self._begin())

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return _at_once(self._finish(error))

    async def __aenter__(self) -> Any:
        self._expect(is_async=True)
        return await self._begin()

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return await self._finish(error)

    def _expect(self, is_async: bool) -> None:
        if self._way.is_async != is_async:
            raise TypeError("`async with` for an asynchronous connection, `with` for any other")

    async def _begin(self) -> Any:
        mended = False
        while True:
            self.lease.refuse_if_over()
            try:
                if self.lease.in_doubt:
                    await self._way.blocking(self.lease.mend)
                return await self._try_to_begin()
            except Exception as error:
                told = self._told(error)
                # After a failover no token speaks until its holder has renewed, or adopted again.
                mend = not mended and self.lease.can_mend(told)
                if mend and await self._way.blocking(self.lease.mend):
                    mended = True
                    continue
                if told is error:
                    raise
                raise told from error

    async def _try_to_begin(self) -> Any:
        try:
            await self._way.begin(self._register)
            for sql, arguments in self.lease.begins_with(self._guards):
                await self._way.value(sql, arguments)
        except BaseException as error:
            with contextlib.suppress(Exception):
                await self._way.end(error)
            self._unregister()
            raise
        return self._way.connection

    def _register(self, driver: Any) -> None:
        """From here on a loss breaks the connection off, where it hangs, too."""
        self._handle = Handle(driver)
        self.lease.enter(self._handle)

    async def _finish(self, error: BaseException | None) -> bool:
        """Whether the error has done its part: psycopg.Rollback only rolls back."""
        try:
            if error is not None:
                return await self._roll_back(error)
            if self._release:
                self.lease.pause()
                try:
                    await self._way.blocking(self.lease.wait_for_heartbeat)
                    await self._commit_with(self.lease.release_by)
                    self.lease.has_been_released()
                finally:
                    self.lease.go_on()
            else:
                await self._commit_with(None)
            return False
        finally:
            self._unregister()

    async def _roll_back(self, error: BaseException) -> bool:
        done = False
        try:
            done = bool(await self._way.end(error))
        except Exception as failure:
            # The error that led here is the one to tell.
            _log.debug("the rollback failed: %s", failure)
        told = self._told(error)
        if told is not error:
            raise told from error
        return done

    async def _commit_with(self, last: Callable[[Any], Any] | None) -> None:
        if last is not None:
            try:
                await last(self._way.value)
            except BaseException as error:
                await self._roll_back(error)
                raise
        try:
            await self._way.end(None)
        except Exception as failure:
            told = self._told(failure)
            if isinstance(told, (LeaseLost, TransactionLost)):
                told.in_doubt = True
            if told is failure:
                raise
            raise told from failure

    def _told(self, error: BaseException) -> BaseException:
        """The typed error, where it is one. A connection that was broken off because of a loss tells the loss."""
        found = classify(error)
        if isinstance(found, TransactionLost) and self.lease.loss is not None:
            return LeaseLost(self.lease.loss.reason, self.lease.names, error)
        if isinstance(found, (StaleToken, NotSpeaking)):
            self.lease.beat_soon()
        return error if found is None else found

    def _unregister(self) -> None:
        if self._handle is not None:
            self.lease.leave(self._handle)
            self._handle = None


def _at_once(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs what never waits, because its connection does not either."""
    try:
        work.send(None)
    except StopIteration as end:
        value: _T = end.value
        return value
    work.close()
    raise RuntimeError("a synchronous connection waited")


class _Way:
    """How one kind of connection begins and ends a transaction and runs a statement; this one is psycopg's. All are
    coroutines; those of a synchronous connection never wait."""

    is_async: ClassVar[bool] = False

    def __init__(self, connection: Any):
        self.connection = connection
        #: The transaction that is ours to end.
        self.transaction: Any = None

    async def begin(self, register: Callable[[Any], None]) -> None:
        """`register` is told the driver's connection before anything is waited for."""
        register(self.connection)
        self._enter(self.connection.transaction())

    def _enter(self, transaction: Any) -> None:
        transaction.__enter__()
        self.transaction = transaction

    async def end(self, error: BaseException | None) -> Any:
        transaction, self.transaction = self.transaction, None
        if transaction is not None:
            return transaction.__exit__(*_raised(error))

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        return value(self.connection, sql, arguments)

    async def blocking(self, call: Callable[[], _T]) -> _T:
        return call()


def _raised(error: BaseException | None) -> tuple[Any, Any, Any]:
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


class _AsyncWay(_Way):
    is_async = True

    async def begin(self, register: Callable[[Any], None]) -> None:
        register(self.connection)
        await self._aenter(self.connection.transaction())

    async def _aenter(self, transaction: Any) -> None:
        await transaction.__aenter__()
        self.transaction = transaction

    async def end(self, error: BaseException | None) -> Any:
        transaction, self.transaction = self.transaction, None
        if transaction is not None:
            return await transaction.__aexit__(*_raised(error))

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        async with self.connection.cursor(row_factory=tuple_row) as cursor:
            await cursor.execute(sql, arguments)
            row = await cursor.fetchone()
            return None if row is None else row[0]

    async def blocking(self, call: Callable[[], _T]) -> _T:
        return await in_thread(call)


class _SQLAlchemy(_Way):
    """A Connection, or a Session."""

    async def begin(self, register: Callable[[Any], None]) -> None:
        # To ask a session for its connection begins a transaction, so look before.
        if not self.connection.in_transaction():
            self._enter(self.connection.begin())
        elif _began_by_itself(self.connection):
            self._enter(_Begun(self.connection))
        register(self._inner().connection.driver_connection)

    def _inner(self) -> Any:
        return self.connection.connection() if hasattr(self.connection, "get_bind") else self.connection

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        return self._inner().exec_driver_sql(sql, tuple(arguments)).scalar()


class _AsyncSQLAlchemy(_AsyncWay):
    async def begin(self, register: Callable[[Any], None]) -> None:
        if not self.connection.in_transaction():
            await self._aenter(self.connection.begin())
        elif _began_by_itself(getattr(self.connection, "sync_session", self.connection)):
            await self._aenter(_Begun(self.connection))
        register((await (await self._inner()).get_raw_connection()).driver_connection)

    async def _inner(self) -> Any:
        return await self.connection.connection() if hasattr(self.connection, "get_bind") else self.connection

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        return (await (await self._inner()).exec_driver_sql(sql, tuple(arguments))).scalar()


def _began_by_itself(session: Any) -> bool:
    """Whether a mere query, or a look at an attribute, has begun a Session's transaction. Nobody else will end it."""
    transaction = session.get_transaction()
    return getattr(getattr(transaction, "origin", None), "name", "") == "AUTOBEGIN"


class _Begun:
    """A Session's transaction that has begun, to be ended as one that is begun here."""

    def __init__(self, session: Any):
        self._session = session

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        self._session.commit() if error is None else self._session.rollback()

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        await (self._session.commit() if error is None else self._session.rollback())


class _Django(_Way):
    async def begin(self, register: Callable[[Any], None]) -> None:
        from django.db import transaction

        self.connection.ensure_connection()
        if transaction.get_connection(self.connection.alias).connection is not self.connection.connection:
            # A copy: the transaction, and with it the guard, would be on the one that is named so.
            raise TypeError("not the connection of that alias in this thread, on which Django begins transactions")
        register(self.connection.connection)
        self._enter(transaction.atomic(using=self.connection.alias))

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, arguments)
            return cursor.fetchone()[0]


def _way_of(connection: Any) -> _Way:
    if isinstance(connection, psycopg.AsyncConnection):
        return _AsyncWay(connection)
    if isinstance(connection, psycopg.Connection):
        return _Way(connection)
    modules = [kind.__module__ for kind in type(connection).__mro__]
    if any(module.startswith("sqlalchemy.ext.asyncio") for module in modules):
        return _AsyncSQLAlchemy(connection)
    if any(module.startswith("sqlalchemy.") for module in modules):
        return _SQLAlchemy(connection)
    if any(module.startswith("django.") for module in modules):
        return _Django(connection)
    raise TypeError(f"not a connection of psycopg 3, SQLAlchemy or Django: {type(connection)}")
