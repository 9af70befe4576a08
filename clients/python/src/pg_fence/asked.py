"""A caller's request, looked over before anything is sent; and the statements that ask it of the server."""

import json
import os
import socket
import uuid
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

Call = tuple[str, list[Any]]

#: A shorter ttl leaves no time for a renewal.
SHORTEST_TTL = timedelta(milliseconds=100)
#: By whom it is taken, where that can be seen. {0} is the extension's schema, where one is given.
_TAKEN_BY = """LEFT JOIN LATERAL (SELECT i.holder, extract(epoch FROM i.remaining)::float8
    FROM unnest(%s::text[]) AS n(name), {0}lease_info(n.name) AS i WHERE granted IS NULL AND i.state IN ('held', 'uncommitted')
    ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true"""
#: Spans of time are sent as text, whatever the role's IntervalStyle. A wait is below the role's timeouts, whatever these are.
_ACQUIRE = f"""SELECT granted, taken.* FROM {{0}}lease_acquire(%s::text, %s::text, %s::text::interval,
    least(%s::text::interval, nullif(current_setting('statement_timeout'), '0')::interval / 2,
        nullif(current_setting('lock_timeout'), '0')::interval / 2),
    %s::text::jsonb, %s::boolean, %s::integer, %s::boolean, %s::boolean) AS granted {_TAKEN_BY}"""
_ACQUIRE_ALL = f"""SELECT granted, taken.* FROM {{0}}lease_acquire_all(%s::text[], %s::text, %s::text::interval, %s::text::jsonb,
    %s::boolean) AS granted {_TAKEN_BY}"""
KEEP = """SELECT outcome, extract(epoch FROM remaining)::float8, extract(epoch FROM again_in)::float8
    FROM {0}lease_keep(%s::text[], %s::bigint[])"""
_PAIRS = "unnest(%s::text[], %s::bigint[]) AS x(name, token)"
#: In the same order everywhere, so that no two wait for each other.
GUARD = f"""SELECT count({{0}}lease_guard(x.name, x.token)) FROM (SELECT x.* FROM {_PAIRS} ORDER BY x.name COLLATE "C") AS x"""
#: Each transaction makes the number known, and whose it is.
GUARD_ADOPTED = f"""SELECT count({{0}}lease_guard(x.name, (SELECT {{0}}lease_adopt(x.name, x.token, %s::text)))) FROM {_PAIRS}"""
TOKEN = "SELECT current_setting('pg_fence.token', true)"
#: Within a transaction of the work. Returns a name under which there is nothing to be released.
RELEASE = f"SELECT min(x.name) FILTER (WHERE {{0}}lease_release(x.name, x.token) IS NULL) FROM {_PAIRS}"
#: In a transaction of its own, which waits no longer than that, in milliseconds, for somebody's open transaction.
RELEASE_ASIDE = f"SELECT {{0}}lease_release(x.name, x.token) FROM set_config('lock_timeout', %s::text, true), {_PAIRS}"


class Asked:
    """An acquire. Times are in seconds."""

    def __init__(
        self, names: Any, ttl: timedelta, wait: timedelta, holder: str | None, metadata: Any, slots: int, **flags: bool
    ):
        for what, flag in flags.items():
            checked(what, flag, bool)
        if flags["reclaim"] and holder is None:
            raise ValueError("reclaim takes a holder: whose lease is it?")
        self.names, self.ttl, self.wait = list_of_names(names), ttl_of(ttl), checked("wait", wait, timedelta).total_seconds()
        self.session, self._holder = flags["session"], holder_of(holder)
        self._metadata = None if metadata is None else json.dumps(metadata)
        self._single = [flags["shared"], checked("slots", slots, int), flags["reclaim"]]
        if len(self.names) > 1 and self._single != [False, 1, False]:
            raise ValueError("several names at once are exclusive: no shared, slots or reclaim")

    def call(self, portion: float) -> tuple[Any, ...]:
        """One try; of a single name, which has a queue, a portion of the wait. The statement, and its arguments."""
        names = list(self.names)
        if len(names) != 1:
            return _ACQUIRE_ALL, names, self._holder, span(self.ttl), self._metadata, self.session, names
        first = *names, self._holder, span(self.ttl), span(portion), self._metadata
        return _ACQUIRE, *first, *self._single, self.session, names


def span(seconds: float) -> str:
    return f"{round(seconds * 1_000_000)} microseconds"


def holder_of(holder: str | None) -> str:
    """By default one that is unique for each call."""
    unique = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
    return unique if holder is None else checked("holder", holder, str)


@lru_cache(maxsize=1)
def holder_of_process(pid: int) -> str:
    """The holder that adopts where none is named: all fences of this process are one holder. A forked process has another."""
    return holder_of(None)


def list_of_names(names: str | Sequence[str]) -> tuple[str, ...]:
    given: list[Any] = list(names) if isinstance(names, (list, tuple)) else [names]
    return tuple(checked("the name of a lease", name, str) for name in given)


def checked(what: str, value: Any, kind: type) -> Any:
    """The value, or a TypeError that names it. A bool is no int."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        unit = ", for a bare number has no unit" if kind is timedelta else ""
        raise TypeError(f"{what} is a {kind.__name__}{unit}: not {value!r}")
    return value


def ttl_of(ttl: timedelta) -> float:
    if checked("ttl", ttl, timedelta) < SHORTEST_TTL:
        raise ValueError(f"ttl is {SHORTEST_TTL.total_seconds()} s or more, for it is renewed meanwhile: not {ttl!r}")
    return ttl.total_seconds()
