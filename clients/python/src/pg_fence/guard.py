"""A transaction under leases."""

import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from socket import socket
from typing import Any, Generic, TypeVar

from psycopg.pq import TransactionStatus

from . import asked
from .asked import Call
from .drivers import driver_of
from .errors import FenceError, LeaseLost, LeaseTaken, Refused, TransactionLost, session_ended, sqlstate_of, told
from .keeper import Keeper, pairs_of
from .keeping import Grant
from .line import at_once, handle_of, in_thread, outcome

C = TypeVar("C")


class Guard(Generic[C]):
    """A transaction under leases, to be entered by `with` or, on an asynchronous connection, by `async with`. It is a
    coroutine in both cases; that of a synchronous connection never waits."""

    def __init__(self, keeper: Keeper, grants: Sequence[Grant], begin: Call, end: Call | None, connection: C):
        self._keeper, self._grants, self._begin, self._end = keeper, grants, begin, end
        self._connection, self._driver = connection, driver_of(connection)
        self._handle: socket | None = None
        self._block: Any = None

    def __enter__(self) -> C:
        return at_once(self._enter(is_async=False))

    def __exit__(self, *raised: object) -> bool | None:
        return at_once(self._block.__aexit__(*raised))

    async def __aenter__(self) -> C:
        return await self._enter(is_async=True)

    async def __aexit__(self, *raised: object) -> bool | None:
        return await self._block.__aexit__(*raised)

    async def _enter(self, is_async: bool) -> C:
        if self._driver.is_async != is_async:
            raise TypeError("`async with` for an asynchronous connection, and `with` for any other")
        self._block = self._transaction()
        try:
            return await self._block.__aenter__()
        except Refused as refused:
            if refused.sqlstate != "PF004" or self._driver.is_inner or not self._grants:
                raise
        # After a failover no token speaks until its holder has renewed.
        await outcome(in_thread(lambda: self._keeper.keep(list(self._grants))), is_async)
        self._block = self._transaction()
        return await self._block.__aenter__()

    @contextlib.asynccontextmanager
    async def _transaction(self) -> AsyncIterator[C]:
        for grant in self._grants:
            self._keeper.check(grant)
        stage, resting = "begin", self._grants if self._end else ()
        try:
            await self._driver.begin(self._register)
            await self._driver.value(*self._begin)
            stage = "work"
            yield self._connection
            stage = "release"
            # The heartbeat leaves out what is about to be released.
            self._rest(resting, 1)
            await self._refuse_if_failed()
            if self._end and (gone := await self._driver.value(*self._end)) is not None:
                self._keeper.end((grant for grant in self._grants if gone in grant.names), "gone")
                raise LeaseLost("gone", (gone,))
            stage = "commit"
            await self._driver.commit()
            self._keeper.tell("released", self._keeper.end(resting, "released"))
        except BaseException as error:
            meant = self._told(error, stage)
            if stage == "commit" and isinstance(meant, (LeaseLost, TransactionLost)):
                # The server has ended an idle transaction before it read the commit.
                meant.in_doubt = sqlstate_of(error) not in {"25P03", "25P04"}
            is_done = await self._roll_back(error)
            self._unregister()
            for grant in self._grants if sqlstate_of(error) in {"PF001", "PF004"} else ():
                # The next renewal tells whether it is lost, within a second; but the connection is sound.
                grant.beat_at = -math.inf
            if is_done and stage == "work":
                # psycopg.Rollback only rolls back.
                return
            if meant is error:
                raise
            raise meant from error
        finally:
            if stage in {"release", "commit"}:
                self._rest(resting, -1)
            self._unregister()

    def _register(self, connection: Any) -> None:
        """From here on a loss breaks the connection off, where it hangs, too."""
        self._handle = handle_of(connection)
        for grant in self._grants:
            grant.handles.add(self._handle)
            self._keeper.check(grant)

    def _unregister(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            for grant in self._grants:
                grant.handles.discard(handle)
            handle.close()

    def _rest(self, resting: Sequence[Grant], more: int) -> None:
        for grant in resting:
            grant.resting += more

    async def _refuse_if_failed(self) -> None:
        """The work may have swallowed an error: then the commit would roll back, and say nothing."""
        status = await self._driver.status()
        if status is TransactionStatus.INERROR:
            raise TransactionLost("a statement of the transaction has failed: all of it is rolled back")
        if status is TransactionStatus.IDLE:
            ended = "the work has ended the transaction itself: what it did after that was not guarded"
            raise TransactionLost(ended, in_doubt=True)

    async def _roll_back(self, error: BaseException) -> bool:
        """Whether the error has done its part by that. A connection on which it fails, or is interrupted, ends."""
        try:
            return await self._driver.rollback(error)
        except BaseException as failed:
            await self._driver.abort()
            if not isinstance(failed, Exception):
                raise
            # The error that led here is the one to tell.
            return False

    def _told(self, error: BaseException, stage: str) -> BaseException:
        """The typed error, where it is one. A connection that was broken off because of a loss tells the loss."""
        if isinstance(error, FenceError) or not isinstance(error, Exception):
            return error
        state, is_ours = sqlstate_of(error), stage in {"begin", "release"}
        ends, is_closed = session_ended(error), self._driver.is_closed()
        # The work may use other connections, too.
        if (ends or is_closed) and (stage != "work" or (ends and (state != "" or is_closed))):
            lost = [grant.lost() for grant in self._grants if grant.is_lost]
            return lost[0] if lost else TransactionLost(f"the session ended under the transaction: {error}")
        if is_ours and not self._grants and state == "22004":
            # NULL from lease_adopt: an older number is guarded.
            return LeaseTaken((self._begin[1][0],))
        return told(error, self._driver.raw, is_ours)


def under(keeper: Keeper, grants: Sequence[Grant], release: bool, connection: C) -> Guard[C]:
    if not grants:
        raise ValueError("a guard takes a lease")
    names_and_tokens = pairs_of(grants)
    end = keeper.call(asked.RELEASE, *names_and_tokens) if release else None
    return Guard(keeper, grants, keeper.call(asked.GUARD, *names_and_tokens), end, connection)
