"""When a lease is renewed and when it is over: decisions from times and answers alone. Times are seconds on a clock that
nobody can set."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import NamedTuple


def now() -> float:
    """On such a clock, which goes on while the machine sleeps where there is one."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


class Answer(NamedTuple):
    """What `lease_keep` says of one name."""

    outcome: str
    remaining: float | None
    again_in: float | None
    code: str | None


#: The outcomes that tell a loss, and its reason.
_LOSSES = {"lost": "gone", "refused": "refused"}


@dataclass
class Keeping:
    """The times of one lease."""

    ttl: float
    deadline: float
    beat_at: float
    #: Transactions that are about to release it: it is not renewed meanwhile.
    resting: int = 0

    @classmethod
    def granted(cls, before: float, ttl: float) -> Keeping:
        """By a call that began then, from where the ttl counts."""
        return cls(ttl, before + ttl, before + ttl / 3)

    def answered(self, answers: list[Answer], before: float, got_on: bool) -> str | None:
        """Takes the answers, one for each name, to a call that began at `before`; `got_on`: it has kept something.
        Returns why the lease is lost, if it is."""
        outcomes = {answer.outcome for answer in answers}
        if losses := [reason for outcome, reason in _LOSSES.items() if outcome in outcomes]:
            return None if self.resting else losses[0]
        again_in = min(self.ttl / 12 if answer.again_in is None else answer.again_in for answer in answers)
        if outcomes == {"kept"}:
            self.deadline = before + min(answer.remaining or 0.0 for answer in answers)
            self.beat_at = before + again_in
        else:
            # Out of locks: at once, in another transaction, as long as that helps.
            self.beat_at = now() + (again_in if got_on or again_in > 0 else self.ttl / 12)
        return None

    def failed(self, smallest: float) -> None:
        """The call has failed. That is no loss: the deadline tells."""
        self.beat_at = now() + smallest / 12

    @property
    def due_at(self) -> float:
        return math.inf if self.resting else self.beat_at

    @property
    def goes_along(self) -> bool:
        """Whether it is renewed when another one is due."""
        return self.due_at <= now() + self.ttl / 6
