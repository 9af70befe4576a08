"""When a lease is renewed and when it is over: decisions from times and answers alone. All times are seconds on the
clock of `clock.now`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Answer(NamedTuple):
    """What `lease_keep` says of one name."""

    outcome: str
    remaining: float | None
    again_in: float | None
    code: str | None


#: The reasons of a loss by the outcomes that tell one.
_LOSSES = {"lost": "gone", "refused": "refused"}


@dataclass
class Keeping:
    """The times of one lease. It was granted by a call that began at `before`, from where its ttl counts."""

    ttl: float
    deadline: float
    beat_at: float
    #: Transactions that are about to release it: it is not renewed meanwhile.
    resting: int = 0

    @classmethod
    def granted(cls, before: float, ttl: float) -> Keeping:
        return cls(ttl, before + ttl, before + ttl / 3)

    def answered(self, answers: list[Answer], before: float, now: float, got_on: bool) -> str | None:
        """Takes the answers, one for each name, to a call that began at `before`; `got_on`: it has kept something.
        Returns why the lease is lost, if it is."""
        for outcome, reason in _LOSSES.items():
            if any(answer.outcome == outcome for answer in answers):
                return None if self.resting else reason
        waits = [self.ttl / 12 if answer.again_in is None else answer.again_in for answer in answers]
        if all(answer.outcome == "kept" for answer in answers):
            self.deadline = before + min(answer.remaining or 0.0 for answer in answers)
            self.beat_at = before + min(waits)
        else:
            # Out of locks: at once, in another transaction, as long as that helps.
            self.beat_at = now + (min(waits) if got_on or min(waits) > 0 else self.ttl / 12)
        return None

    def failed(self, now: float, smallest: float) -> None:
        """The call has failed. That is no loss: the deadline tells."""
        self.beat_at = now + smallest / 12

    def soon(self) -> None:
        """The next renewal is to tell whether it is lost."""
        self.beat_at = -math.inf


def due(all_leases: Iterable[Keeping], now: float) -> tuple[bool, float]:
    """Whether one is due, or else when the next one is."""
    first = min((one.beat_at for one in all_leases if not one.resting), default=math.inf)
    return first <= now, first


def goes_along(one: Keeping, now: float) -> bool:
    """Whether it is renewed now that another one is due."""
    return not one.resting and one.beat_at <= now + one.ttl / 12
