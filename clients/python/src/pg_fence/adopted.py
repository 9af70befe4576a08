"""A lease that somebody else grants: another lock service, another database."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self

import psycopg

from .connection import OwnConnection, in_thread
from .errors import LeaseLost, LeaseTaken, NotSpeaking, StaleToken, classify, sqlstate_of
from .holding import Holding
from .keeper import Keeper

_log = logging.getLogger("pg_fence")

#: How long a call may take beside its wait, in seconds: a third of the usual ttl, for an adopted lease has none.
LIMIT = 10.0

#: A guard that cannot begin so may after an adoption in a transaction of its own: its own was NULL (22004), or cannot
#: be relied on in the same transaction, at REPEATABLE READ (55000).
_MENDABLE = {"22004", "55000"}


class Adopted(Holding):
    """A lease that somebody else grants, known here under the number that it has there. `Fence.adopt` makes it.

    There is no heartbeat, no deadline, no thread and no connection: nothing has to be closed. As a block (`with`,
    `async with`) it is released at the end; the same number is refused from then on.
    """

    def __init__(self, keeper: Keeper, name: str, token: int, holder: str, metadata: Any):
        super().__init__(keeper.prefix, (name,))
        self.token = token
        self._holder = holder
        self._metadata = None if metadata is None else json.dumps(metadata)
        self._lock = threading.Condition()
        self._keeper = keeper
        self._own = keeper.connection(LIMIT)
        #: Taken before each use: several threads may begin transactions.
        self._turn = threading.Lock()
        self._released = False

    def adopt(self, wait: timedelta) -> None:
        """Makes the number known. Raises LeaseTaken where an older one is guarded still, StaleToken where a greater
        one is known."""
        sql, arguments = self._adoption("%s")
        arguments.insert(3, wait)
        try:
            adopted = self._aside(lambda own: own.call(LIMIT + wait.total_seconds(), self.call(sql), arguments))
        except psycopg.Error as error:
            told = classify(error)
            if isinstance(told, StaleToken):
                raise told from error
            raise
        if adopted is None:
            raise LeaseTaken(f"the lease {self.names[0]} is taken: a transaction guards an older grant of it")
        self.in_doubt = False

    async def aadopt(self, wait: timedelta) -> None:
        """As `adopt`, in asyncio."""
        is_over = False

        def adopt() -> None:
            nonlocal is_over
            try:
                self.adopt(wait)
            finally:
                with self._lock:
                    is_over = True
                    self._lock.notify_all()

        try:
            await in_thread(adopt)
        except asyncio.CancelledError:
            # One that comes all the same stays: the service has granted the lease.
            cancel = threading.Thread(target=self._own.cancel_until, args=[lambda: is_over, self._lock], daemon=True)
            cancel.start()
            raise

    def release(self) -> None:
        """Gives it back: the number is refused from then on. No error where that fails: then it stays until a greater
        one is adopted."""
        with self._lock:
            is_over, self._released = self._released, True
        if is_over:
            return
        try:
            if self._aside(lambda own: own.value(LIMIT, LIMIT, *self._on_names("lease_release"))) is None:
                self._lose("gone")
        except psycopg.Error as error:
            _log.warning("the lease %s was not released: %s", self.names[0], error)

    async def arelease(self) -> None:
        """As `release`, in asyncio."""
        await in_thread(self.release)

    def __enter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        await self.arelease()
        if error is None and self.loss is not None:
            raise self._lost()

    def _aside(self, call: Callable[[OwnConnection], Any]) -> Any:
        with self._turn:
            try:
                return call(self._own)
            finally:
                self._own.close()
                self._keeper.settle()

    def _adoption(self, wait: str) -> tuple[str, list[Any]]:
        # The JSON as text: drivers differ.
        call = f"lease_adopt(%s::text, %s::bigint, %s::text, {wait}, %s::text::jsonb)"
        return call, [self.names[0], self.token, self._holder, self._metadata]

    def _lose(self, reason: str, cause: BaseException | None = None) -> None:
        if self.loss is None:
            self.loss = LeaseLost(reason, self.names, cause)
            _log.warning("%s", self.loss)

    # For the transactions under it

    def refuse_if_over(self) -> None:
        if self.loss is not None:
            raise self._lost()
        if self._released:
            raise LeaseLost("released", self.names)

    def _guard(self) -> tuple[str, list[Any]]:
        # Each transaction makes the number known: a failover may have lost it, and then silences it in any case.
        adopt, arguments = self._adoption("NULL")
        return self.call(f"lease_guard(%s::text, ({self.call(adopt)}))"), [self.names[0], *arguments]

    def can_mend(self, error: BaseException) -> bool:
        return isinstance(error, NotSpeaking) or sqlstate_of(error) in _MENDABLE

    def mend(self) -> bool:
        self.adopt(timedelta(0))
        return True

    def beat_soon(self) -> None:
        self.in_doubt = True

    def has_been_released(self) -> None:
        self._released = True
