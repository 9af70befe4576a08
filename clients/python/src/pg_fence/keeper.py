"""Keeps all leases of a fence: one thread renews them, and another one watches their deadlines."""

import atexit
import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from socket import socket
from typing import Any, Literal

import psycopg

from . import asked as statements
from .asked import Asked, Call
from .errors import FenceError, LeaseLost, LeaseTaken, NotGranted, NotInstalled, sqlstate_of
from .line import GivenUp, Line, Opener, cut, now
from .rows import Row, Statements, Table, statements_of

_log = logging.getLogger("pg_fence")

#: Timers may stand still while the machine sleeps, and nothing tells that a session has ended: look again, in seconds.
LOOK_AGAIN = 1.0
#: No call takes longer, in seconds, whatever the ttl.
LONGEST = 10.0
#: No portion of a wait takes longer, in seconds: its snapshot would hold back vacuum.
PORTION = 2.0
#: Several names have no queue: so often they are tried, in seconds.
TRY_AGAIN = 0.25
#: The most for one `lease_keep`; and for a release in one transaction, which has its share of locks.
MOST_PAIRS, MOST_RELEASED = 10_000, 200

#: A row that its worker's own transaction holds is looked at after a tenth of what remains; so often at the most, in seconds.
LOOK_AT_ROW = 1.0

#: The answer of `lease_keep` for one name: the outcome, what remains, and when to send it again. A row's may be `locked`.
Answer = tuple[str, float | None, float | None]

Kind = Literal["acquired", "renewed", "lost", "released"]


@dataclass(frozen=True)
class Event:
    """An event for `on_event`, in whatever thread it happens; it must not block. A loss has a `reason`."""

    kind: Kind
    names: tuple[str, ...]
    token: int
    remaining: timedelta
    reason: str | None


class Grant:
    """A lease that was granted, until it is released or lost: then it has a reason."""

    def __init__(
        self, names: tuple[str, ...], token: int, ttl: float, before: float, session: Any = None, row: Row | None = None
    ):
        """By a call that began at `before`, from where the ttl counts. `session`: the connection that it lives on. `row`: the
        row that it is a lease of, if it is none by name."""
        self.names, self.token, self.ttl, self.session, self.row = names, token, ttl, session, row
        self.deadline, self.beat_at = before + ttl, before + ttl / 3
        #: Transactions that are about to release it: it is not renewed meanwhile.
        self.resting = 0
        self.reason: str | None = None
        #: A commit was on its way when a task was cancelled.
        self.in_doubt = False
        #: The connections that are in a guard of it.
        self.handles = set[socket]()
        self.lost = threading.Event()
        #: Called at its loss, and must not block.
        self.on_loss: Callable[[], object] = lambda: None

    @property
    def remaining(self) -> timedelta:
        return timedelta(seconds=max(0.0, self.deadline - now() if self.reason is None else 0.0))

    @property
    def is_lost(self) -> bool:
        return self.reason not in (None, "released")

    def loss(self) -> LeaseLost:
        return LeaseLost(self.reason or "deadline", self.names, self.in_doubt)

    def answered(self, answers: list[Answer], before: float, got_on: bool) -> str:
        """Takes the answers, one for each name, to a call that began at `before`; `got_on`: it has kept something.
        Returns `kept`, `later`, or why the lease is lost."""
        outcomes = {outcome for outcome, _, _ in answers}
        if not outcomes.isdisjoint({"lost", "refused"}):
            return "later" if self.resting else "gone" if "lost" in outcomes else "refused"
        if outcomes == {"locked"}:
            self._is_locked(answers[0][1] or 0.0, before)
            return "later"
        again_in = min(self.ttl / 12 if again is None else again for _, _, again in answers)
        if outcomes == {"kept"}:
            self.deadline = before + min(remaining or 0.0 for _, remaining, _ in answers)
            self.beat_at = before + again_in
            return "kept"
        # Out of locks: at once, in another transaction, as long as that helps.
        self.beat_at = now() + (again_in if got_on or again_in > 0 else self.ttl / 12)
        return "later"

    def _is_locked(self, left: float, before: float) -> None:
        """The row has the token, and is locked, mostly by a transaction of its own worker: nobody can come before that ends,
        so it is ours until the next look, whatever its deadline."""
        again_in = max(left / 10, min(LOOK_AT_ROW, self.ttl / 12) if left > 0 else LOOK_AT_ROW)
        self.beat_at = before + again_in
        until_next_look = self.beat_at + max(LOOK_AT_ROW, min(self.ttl / 3, LONGEST))
        self.deadline = max(self.deadline, before + left, until_next_look)

    @property
    def due_at(self) -> float:
        return math.inf if self.resting else self.beat_at


