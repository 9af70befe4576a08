"""A lease, from its acquire to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from .connection import LOOK_AGAIN, Handle, OwnConnection, in_thread, now
from .errors import LeaseLost, LeaseTaken, NotSpeaking, is_permanent
from .holding import Holding

_log = logging.getLogger("pg_fence")


def unique_holder() -> str:
    """What the view of all leases shows as the holder, unless one is named."""
    return f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"


class Lease(Holding):
    """A lease that is kept by a thread and a connection of its own, until it is released or lost.

    Enter it by `with` or `async with`; `Fence.lease` makes it.
    """

    # Two threads: the keeper acquires, renews and releases; the watch tells a loss at the deadline and breaks off
    # calls that take too long, so that it does not matter where the keeper hangs. _lock guards what they share.

    def __init__(
        self,
        open: Callable[[float], psycopg.Connection[Any]],
        sql: Callable[[str], str],
        names: tuple[str, ...],
        ttl: timedelta,
        wait: timedelta,
        holder: str | None,
        metadata: Any,
        kind: dict[str, Any],
        on_lost: Callable[[LeaseLost], None] | None,
    ):
        super().__init__(sql, names)
        self.ttl = ttl
        self._wait = wait
        self._holder = holder or unique_holder()
        self._metadata = None if metadata is None else Jsonb(metadata)
        self._kind = kind
        self._on_lost: list[Callable[[LeaseLost], None]] = [on_lost] if on_lost else []
        self._on_answer: Callable[[], object] = lambda: None
        #: Between two renewals, and how long a call may take, in seconds.
        self._beat_pause = self._limit = ttl.total_seconds() / 3
        self._lock = threading.Condition()
        self._own = OwnConnection(open, self._limit, self._lock)
        self._threads: list[threading.Thread] = []
        # Where it stands: answered (the acquire), held, ending (the holder wants it to end), finished (the keeper).
        self._answered = self._held = self._ending = self._finished = False
        #: Its release was part of a transaction of the holder's.
        self._released = False
        #: Nobody waits for its acquire.
        self._given_up = False
        self._failure: BaseException | None = None
        self._deadline = self._next_beat = -math.inf
        self._beating = False
        self._beats = self._pauses = 0
        self._renewed: int | None = None
        self._guards: set[Handle] = set()
        self._task: asyncio.Task[Any] | None = None
        self._task_cancelled = False

    # What its holder asks

    @property
    def held(self) -> bool:
        """Whether it is ours at this moment, by our own clock."""
        with self._lock:
            return self._held and self.loss is None and now() < self._deadline

    @property
    def remaining(self) -> timedelta:
        """How long it is ours if no renewal comes through any more."""
        with self._lock:
            left = self._deadline - now() if self._held and self.loss is None else 0.0
            return timedelta(seconds=max(0.0, left))

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
        if not self._held:
            raise LeaseLost("released", self.names)

    def wait(self, span: timedelta) -> None:
        """Sleeps; raises LeaseLost as soon as the lease is lost."""
        end = now() + span.total_seconds()
        with self._lock:
            while self.loss is None and now() < end:
                self._lock.wait(max(0.0, min(end - now(), LOOK_AGAIN)))
        self.check()

    def renew(self) -> int | None:
        """Has it renewed at once, and returns the new token, which a `strict` table asks for when a row is written
        again; None when the renewal failed, which is no loss yet. Raises LeaseLost."""
        self.check()
        with self._lock:
            seen, self._renewed, self._next_beat = self._beats, None, -math.inf
            self._lock.notify_all()
            # Opening a connection may take two seconds beside the call itself.
            limit = 2 * self._limit + 3
            self._lock.wait_for(lambda: self._beats > seen or self._finished or self.loss is not None, limit)
            renewed = self._renewed
        self.check()
        return renewed

    # Acquire and release

    def acquire(self) -> bool:
        """Whether the lease could be had."""
        self._start()
        try:
            with self._lock:
                self._lock.wait_for(lambda: self._answered)
        except BaseException:
            self._give_up()
            raise
        return self._outcome()

    def release(self) -> None:
        """Gives it back. No error where that fails: then it ends at its ttl."""
        self._end()
        self._join()

    def __enter__(self) -> Lease:
        if not self.acquire():
            raise LeaseTaken(f"the lease {', '.join(self.names)} is taken")
        return self

    async def aacquire(self) -> bool:
        """As `acquire`, in asyncio."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()

        def answered() -> None:
            if not answer.done():
                answer.set_result(None)

        self._on_answer = lambda: loop.call_soon_threadsafe(answered)
        self._start()
        try:
            await answer
        except asyncio.CancelledError:
            self._give_up()
            raise
        return self._outcome()

    async def arelease(self) -> None:
        """As `release`, in asyncio."""
        self._end()
        await in_thread(self._join)

    async def __aenter__(self) -> Lease:
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()

        def cancel_task(_: LeaseLost) -> None:
            # The loop may be closed by then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._cancel_task)

        self._on_lost.append(cancel_task)
        try:
            granted = await self.aacquire()
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

    async def __aexit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
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

    # The threads

    def _start(self) -> None:
        if self._threads:
            raise RuntimeError("a lease is acquired once: ask the fence for another")
        for target, what in [(self._keep, "keeper"), (self._watch, "watch")]:
            # Daemons: one that hangs in the resolver must not keep the process from ending.
            thread = threading.Thread(target=target, name=f"pg_fence {what} {self.names[0]}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _outcome(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return self._held or self.loss is not None

    def _answer(self, failure: BaseException | None = None) -> None:
        with self._lock:
            self._failure, self._answered = failure, True
            self._lock.notify_all()
        self._on_answer()

    def _end(self) -> None:
        with self._lock:
            self._ending = True
            self._lock.notify_all()

    def _give_up(self) -> None:
        """Nobody waits for the acquire any more. A grant that comes all the same is given back."""
        self._given_up = True
        self._end()
        # The keeper waits for the answer: some poolers do not survive a client that cancels and hangs up.
        answered = lambda: self._answered  # noqa: E731
        name = f"pg_fence cancel {self.names[0]}"
        threading.Thread(target=self._own.cancel_until, args=[answered], name=name, daemon=True).start()

    def _join(self) -> None:
        for thread in self._threads:
            if thread is threading.current_thread():
                continue
            # A renewal, then the release, and opening a connection may take two seconds.
            thread.join(3 * self._limit + 3)

    def _watch(self) -> None:
        while True:
            with self._lock:
                if self._finished:
                    return
                if now() >= self._own.cut_at:
                    self._own.cut()
                deadline = self._deadline if self._held and self.loss is None else math.inf
                if now() < deadline:
                    pause = min(self._own.cut_at, deadline) - now()
                    self._lock.wait(max(0.0, min(pause, LOOK_AGAIN)))
                    continue
            self._lose("deadline")

    def _keep(self) -> None:
        try:
            if self._take():
                self._renew_until_the_end()
                self._give_back()
        finally:
            self._own.close()
            with self._lock:
                self._finished = True
                self._lock.notify_all()

    def _take(self) -> bool:
        try:
            before = now()
            token = self.token = self._acquire()
            # After a wait in line the server counts from a later moment than we do: a renewal mends that.
            while token is not None and now() >= before + self._beat_pause and not self._ending:
                before = now()
                token = self._renew()
        except Exception as error:
            self.token = None
            self._answer(error)
            return False
        if token is None:
            self.token = None
            self._answer()
            return False
        with self._lock:
            self._held = True
            self._counts_from(before, token)
        self._answer()
        return True

    def _acquire(self) -> int | None:
        if len(self.names) > 1:
            return self._acquire_all(now() + self._wait.total_seconds())
        call = self.sql("lease_acquire(%s, %s, %s, %s, %s, %s, %s, %s, %s)")
        one = [self.names[0], self._holder, self.ttl, self._wait, self._metadata]
        kind = [self._kind[what] for what in ("shared", "slots", "reclaim", "session")]
        token: int | None = self._own.call(self._limit + self._wait.total_seconds(), call, one + kind)
        return token

    def _acquire_all(self, until: float) -> int | None:
        call = self.sql("lease_acquire_all(%s::text[], %s, %s, %s, %s)")
        arguments = [list(self.names), self._holder, self.ttl, self._metadata, self._kind["session"]]
        while True:
            token: int | None = self._own.call(self._limit, call, arguments)
            if token is not None or now() >= until:
                return token
            with self._lock:
                # The server has no line to wait in for several at once.
                if self._lock.wait_for(lambda: self._ending, min(0.25, max(0.0, until - now()))):
                    return None

    def _renew_until_the_end(self) -> None:
        while True:
            with self._lock:
                while not self._ending and self.loss is None and (self._pauses or now() < self._next_beat):
                    self._lock.wait(max(0.0, min(self._next_beat - now(), LOOK_AGAIN)) if not self._pauses else None)
                if self._ending or self.loss is not None:
                    return
                self._beating = True
            try:
                self._beat()
            finally:
                with self._lock:
                    self._beating = False
                    self._beats += 1
                    self._lock.notify_all()

    def _beat(self) -> None:
        reuses_connection = self._own.is_open
        before = now()
        try:
            token = self._renew()
        except Exception as error:
            if reuses_connection and not self._own.is_open and not self._kind["session"]:
                # The connection had ended unseen since the last time: a new one may do at once.
                self._beat()
            else:
                self._heartbeat_failed(error)
            return
        if token is None:
            self._lose("gone")
            return
        with self._lock:
            self._counts_from(before, token)

    def _renew(self) -> int | None:
        token: int | None = self._own.call_within(self._limit, *self._on_names("lease_renew"))
        return token

    def _counts_from(self, before: float, token: int) -> None:
        """Granted or renewed by a call that was begun at `before`: from there the ttl counts."""
        self._deadline = before + self.ttl.total_seconds()
        self._next_beat = before + self._beat_pause
        self._renewed = token
        self._lock.notify_all()

    def _heartbeat_failed(self, error: Exception) -> None:
        """No loss yet where trying again can help: the deadline tells."""
        _log.warning("the lease %s was not renewed: %s", self.names[0], error)
        if is_permanent(error):
            self._lose("denied", error)
        elif self._kind["session"] and not self._own.is_open:
            self._lose("session", error)
        with self._lock:
            self._next_beat = now() + self._beat_pause / 4

    def _give_back(self) -> None:
        if self.loss is None and not self._released:
            try:
                closing = self._own.call_within(self._limit, *self._on_names("lease_release"))
                if closing is None and not self._given_up:
                    self._lose("gone")
            except Exception as error:
                _log.warning("the lease %s was not released, and ends at its ttl: %s", self.names[0], error)
        with self._lock:
            self._held = False

    def _lose(self, reason: str, cause: BaseException | None = None) -> None:
        with self._lock:
            if not self._held or self.loss is not None:
                return
            self.loss = LeaseLost(reason, self.names, cause)
            # What still works under it ends here, wherever it hangs.
            for handle in self._guards:
                handle.cut()
            if reason == "deadline":
                self._own.cut()
            self._lock.notify_all()
        _log.warning("%s", self.loss)
        for tell in self._on_lost:
            try:
                tell(self.loss)
            except Exception:
                _log.exception("on_lost failed")

    # For the transactions under it

    def refuse_if_over(self) -> None:
        self.check()

    def can_mend(self, error: BaseException) -> bool:
        return isinstance(error, NotSpeaking)

    def mend(self) -> bool:
        return self.renew() is not None

    def enter(self, handle: Handle) -> None:
        with self._lock:
            self._guards.add(handle)
        self.check()

    def leave(self, handle: Handle) -> None:
        with self._lock:
            self._guards.discard(handle)
        super().leave(handle)

    def beat_soon(self) -> None:
        with self._lock:
            self._next_beat = -math.inf
            self._lock.notify_all()

    def pause(self) -> None:
        with self._lock:
            self._pauses += 1

    def wait_for_heartbeat(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: not self._beating or self._finished)

    def go_on(self) -> None:
        with self._lock:
            self._pauses -= 1
            self._lock.notify_all()

    def has_been_released(self) -> None:
        with self._lock:
            self._released, self._held = True, False
        self._end()
