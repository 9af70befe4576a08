"""A transaction under leases."""

import contextlib
import math
from collections.abc import Sequence
from socket import socket
from typing import Any, Generic, TypeVar

from psycopg.pq import TransactionStatus

from . import asked
from .asked import Call
from .drivers import driver_of
from .errors import FenceError, LeaseLost, LeaseTaken, TransactionLost, session_ended, sqlstate_of, told
from .keeper import Keeper
from .keeping import Grant
from .line import at_once, handle_of, in_thread, outcome

C = TypeVar("C")


class Guard(Generic[C]):
    """A transaction under leases, to be entered by `with` or, on an asynchronous connection, by `async with`. Its steps are
    coroutines; those of a synchronous connection never wait."""

    def __init__(self, keeper: Keeper, grants: Sequence[Grant], begins: list[Call], ends: list[Call], connection: C):
        self._keeper, self._grants, self._begins, self._ends = keeper, grants, begins, ends
        self._connection, self._driver = connection, driver_of(connection)
        self._handle: socket | None = None

    def __enter__(self) -> C:
        return at_once(self._begin(is_async=False))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return at_once(self._finish(error))

    async def __aenter__(self) -> C:
        return await self._begin(is_async=True)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return await self._finish(error)

    async def _begin(self, is_async: bool, is_first: bool = True) -> C:
        if self._driver.is_async != is_async:
            raise TypeError("`async with` for an asynchronous connection, and `with` for any other")
        for grant in self._grants:
            self._keeper.check(grant)
        try:
            await self._driver.begin(self._register)
            for call in self._begins:
                await self._driver.value(*call)
            return self._connection
        except BaseException as error:
            meant = self._told(error, "begin")
            with contextlib.suppress(Exception):
                await self._roll_back(error)
            is_silent = sqlstate_of(error) == "PF004" and self._grants and not self._driver.is_inner
            if not (is_silent and is_first):
                if meant is error:
                    raise
                raise meant from error
        # After a failover no token speaks until its holder has renewed.
        await outcome(in_thread(lambda: self._keeper.keep(list(self._grants))), is_async)
        return await self._begin(is_async, is_first=False)

    def _register(self, connection: Any) -> None:
        """From here on a loss breaks the connection off, where it hangs, too."""
        self._handle = handle_of(connection)
        for grant in self._grants:
            grant.handles.add(self._handle)
            self._keeper.check(grant)

    async def _finish(self, error: BaseException | None) -> bool:
        """Whether the error has done its part: psycopg.Rollback only rolls back."""
        raised, stage = error, "work"
        # The heartbeat leaves out what is about to be released.
        resting = self._grants if self._ends else ()
        for grant in resting:
            grant.resting += 1
        try:
            if error is None:
                await self._refuse_if_failed()
                stage = "release"
                for sql, arguments in self._ends:
                    if await self._driver.value(sql, arguments) is None:
                        self._keeper.end((grant for grant in self._grants if arguments[0] in grant.names), "gone")
                        raise LeaseLost("gone", (arguments[0],))
                stage = "commit"
                await self._driver.commit()
                self._keeper.tell("released", self._keeper.end(resting, "released"))
        except BaseException as failed:  # noqa: BLE001
            raised = failed
        finally:
            for grant in resting:
                grant.resting -= 1
        if raised is None:
            self._unregister()
            return False
        meant = self._told(raised, stage)
        if stage == "commit" and isinstance(meant, (LeaseLost, TransactionLost)):
            # The server has ended an idle transaction before it read the commit.
            meant.in_doubt = sqlstate_of(raised) not in {"25P03", "25P04"}
        is_done = await self._roll_back(raised)
        if is_done or meant is error:
            return is_done
        if meant is raised:
            raise meant
        raise meant from raised

    async def _refuse_if_failed(self) -> None:
        """The work may have swallowed an error: then the commit would roll back, and say nothing."""
        status = await self._driver.status()
        if status is TransactionStatus.INERROR:
            raise TransactionLost("a statement of the transaction has failed: all of it is rolled back")
        if status is TransactionStatus.IDLE:
            ended = "the work has ended the transaction itself: what it did after that was not guarded"
            raise TransactionLost(ended, in_doubt=True)

    async def _roll_back(self, error: BaseException) -> bool:
        """A connection on which that fails, or is interrupted, ends."""
        try:
            return await self._driver.rollback(error)
        except BaseException as failed:
            await self._driver.abort()
            if not isinstance(failed, Exception):
                raise
            # The error that led here is the one to tell.
            return False
        finally:
            self._unregister()

    def _told(self, error: BaseException, stage: str) -> BaseException:
        """The typed error, where it is one. A connection that was broken off because of a loss tells the loss."""
        if isinstance(error, FenceError) or not isinstance(error, Exception):
            return error
        state, is_ours = sqlstate_of(error), stage in {"begin", "release"}
        if stage == "work":
            # It may use other connections, too.
            is_over = session_ended(error) and (state != "" or self._driver.is_closed())
        else:
            is_over = session_ended(error) or self._driver.is_closed()
        if is_over:
            lost = [grant.lost() for grant in self._grants if grant.is_lost]
            return lost[0] if lost else TransactionLost(f"the session ended under the transaction: {error}")
        for grant in self._grants if state in {"PF001", "PF004"} else ():
            # The next renewal tells whether it is lost, within a second.
            grant.beat_at = -math.inf
        if is_ours and not self._grants and state == "22004":
            # NULL from lease_adopt: an older number is guarded.
            return LeaseTaken(tuple(self._begins[0][1][:1]))
        return told(error, self._driver.raw, is_ours)

    def _unregister(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            for grant in self._grants:
                grant.handles.discard(handle)
            handle.close()


def under(keeper: Keeper, grants: Sequence[Grant], release: bool, connection: C) -> Guard[C]:
    """The leases are guarded in the same order everywhere, so that no two wait for each other."""
    if not grants:
        raise ValueError("a guard takes a lease")
    pairs = sorted((name.encode(), name, grant.token) for grant in grants for name in grant.names)
    begins = [keeper.call(asked.GUARD, name, token) for _, name, token in pairs]
    ends = [keeper.call(asked.RELEASE, name, token) for _, name, token in pairs if release]
    return Guard(keeper, grants, begins, ends, connection)
