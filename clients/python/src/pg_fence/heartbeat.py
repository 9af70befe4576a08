"""The heartbeat of a fence, which renews its leases. It owns the clock, the threads and the
connections. One thread gives all inputs to LeaseStates, which decides, and carries out the effects.
Another one calls the program's handlers of events and of the log, which may block."""

import asyncio
import atexit
import contextlib
import logging
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from socket import socket
from typing import Literal, NamedTuple

import psycopg

from . import statements
from .connection import Connection, Opener, cut, in_thread, outcome, run, started, uncancellable
from .errors import FenceError, LeaseLost, LeaseTaken, never_opens, sqlstate_of, typed
from .lease_state import (
    CHECK_INTERVAL,
    LONGEST_CALL,
    LOST,
    NEVER,
    Call,
    Effect,
    LeaseState,
    LeaseStates,
    error_type,
)
from .statements import Statement

_log = logging.getLogger("pg_fence")

Kind = Literal["acquired", "renewed", "lost", "released", "interrupted"]


class Event(NamedTuple):
    """A change of a lease, for `on_event`, which is called in a thread of the fence. While it blocks,
    later events and the answers to acquires wait, and the heartbeat goes on. A loss has a `reason`,
    and so has a release without an answer (`unconfirmed`). `interrupted` comes from `lead`, which no
    longer leads and will try again."""

    kind: Kind
    names: tuple[str, ...]
    token: int
    remaining: timedelta
    reason: str | None


#: A clock that runs while the computer sleeps, where there is one.
_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", None)


def now() -> int:
    """Returns the milliseconds of the clock of all times and deadlines."""
    ns = time.monotonic_ns() if _BOOTTIME is None else time.clock_gettime_ns(_BOOTTIME)
    return ns // 1_000_000


#: How long close() waits for the handlers of the last events and lines of the log, in seconds.
_REPORTED = 1.0
_MILLISECOND = timedelta(milliseconds=1)
_LONGEST_SPAN = timedelta.max // _MILLISECOND


def span(ms: int) -> timedelta:
    return min(ms, _LONGEST_SPAN) * _MILLISECOND


@dataclass(eq=False)
class Holding(LeaseState):
    """A lease, and what the threads of the program wait for."""

    #: The result of the acquire: None, or an error.
    granted: Future[None] = field(default_factory=uncancellable)
    #: The error of its last call, and the login role of that connection.
    cause: BaseException | None = None
    role: str = ""
    #: `lost` is set at a loss, `renewed` at a renewal or the end, `ended` at the end.
    lost: threading.Event = field(default_factory=threading.Event)
    renewed: threading.Event = field(default_factory=threading.Event)
    ended: Future[None] = field(default_factory=uncancellable)
    #: The sockets of the connections with a guard of this lease.
    sockets: set[socket] = field(default_factory=set)
    #: True if a task was cancelled while its commit was under way.
    in_doubt: bool = False
    #: Called at the loss. It must not block.
    on_loss: Callable[[], object] = lambda: None

    @property
    def display_names(self) -> tuple[str, ...]:
        return (self.table.named(self.names[0]),) if self.table else self.names

    @property
    def is_lost(self) -> bool:
        return self.end_reason(now()) not in {"", "released"}

    def loss(self) -> LeaseLost:
        return LeaseLost(
            self.end_reason(now()) or "gone", self.display_names, self.in_doubt, self.advice
        )

    def check(self) -> None:
        """Raises LeaseLost if the lease is not held, without waiting for the heartbeat's thread."""
        if self.end_reason(now()):
            raise self.loss()

    def end(self) -> None:
        self.renewed.set()
        self.ended.set_result(None)


