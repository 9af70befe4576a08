"""Who leads, by looking."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Self

import psycopg

from .errors import FenceError
from .keeper import Keeper

_log = logging.getLogger("pg_fence")

#: Seconds between two looks, and how long one may take.
PAUSE, LIMIT = 1.0, 5.0


@dataclass(frozen=True)
class Leader:
    """Who holds a lease: `holder`, under `token` (the acquire's), since then. All three are None where nobody does."""

    name: str
    holder: str | None = None
    token: int | None = None
    since: datetime | None = None


class Observer:
    """Looks who holds a lease, each second, in a thread and on a connection of its own. `Fence.observe` makes it."""

    def __init__(self, keeper: Keeper, name: str, on_leader: Callable[[Leader], None]):
        self._keeper = keeper
        self._name = name
        self._on_leader = on_leader
        self._closing = threading.Event()
        self._own = keeper.connection(LIMIT)
        self._thread = threading.Thread(target=self._run, name="pg_fence observer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """It tells nothing more."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * LIMIT)
        self._keeper.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        told: Leader | None = None
        try:
            while not self._closing.is_set():
                with contextlib.suppress(psycopg.Error, FenceError):
                    leader = self._look()
                    if told is None or leader.token != told.token:
                        told = leader
                        self._tell(leader)
                self._closing.wait(PAUSE)
        finally:
            self._own.close()

    def _look(self) -> Leader:
        # Of several that share it, the one that has it for longest.
        sql = (
            f"SELECT holder, first_token, acquired_at FROM {self._keeper.prefix}lease_info(%s)"
            " WHERE state = 'held' ORDER BY acquired_at, first_token LIMIT 1"
        )
        rows = self._own.rows(LIMIT, LIMIT, sql, [self._name])
        return Leader(self._name, *rows[0]) if rows else Leader(self._name)

    def _tell(self, leader: Leader) -> None:
        try:
            self._on_leader(leader)
        except Exception:  # noqa: BLE001
            _log.exception("on_leader failed")
