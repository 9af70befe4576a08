"""Spans and counters for OpenTelemetry, where its API is installed; nothing otherwise.

Spans `pg_fence acquire`, `pg_fence claim`, `pg_fence guard` and `pg_fence present`; counters `pg_fence.leases.lost`, by
reason, and `pg_fence.writes.refused`, by SQLSTATE. A span names its leases; a counter does not, for there may be many.
"""

from __future__ import annotations

import contextlib
from typing import Any

from .errors import FenceError

_metrics: Any
_trace: Any
try:
    from opentelemetry import metrics as _metrics
    from opentelemetry import trace as _trace
except ImportError:
    _metrics = _trace = None


def span(what: str, names: tuple[str, ...]) -> contextlib.AbstractContextManager[Any]:
    """A span around what takes its time."""
    if _trace is None:
        return contextlib.nullcontext()
    tracer: Any = _trace.get_tracer("pg_fence")
    return tracer.start_as_current_span(f"pg_fence {what}", attributes={"pg_fence.leases": names})


def lost(names: tuple[str, ...], reason: str) -> None:
    """A lease was lost."""
    _count("pg_fence.leases.lost", "Leases that were lost", {"reason": reason})


def refused(error: FenceError) -> None:
    """The fence has refused a write or a guard."""
    _count("pg_fence.writes.refused", "Writes and guards that the fence refused", {"sqlstate": error.sqlstate or ""})


def _count(name: str, description: str, attributes: dict[str, str]) -> None:
    if _metrics is not None:
        # The same name is the same counter, whatever provider was set meanwhile.
        _metrics.get_meter("pg_fence").create_counter(name, description=description).add(1, attributes)
