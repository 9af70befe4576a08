"""The heartbeat of all leases of a fence: one thread, and one connection."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psycopg

from .connection import OwnConnection, now
from .errors import concerns_all, is_permanent
from .watch import LOOK_AGAIN, Watch

if TYPE_CHECKING:
    from .lease import Lease

_log = logging.getLogger("pg_fence")

#: What the keeper does beside renewing, on its connection. It returns when it is to be tried again; None: it is done.
Job = Callable[[OwnConnection], float | None]

#: How many leases one statement renews: the server's table of locks has an end.
BATCH = 500

#: What part of the smallest ttl a renewal may wait for somebody's open transaction, and at least so many seconds.
LOCK_PART, SHORTEST_LOCK_WAIT = 240, 0.01

#: How long the end of the last lease waits for the threads to end, in seconds.
_LAST_WORDS = 3.0


class Batch(list["Lease"]):
    """Leases that one statement renews."""

    #: What is left of one that was refused. It waits for a lock for a tenth of the time, for there may be many.
    is_part = False


class Keeper:
    """Renews what is held, acquires and releases. Its connection is opened with the first lease and closed with the
    last; so are its threads."""

    # watch.lock guards all of it. A lease has a lock of its own, which may be taken under that one, but not the other
    # way round.

    def __init__(self, open: Callable[[float], psycopg.Connection[Any]], prefix: str):
        self.prefix = prefix
        self._open = open
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self.watch = Watch()
        self._changed = threading.Condition(self.watch.lock)
        self._thread: threading.Thread | None = None
        self._jobs: list[tuple[float, int, Job]] = []
        self._order = itertools.count()
        #: Leases whose holder has forgotten them. Nothing is locked for it: garbage is collected at any time.
        self._forgotten: deque[Job] = deque()
        #: When the next renewal is due.
        self._beats_at = math.inf
        #: What is being renewed, in its order.
        self._batches: deque[Batch] = deque()
        self._taken: set[Lease] = set()

    def connection(self, open_limit: float) -> OwnConnection:
        """One that is used beside the keeper's, and watched as that one is."""
        return OwnConnection(self._open, open_limit, self.watch)

    # What leases ask

    def do(self, job: Job) -> None:
        """As soon as no renewal is due."""
        with self.watch.lock:
            heapq.heappush(self._jobs, (-math.inf, next(self._order), job))
            self._go_on()

    def keep(self, lease: Lease) -> None:
        """From now on it is renewed, and its deadline watched."""
        with self.watch.lock:
            self.watch.add(lease)
            self.beat_by(lease._next_beat)

    def beat_by(self, when: float) -> None:
        """A lease is to be renewed by then."""
        with self.watch.lock:
            self._beats_at = min(self._beats_at, when)
            self._go_on()

    def drop(self, lease: Lease) -> None:
        with self.watch.lock:
            self.watch.remove(lease)
            self._changed.notify_all()

    def forget(self, job: Job) -> None:
        """From a lease that is being collected, wherever that happens."""
        self._forgotten.append(job)
        if self.watch.lock.acquire(blocking=False):
            try:
                with contextlib.suppress(RuntimeError):
                    self._go_on()
            finally:
                self.watch.lock.release()

    def settle(self) -> None:
        """Waits for the end of threads that nobody needs any more."""
        with self.watch.lock:
            if self._is_needed():
                return
            threads = [self._thread, self.watch.idle_thread()]
        for thread in threads:
            if thread is not None and thread is not threading.current_thread():
                thread.join(_LAST_WORDS)

    def limit(self, ttl: float = math.inf) -> float:
        """How long a call may take: a third of the smallest ttl, for the others wait meanwhile."""
        with self.watch.lock:
            return min([ttl, *(lease._seconds for lease in self.watch.leases)]) / 3

    def lock_limit(self, ttl: float = math.inf) -> float:
        """How long it may wait for a lock."""
        return max(SHORTEST_LOCK_WAIT, self.limit(ttl) * 3 / LOCK_PART)

    # The thread

    def _is_needed(self) -> bool:
        return bool(self._jobs or self._forgotten or self.watch.leases)

    def _go_on(self) -> None:
        if self._thread is None:
            # A daemon: one that hangs in the resolver must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="pg_fence keeper", daemon=True)
            self._thread.start()
        else:
            self._changed.notify_all()

    def _run(self) -> None:
        own = self.connection(math.inf)
        try:
            while self._step(own):
                pass
        finally:
            own.close()
            with self.watch.lock:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _step(self, own: OwnConnection) -> bool:
        """Renews one batch of what is due, then does one job. False: there is nothing to do any more."""
        with self.watch.lock:
            while True:
                while self._forgotten:
                    heapq.heappush(self._jobs, (-math.inf, next(self._order), self._forgotten.popleft()))
                # Before what is left of a batch that was refused.
                self._batches.extendleft(reversed(self._due()))
                job = heapq.heappop(self._jobs)[2] if self._jobs and self._jobs[0][0] <= now() else None
                if self._batches or job is not None:
                    break
                if not self._is_needed():
                    own.close()
                    self._thread = None
                    return False
                next_job = self._jobs[0][0] if self._jobs else math.inf
                self._changed.wait(max(0.0, min(self._beats_at, next_job, now() + LOOK_AGAIN) - now()))
        own.open_limit = self.limit()
        if self._batches:
            self._beat(own, self._batches.popleft())
        if job is not None:
            self._do(own, job)
        return True

    def _do(self, own: OwnConnection, job: Job) -> None:
        try:
            again_at = job(own)
        except Exception:  # noqa: BLE001
            _log.exception("this should not happen")
            return
        if again_at is not None:
            with self.watch.lock:
                heapq.heappush(self._jobs, (again_at, next(self._order), job))

    def _due(self) -> list[Batch]:
        """What is to be renewed now. Leases with as short a ttl come along, and from then on beat together; so do those
        that are nearly due. One that stands apart is alone, and there is one of these at a time."""
        at = now()
        if at < self._beats_at:
            return []
        kept = [one for one in self.watch.leases if one._is_kept and one not in self._taken]
        together = [one for one in kept if not one._stands_apart]
        apart = [one for one in kept if one._stands_apart and one._next_beat <= at]
        due = [one for one in together if one._next_beat <= at]
        batches: list[Batch] = []
        if due:
            # One that is to be renewed at once, out of turn, brings no others.
            longest = max((one._seconds for one in due if one._next_beat > -math.inf), default=0.0)
            near = [one for one in together if one._next_beat <= at + one._seconds / 12 or one._seconds <= longest]
            single = sorted((one for one in near if len(one.names) == 1), key=lambda one: one.names[0].encode())
            batches = [Batch(single[first : first + BATCH]) for first in range(0, len(single), BATCH)]
            batches += [Batch([one]) for one in near if len(one.names) > 1]
        if apart:
            batches.append(_part([min(apart, key=lambda one: one._next_beat)]))
        self._taken.update(one for batch in batches for one in batch)
        self._beats_at = min((one._next_beat for one in kept if one not in self._taken), default=math.inf)
        return batches

    def _beat(self, own: OwnConnection, taken: Batch) -> None:
        batch = Batch(lease for lease in taken if lease._begin_beat())
        batch.is_part = taken.is_part
        parts: list[Batch] = []
        try:
            parts = self._renew_on_an_open_connection(own, batch) if batch else []
        except Exception as error:  # noqa: BLE001
            # For the others in turn, too, there is no connection.
            for lease in [*batch, *(lease for other in self._batches for lease in other)]:
                lease._beat_failed(error)
                self._taken.discard(lease)
            self._batches.clear()
        finally:
            for lease in batch:
                lease._end_beat()
        self._batches.extend(parts)
        self._taken.difference_update(taken)
        self._taken.update(lease for part in parts for lease in part)
        # Those that rested, or were answered.
        self.beat_by(min((lease._next_beat for lease in taken if lease not in self._taken), default=math.inf))

    def _renew_on_an_open_connection(self, own: OwnConnection, batch: Batch) -> list[Batch]:
        reuses_connection = own.is_open
        try:
            return self._renew(own, batch)
        except Exception:
            if not reuses_connection or own.is_open:
                raise
            # It had ended unseen since the last time: a new one may do at once.
            return self._renew(own, batch)

    def _renew(self, own: OwnConnection, batch: Batch) -> list[Batch]:
        """Renews them, each with an answer of its own, and returns what is to be tried in parts. Raises where the
        connection fails."""
        before = now()
        try:
            answers = self._ask(own, batch)
        except Exception as error:
            if not own.is_open:
                raise
            return self._refused(batch, error)
        for lease in batch:
            lease._renewed(before, answers.get(lease.token))
        return []

    def _ask(self, own: OwnConnection, batch: Batch) -> dict[int | None, int | None]:
        """The new token for each token."""
        limits = self.limit(), self.lock_limit() / (10 if batch.is_part else 1)
        if len(batch[0].names) > 1:
            (lease,) = batch
            return {lease.token: own.value(*limits, *lease._on_names("lease_renew"))}
        sql = (
            f"SELECT x.token, {self.prefix}lease_renew(x.name, x.token)"
            " FROM unnest(%s::text[], %s::bigint[]) AS x(name, token)"
        )
        arguments = [[lease.names[0] for lease in batch], [lease.token for lease in batch]]
        return dict(own.rows(*limits, sql, arguments))  # type: ignore[arg-type]

    def _refused(self, batch: Batch, error: Exception) -> list[Batch]:
        """The statement failed. Halved until the lease that it failed for stands alone, it holds up no other."""
        if len(batch) == 1 or concerns_all(error):
            for lease in batch:
                lease._stands_apart = not concerns_all(error) and not is_permanent(error)
                lease._beat_failed(error)
            return []
        middle = len(batch) // 2
        return [_part(batch[:middle]), _part(batch[middle:])]


def _part(leases: list[Lease]) -> Batch:
    part = Batch(leases)
    part.is_part = True
    return part


_all: weakref.WeakSet[Keeper] = weakref.WeakSet()


def _after_fork() -> None:
    """The child has no threads. The leases, and their sessions, are its parent's."""
    for keeper in list(_all):
        for lease in list(keeper.watch.leases):
            lease._abandon()
        keeper._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
