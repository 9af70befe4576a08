"""What a caller asks for, looked over before anything is sent; and the statements that ask it of the server."""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

Call = tuple[str, list[Any]]

#: A shorter ttl leaves no time for a renewal.
SHORTEST_TTL = timedelta(milliseconds=100)
#: No portion of a wait takes longer, in seconds: its snapshot would hold back vacuum.
PORTION = 2.0
# As text, whatever the role's IntervalStyle; and a wait that is below the role's timeouts, whatever these are.
_SPAN = "%s::text::interval"
_WAIT = (
    f"least({_SPAN}, nullif(current_setting('statement_timeout'), '0')::interval / 2,"
    " nullif(current_setting('lock_timeout'), '0')::interval / 2)"
)


@dataclass(frozen=True)
class Asked:
    """An acquire. `wait` is in seconds, and may be infinite."""

    names: tuple[str, ...]
    ttl: float
    wait: float
    holder: str
    metadata: str | None = None
    shared: bool = False
    slots: int = 1
    reclaim: bool = False
    session: bool = False

    def call(self, prefix: str, portion: float) -> Call:
        """One try, or a portion of the wait."""
        if len(self.names) > 1:
            sql = f"SELECT {prefix}lease_acquire_all(%s::text[], %s::text, {_SPAN}, %s::text::jsonb, %s::boolean)"
            return sql, [list(self.names), self.holder, span(self.ttl), self.metadata, self.session]
        types = "%s::text::jsonb, %s::boolean, %s::integer, %s::boolean, %s::boolean"
        sql = f"SELECT {prefix}lease_acquire(%s::text, %s::text, {_SPAN}, {_WAIT}, {types})"
        options = [self.metadata, self.shared, self.slots, self.reclaim, self.session]
        return sql, [*self.names, self.holder, span(self.ttl), span(portion), *options]

    def portion(self, remains: float, smallest: float) -> float:
        """How long the next one waits. A session lease waits on the connection that keeps the others, the smallest ttl
        of which is that."""
        return max(0.0, min(remains, PORTION, smallest / 3 if self.session else PORTION))


def span(seconds: float) -> str:
    return f"{round(seconds * 1_000_000)} microseconds"


def keep(prefix: str, pairs: list[tuple[str, int]]) -> Call:
    spans = "extract(epoch FROM remaining)::float8, extract(epoch FROM again_in)::float8"
    sql = f"SELECT outcome, {spans}, code FROM {prefix}lease_keep(%s::text[], %s::bigint[])"
    return sql, [[name for name, _ in pairs], [token for _, token in pairs]]


def guard(prefix: str, name: str, token: int) -> Call:
    return f"SELECT {prefix}lease_guard(%s::text, %s::bigint)", [name, token]


def guard_adopted(prefix: str, name: str, token: int) -> Call:
    """Each transaction makes the number known."""
    adopt = f"(SELECT {prefix}lease_adopt(%s::text, %s::bigint))"
    return f"SELECT {prefix}lease_guard(%s::text, {adopt})", [name, name, token]


def release(prefix: str, names: Sequence[str], token: int) -> Call:
    """Within a transaction of the work."""
    if len(names) > 1:
        return f"SELECT {prefix}lease_release_all(%s::text[], %s::bigint)", [list(names), token]
    return f"SELECT {prefix}lease_release(%s::text, %s::bigint)", [*names, token]


def release_aside(prefix: str, pairs: list[tuple[str, int]], lock_limit: float) -> Call:
    """In a transaction of its own, which waits no longer than that for the lock of somebody's open transaction."""
    limit = f"set_config('lock_timeout', '{max(10, round(lock_limit * 1000))}', true)"
    sql = f"SELECT {prefix}lease_release(x.name, x.token) FROM {limit}, unnest(%s::text[], %s::bigint[]) AS x(name, token)"
    return sql, [[name for name, _ in pairs], [token for _, token in pairs]]


def holder_of(prefix: str, names: tuple[str, ...]) -> Call:
    of = f"unnest(%s::text[]) AS n(name), {prefix}lease_info(n.name) AS i WHERE i.state IN ('held', 'uncommitted')"
    sql = f"SELECT i.holder, i.remaining FROM {of} ORDER BY i.remaining DESC NULLS LAST LIMIT 1"
    return sql.replace("i.remaining FROM", "extract(epoch FROM i.remaining)::float8 FROM"), [list(names)]


def claim(prefix: str, names: Sequence[str], n: int, holder: str, ttl: float) -> Call:
    sql = f"SELECT name, token FROM {prefix}lease_acquire_any(%s::text[], %s::integer, %s::text, {_SPAN})"
    return sql, [list(names), n, holder, span(ttl)]


def unique_holder() -> str:
    return f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"


def list_of_names(names: str | Sequence[str]) -> tuple[str, ...]:
    given: list[Any] = list(names) if isinstance(names, (list, tuple)) else [names]
    if not given:
        raise ValueError("a lease needs a name")
    return tuple(checked("the name of a lease", name, str) for name in given)


def checked(what: str, value: Any, kind: type) -> Any:
    """The value, or a TypeError that names it. A bool is no int."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        unit = ", for a bare number has no unit" if kind is timedelta else ""
        raise TypeError(f"{what} is a {kind.__name__}{unit}: not {value!r}")
    return value


def json_of(metadata: Any) -> str | None:
    try:
        return None if metadata is None else json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metadata has no JSON: {error}") from None


def ttl_of(ttl: timedelta) -> float:
    if checked("ttl", ttl, timedelta) < SHORTEST_TTL:
        raise ValueError(f"ttl is {SHORTEST_TTL.total_seconds()} s or more, for it is renewed meanwhile: not {ttl!r}")
    return ttl.total_seconds()