class Keeper:
    """Its threads and its connection begin with the first lease, and end with the last."""

    def __init__(self, open: Opener, prefix: str, on_event: Callable[[Event], object] | None):
        self._open, self._prefix, self._on_event = open, prefix, on_event
        self._changed = threading.Condition()
        self._grants: set[Grant] = set()
        self._line = Line(self._open)
        #: Of tables whose rows are leases.
        self._statements: dict[Table, Statements] = {}
        #: Calls that are under way.
        self._users = 0
        #: The work that threads do again and again, as long as there are leases or calls.
        self._running = set[Callable[[], None]]()
        #: Where the heartbeat fails: of leases by name, or of a table; and a loss by that is in the log: one line an outage,
        #: however many leases there are.
        self._outages: set[Table | None] = set()
        self._has_told = self.is_closed = False
        _all.add(self)

    def call(self, sql: str, *arguments: Any) -> Call:
        return sql.format(self._prefix), list(arguments)

    # Called by a fence. All of these block.

    def acquire(self, asked: Asked, given_up: GivenUp) -> Grant:
        """Raises LeaseTaken. A wait ends soon after it is given up."""
        until = now() + asked.wait
        with self._in_use(begins=True), contextlib.closing(Line(self._open)) as own:
            # The others are renewed meanwhile; but a session lease lives on their connection.
            line = own if asked.wait and not asked.session else self._line
            while True:
                before = now()
                limit = self._limit(asked.ttl) if line is self._line else min(asked.ttl / 3, LONGEST)
                portion = max(0.0, min(until - before, PORTION, limit if asked.session else PORTION))
                call = self.call(*asked.call(portion))
                ((token, holder, left),) = self._acquiring(line, call, portion + limit, given_up)
                if token is not None:
                    # Where the connection has ended since, it is none that the lease could live on.
                    session = (line.connection or line) if asked.session else None
                    return self._granted(Grant(asked.names, token, asked.ttl, before, session))
                if now() >= until or given_up() or self.is_closed:
                    raise LeaseTaken(asked.names, holder, None if left is None else timedelta(seconds=left))
                if len(asked.names) > 1:
                    time.sleep(max(0.0, min(until - now(), TRY_AGAIN)))

    def _acquiring(self, line: Line, call: Call, limit: float, given_up: GivenUp) -> list[tuple[Any, ...]]:
        while True:
            # The role's transactions may be SERIALIZABLE.
            with contextlib.suppress(psycopg.errors.SerializationFailure):
                return line.rows(call, limit, given_up)

    def keep_row(self, row: Row, token: int, ttl: float) -> Grant:
        """Renews what an UPDATE of the program's own has claimed. Raises LeaseLost where somebody else has it."""
        with self._in_use(begins=True):
            while True:
                before = now()
                grant = Grant((row.name,), token, ttl, before, row=row)
                (answers,), error = self._ask_rows([grant], self._limit(ttl))
                if error is None:
                    break
                # The role's transactions may be SERIALIZABLE.
                if sqlstate_of(error) != "40001":
                    raise error
            # How long it was claimed for is the answer's to say.
            grant.deadline = before
            if (outcome := grant.answered(answers, before, True)) not in {"kept", "later"}:
                raise LeaseLost(outcome, grant.names)
            return self._granted(grant)

    def release(self, grants: list[Grant]) -> None:
        """No error where that fails: then they end at their ttl. A row is given back by an UPDATE of its worker's own."""
        # In use, for the connection, on which a session lease lives, is there until then.
        with self._in_use():
            ended = self.end(grants, "released")
            self.tell("released", [grant for grant in ended if grant.row])
            grants = [grant for grant in ended if not grant.row]
            while grants and self._release(grants[:MOST_RELEASED]):
                grants = grants[MOST_RELEASED:]

    def keep(self, grants: list[Grant]) -> None:
        """Renews them now."""
        of_table: dict[Table | None, list[Grant]] = {}
        for grant in grants:
            of_table.setdefault(grant.row and grant.row.table, []).append(grant)
        for table, some in of_table.items():
            self._keep(table, some)

    def _keep(self, table: Table | None, grants: list[Grant]) -> None:
        """Those by name, or those of one table."""
        before, smallest = now(), min(grant.ttl for grant in grants)
        answers: list[list[Answer]] = []
        try:
            # A guard may ask for it while the threads end.
            with self._in_use():
                answers, failed = (self._ask_rows if table else self._ask_names)(grants, min(smallest / 3, LONGEST))
        except (NotGranted, NotInstalled):
            # The statement itself: trying again cannot help.
            self.end(grants, "refused")
            return
        except Exception as error:  # noqa: BLE001
            # That is no loss: the deadline tells.
            failed = error
            for grant in grants:
                grant.beat_at = now() + smallest / 12
        if failed is None:
            self._outages.discard(table)
            self._has_told = self._has_told and bool(self._outages)
        elif table not in self._outages:
            self._outages.add(table)
            _log.warning("leases are not renewed, and it is tried again: %s", failed)
        got_on = any(outcome == "kept" for mine in answers for outcome, _, _ in mine)
        told: dict[str, list[Grant]] = {"kept": [], "later": []}
        for grant, mine in zip(grants, answers, strict=False):
            if grant.reason is None:
                told.setdefault(grant.answered(mine, before, got_on), []).append(grant)
        self.tell("renewed", told.pop("kept"))
        del told["later"]
        for reason, lost in told.items():
            self.end(lost, reason)

    def _ask_names(self, grants: list[Grant], limit: float) -> tuple[list[list[Answer]], None]:
        names, tokens = pairs_of(grants)
        answers: list[Any] = []
        for part in (slice(at, at + MOST_PAIRS) for at in range(0, len(names), MOST_PAIRS)):
            answers += self._line.rows(self.call(statements.KEEP, names[part], tokens[part]), limit)
        rows = iter(answers)
        return [[next(rows) for _ in grant.names] for grant in grants], None

    def _ask_rows(self, grants: list[Grant], limit: float) -> tuple[list[list[Answer]], Exception | None]:
        """Of one table."""
        (table,) = {grant.row.table for grant in grants if grant.row}

        def ask(call: Call) -> list[tuple[Any, ...]]:
            try:
                return self._line.rows(call, limit)
            except NotGranted as error:
                where = ".".join(table.names)
                raise NotGranted(f"the role may not keep rows of {where}, for which it needs SELECT and UPDATE: {error.__cause__}") from error
            except NotInstalled as error:
                # Nothing of the extension's is called: it is the table's schema, or a type, that is not there.
                raise error.__cause__ or error from None

        answers: list[list[Answer]] = []
        failed: Exception | None = None
        try:
            of_table = self._statements.get(table) or self._statements.setdefault(table, statements_of(table, ask))
            for at in range(0, len(grants), MOST_PAIRS):
                given = [(grant.row.values, grant.token, grant.ttl) for grant in grants[at : at + MOST_PAIRS] if grant.row]
                some, error = of_table.keep(given, ask)
                answers, failed = answers + [[answer] for answer in some], error or failed
        except Exception:
            # The table may have been altered.
            self._statements.pop(table, None)
            raise
        return answers, failed

    def close(self) -> None:
        """Gives everything back, and ends the waits after their portions."""
        self.is_closed = True
        self.release(list(self._grants))
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running, 3 * LOOK_AGAIN)

    def check(self, grant: Grant) -> None:
        """Raises LeaseLost where it is over, whatever the threads do."""
        if now() >= grant.deadline:
            self.end([grant], "deadline")
        if grant.reason is not None:
            raise grant.loss()

    def end(self, grants: Iterable[Grant], reason: str) -> list[Grant]:
        """Returns the leases that were not over before."""
        with self._changed:
            ended = [grant for grant in grants if grant.reason is None]
            for grant in ended:
                grant.reason = reason
                self._grants.discard(grant)
            handles = [handle for grant in ended for handle in grant.handles]
            self._changed.notify_all()
        if ended and reason != "released":
            for handle in handles:
                cut(handle)
            for grant in ended:
                grant.lost.set()
                # An event loop may be closed by then.
                with contextlib.suppress(RuntimeError):
                    grant.on_loss()
            by_outage = bool(self._outages) and reason == "deadline"
            level = logging.DEBUG if by_outage and self._has_told else logging.WARNING
            _log.log(level, "%s lost (%s)", _all_of(ended), reason)
            self._has_told = by_outage
            self.tell("lost", ended)
        return ended

    def tell(self, kind: Kind, grants: list[Grant]) -> None:
        for grant in grants if self._on_event else ():
            try:
                self._on_event(Event(kind, grant.names, grant.token, grant.remaining, grant.reason))  # type: ignore[misc]
            except Exception:  # noqa: BLE001
                _log.exception("on_event failed")

    def _granted(self, grant: Grant) -> Grant:
        """Begins to keep it. Raises LeaseLost."""
        try:
            self.tell("acquired", [grant])
            if now() > grant.beat_at:
                # The call has waited, and the server counts from a later moment.
                self.keep([grant])
            with self._changed:
                if grant.reason is None:
                    self._grants.add(grant)
                    self._changed.notify_all()
        except BaseException:
            # Nobody gets it: `on_event` has ended the thread.
            self.release([grant])
            raise
        if self.is_closed:
            self.release([grant])
        self.check(grant)
        return grant

    def _release(self, grants: list[Grant]) -> bool:
        """In one transaction. Whether the server could be asked at all."""
        limit = self._limit(min(grant.ttl for grant in grants))
        lock_limit = str(max(10, round(limit / 4 * 1000)))
        until, call = now() + limit, self.call(statements.RELEASE_ASIDE, lock_limit, *pairs_of(grants))
        while True:
            try:
                answers = iter(self._line.rows(call, limit))
                break
            except Exception as error:  # noqa: BLE001
                # Somebody's open transaction has changed one of them.
                is_locked = sqlstate_of(error) in {"55P03", "40001"}
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

    def _limit(self, ttl: float) -> float:
        """How long a call may take: a third of that ttl and of all that are kept."""
        with self._changed:
            return min([LONGEST, ttl / 3, *(grant.ttl / 3 for grant in self._grants)])

    @contextlib.contextmanager
    def _in_use(self, begins: bool = False) -> Iterator[None]:
        """There are threads, and the connection is not closed meanwhile."""
        with self._changed:
            if begins and self.is_closed:
                raise FenceError("the fence is closed")
            for step in {self._beat, self._watch} - self._running if not self.is_closed else ():
                threading.Thread(target=self._repeat, args=[step], name="pg_fence", daemon=True).start()
                self._running.add(step)
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def _repeat(self, step: Callable[[], None]) -> None:
        while True:
            with self._changed:
                if not self._grants and not self._users:
                    self._running.discard(step)
                    if not self._running:
                        self._line.close()
                    self._changed.notify_all()
                    return
            try:
                step()
            except BaseException:  # noqa: BLE001
                # Of whatever: it goes on with the leases that come.
                _log.exception("what kept the leases has died")
                self.end(list(self._grants), "keeper")

    def _beat(self) -> None:
        with self._changed:
            first, at = min((grant.due_at for grant in self._grants), default=math.inf), now()
            # Leases that are due soon go along.
            due = [grant for grant in self._grants if first <= at and grant.due_at <= at + grant.ttl / 6]
            if not due:
                self._sleep(first)
            bound = [grant for grant in self._grants if grant.session]
        if bound:
            # A session lease ends with its connection.
            connection = self._line.look()
            self.end([grant for grant in bound if grant.session is not connection], "session")
        if due:
            self.keep(due)

    def _watch(self) -> None:
        with self._changed:
            over = [grant for grant in self._grants if grant.deadline <= now()]
            if not over:
                self._sleep(min((grant.deadline for grant in self._grants), default=math.inf))
        self.end(over, "deadline")

    def _sleep(self, until: float) -> None:
        self._changed.wait(max(0.0, min(until - now(), LOOK_AGAIN)))

    def forked(self) -> None:
        """In the child there are no threads. The leases, and their session, are its parent's."""
        for grant in self._grants:
            grant.reason = "keeper"
        # Kept, so that nobody closes its connection.
        _of_the_parent.append(self._line)
        self.__init__(self._open, self._prefix, self._on_event)


def pairs_of(grants: Sequence[Grant]) -> tuple[list[str], list[int]]:
    names = [name for grant in grants for name in grant.names]
    return names, [grant.token for grant in grants for _ in grant.names]


def _all_of(grants: list[Grant]) -> str:
    names = [name for grant in grants[:5] for name in grant.names]
    more = f" and {len(grants) - 5} more" if len(grants) > 5 else ""
    return ("the lease is" if len(grants) == 1 else "leases are") + f" {', '.join(names)}{more}:"


_all: weakref.WeakSet[Keeper] = weakref.WeakSet()
_of_the_parent: list[Line] = []
atexit.register(lambda: [keeper.close() for keeper in list(_all)])
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [keeper.forked() for keeper in list(_all)])
