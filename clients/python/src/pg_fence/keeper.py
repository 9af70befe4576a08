"""What keeps all leases of a fence: one thread renews them, and another one watches their deadlines."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import psycopg

from . import asked as statements
from .asked import Asked
from .clock import now
from .errors import FenceError, LeaseLost, LeaseTaken, sqlstate_of, told_by_call
from .keeping import Answer, Keeping, due, goes_along
from .line import Handle, Line
from .source import Opener

_log = logging.getLogger("pg_fence")

#: Timers may stand still while the machine sleeps, and nothing tells that a session has ended: look again, in seconds.
LOOK_AGAIN = 1.0

#: What `lease_keep` takes at once; and how many are released in one transaction, which has its share of locks.
MOST_PAIRS, MOST_RELEASED = 10_000, 200


@dataclass(frozen=True)
class Event:
    """What `on_event` is told, in whatever thread it happens; it must not block."""

    kind: Literal["acquired", "renewed", "lost", "released"]
    names: tuple[str, ...]
    token: int
    remaining: timedelta
    #: Of a loss.
    reason: str | None = None


@dataclass(eq=False)
class Grant:
    """A lease that was granted, until it is released or lost: then it has a reason."""

    names: tuple[str, ...]
    token: int
    keeping: Keeping
    #: The connection that a session lease lives on.
    session: int | None = None
    reason: str | None = None
    #: The connections that are in a guard of it.
    guards: set[Handle] = field(default_factory=set[Handle])
    #: Called when it is over, and must not block.
    on_end: Callable[[], object] = lambda: None

    @property
    def remaining(self) -> timedelta:
        left = self.keeping.deadline - now() if self.reason is None else 0.0
        return timedelta(seconds=max(0.0, left))

    @property
    def is_lost(self) -> bool:
        return self.reason not in (None, "released")

    def lost(self) -> LeaseLost:
        return LeaseLost(self.reason or "deadline", self.names)


class Keeper:
    """Its threads and its connection begin with the first lease, and end with the last."""

    def __init__(self, open: Opener, prefix: str, on_event: Callable[[Event], object] | None):
        self._open, self.prefix, self._on_event = open, prefix, on_event
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._grants: set[Grant] = set()
        #: When calls that are under way are to be broken off.
        self._alarms: dict[Handle, float] = {}
        self._line = Line(self._open, self._alarm)
        #: Calls that are under way, and the waits among them.
        self._users = 0
        self._waits: set[threading.Event] = set()
        #: Both threads run as long as this is theirs.
        self._run: object | None = None
        self._is_out = self.is_closed = False

    # What a fence asks of it. All of these block.

    def acquire(self, asked: Asked, given_up: threading.Event) -> Grant:
        """Raises LeaseTaken. A wait ends soon after `given_up` is set."""
        with self._in_use(given_up):
            if not asked.wait or asked.session:
                return self._acquire(self._line, asked, given_up)
            # The others are renewed meanwhile.
            own = Line(self._open, self._alarm)
            try:
                return self._acquire(own, asked, given_up)
            finally:
                own.close()

    def claim(self, names: tuple[str, ...], n: int, ttl: timedelta, holder: str) -> list[Grant]:
        with self._in_use(), self._telling(self._line):
            before = now()
            limit = self._smallest(ttl.total_seconds()) / 3
            rows = self._line.rows(statements.claim(self.prefix, names, n, holder, ttl), limit)
            return [self._granted((name,), token, before, ttl.total_seconds()) for name, token in rows]

    def release(self, grants: list[Grant]) -> None:
        """No error where that fails: then they end at their ttl."""
        grants = self.end(grants, "released")
        while grants:
            some, grants = grants[:MOST_RELEASED], grants[MOST_RELEASED:]
            if not self._release(some):
                return

    def _release(self, grants: list[Grant]) -> bool:
        """In one transaction. Whether the server could be asked at all."""
        pairs = [(name, grant.token) for grant in grants for name in grant.names]
        ttl = self._smallest(min(grant.keeping.ttl for grant in grants))
        until, call = now() + ttl / 3, statements.release_aside(self.prefix, pairs, ttl / 12)
        while True:
            try:
                with self._in_use():
                    answers = iter(self._line.rows(call, ttl / 3, repeats=True))
                break
            except Exception as error:  # noqa: BLE001
                # Somebody's open transaction has changed one of them.
                is_locked = sqlstate_of(error) == "55P03"
                if is_locked and len(grants) > 1:
                    return [self._release([grant]) for grant in grants].count(False) == 0
                if not is_locked or now() > until:
                    _log.warning("%s not released, and ends at its ttl: %s", _all_of(grants), error)
                    return sqlstate_of(error) is not None
                time.sleep(ttl / 12)
        for grant in grants:
            self.was_released(grant, None not in [next(answers)[0] for _ in grant.names])
        return True

    def was_released(self, grant: Grant, is_ours: bool) -> None:
        if not is_ours:
            grant.reason = "gone"
            _log.warning("%s lost (gone)", _all_of([grant]))
        self._tell("released" if is_ours else "lost", [grant])

    def keep(self, grants: list[Grant]) -> None:
        """Renews them now."""
        pairs = [(name, grant.token) for grant in grants for name in grant.names]
        before, smallest = now(), min(grant.keeping.ttl for grant in grants)
        answers: list[Answer] = []
        try:
            for some in (pairs[i : i + MOST_PAIRS] for i in range(0, len(pairs), MOST_PAIRS)):
                call = statements.keep(self.prefix, [name for name, _ in some], [token for _, token in some])
                answers += (Answer(*row) for row in self._line.rows(call, smallest / 3, urgent=True, repeats=True))
        except Exception as error:  # noqa: BLE001
            for grant in grants:
                grant.keeping.failed(now(), smallest)
            self._log_outage(error)
            return
        self._log_outage(None)
        self._take(grants, answers, before)

    def close(self) -> None:
        """Gives everything back, and ends the waits."""
        with self._changed:
            self.is_closed = True
            for given_up in self._waits:
                given_up.set()
            grants = list(self._grants)
        self.release(grants)
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._run is None, 3 * LOOK_AGAIN)

    # How a lease comes

    def _acquire(self, line: Line, asked: Asked, given_up: threading.Event) -> Grant:
        until = now() + asked.wait
        while True:
            before = now()
            smallest = self._smallest(asked.seconds)
            portion = asked.portion(until - before, smallest)
            with self._telling(line):
                # An acquire alone hangs no longer than its own ttl suggests.
                limit = portion + (smallest if line is self._line else asked.seconds) / 3
                token = self._try(line, asked, portion, limit)
            if token is not None:
                session = line.session if asked.session else None
                return self._granted(asked.names, token, before, asked.seconds, session)
            if now() >= until or given_up.is_set():
                raise self._taken(line, asked)
            if len(asked.names) > 1:
                given_up.wait(max(0.0, min(until - now(), statements.TRY_AGAIN)))

    def _try(self, line: Line, asked: Asked, portion: float, limit: float) -> int | None:
        until = now() + limit
        while True:
            try:
                token: int | None = line.value(asked.call(self.prefix, portion), limit)
                return token
            except psycopg.errors.SerializationFailure:
                # The role's transactions are SERIALIZABLE.
                if now() > until:
                    raise

    def _granted(self, names: tuple[str, ...], token: int, before: float, ttl: float, session: int | None = None) -> Grant:
        grant = Grant(names, token, Keeping.granted(before, ttl), session)
        if now() > grant.keeping.beat_at:
            # The call has waited, and the server counts from a later moment.
            self.keep([grant])
        with self._changed:
            if grant.reason is None and not self.is_closed:
                self._grants.add(grant)
                self._wake(grant.keeping.beat_at)
        if self.is_closed:
            self.release([grant])
        self.check(grant)
        self._tell("acquired", [grant])
        return grant

    def _taken(self, line: Line, asked: Asked) -> LeaseTaken:
        """By whom, where that can be seen."""
        with contextlib.suppress(psycopg.Error, FenceError):
            for holder, left in line.rows(statements.holder_of(self.prefix, asked.names), asked.seconds / 3):
                return LeaseTaken(asked.names, holder, None if left is None else timedelta(seconds=left))
        return LeaseTaken(asked.names)

    @contextlib.contextmanager
    def _telling(self, line: Line) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            told = told_by_call(error, line.role)
            if told is error:
                raise
            raise told from error

    # How it ends

    def check(self, grant: Grant) -> None:
        """Raises LeaseLost where it is over, whatever the threads do."""
        if grant.reason is None and now() >= grant.keeping.deadline:
            self.end([grant], "deadline")
        if grant.reason is not None:
            raise grant.lost()

    def end(self, grants: Iterable[Grant], reason: str) -> list[Grant]:
        """Those that were not over before."""
        with self._changed:
            ended = [grant for grant in grants if grant.reason is None]
            for grant in ended:
                grant.reason = reason
                self._grants.discard(grant)
            cuts = [handle for grant in ended for handle in grant.guards if reason != "released"]
            self._changed.notify_all()
        for handle in cuts:
            handle.cut()
        if ended and reason != "released":
            _log.warning("%s lost (%s)", _all_of(ended), reason)
            self._tell("lost", ended)
        for grant in ended:
            grant.on_end()
        return ended

    # Its threads

    @contextlib.contextmanager
    def _in_use(self, wait: threading.Event | None = None) -> Iterator[None]:
        with self._changed:
            if wait is not None and self.is_closed:
                raise FenceError("the fence is closed")
            self._users += 1
            if wait is not None:
                self._waits.add(wait)
        try:
            self._start()
            yield
        finally:
            with self._changed:
                self._users -= 1
                if wait is not None:
                    self._waits.discard(wait)
                if not self._users and not self._grants:
                    self._changed.notify_all()

    def _start(self) -> None:
        with self._changed:
            if self._run is not None:
                return
            run = self._run = object()
        try:
            for body in (self._beat, self._watch):
                threading.Thread(target=self._guarded, args=[body, run], name="pg_fence", daemon=True).start()
        except BaseException:
            self._died(run)
            raise

    def _guarded(self, body: Callable[[object], None], run: object) -> None:
        try:
            body(run)
        except BaseException:  # noqa: BLE001
            _log.exception("what kept the leases has died")
            self._died(run)

    def _died(self, run: object) -> None:
        """The next acquire begins with others."""
        with self._changed:
            if self._run is not run:
                return
            self._run = None
            grants = list(self._grants)
        self.end(grants, "keeper")
        if not self._users:
            self._line.close()

    def _beat(self, run: object) -> None:
        while True:
            with self._changed:
                if self._run is not run:
                    return
                if not self._grants and not self._users:
                    self._run = None
                    self._line.close()
                    self._changed.notify_all()
                    return
                is_due, at = due((grant.keeping for grant in self._grants), now())
                if not is_due:
                    self._sleep(at)
                some = [grant for grant in self._grants if is_due and goes_along(grant.keeping, now())]
            self._look_at_sessions()
            if some:
                self.keep(some)

    def _watch(self, run: object) -> None:
        while True:
            with self._changed:
                if self._run is not run:
                    return
                over = [grant for grant in self._grants if grant.keeping.deadline <= now()]
                for handle in [handle for handle, at in self._alarms.items() if at <= now()]:
                    del self._alarms[handle]
                    handle.cut()
                if not over:
                    deadlines = [*self._alarms.values(), *(grant.keeping.deadline for grant in self._grants)]
                    self._sleep(min(deadlines, default=math.inf))
            self.end(over, "deadline")

    def _sleep(self, until: float) -> None:
        self._changed.wait(max(0.0, min(until - now(), LOOK_AGAIN)))

    def _wake(self, at: float) -> None:
        """Where the threads may sleep for longer."""
        if at < now() + LOOK_AGAIN:
            self._changed.notify_all()

    @contextlib.contextmanager
    def _alarm(self, handle: Handle, limit: float) -> Iterator[None]:
        with self._changed:
            self._alarms[handle] = now() + limit
            self._wake(now() + limit)
        try:
            yield
        finally:
            with self._changed:
                self._alarms.pop(handle, None)

    def _look_at_sessions(self) -> None:
        """A session lease ends with its connection."""
        with self._changed:
            bound = [grant for grant in self._grants if grant.session is not None]
        if bound:
            self._line.look()
            self.end([grant for grant in bound if grant.session != self._line.session], "session")

    # Answers

    def _take(self, grants: list[Grant], answers: list[Answer], before: float) -> None:
        got_on = any(answer.outcome == "kept" for answer in answers)
        rows = iter(answers)
        losses: dict[str, list[Grant]] = {}
        renewed: list[Grant] = []
        for grant in grants:
            mine = [next(rows) for _ in grant.names]
            reason = grant.keeping.answered(mine, before, now(), got_on)
            if reason is not None:
                losses.setdefault(reason, []).append(grant)
            elif grant.reason is None and all(answer.outcome == "kept" for answer in mine):
                renewed.append(grant)
        for reason, lost in losses.items():
            self.end(lost, reason)
        self._tell("renewed", renewed)

    def beat_soon(self, grants: list[Grant]) -> None:
        """Has the next renewal tell whether they are lost."""
        with self._changed:
            for grant in grants:
                grant.keeping.soon()
            self._changed.notify_all()

    def _smallest(self, ttl: float) -> float:
        """Of that and the ttls that are kept: no call may take longer than a third of it."""
        with self._changed:
            return min([ttl, *(grant.keeping.ttl for grant in self._grants)])

    def _log_outage(self, error: Exception | None) -> None:
        if error is not None and not self._is_out:
            _log.warning("leases are not renewed, and it is tried again: %s", error)
        elif error is None and self._is_out:
            _log.info("leases are renewed again")
        self._is_out = error is not None

    def _tell(self, kind: Literal["acquired", "renewed", "lost", "released"], grants: list[Grant]) -> None:
        if self._on_event is None:
            return
        for grant in grants:
            try:
                self._on_event(Event(kind, grant.names, grant.token, grant.remaining, grant.reason))
            except Exception:  # noqa: BLE001
                _log.exception("on_event failed")

    def forked(self) -> None:
        """In the child there are no threads. The leases, and their session, are its parent's."""
        for grant in self._grants:
            grant.reason = "keeper"
        self._line.abandon()
        self._begin()


def _all_of(grants: list[Grant]) -> str:
    names = [name for grant in grants[:5] for name in grant.names]
    more = f" and {len(grants) - 5} more" if len(grants) > 5 else ""
    return ("the lease is" if len(grants) == 1 else "leases are") + f" {', '.join(names)}{more}:"


_all: weakref.WeakSet[Keeper] = weakref.WeakSet()


def _at_exit() -> None:
    for keeper in list(_all):
        keeper.close()


def _after_fork() -> None:
    for keeper in list(_all):
        keeper.forked()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
