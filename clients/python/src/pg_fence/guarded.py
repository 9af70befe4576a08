"""Transactions under a lease, on connections of psycopg, SQLAlchemy and Django."""

from __future__ import annotations

import contextlib
import enum
import logging
import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from . import telemetry
from .connection import Handle, in_thread, value
from .errors import (
    FenceError,
    LeaseLost,
    NotSpeaking,
    StaleToken,
    TransactionLost,
    classify,
    sqlstate_of,
)

if TYPE_CHECKING:
    from .holding import Holding

_log = logging.getLogger("pg_fence")
_T = TypeVar("_T")


class Guarded:
    """A transaction under one lease, or several: what `guard` and `present` return, to be entered by `with` or
    `async with` as its connection asks."""

    def __init__(self, leases: Sequence[Holding], connection: Any, guards: bool, release: bool):
        self.leases = leases
        self._way = way_of(connection)
        self._guards = guards
        self._release = release
        self._handles: list[tuple[Holding, Handle]] = []
        names = tuple(name for lease in leases for name in lease.names)
        self._span = telemetry.span("guard" if guards else "present", names)

    def __enter__(self) -> Any:
        self._expect(is_async=False)
        return at_once(self._begin())

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return at_once(self._finish(error))

    async def __aenter__(self) -> Any:
        self._expect(is_async=True)
        return await self._begin()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return await self._finish(error)

    def _expect(self, is_async: bool) -> None:
        if self._way.is_async != is_async:
            raise TypeError("`async with` for an asynchronous connection, `with` for any other")

    async def _begin(self) -> Any:
        self._span.__enter__()
        try:
            return await self._begin_or_mend()
        except BaseException as error:
            self._span.__exit__(*_raised(error))
            raise

    async def _begin_or_mend(self) -> Any:
        mended = False
        while True:
            for lease in self.leases:
                lease.refuse_if_over()
            try:
                for lease in self.leases:
                    if lease.in_doubt:
                        await self._way.blocking(lease.mend)
                return await self._try_to_begin()
            except Exception as error:
                told = self._told(error)
                # After a failover no token speaks until its holder has renewed, or adopted again.
                if not mended and await self._mend(told):
                    mended = True
                    continue
                if told is error:
                    raise
                raise told from error

    async def _mend(self, told: BaseException) -> bool:
        if not all(lease.can_mend(told) for lease in self.leases):
            return False
        for lease in self.leases:
            if not await self._way.blocking(lease.mend):
                return False
        return True

    async def _try_to_begin(self) -> Any:
        try:
            await self._way.begin(self._register)
            for sql, arguments in self._first_statements():
                await self._way.value(sql, arguments)
        except BaseException as error:
            with contextlib.suppress(Exception):
                await self._way.end(error)
            self._unregister()
            raise
        return self._way.connection

    def _first_statements(self) -> Iterator[tuple[str, list[Any]]]:
        if len(self.leases) == 1:
            yield from self.leases[0].begins_with(self._guards)
            return
        # Several are guarded in the same order everywhere, so that no two callers wait for each other.
        pairs = sorted((name.encode(), name, lease.token) for lease in self.leases for name in lease.names)
        guard = f"{self.leases[0].prefix}lease_guard(x.name, x.token)"
        sql = f"SELECT count({guard}) FROM unnest(%s::text[], %s::bigint[]) AS x(name, token)"
        yield sql, [[name for _, name, _ in pairs], [token for _, _, token in pairs]]

    def _register(self, driver: Any) -> None:
        """From here on a loss breaks the connection off, where it hangs, too."""
        for lease in self.leases:
            handle = Handle(driver)
            self._handles.append((lease, handle))
            lease.enter(handle)

    async def _finish(self, error: BaseException | None) -> bool:
        """Whether the error has done its part: psycopg.Rollback only rolls back."""
        told = error
        try:
            if error is not None:
                return await self._roll_back(error)
            if self._release:
                await self._release_and_commit()
            else:
                await self._commit()
            return False
        except BaseException as raised:
            told = raised
            raise
        finally:
            self._unregister()
            self._span.__exit__(*_raised(told))

    async def _release_and_commit(self) -> None:
        for lease in self.leases:
            lease.pause()
        try:
            for lease in self.leases:
                await self._way.blocking(lease.wait_for_heartbeat)
            await self._commit(releases=True)
            for lease in self.leases:
                lease.has_been_released()
        finally:
            for lease in self.leases:
                lease.go_on()

    async def _roll_back(self, error: BaseException) -> bool:
        done = False
        try:
            done = bool(await self._way.end(error))
        except Exception as failure:  # noqa: BLE001
            # The error that led here is the one to tell.
            _log.debug("the rollback failed: %s", failure)
        told = self._told(error)
        if told is not error:
            raise told from error
        return done

    async def _commit(self, releases: bool = False) -> None:
        try:
            await self._refuse_if_failed()
            if releases:
                for lease in self.leases:
                    await lease.release_by(self._way.value)
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

    async def _refuse_if_failed(self) -> None:
        """The work may have swallowed an error: then the commit would roll back, and say nothing."""
        state = await self._way.state()
        if state is State.FAILED:
            raise TransactionLost("a statement of the transaction has failed: all of it is rolled back")
        if state is State.ENDED:
            told = TransactionLost("the work has ended the transaction itself: what it did after that was not guarded")
            told.in_doubt = True
            raise told

    def _told(self, error: BaseException) -> BaseException:
        """The typed error, where it is one. A connection that was broken off because of a loss tells the loss."""
        found = classify(error)
        if isinstance(found, TransactionLost):
            for lease in self.leases:
                if lease.loss is not None:
                    return LeaseLost(lease.loss.reason, lease.names, error)
        if isinstance(found, FenceError) and (found.sqlstate or "").startswith("PF"):
            telemetry.refused(found)
        if isinstance(found, (StaleToken, NotSpeaking)):
            for lease in self.leases:
                lease.beat_soon()
        return error if found is None else found

    def _unregister(self) -> None:
        handles, self._handles = self._handles, []
        for lease, handle in handles:
            lease.leave(handle)


