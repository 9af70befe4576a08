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
    session_ended,
    sqlstate_of,
    told_of_call,
    told_of_work,
)
from .keeper import Grant, Keeper
from .line import Handle

C = TypeVar("C")
_T = TypeVar("_T")


class Guard(Generic[C]):
    """A transaction under leases, to be entered by `with` or, on an asynchronous connection, by `async with`. Its steps are
    coroutines; those of a synchronous connection never wait."""

    def __init__(self, keeper: Keeper, grants: Sequence[Grant], begins: list[Call], ends: list[Call], connection: C):
        self._keeper, self._grants, self._begins, self._ends = keeper, grants, begins, ends
        self._connection, self._driver = connection, driver_of(connection)
        self._handle: Handle | None = None

    def __enter__(self) -> C:
        self._expect(is_async=False)
        return _at_once(self._begin())

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return _at_once(self._finish(error))

    async def __aenter__(self) -> C:
        self._expect(is_async=True)
        return await self._begin()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return await self._finish(error)

    def _expect(self, is_async: bool) -> None:
        if self._driver.is_async != is_async:
            raise TypeError("`async with` for an asynchronous connection, and `with` for any other")

    async def _begin(self, is_first: bool = True) -> C:
        for grant in self._grants:
            self._keeper.check(grant)
        try:
            await self._driver.begin(self._register)
            for call in self._begins:
                await self._driver.value(*call)
            return self._connection
        except BaseException as error:
            told = self._told(error, is_ours=True)
            with contextlib.suppress(Exception):
                await self._roll_back(error)
            if sqlstate_of(error) == "PF004" and is_first and not self._driver.is_inner and self._grants:
                # After a failover no token speaks until its holder has renewed.
                await self._driver.blocking(lambda: self._keeper.keep(list(self._grants)))
                return await self._begin(is_first=False)
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
        is_committing = False
        self._rest(1)
        try:
            if error is not None:
                raise error
            await self._refuse_if_failed()
            await self._release()
            is_committing = True
            await self._driver.commit()
        except BaseException as raised:
            told = self._told(raised, is_ours=raised is not error)
            if is_committing and isinstance(told, (LeaseLost, TransactionLost)):
                # The server has ended an idle transaction before it read the commit.
                told.in_doubt = sqlstate_of(raised) not in {"25P03", "25P04"}
            if await self._roll_back(raised):
                return True
            if told is not raised:
                raise told from raised
            if raised is not error:
                raise
        else:
            released = self._keeper.end(self._grants, "released") if self._ends else []
            self._keeper.tell("released", released)
        finally:
            self._rest(-1)
            self._unregister()
        return False

    def _rest(self, more: int) -> None:
        """The heartbeat leaves out what is about to be released."""
        for grant in self._grants if self._ends else ():
            grant.keeping.resting += more

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

    async def _roll_back(self, error: BaseException) -> bool:
        """A connection on which that fails, or is interrupted, ends."""
        done = False
        try:
            done = await self._driver.rollback(error)
        except Exception:  # noqa: BLE001
            # The error that led here is the one to tell.
            await self._driver.abort()
        except BaseException:
            await self._driver.abort()
            raise
        else:
            if self._driver.is_open():
                await self._driver.abort()
        finally:
            self._unregister()
        return done

    def _told(self, error: BaseException, is_ours: bool) -> BaseException:
        """The typed error, where it is one. A connection that was broken off because of a loss tells the loss."""
        if isinstance(error, FenceError) or not isinstance(error, Exception):
            return error
        state = sqlstate_of(error)
        if session_ended(error) and (state or self._driver.is_closed()):
            lost = [grant.lost() for grant in self._grants if grant.is_lost]
            return lost[0] if lost else TransactionLost(f"the session ended under the transaction: {error}")
        if state in {"PF001", "PF004"}:
            self._keeper.beat_soon(self._grants)
        if is_ours and not self._grants and state == "22004":
            # NULL from lease_adopt: an older number is guarded.
            return LeaseTaken(tuple(self._begins[0][1][:1]))
        return told_of_call(error, self._driver.role()) if is_ours else told_of_work(error)

    def _unregister(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            for grant in self._grants:
                grant.guards.discard(handle)
            handle.close()


def under(keeper: Keeper, grants: Sequence[Grant], release: bool, connection: C) -> Guard[C]:
    """The leases are guarded in the same order everywhere, so that no two wait for each other."""
    if not grants:
        raise ValueError("a guard takes a lease")
    pairs = sorted((name.encode(), name, grant.token) for grant in grants for name in grant.names)
    begins = [asked.guard(keeper.prefix, name, token) for _, name, token in pairs]
    ends = [asked.release(keeper.prefix, grant.names, grant.token) for grant in grants if release]
    return Guard(keeper, grants, begins, ends, connection)


def _at_once(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs what never waits, because its connection does not either."""
    try:
        work.send(None)
    except StopIteration as end:
        value: _T = end.value
        return value
    work.close()
    raise RuntimeError("a synchronous connection waited")
