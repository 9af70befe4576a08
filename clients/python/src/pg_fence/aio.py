"""The same verbs for asyncio. The leases are kept by the same threads, so a loop that is blocked does not lose them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, Self, TypeVar

from .asked import Asked
from .fence import HALF_A_MINUTE, Held, Leases, goes_on, leading
from .keeper import Grant, Keeper
from .line import in_thread

_T = TypeVar("_T")


class AsyncLease(Held):
    """A lease for as long as a block runs: `async with fence.lease(…) as lease:`. At a loss the task that entered it is
    cancelled, and the block raises LeaseLost."""

    def __init__(self, keeper: Keeper, asked: Asked | None, grant: Grant | None):
        self._task: asyncio.Task[Any] | None = None
        self._has_cancelled = False
        super().__init__(keeper, asked, grant)

    async def release(self) -> None:
        """Gives it back before the end of its block. No error where that fails: then it ends at its ttl."""
        grants = [self._granted()]
        await asyncio.wrap_future(in_thread(lambda: self._keeper.release(grants)))

    async def __aenter__(self) -> Self:
        if self._grant is None and self._asked is not None:
            self._grant = await acquired(self._keeper, self._asked)
        self._task, loop, grant = asyncio.current_task(), asyncio.get_running_loop(), self._granted()

        def tell() -> None:
            # The loop may be closed by then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._cancel)

        grant.on_end = tell
        # It may have ended before.
        self._cancel()
        return self

    def _cancel(self) -> None:
        if self._task is not None and self._granted().is_lost and not self._has_cancelled:
            self._has_cancelled = True
            self._task.cancel()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        task, self._task = self._task, None
        asked_by_others = False
        if self._has_cancelled and task is not None:
            asked_by_others = task.uncancel() > 0
            if not isinstance(error, asyncio.CancelledError):
                # It was asked for after the last await of the work, and would hit the next one.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
        await self.release()
        by_us = isinstance(error, asyncio.CancelledError) and self._has_cancelled and not asked_by_others
        self._end(None if by_us else error)


class AsyncClaimed(list[AsyncLease]):
    """Leases that are held. As a block it releases what is left of them."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for lease in self:
            await lease.release()


async def acquired(keeper: Keeper, asked: Asked) -> Grant:
    given_up = threading.Event()
    future = in_thread(lambda: keeper.acquire(asked, given_up))
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        # A grant that comes all the same is given back.
        given_up.set()
        future.add_done_callback(lambda done: done.exception() or in_thread(lambda: keeper.release([done.result()])))
        raise


class AsyncFence(Leases[AsyncLease]):
    """Where leases come from: one for a process. As a block it is closed at the end. Its connection is psycopg's, too."""

    _kind = AsyncLease

    async def claim(
        self, names: Sequence[str], *, n: int = 1, ttl: timedelta = HALF_A_MINUTE, holder: str | None = None
    ) -> AsyncClaimed:
        """The first `n` of these that are free, in their order."""
        return AsyncClaimed(await asyncio.wrap_future(in_thread(self._claim(names, n, ttl, holder))))

    async def lead(
        self,
        name: str,
        work: Callable[[AsyncLease], Awaitable[_T]],
        *,
        stop: asyncio.Event | None = None,
        ttl: timedelta = HALF_A_MINUTE,
    ) -> _T | None:
        """Runs `work(lease)` whenever this process leads, and returns what it returned; None when `stop` was set
        first, at which the work is to return by itself."""
        stop = stop or asyncio.Event()
        asked = leading(name, ttl)
        while not stop.is_set():
            grant = None
            try:
                grant = await unless(stop, acquired(self._keeper, asked))
                if grant is not None:
                    async with AsyncLease(self._keeper, asked, grant) as lease:
                        return await work(lease)
            except Exception as error:
                if self._keeper.is_closed or not goes_on(error, grant):
                    raise
                await unless(stop, asyncio.sleep(asked.ttl / 12))
        return None

    async def close(self) -> None:
        """Gives everything back, and ends all waits."""
        await asyncio.wrap_future(in_thread(self._keeper.close))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def unless(stop: asyncio.Event, work: Awaitable[_T]) -> _T | None:
    """What it comes to; None where it is stopped first."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        stopped.cancel()
        task.cancel()
