"""A transaction under leases."""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, TypeVar

from . import asked
from .asked import Call
from .drivers import State, driver_of
from .errors import (
    FenceError,
    LeaseLost,
    LeaseTaken,
    TransactionLost,
    refused,
    session_ended,
    sqlstate_of,
    told_by_call,
)
from .keeper import Grant, Keeper
from .line import Handle

C = TypeVar("C")
_T = TypeVar("_T")


class Guard(Generic[C]):
    """A transaction under leases, to be entered by `with` or, on an asynchronous connection, by `async with`. Its steps are
    coroutines; those of a synchronous connection never wait."""

    def __init__(self, keeper: Keeper, grants: Sequence[Grant], calls: list[Call], ends: list[Call], connection: C):
        self._keeper, self._grants, self._calls, self._connection = keeper, grants, calls, connection
        #: The releases, where this is the last transaction.
        self._ends = ends
        self._driver = driver_of(connection)
        self._handle: Handle | None = None

    def __enter__(self) -> C:
        self._expect(is_async=False)
        return at_once(self._begin())

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return at_once(self._finish(error))

    async def __aenter__(self) -> C:
        self._expect(is_async=True)
        return await self._begin()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return await self._finish(error)

    def _expect(self, is_async: bool) -> None:
        if self._driver.is_async != is_async:
            raise TypeError("`async with` for an asynchronous connection, and `with` for any other")

    async def _begin(self) -> C:
        has_renewed = False
        while True:
            for grant in self._grants:
                self._keeper.check(grant)
            try:
                await self._driver.begin(self._register)
                for call in self._calls:
                    await self._driver.value(*call)
                return self._connection
            except BaseException as error:
                told = self._told(error, is_ours=True)
                with contextlib.suppress(Exception):
                    await self._end(error)
                # After a failover no token speaks until its holder has renewed.
                if sqlstate_of(error) == "PF004" and not (has_renewed or self._driver.is_inner) and self._grants:
                    has_renewed = True
                    await self._driver.blocking(lambda: self._keeper.keep(list(self._grants)))
                    continue
                if told is error:
                    raise
                raise told from error

    def _register(self, connection: Any) -> None:
        """From here on a loss breaks the connection off, where it hangs, too."""
        self._handle = Handle(connection)
        for grant in self._grants:
            grant.guards.add(self._handle)
            self._keeper.check(grant)

    async def _finish(self, error: BaseException | None) -> bool:
        """Whether the error has done its part: psycopg.Rollback only rolls back."""
        for grant in self._grants if self._ends else ():
            grant.keeping.resting += 1
        is_committing = False
        try:
            if error is not None:
                raise error
            await self._refuse_if_failed()
            await self._release()
            is_committing = True
            await self._driver.commit()
            for grant in self._grants if self._ends else ():
                self._keeper.end([grant], "released")
                self._keeper.was_released(grant, True)
            return False
        except BaseException as raised:
            told = self._told(raised, is_ours=raised is not error)
            if is_committing and isinstance(told, (LeaseLost, TransactionLost)):
                # The server has ended an idle transaction before it read the commit.
                told.in_doubt = sqlstate_of(raised) not in {"25P03", "25P04"}
            if await self._end(raised):
                return True
            if told is raised:
                if raised is error:
                    return False
                raise
            raise told from raised
        finally:
            for grant in self._grants if self._ends else ():
                grant.keeping.resting -= 1
            self._unregister()

    async def _release(self) -> None:
        if self._ends:
            await self._driver.flush()
        for number, call in enumerate(self._ends):
            if await self._driver.value(*call) is None:
                self._keeper.end(self._grants[number : number + 1], "gone")
                raise LeaseLost("gone", tuple(call[1][:1]))

    async def _refuse_if_failed(self) -> None:
        """The work may have swallowed an error: then the commit would roll back, and say nothing."""
        state = await self._driver.state()
        if state is State.FAILED:
            raise TransactionLost("a statement of the transaction has failed: all of it is rolled back")
        if state is State.ENDED:
            told = "the work has ended the transaction itself: what it did after that was not guarded"
            raise TransactionLost(told, in_doubt=True)

    async def _end(self, error: BaseException) -> bool:
        """Rolls back. A connection on which that fails, or is interrupted, ends."""
        try:
            done = await self._driver.rollback(error)
            if self._driver.is_open():
                await self._driver.abort()
            return done
        except Exception:  # noqa: BLE001
            # The error that led here is the one to tell.
            await self._driver.abort()
            return False
        except BaseException:
            await self._driver.abort()
            raise
        finally:
            self._unregister()

    def _told(self, error: BaseException, is_ours: bool) -> BaseException:
        """The typed error, where it is one. A connection that was broken off because of a loss tells the loss."""
        if isinstance(error, FenceError) or not isinstance(error, Exception):
            return error
        if session_ended(error) and (sqlstate_of(error) or self._driver.is_closed()):
            for grant in self._grants:
                if grant.is_lost:
                    return grant.lost()
            return TransactionLost(f"the session ended under the transaction: {error}".strip())
        if sqlstate_of(error) in {"PF001", "PF004"}:
            self._keeper.beat_soon(list(self._grants))
        if is_ours and not self._grants and sqlstate_of(error) == "22004":
            # NULL from lease_adopt: an older number is guarded.
            return LeaseTaken((str(self._calls[0][1][0]),))
        return told_by_call(error, self._driver.role()) if is_ours else refused(error) or error

    def _unregister(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            for grant in self._grants:
                grant.guards.discard(handle)
            handle.close()


def at_once(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs what never waits, because its connection does not either."""
    try:
        work.send(None)
    except StopIteration as end:
        value: _T = end.value
        return value
    work.close()
    raise RuntimeError("a synchronous connection waited")


def under(keeper: Keeper, grants: Sequence[Grant], release: bool) -> tuple[list[Call], list[Call]]:
    """What begins, and what ends, a transaction under these: in the same order everywhere, so that no two wait for each
    other."""
    pairs = sorted((name.encode(), name, grant.token) for grant in grants for name in grant.names)
    guard = f"SELECT {keeper.prefix}lease_guard(%s::text, %s::bigint)"
    begins: list[Call] = [(guard, [name, token]) for _, name, token in pairs]
    return begins, [asked.release(keeper.prefix, grant.names, grant.token) for grant in grants if release]


def adopting(keeper: Keeper, name: str, token: int, release: bool) -> tuple[list[Call], list[Call]]:
    """The same by a number that somebody else grants, which each transaction makes known."""
    adopt = f"{keeper.prefix}lease_adopt(%s::text, %s::bigint)"
    call: Call = f"SELECT {keeper.prefix}lease_guard(%s::text, (SELECT {adopt}))", [name, name, token]
    return [call], [asked.release(keeper.prefix, (name,), token)] if release else []
