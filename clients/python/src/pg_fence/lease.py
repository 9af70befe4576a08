"""A lease, from its acquire to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self

import psycopg

from . import telemetry
from .acquiring import Acquire, Asked
from .connection import Handle, OwnConnection, in_thread, now
from .errors import FenceError, LeaseLost, LeaseTaken, NotSpeaking, is_permanent, sqlstate_of
from .holding import Holding
from .keeper import Keeper
from .watch import LOOK_AGAIN

_log = logging.getLogger("pg_fence")


class Lease(Holding):
    """A lease that is kept until it is released or lost, by the heartbeat of its fence. `Fence.lease` makes it.

    Enter it by `with` or `async with`.
    """

    def __init__(self, keeper: Keeper, asked: Asked):
        super().__init__(keeper.prefix, asked.names)
        self.ttl = asked.ttl
        #: The row of the query that it was claimed by: a tuple, whose first value is the lease's name.
        self.row: tuple[Any, ...] | None = None
        self._keeper = keeper
        self._asked = asked
        #: The acquire, until it has an answer.
        self._attempt: Acquire | None = None
        #: What is told of a loss at once, and must not block.
        self._on_lost: list[Callable[[LeaseLost], None]] = []
        self._telling: threading.Thread | None = None
        self._on_answer: Callable[[], object] = lambda: None
        #: Its ttl, and how long a call may take.
        self._seconds = asked.ttl.total_seconds()
        self._limit = self._seconds / 3
        self._lock = threading.Condition()
        # Where it stands: started, answered (the acquire), held, ending (its holder wants it to end), over.
        self._started = self._answered = self._held = self._ending = self._over = False
        #: Its holder is to stop: it is over for the holder, but for the transactions that are under way.
        self._stopping = False
        #: Nobody waits for its acquire.
        self._given_up = False
        self._failure: BaseException | None = None
        self._granted_at = self._next_beat = -math.inf
        #: When a renewal out of turn was asked for last.
        self._asked_soon_at = -math.inf
        self._deadline = math.inf
        self._is_beating = False
        #: A renewal of it alone was refused: it is renewed by itself until one succeeds.
        self._stands_apart = False
        self._beats = self._pauses = 0
        self._latest: int | None = None
        #: The connection that a session lease is bound to.
        self._session: OwnConnection | None = None
        self._guards: set[Handle] = set()
        self._task: asyncio.Task[Any] | None = None
        self._task_cancelled = False

    # What its holder asks

    @property
    def held(self) -> bool:
        """Whether it is ours at this moment, by our own clock."""
        with self._lock:
            return self._is_ours() and now() < self._deadline

    @property
    def remaining(self) -> timedelta:
        """How long it is ours if no renewal comes through any more."""
        with self._lock:
            left = self._deadline - now() if self._is_ours() else 0.0
            return timedelta(seconds=max(0.0, left))

    def _is_ours(self) -> bool:
        return self._held and self.loss is None and not self._stopping

    def check(self) -> None:
        """Raises LeaseLost when it is ours no more. For long steps between transactions, and before each call to
        the outside."""
        with self._lock:
            if not self._answered:
                raise RuntimeError("the lease has not been acquired")
            late = self._held and self.loss is None and now() >= self._deadline
        if late:
            self._lose("deadline")
        if self.loss is not None:
            raise self._lost()
        if not self._is_ours():
            raise LeaseLost("released", self.names)

    def wait(self, span: timedelta) -> None:
        """Sleeps; raises LeaseLost as soon as the lease is lost."""
        end = now() + span.total_seconds()
        with self._lock:
            while self.loss is None and not self._stopping and now() < end:
                self._lock.wait(max(0.0, min(end - now(), LOOK_AGAIN)))
        self.check()

    def renew(self) -> int | None:
        """Has it renewed at once, and returns the new token, which a `strict` table asks for when a row is written
        again; None when the renewal failed, which is no loss yet, and after `hold_at_most`. Raises LeaseLost."""
        self.check()
        with self._lock:
            # One that is under way has begun before.
            seen, self._latest = self._beats + self._is_beating, None
        self.beat_soon()
        with self._lock:
            # Opening a connection may take two seconds beside the call itself; and it waits for a call under way.
            limit = 3 * self._limit + 3
            self._lock.wait_for(
                lambda: self._beats > seen or self._over or self.loss is not None or not self._can_beat, limit
            )
            latest = self._latest
        self.check()
        return latest

    def detach(self) -> int:
        """Keeps it no more, and does not release it: returns the token, which is handed to another process, whose
        `Fence.resume` goes on with it before the ttl is over. Raises LeaseLost."""
        self.check()
        if self._asked.session:
            raise ValueError("a session lease ends with its session: it cannot be handed over")
        self.pause()
        self.wait_for_heartbeat()
        with self._lock:
            if self._guards:
                self._pauses -= 1
                raise RuntimeError("a transaction is open under the lease")
        self.check()
        self._finish()
        self._keeper.settle()
        assert self.token is not None
        return self.token

    async def adetach(self) -> int:
        """As `detach`, in asyncio."""
        return await in_thread(self.detach)

    # Acquire and release

    def acquire(self) -> bool:
        """Whether the lease could be had. Raises AcquireTimeout where the server did not answer in time, LeaseLost
        where a token that is to be resumed is over."""
        with telemetry.span("acquire", self.names):
            attempt = self._start()
            try:
                with self._lock:
                    self._lock.wait_for(lambda: self._answered)
            except BaseException:
                self._give_up()
                raise
            attempt.join()
            self._keeper.settle()
            return self._outcome()

    def release(self) -> None:
        """Gives it back. No error where that fails: then it ends at its ttl."""
        self._end()
        with self._lock:
            # A call under way, then the release, and opening a connection may take two seconds.
            self._lock.wait_for(lambda: self._over or not self._started, 3 * self._limit + 3)
        self._keeper.settle()
        telling = self._telling
        if telling is not None and telling is not threading.current_thread():
            telling.join(self._limit)

    def __enter__(self) -> Self:
        if not self._held and not self.acquire():
            raise LeaseTaken(f"the lease {', '.join(self.names)} is taken")
        return self

    async def aacquire(self) -> bool:
        """As `acquire`, in asyncio."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()

        def answered() -> None:
            if not answer.done():
                answer.set_result(None)

        def tell() -> None:
            # The loop may be closed by then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(answered)

        with telemetry.span("acquire", self.names):
            self._on_answer = tell
            self._start()
            try:
                await answer
            except asyncio.CancelledError:
                self._give_up()
                raise
            if not self._held:
                await in_thread(self._keeper.settle)
            return self._outcome()

    async def arelease(self) -> None:
        """As `release`, in asyncio."""
        await in_thread(self.release)

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()

        def cancel_task(_: LeaseLost) -> None:
            # The loop may be closed by then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._cancel_task)

        self._on_lost.append(cancel_task)
        try:
            granted = self._held or await self.aacquire()
        except asyncio.CancelledError:
            task, self._task = self._task, None
            # Lost before its block could begin.
            if self._task_cancelled and task is not None and task.uncancel() == 0:
                raise self._lost() from None
            raise
        if not granted:
            raise LeaseTaken(f"the lease {', '.join(self.names)} is taken")
        return self

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task_cancelled = True
            self._task.cancel()

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        task, self._task = self._task, None
        asked_by_others = False
        if self._task_cancelled and task is not None:
            asked_by_others = task.uncancel() > 0
            if not isinstance(error, asyncio.CancelledError):
                # The cancellation was asked for after the last await of the work, and would hit the next one.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
        await self.arelease()
        by_us = isinstance(error, asyncio.CancelledError) and self._task_cancelled and not asked_by_others
        if self.loss is not None and (error is None or by_us):
            raise self._lost() from error

    def __del__(self) -> None:
        if not getattr(self, "_held", False) or self.loss is not None or sys.is_finalizing():
            return
        told = f"the lease {', '.join(self.names)} was forgotten, and not released"
        warnings.warn(told, ResourceWarning, source=self)
        session, (sql, arguments) = self._session, self._on_names("lease_release")
        limit, keeper, itself = self._limit, self._keeper, weakref.ref(self)

        def release(own: OwnConnection) -> None:
            # The warning may have kept it.
            lease = itself()
            if lease is not None:
                keeper.drop(lease)
            own.open_limit = limit
            with contextlib.suppress(psycopg.Error, FenceError):
                own.value(limit, limit, sql, arguments)
            if session is not None:
                session.close()

        self._held, self._over = False, True
        keeper.forget(release)

    # As the acquire sees it

    def _start(self) -> Acquire:
        with self._lock:
            if self._started:
                raise RuntimeError("a lease is acquired once: ask the fence for another")
            self._started = True
            attempt = self._attempt = Acquire(self, self._keeper, self._asked)
        attempt.start()
        return attempt

    def _is_granted(self, before: float, token: int, session: OwnConnection | None = None) -> bool:
        """From now on it is kept; False: nobody waits for it any more."""
        with self._keeper.watch.lock, self._lock:
            if self._given_up:
                return False
            self.token, self._granted_at, self._session = token, before, session
            self._counts_from(before, token)
            self._started = self._held = self._answered = True
            self._keeper.keep(self)
            return True

    def _answer(self, failure: BaseException | None = None) -> None:
        with self._lock:
            self._failure, self._answered, self._attempt = failure, True, None
            self._over = self._over or not self._held
            self._lock.notify_all()
        self._on_answer()

    def _outcome(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return self._held or self.loss is not None

    # Its end

    def _end(self) -> None:
        with self._lock:
            if self._ending:
                return
            self._ending = True
            self._lock.notify_all()
            if not self._started or self._over:
                return
            is_answered, is_lost = self._answered, self.loss is not None
        if not is_answered:
            self._give_up()
        elif is_lost:
            self._finish()
        else:
            give_up_at = now() + self._limit
            self._keeper.do(lambda own: self._give_back(own, give_up_at))

    def _give_up(self) -> None:
        """Nobody waits for the acquire any more. A grant that comes all the same is given back."""
        with self._lock:
            self._given_up = self._ending = True
            came, attempt = self._answered and self._held and not self._over, self._attempt
            self._lock.notify_all()
        if came:
            # At that very moment.
            give_up_at = now() + self._limit
            self._keeper.do(lambda own: self._give_back(own, give_up_at))
        elif attempt is not None:
            attempt.cancel()

    def _give_back(self, own: OwnConnection, give_up_at: float) -> float | None:
        """When it is to be tried again, because somebody's open transaction has changed the lease."""
        if self.loss is None:
            reuses_connection = own.is_open
            try:
                try:
                    answer = self._call_back(own)
                except psycopg.Error:
                    if not reuses_connection or own.is_open:
                        raise
                    answer = self._call_back(own)
                if answer is None and not self._given_up:
                    self._lose("gone")
            except Exception as error:  # noqa: BLE001
                if sqlstate_of(error) == "55P03" and now() < give_up_at:
                    return now() + self._limit / 12
                _log.warning("the lease %s was not released, and ends at its ttl: %s", self.names[0], error)
        self._finish()
        return None

    def _call_back(self, own: OwnConnection) -> Any:
        limits = self._keeper.limit(self._seconds), self._keeper.lock_limit(self._seconds)
        own.open_limit = limits[0]
        return own.value(*limits, *self._last_call())

    def _last_call(self) -> tuple[str, list[Any]]:
        """Releases it; or has it end by itself, where it is to be held for longer."""
        at_least = self._asked.hold_at_least
        remains = 0.0 if at_least is None else self._granted_at + at_least.total_seconds() - now()
        if remains <= 0:
            return self._on_names("lease_release")
        sql, arguments = self._on_names("lease_renew")
        # Never longer than the server keeps it without that.
        return sql.replace("::bigint)", "::bigint, %s::interval)"), [*arguments, timedelta(seconds=remains)]

    def _finish(self) -> None:
        with self._lock:
            self._held, self._ending, self._over = False, True, True
            session, self._session = self._session, None
            self._lock.notify_all()
        self._keeper.drop(self)
        if session is not None:
            session.close()

    def _lose(self, reason: str, cause: BaseException | None = None) -> None:
        with self._lock:
            if not self._held or self.loss is not None:
                return
            self.loss = LeaseLost(reason, self.names, cause)
            # What still works under it ends here, wherever it hangs.
            for handle in self._guards:
                handle.cut()
            session, self._session = self._session, None
            self._lock.notify_all()
        self._keeper.drop(self)
        if session is not None:
            session.close()
        _log.warning("%s", self.loss)
        telemetry.lost(self.names, reason)
        for tell in self._on_lost:
            tell(self.loss)
        if self._asked.on_lost is not None:
            # It may take its time, and others are to be renewed.
            self._telling = threading.Thread(target=self._tell, args=[self.loss], name="pg_fence on_lost", daemon=True)
            self._telling.start()

    def _tell(self, loss: LeaseLost) -> None:
        try:
            assert self._asked.on_lost is not None
            self._asked.on_lost(loss)
        except Exception:  # noqa: BLE001
            _log.exception("on_lost failed")

    def _stop(self) -> None:
        """Its holder is to stop: a wait ends; a lease that is held is over for the holder, and is released when no
        transaction is open under it."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
            self._lock.wait_for(lambda: not self._guards or self._over or self.loss is not None)
        self.release()

    def _abandon(self) -> None:
        """In a process that was forked: it is the parent's."""
        self._lock = threading.Condition()
        self._held, self._ending, self._over = False, True, True
        if self._session is not None:
            self._session.abandon()
            self._session = None

    # Its heartbeat, as the keeper sees it

    @property
    def _can_beat(self) -> bool:
        at_most = self._asked.hold_at_most
        return at_most is None or now() < self._granted_at + at_most.total_seconds()

    @property
    def _is_kept(self) -> bool:
        """Whether it is renewed at all."""
        return self._held and not self._ending and self.loss is None and not self._pauses and self._can_beat

    def _begin_beat(self) -> bool:
        with self._lock:
            self._is_beating = self._is_kept
            return self._is_beating

    def _end_beat(self) -> None:
        with self._lock:
            self._is_beating = False
            self._beats += 1
            self._lock.notify_all()

    def _renewed(self, before: float, token: int | None) -> None:
        """The answer to a renewal that was begun at `before`."""
        self._stands_apart = False
        if token is None:
            self._lose("gone")
        else:
            with self._lock:
                self._counts_from(before, token)
            self._keeper.beat_by(self._next_beat)
        self._is_beating = False

    def _counts_from(self, before: float, token: int) -> None:
        """Granted or renewed by a call that was begun at `before`: from there the ttl counts."""
        if self.loss is not None:
            return
        self._deadline = before + self._seconds
        self._next_beat = -math.inf if self._asked_soon_at > before else before + self._limit
        self._latest = token

    def _beat_failed(self, error: Exception) -> None:
        """No loss yet where trying again can help: the deadline tells."""
        _log.warning("the lease %s was not renewed: %s", self.names[0], error)
        if is_permanent(error):
            self._lose("denied", error)
        self._is_beating = False
        self._next_beat = now() + self._limit / 4
        self._keeper.beat_by(self._next_beat)

    # For the transactions under it

    def refuse_if_over(self) -> None:
        self.check()

    def can_mend(self, error: BaseException) -> bool:
        return isinstance(error, NotSpeaking)

    def mend(self) -> bool:
        return self.renew() is not None

    def enter(self, handle: Handle) -> None:
        self.check()
        with self._lock:
            self._guards.add(handle)
        self.check()

    def leave(self, handle: Handle) -> None:
        with self._lock:
            self._guards.discard(handle)
            self._lock.notify_all()
        super().leave(handle)

    def beat_soon(self) -> None:
        with self._lock:
            self._asked_soon_at, self._next_beat = now(), -math.inf
        self._keeper.beat_by(self._next_beat)

    def pause(self) -> None:
        with self._lock:
            self._pauses += 1

    def wait_for_heartbeat(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: not self._is_beating or self._over)

    def go_on(self) -> None:
        with self._lock:
            self._pauses -= 1
        self._keeper.beat_by(self._next_beat)

    def has_been_released(self) -> None:
        self._finish()