class Heartbeat:
    """The threads and connections exist from the first lease to the last."""

    def __init__(self, open: Opener, prefix: str, on_event: Callable[[Event], object] | None):
        self._open, self._prefix, self._on_event = open, prefix, on_event
        self.states = LeaseStates(random.randrange(1001))
        self._holdings: dict[str, Holding] = {}
        self._connections: dict[int, Connection] = {}
        self._checked_at = 0
        #: The reasons and names of the leases that a step has ended, for the log.
        self._ended: list[tuple[str, str]] = []
        #: The inputs, each with the number of the call that it answers, or 0.
        self._inbox: queue.SimpleQueue[tuple[Callable[[], object], int, Future[None]]]
        self._inbox = queue.SimpleQueue()
        self._lock, self._run_lock = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        #: The calls of the program's handlers that a step makes, and the answers after them.
        self._reports: list[Callable[[], object]] = []
        #: The reports of earlier steps, for the thread that calls them.
        self._batches: queue.SimpleQueue[list[Callable[[], object]]] = queue.SimpleQueue()
        #: That thread, or None if there is nothing to call.
        self._reporter: threading.Thread | None = None
        #: Done when the fence is closed, and when the handlers have had the last reports.
        self._closed, self._reported = uncancellable(), uncancellable()
        _heartbeats.add(self)

    @property
    def is_closed(self) -> bool:
        return self.states.closed_at < NEVER

    def of_schema(self, statement: Statement) -> Statement:
        return statement[0].format(self._prefix), statement[1]

    # Requests of the program. A signal handler's exception can interrupt any of these methods.

    def input(self, decide: Callable[[], object]) -> Future[None]:
        """Queues an input. The future is done when the effects have been carried out."""
        if threading.current_thread() in {self._thread, self._reporter}:
            raise RuntimeError("on_event must not wait for its fence")
        return self._put(decide)

    def _put(self, decide: Callable[[], object], answer_to: int = 0) -> Future[None]:
        future = uncancellable()
        self._inbox.put((decide, answer_to, future))
        with self._lock:
            if self._thread is None:
                self._thread = started(self._run, "pg_fence")
        return future

    def acquire(self, holding: Holding) -> None:
        def decide() -> None:
            self._holdings[holding.id] = holding
            self.states.acquire(holding)

        self.input(decide)

    def give_up(self, id: str) -> None:
        """Ends an acquire whose caller no longer waits, and releases what it was granted."""
        self.input(lambda: (self.states.give_up(id), self.states.release(id)))

    async def release(self, holding: Holding, is_async: bool) -> None:
        """Releases the lease. If that fails no error is raised, and it ends at its ttl."""
        self.input(lambda: self.states.release(holding.id))
        await outcome(holding.ended, is_async)

    async def renew(self, holdings: Sequence[Holding], is_async: bool) -> None:
        """Renews the leases at once, and waits for the outcome."""
        for holding in holdings:
            holding.renewed.clear()
        self.suspect(holdings)
        for holding in holdings:
            waits = in_thread(lambda of=holding: of.renewed.wait(LONGEST_CALL / 1000))
            await outcome(waits, is_async)

    def suspect(self, holdings: Sequence[Holding]) -> None:
        self.input(lambda: self.states.suspect([one.id for one in holdings]))

    async def last_transaction(
        self, holdings: Sequence[Holding], stage: str, is_async: bool
    ) -> None:
        """Reports the stage of the transaction that releases the leases."""
        keys = [holding.id for holding in holdings]
        if keys:
            await outcome(self.input(lambda: self.states.last_transaction(keys, stage)), is_async)

    def row_locks(self, holdings: Sequence[Holding], begins: bool) -> Future[None]:
        """Reports that a transaction has written the rows, or has ended."""
        keys = [holding.id for holding in holdings]
        decide = self.states.row_locked if begins else self.states.row_unlocked
        return self.input(lambda: [decide(key) for key in keys])

    async def close(self, is_async: bool) -> None:
        """Releases all leases, and ends all waits."""
        self.input(self.states.close)
        await outcome(self._closed, is_async)
        if is_async:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(self._reported), _REPORTED)
        else:
            wait([self._reported], _REPORTED)

    def interrupted(self, name: str, line: str | None, error: BaseException) -> None:
        """Reports an error after which a leader acquires again."""
        again = "%s %s, and it is tried again: %s"
        self.input(
            lambda: (
                self._log(again, name, line, error) if line else self._emit("interrupted", (name,))
            )
        )

    def forked(self) -> None:
        """Begins anew in a forked child, which has no threads. The leases are its parent's."""
        for holding in self._holdings.values():
            holding.state, holding.reason = LOST, "heartbeat"
            # A thread of the parent, which the child does not have, may hold the future's lock.
            holding.ended = uncancellable()
            holding.ended.set_result(None)
        # The garbage collector would close the parent's sessions.
        _inherited_connections.append(self._connections)
        self.__init__(self._open, self._prefix, self._on_event)

    # In the heartbeat's thread.

    def _run(self) -> None:
        # A signal may have come after another thread was started, and before it was recorded: that
        # one goes first.
        with self._run_lock:
            while self._run_step():
                pass

    def _run_step(self) -> bool:
        at = now()
        wake = self.states.wake(at)
        if wake >= NEVER:
            with self._lock:
                if self._inbox.empty():
                    self._thread = None
                    return False
        decide, answer_to, future = (lambda: None), 0, uncancellable()
        self._ended = []
        try:
            left = None if wake >= NEVER else (wake - at) / 1000
            with contextlib.suppress(queue.Empty):
                decide, answer_to, future = self._inbox.get(timeout=left)
            for effect in self.states.step(now(), decide, answer_to=answer_to):
                self._carry_out(effect)
            self._check_idle_connections()
        except BaseException as error:  # noqa: BLE001
            self._log("the heartbeat has failed", cause=error)
            for effect in self.states.step(now(), self.states.heartbeat_died):
                self._carry_out(effect)
            for id, holding in list(self._holdings.items()):
                if not holding.granted.done():
                    self.states.give_up(id)
                    del self._holdings[id]
                    self._answer(holding.granted, FenceError("the heartbeat has failed"))
        if self._closed.done():
            self._answer(self._reported)
        self._start_reports()
        future.set_result(None)
        return True

    def _check_idle_connections(self) -> None:
        """Checks whether idle connections have ended, which no call would notice."""
        if now() - self._checked_at < CHECK_INTERVAL / 2:
            return
        self._checked_at = now()
        busy = {call.connection for call in self.states.calls.values()}
        for number, connection in self._connections.items():
            if number not in busy:
                connection.enqueue(lambda of=connection: of.has_ended() and self._disconnected(of))

    def _disconnected(self, connection: Connection) -> None:
        def decide() -> None:
            if self._connections.pop(connection.number, None):
                connection.hang_up()
            self.states.disconnected(connection.number)

        self._put(decide)

    def _carry_out(self, effect: Effect) -> None:
        # Most effects are events of renewals, and a pattern is matched slowly.
        if "event" in effect:
            self._event(effect)
            return
        match effect:
            case {"call": call}:
                self._send(call)
            case {"cut": number}:
                if connection := self._connections.pop(number, None):
                    connection.cut()
            case {"hang_up": number}:
                if connection := self._connections.pop(number, None):
                    connection.hang_up()
            case {"reply": id, "error": ""}:
                self._answer(self._holdings[id].granted)
            case {"reply": id}:
                holding = self._holdings.pop(id)
                self._answer(holding.granted, _acquire_error(holding, effect))
            case {"log": "not acquired", "key": id, "code": code}:
                error = self._holdings[id].cause if code != "no answer" else None
                self._log("no lease could be acquired, and it is tried again: %s", error or code)
            case {"log": "not renewed", "code": code}:
                self._log("leases are not renewed, and it is tried again: %s", code)
            case {"log": line}:
                count, reason = effect["count"], effect["reason"]
                more = f" ({reason})" if reason else ""
                ended = [names for why, names in self._ended if why == (reason or "unconfirmed")]
                which = "; ".join(ended[:3] + ["…"] * (len(ended) > 3))
                # The program does not know a lease that was granted after its acquire had been
                # given up.
                which = f" ({which})" if which else ""
                self._log("leases are %s%s: %s%s", line, more, count, which)
            case {"closed": _}:
                self._closed.set_result(None)

    def _event(self, effect: Effect) -> None:
        event, key = effect["event"], effect["key"]
        holding = self._holdings[key]
        if event == "renewed" and not holding.renewed.is_set():
            holding.renewed.set()
        if event == "lost":
            for one in list(holding.sockets):
                cut(one)
            holding.lost.set()
            # An event loop may be closed by then.
            with contextlib.suppress(RuntimeError):
                holding.on_loss()
        if event in {"lost", "released"}:
            del self._holdings[key]
            holding.end()
            self._ended.append((effect["reason"], ", ".join(holding.display_names)))
        left, reason = effect["remaining"], effect["reason"]
        self._emit(event, holding.display_names, effect["token"], left, reason)

    def _emit(
        self, kind: Kind, names: tuple[str, ...], token: int = 0, left: int = 0, reason: str = ""
    ) -> None:
        if (on_event := self._on_event) is None:
            return
        until = self.states.now + left

        def call() -> None:
            try:
                # An earlier event may have held up this one.
                on_event(Event(kind, names, token, span(max(0, until - now())), reason or None))
            except BaseException as error:  # noqa: BLE001
                _write_log("on_event failed", cause=error)

        self._reports.append(call)

    def _log(self, line: str, *values: object, cause: BaseException | None = None) -> None:
        self._reports.append(partial(_write_log, line, *values, cause=cause))

    def _answer(self, future: Future[None], error: BaseException | None = None) -> None:
        """Gives an answer to the program, after what is to be reported before it."""
        if self._reports or self._reporter is not None:
            self._reports.append(partial(_settle, future, error))
        else:
            _settle(future, error)

    def _start_reports(self) -> None:
        """Has the reports of a step be called by a thread that does nothing else."""
        if not self._reports:
            return
        batch, self._reports = self._reports, []
        with self._lock:
            self._batches.put(batch)
            if self._reporter is not None:
                return
            with contextlib.suppress(RuntimeError):
                self._reporter = started(self._report_all, "pg_fence events")
                return
        self._report_all()

    def _report_all(self) -> None:
        while True:
            with self._lock:
                if self._batches.empty():
                    self._reporter = None
                    return
            for call in self._batches.get():
                call()

    # Calls, which run in the threads of their connections.

    def _send(self, call: Call) -> None:
        if call.open:
            self._connections[call.connection] = Connection(call.connection, self._open)
        connection = self._connections[call.connection]
        connection.enqueue(lambda: self._run_call(call, connection))

    def _run_call(self, call: Call, connection: Connection) -> None:
        """Sends a call, and queues its answer as an input."""
        number, code = call.number, ""
        try:
            if call.open:
                code = "connect"
                connection.open((call.until - now()) / 1000)
                code = ""
                self._put(lambda: self.states.sent(number), number)
            elif connection.has_ended():
                self._put(lambda: self.states.failed(number, "unsent"), number)
                return
            rows = connection.rows(self.of_schema(statements.of_call(call)))
            code = "unreadable"
            answer = statements.answer(call, rows)
        except BaseException as error:  # noqa: BLE001
            self._failed(call, connection, _code_of(error, code), error)
        else:
            self._put(lambda: self.states.answered(number, *answer), number)

    def _failed(self, call: Call, connection: Connection, code: str, error: BaseException) -> None:
        broken = connection.is_broken()

        def decide() -> None:
            for holding in call.senders:
                if isinstance(holding, Holding):
                    holding.cause, holding.role = error, connection.role
            self.states.failed(call.number, code, broken)

        self._put(decide, call.number)


