"""A transaction under leases."""

import contextlib
import math
import os
from collections.abc import AsyncIterator
from socket import socket
from typing import Any, TypeVar

from psycopg.pq import TransactionStatus

from . import asked
from .drivers import driver_of
from .errors import FenceError, LeaseLost, LeaseTaken, Refused, TransactionLost, session_ended, sqlstate_of, told
from .keeper import Grant, Keeper, pairs_of
from .line import Block, aside, handle_of

C = TypeVar("C")
FAILED = "a statement of the transaction has failed: all of it is rolled back"


class Guard(Block[C]):
    """A transaction under leases, to be entered by `with` or, on an asynchronous connection, by `async with`."""

    def __init__(
        self, keeper: Keeper, grants: list[Grant], release: bool, connection: C, adopted: tuple[str, int, str | None] | None = None
    ):
        """`adopted`: a name, its number, and the holder of the number."""
        names, tokens = ([adopted[0]], [adopted[1]]) if adopted else pairs_of(grants)
        if not names:
            raise ValueError("a guard takes a lease")
        self._keeper, self._grants, self._names = keeper, grants, names
        if adopted:
            self._begin = keeper.call(asked.GUARD_ADOPTED, adopted[2] or asked.holder_of_process(os.getpid()), names, tokens)
        else:
            self._begin = keeper.call(asked.GUARD, names, tokens)
        self._end = keeper.call(asked.RELEASE, names, tokens) if release else None
        self._connection, self._driver = connection, driver_of(connection)
        self._is_async = self._driver.is_async
        self._handle: socket | None = None

    async def _enter(self) -> C:
        self._transaction = self._around()
        return await self._transaction.__aenter__()

    async def _leave(self, *raised: Any) -> bool | None:
        return await self._transaction.__aexit__(*raised)

    @contextlib.asynccontextmanager
    async def _around(self) -> AsyncIterator[C]:
        for grant in self._grants:
            self._keeper.check(grant)
        stage, resting = "begin", self._grants if self._end else []
        try:
            try:
                await self._begin_once()
            except Exception as error:
                if sqlstate_of(error) != "PF004" or self._driver.is_inner or not self._grants:
                    raise
                # After a failover no token speaks until its holder has renewed.
                await self._roll_back(error)
                await aside(lambda: self._keeper.keep(self._grants), self._is_async)
                await self._begin_once()
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
            for grant in self._grants if stage == "commit" and not isinstance(error, Exception) else ():
                grant.in_doubt = True
            if stage == "commit" and isinstance(meant, (LeaseLost, TransactionLost)):
                # The server has ended an idle transaction before it read the commit.
                meant.in_doubt = sqlstate_of(error) not in {"25P03", "25P04"}
            await self._roll_back(error)
            for grant in self._grants if sqlstate_of(error) in {"PF001", "PF004"} else ():
                # The next renewal tells whether it is lost, within a second; but the connection is sound.
                grant.beat_at = -math.inf
            if meant is error:
                raise
            raise meant from error
        finally:
            if stage in {"release", "commit"}:
                self._rest(resting, -1)
            self._unregister()

    async def _begin_once(self) -> None:
        await self._driver.begin(self._register)
        await self._driver.value(*self._begin)

    def _register(self, connection: Any) -> None:
        """From here on a loss breaks the connection off, where it hangs, too."""
        self._handle = handle_of(connection)
        for grant in self._grants:
            grant.handles.add(self._handle)
            self._keeper.check(grant)

    def _unregister(self) -> None:
        if self._handle is not None:
            for grant in self._grants:
                grant.handles.discard(self._handle)
            self._handle.close()

    def _rest(self, resting: list[Grant], more: int) -> None:
        for grant in resting:
            grant.resting += more

    async def _refuse_if_failed(self) -> None:
        """The work may have swallowed an error: then the commit would roll back, and say nothing."""
        status = await self._driver.status()
        if status is TransactionStatus.INERROR:
            raise TransactionLost(FAILED)
        # A driver may have begun another one by itself; but the token is of this one alone.
        if status is TransactionStatus.IDLE or not await self._driver.value(asked.TOKEN, []):
            ended = "the work has ended the transaction itself: what it did after that was not guarded"
            raise TransactionLost(ended, in_doubt=True)

    async def _roll_back(self, error: BaseException) -> None:
        """A connection on which it fails, or is interrupted, ends. Any other is sound, and no loss breaks it off any more."""
        try:
            await self._driver.rollback(error)
        except BaseException as failed:
            await self._driver.abort()
            # Else the error that led here is the one to tell.
            if not isinstance(failed, Exception):
                raise
        self._unregister()

    def _told(self, error: BaseException, stage: str) -> BaseException:
        """The typed error, where it is one. A connection that was broken off because of a loss tells the loss."""
        if isinstance(error, FenceError) or not isinstance(error, Exception):
            return error
        state, is_ours = sqlstate_of(error), stage in {"begin", "release"}
        ends, is_closed = session_ended(error), self._driver.is_closed()
        # The work may use other connections, too.
        if (ends or is_closed) and (stage != "work" or (ends and (state != "" or is_closed))):
            lost = [grant.loss() for grant in self._grants if grant.is_lost]
            return lost[0] if lost else TransactionLost(f"the session ended under the transaction: {error}")
        if stage == "release" and state == "25P02":
            return TransactionLost(FAILED)
        meant = told(error, self._driver.raw, is_ours)
        if stage == "begin" and not self._grants and state in {"22004", "PF004"} and isinstance(meant, Refused):
            # NULL from lease_adopt: an older number is guarded. PF004 from it: another holder has adopted this number.
            return LeaseTaken(tuple(self._names), meant.detail.get("holder"))
        return meant
