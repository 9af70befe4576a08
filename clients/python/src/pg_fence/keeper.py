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
from .errors import FenceError, LeaseLost, LeaseTaken, NotGranted, NotInstalled, sqlstate_of
from .keeping import Answer, Keeping, now
from .line import Handle, Line
from .source import Opener

_log = logging.getLogger("pg_fence")

#: Timers may stand still while the machine sleeps, and nothing tells that a session has ended: look again, in seconds.
LOOK_AGAIN = 1.0
#: No call takes longer, in seconds, whatever the ttl.
LONGEST = 10.0
#: Several names have no queue: so often they are tried, in seconds.
TRY_AGAIN = 0.25
#: What `lease_keep` takes at once; and how many are released in one transaction, which has its share of locks.
MOST_PAIRS, MOST_RELEASED = 10_000, 200

Kind = Literal["acquired", "renewed", "lost", "released"]


@dataclass(frozen=True)
class Event:
    """What `on_event` is told, in whatever thread it happens; it must not block. A loss has a `reason`."""

    kind: Kind
    names: tuple[str, ...]
    token: int
    remaining: timedelta
    reason: str | None


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
        return timedelta(seconds=max(0.0, self.keeping.deadline - now() if self.reason is None else 0.0))

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
        #: Calls that are under way.
        self._users = 0
        #: Both threads run as long as this is theirs.
        self._run: object | None = None
        #: The heartbeat fails; and a loss by that is in the log: one line an outage, however many leases there are.
        self._is_out = self._has_told = self.is_closed = False

    # What a fence asks of it. All of these block.

    def acquire(self, asked: Asked, given_up: threading.Event) -> Grant:
        """Raises LeaseTaken. A wait ends soon after `given_up` is set."""
        with self._in_use(begins=True):
            if not asked.wait or asked.session:
                return self._acquire(self._line, asked, given_up)
            # The others are renewed meanwhile.
            own = Line(self._open, self._alarm)
            try:
                return self._acquire(own, asked, given_up)
            finally:
                own.close()

    def claim(self, names: tuple[str, ...], n: int, ttl: float, holder: str) -> list[Grant]:
        with self._in_use(begins=True):
            before = now()
            rows = self._line.rows(statements.claim(self.prefix, names, n, holder, ttl), self._limit(ttl))
            grants = [Grant((name,), token, Keeping.granted(before, ttl)) for name, token in rows]
            try:
                return [self._granted(grant) for grant in grants]
            except LeaseLost:
                # Nobody has the others yet.
                self.release(grants)
                raise

    def release(self, grants: list[Grant]) -> None:
        """No error where that fails: then they end at their ttl."""
        with self._changed:
            # The connection, on which a session lease lives, is there until then.
            self._users += 1
        try:
            grants = self.end(grants, "released")
            while grants:
                some, grants = grants[:MOST_RELEASED], grants[MOST_RELEASED:]
                if not self._release(some):
                    return
        finally:
            self._used()

    def keep(self, grants: list[Grant]) -> None:
        """Renews them now."""
        pairs = [(name, grant.token) for grant in grants for name in grant.names]
        before, smallest = now(), min(grant.keeping.ttl for grant in grants)
        answers: list[Answer] = []
        try:
            for some in (pairs[i : i + MOST_PAIRS] for i in range(0, len(pairs), MOST_PAIRS)):
                call = statements.keep(self.prefix, some)
                # A guard may ask for it while the threads end.
                with self._in_use():
                    rows = self._line.rows(call, min(smallest / 3, LONGEST), urgent=True, repeats=True)
                answers += (Answer(*row) for row in rows)
        except (NotGranted, NotInstalled):
            # The statement itself: trying again cannot help.
            self.end(grants, "refused")
        except Exception as error:  # noqa: BLE001
            for grant in grants:
                grant.keeping.failed(smallest)
            if not self._is_out:
                _log.warning("leases are not renewed, and it is tried again: %s", error)
            self._is_out = True
        else:
            self._is_out = self._has_told = False
            self._take(grants, answers, before)

    def close(self) -> None:
        """Gives everything back, and ends the waits after their portions."""
        with self._changed:
            self.is_closed = True
            grants = list(self._grants)
        self.release(grants)
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._run is None, 3 * LOOK_AGAIN)

    def check(self, grant: Grant) -> None:
        """Raises LeaseLost where it is over, whatever the threads do."""
        if grant.reason is None and now() >= grant.keeping.deadline:
            self.end([grant], "deadline")
        if grant.reason is not None:
            raise grant.lost()

    def beat_soon(self, grants: Iterable[Grant]) -> None:
        """Has the next renewal tell whether they are lost."""
        with self._changed:
            for grant in grants:
                grant.keeping.beat_at = -math.inf
            self._changed.notify_all()

    def end(self, grants: Iterable[Grant], reason: str) -> list[Grant]:
        """Those that were not over before."""
        with self._changed:
            ended = [grant for grant in grants if grant.reason is None]
            for grant in ended:
                grant.reason = reason
                self._grants.discard(grant)
            cuts = [handle for grant in ended for handle in grant.guards if reason != "released"]
            self._changed.notify_all()
        for grant in ended:
            grant.on_end()
        for handle in cuts:
            handle.cut()
        if ended and reason != "released":
            by_outage = self._is_out and reason == "deadline"
            _log.log(logging.DEBUG if by_outage and self._has_told else logging.WARNING, "%s lost (%s)", _all_of(ended), reason)
            self._has_told = by_outage
            self.tell("lost", ended)
        return ended

    def tell(self, kind: Kind, grants: list[Grant]) -> None:
        for grant in grants if self._on_event else ():
            try:
                self._on_event(Event(kind, grant.names, grant.token, grant.remaining, grant.reason))  # type: ignore[misc]
            except Exception:  # noqa: BLE001
                _log.exception("on_event failed")

    # Calls

    def _acquire(self, line: Line, asked: Asked, given_up: threading.Event) -> Grant:
        until = now() + asked.wait
        while True:
            before = now()
            portion = asked.portion(until - before, 3 * self._limit(asked.ttl))
            limit = self._limit(asked.ttl) if line is self._line else min(asked.ttl / 3, LONGEST)
            try:
                ((token,),) = line.rows(asked.call(self.prefix, portion), portion + limit)
            except psycopg.errors.SerializationFailure:
                # The role's transactions are SERIALIZABLE.
                continue
            if token is not None:
                keeping = Keeping.granted(before, asked.ttl)
                return self._granted(Grant(asked.names, token, keeping, line.session if asked.session else None))
            if now() >= until or given_up.is_set() or self.is_closed:
                raise self._taken(line, asked, limit)
            if len(asked.names) > 1:
                given_up.wait(max(0.0, min(until - now(), TRY_AGAIN)))

    def _granted(self, grant: Grant) -> Grant:
        self.tell("acquired", [grant])
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
        return grant

    def _taken(self, line: Line, asked: Asked, limit: float) -> LeaseTaken:
        """By whom, where that can be seen."""
        with contextlib.suppress(psycopg.Error, FenceError):
            for holder, left in line.rows(statements.holder_of(self.prefix, asked.names), limit):
                return LeaseTaken(asked.names, holder, None if left is None else timedelta(seconds=left))
        return LeaseTaken(asked.names)

    def _release(self, grants: list[Grant]) -> bool:
        """In one transaction. Whether the server could be asked at all."""
        limit = self._limit(min(grant.keeping.ttl for grant in grants))
        pairs = [(name, grant.token) for grant in grants for name in grant.names]
        until, call = now() + limit, statements.release_aside(self.prefix, pairs, limit / 4)
        while True:
            try:
                with self._in_use():
                    answers = iter(self._line.rows(call, limit, repeats=True))
                break
            except Exception as error:  # noqa: BLE001
                # Somebody's open transaction has changed one of them.
                is_locked = sqlstate_of(error) == "55P03"
                if is_locked and len(grants) > 1:
                    return [self._release([grant]) for grant in grants].count(False) == 0
                if not is_locked or now() > until:
                    _log.warning("%s not released, and ends at its ttl: %s", _all_of(grants), error)
                    return sqlstate_of(error) != ""
                time.sleep(limit / 4)
        for grant in grants:
            if None in [next(answers)[0] for _ in grant.names]:
                grant.reason = "gone"
                _log.warning("%s lost (gone)", _all_of([grant]))
            self.tell("lost" if grant.is_lost else "released", [grant])
        return True

    def _take(self, grants: list[Grant], answers: list[Answer], before: float) -> None:
        got_on = any(answer.outcome == "kept" for answer in answers)
        rows = iter(answers)
        losses: dict[str, list[Grant]] = {}
        for grant in grants:
            mine = [next(rows) for _ in grant.names]
            reason = grant.keeping.answered(mine, before, got_on)
            if reason is not None:
                losses.setdefault(reason, []).append(grant)
            elif grant.reason is None and all(answer.outcome == "kept" for answer in mine):
                self.tell("renewed", [grant])
        for reason, lost in losses.items():
            self.end(lost, reason)

    def _limit(self, ttl: float) -> float:
        """How long a call may take: a third of that ttl and of all that are kept."""
        with self._changed:
            return min([LONGEST, ttl / 3, *(grant.keeping.ttl / 3 for grant in self._grants)])

    # Threads

    @contextlib.contextmanager
    def _in_use(self, begins: bool = False) -> Iterator[None]:
        with self._changed:
            if begins and self.is_closed:
                raise FenceError("the fence is closed")
            self._users += 1
        try:
            self._start()
            yield
        finally:
            self._used()

    def _used(self) -> None:
        with self._changed:
            self._users -= 1
            if not self._users and not self._grants:
                self._changed.notify_all()
                if self._run is None:
                    self._line.close()

    def _start(self) -> None:
        with self._changed:
            if self._run is not None:
                return
            run = self._run = object()
        try:
            for body in (self._beat, self._watch):
                threading.Thread(target=self._until_death, args=[body, run], name="pg_fence", daemon=True).start()
        except BaseException:
            self._died(run)
            raise

    def _until_death(self, body: Callable[[object], None], run: object) -> None:
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
            self._run, grants = None, list(self._grants)
            if not self._users:
                self._line.close()
        self.end(grants, "keeper")

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
                first = min((grant.keeping.due_at for grant in self._grants), default=math.inf)
                due = [grant for grant in self._grants if first <= now() and grant.keeping.goes_along]
                if not due:
                    self._sleep(first)
                bound = [grant for grant in self._grants if grant.session is not None]
            if bound:
                # A session lease ends with its connection.
                self._line.look()
                self.end([grant for grant in bound if grant.session != self._line.session], "session")
            if due:
                self.keep(due)

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
atexit.register(lambda: [keeper.close() for keeper in list(_all)])
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [keeper.forked() for keeper in list(_all)])
