"""The clock, and calls in threads of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def now() -> float:
    """Seconds on a clock that nobody can set, and that goes on while the machine sleeps where there is one."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


def in_thread(call: Callable[[], _T]) -> Future[_T]:
    """Runs a call that blocks where no signal's exception can interrupt it, and no loop waits for it."""
    future: Future[_T] = Future()
    # Nobody who gives up takes the outcome away.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="pg_fence call", daemon=True).start()
    return future