def _settle(future: Future[None], error: BaseException | None) -> None:
    # When the heartbeat has failed, an acquire may have its answer already.
    with contextlib.suppress(InvalidStateError):
        future.set_result(None) if error is None else future.set_exception(error)


def _write_log(line: str, *values: object, cause: BaseException | None = None) -> None:
    """Writes to the log, an error if it has a cause. A log handler of the program that raises does
    not end the thread."""
    with contextlib.suppress(BaseException):
        _log.log(logging.ERROR if cause else logging.WARNING, line, *values, exc_info=cause)


def _code_of(error: BaseException, stage: str) -> str:
    """Returns the code of an error. `stage` is `connect` while the connection is being opened, empty
    while the statement runs, and `unreadable` while its rows are read."""
    if not isinstance(error, Exception):
        return "panicked"
    is_driver_broken = isinstance(
        error, (psycopg.OperationalError, psycopg.InterfaceError, OSError)
    )
    state = sqlstate_of(error)
    if stage == "connect" and not state and (not is_driver_broken or never_opens(error)):
        # No retry can open it, or the program's own function has failed.
        return "misconfigured"
    # An error without an SQLSTATE that is not of the connection: psycopg has refused an argument.
    return state or stage or ("ended" if is_driver_broken else "22000")


def _acquire_error(of: Holding, reply: Effect) -> BaseException:
    names, in_doubt = of.display_names, reply.get("in_doubt", False)
    cause = of.cause if isinstance(of.cause, Exception) else None
    because = "" if of.cause is None else f": {of.cause}"
    match reply["error"]:
        case "LeaseTaken":
            left = span(reply["remaining"]) if reply["holder"] else None
            return LeaseTaken(names, reply["holder"], left, reply["waits_for"])
        case "LeaseLost":
            return LeaseLost(reply["reason"], names, advice=reply["advice"])
        case "Closed":
            return FenceError("the fence is closed")
        case "NoAnswer":
            error = FenceError(f"the server has not answered in time{because}", in_doubt)
        case "NoConnection":
            error = cause or FenceError(f"no connection to the server{because}", in_doubt)
        case _ if not cause:
            return FenceError("nobody waits for the answer any more")
        case _:
            kind = error_type(sqlstate_of(cause), bool(of.table))
            error = typed(cause, kind, of.role, bool(of.table))
    if error is not cause:
        error.__cause__ = of.cause
    return error


_heartbeats: weakref.WeakSet[Heartbeat] = weakref.WeakSet()
_inherited_connections: list[object] = []


def _close_all() -> None:
    for heartbeat in list(_heartbeats):
        if heartbeat.is_closed:
            continue
        if heartbeat._thread is not None:
            # A thread that has ended meanwhile has nothing to close, and Python 3.12 starts no
            # other one any more.
            with contextlib.suppress(RuntimeError):
                run(heartbeat.close(is_async=False), is_async=False)
                continue
        if (reporter := heartbeat._reporter) is not None:
            reporter.join(_REPORTED)


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [one.forked() for one in list(_heartbeats)])
