"""When a lease is renewed and when it is over: decisions from times and answers alone. Times are seconds on a clock that
nobody can set."""

import math
import time
from collections.abc import Callable
from datetime import timedelta
from socket import socket
from typing import Any

from .errors import LeaseLost

#: The answer of `lease_keep` for one name: the outcome, what remains, and when to send it again.
Answer = tuple[str, float | None, float | None]
#: The outcomes that tell a loss, and its reason.
_LOSSES = {"lost": "gone", "refused": "refused"}


def now() -> float:
    """On such a clock, which goes on while the machine sleeps where there is one."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


class Grant:
    """A lease that was granted, until it is released or lost: then it has a reason."""

    def __init__(self, names: tuple[str, ...], token: int, ttl: float, before: float, session: Any = None):
        """By a call that began at `before`, from where the ttl counts. `session`: the connection that it lives on."""
        self.names, self.token, self.ttl, self.session = names, token, ttl, session
        self.deadline, self.beat_at = before + ttl, before + ttl / 3
        #: Transactions that are about to release it: it is not renewed meanwhile.
        self.resting = 0
        self.reason: str | None = None
        #: The connections that are in a guard of it.
        self.handles = set[socket]()
        #: Called when it is over, and must not block.
        self.on_end: Callable[[], object] = lambda: None

    @property
    def remaining(self) -> timedelta:
        return timedelta(seconds=max(0.0, self.deadline - now() if self.reason is None else 0.0))

    @property
    def is_lost(self) -> bool:
        return self.reason not in (None, "released")

    def lost(self) -> LeaseLost:
        return LeaseLost(self.reason or "deadline", self.names)

    def answered(self, answers: list[Answer], before: float, got_on: bool) -> str:
        """Takes the answers, one for each name, to a call that began at `before`; `got_on`: it has kept something.
        Returns `kept`, `later`, or why the lease is lost."""
        outcomes = {outcome for outcome, _, _ in answers}
        for outcome in outcomes & _LOSSES.keys():
            return "later" if self.resting else _LOSSES[outcome]
        again_in = min(self.ttl / 12 if again is None else again for _, _, again in answers)
        if outcomes == {"kept"}:
            self.deadline = before + min(remaining or 0.0 for _, remaining, _ in answers)
            self.beat_at = before + again_in
            return "kept"
        # Out of locks: at once, in another transaction, as long as that helps.
        self.beat_at = now() + (again_in if got_on or again_in > 0 else self.ttl / 12)
        return "later"

    @property
    def due_at(self) -> float:
        return math.inf if self.resting else self.beat_at