def at_once(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs what never waits, because its connection does not either."""
    try:
        work.send(None)
    except StopIteration as end:
        value: _T = end.value
        return value
    work.close()
    raise RuntimeError("a synchronous connection waited")


class State(enum.Enum):
    """Where a transaction is when its block ends."""

    OPEN, FAILED, ENDED = range(3)


class Way:
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

    async def state(self) -> State:
        """Where the transaction is now."""
        return _state_of(self.connection)

    async def blocking(self, call: Callable[[], _T]) -> _T:
        return call()


def _state_of(driver: Any) -> State:
    """As libpq has it, in psycopg 3 and 2."""
    if hasattr(driver, "get_transaction_status"):
        status = driver.get_transaction_status()
    else:
        status = getattr(getattr(driver, "info", None), "transaction_status", TransactionStatus.INTRANS)
    states = {TransactionStatus.INERROR: State.FAILED, TransactionStatus.IDLE: State.ENDED}
    return states.get(status, State.OPEN)


def _raised(error: BaseException | None) -> tuple[Any, Any, Any]:
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


class _AsyncWay(Way):
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


class _Asyncpg(_AsyncWay):
    async def value(self, sql: str, arguments: list[Any]) -> Any:
        numbers = iter(range(1, len(arguments) + 1))
        return await self.connection.fetchval(re.sub("%s", lambda _: f"${next(numbers)}", sql), *arguments)

    async def state(self) -> State:
        if not self.connection.is_in_transaction():
            return State.ENDED
        try:
            await self.connection.execute("SELECT 1")
        except Exception as error:
            if sqlstate_of(error) == "25P02":
                return State.FAILED
            raise
        return State.OPEN


class _SQLAlchemy(Way):
    """A Connection, or a Session."""

    async def begin(self, register: Callable[[Any], None]) -> None:
        # To ask a session for its connection begins a transaction, so look before.
        if not self.connection.in_transaction():
            self._enter(self.connection.begin())
        elif _began_by_itself(self.connection):
            self._enter(_Begun(self.connection))
        self._driver = self._inner().connection.driver_connection
        self._root = self.connection.get_transaction()
        register(self._driver)

    def _inner(self) -> Any:
        return self.connection.connection() if hasattr(self.connection, "get_bind") else self.connection

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        return self._inner().exec_driver_sql(sql, tuple(arguments)).scalar()

    async def state(self) -> State:
        return _state_in(self.connection, self._root, self._driver)


class _AsyncSQLAlchemy(_AsyncWay):
    async def begin(self, register: Callable[[Any], None]) -> None:
        if not self.connection.in_transaction():
            await self._aenter(self.connection.begin())
        elif _began_by_itself(self._sync):
            await self._aenter(_Begun(self.connection))
        self._driver = (await (await self._inner()).get_raw_connection()).driver_connection
        self._root = self._sync.get_transaction()
        register(self._driver)

    @property
    def _sync(self) -> Any:
        return getattr(self.connection, "sync_session", None) or self.connection.sync_connection

    async def _inner(self) -> Any:
        return await self.connection.connection() if hasattr(self.connection, "get_bind") else self.connection

    async def value(self, sql: str, arguments: list[Any]) -> Any:
        from sqlalchemy import text

        # As SQLAlchemy writes it, for its drivers differ.
        names = [f"a{number}" for number in range(len(arguments))]
        parts = iter(names)
        bound = re.sub("%s", lambda _: f":{next(parts)}", sql.replace("::", "\\:\\:"))
        return (await (await self._inner()).execute(text(bound), dict(zip(names, arguments)))).scalar()

    async def state(self) -> State:
        state = _state_in(self._sync, self._root, self._driver)
        if state is State.OPEN and type(self._driver).__module__.startswith("asyncpg"):
            return await _Asyncpg(self._driver).state()
        return state


def _state_in(connection: Any, root: Any, driver: Any) -> State:
    now = connection.get_transaction()
    if now is not root:
        return State.ENDED
    return _state_of(driver) if root.is_active else State.FAILED


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

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._session.commit() if error is None else self._session.rollback()

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        await (self._session.commit() if error is None else self._session.rollback())


class _Django(Way):
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

    async def state(self) -> State:
        if self.connection.needs_rollback:
            return State.FAILED
        return _state_of(self.connection.connection)


_TAKEN = "a connection of psycopg 3, asyncpg or Django, or a connection or session of SQLAlchemy"


def way_of(connection: Any) -> Way:
    """How that kind of connection does it. Raises TypeError where it is none."""
    if isinstance(connection, psycopg.AsyncConnection):
        return _AsyncWay(connection)
    if isinstance(connection, psycopg.Connection):
        return Way(connection)
    modules = [kind.__module__ for kind in type(connection).__mro__]
    for package, way, attribute in _WAYS:
        # A pool, an engine or a maker of sessions has none of these.
        if any(module.startswith(package) for module in modules) and hasattr(connection, attribute):
            return way(connection)
    told = f"this takes {_TAKEN}, and no {kind_of(connection)}"
    raise TypeError(f"{told}; of a pool or an engine, take a connection first")


def kind_of(thing: object) -> str:
    """Its type, for an error."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


_WAYS: list[tuple[str, type[Way], str]] = [
    ("asyncpg.", _Asyncpg, "is_in_transaction"),
    ("sqlalchemy.ext.asyncio", _AsyncSQLAlchemy, "in_transaction"),
    ("sqlalchemy.", _SQLAlchemy, "in_transaction"),
    ("django.", _Django, "ensure_connection"),
]
