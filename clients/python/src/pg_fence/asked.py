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

#: Several names have no queue: so often they are tried, in seconds.
TRY_AGAIN = 0.25


@dataclass(frozen=True)
class Asked:
    """An acquire. `wait` is in seconds, and may be infinite."""

    names: tuple[str, ...]
    ttl: timedelta
    wait: float
    holder: str
    metadata: str | None = None
    shared: bool = False
    slots: int = 1
    reclaim: bool = False
    session: bool = False

    @property
    def seconds(self) -> float:
        return self.ttl.total_seconds()

    def call(self, prefix: str, portion: float) -> Call:
        """One try, or a portion of the wait."""
        if len(self.names) > 1:
            sql = f"SELECT {prefix}lease_acquire_all(%s::text[], %s::text, {_SPAN}, %s::text::jsonb, %s::boolean)"
            return sql, [list(self.names), self.holder, span(self.seconds), self.metadata, self.session]
        sql = (
            f"SELECT {prefix}lease_acquire(%s::text, %s::text, {_SPAN}, {_PORTION}, %s::text::jsonb, %s::boolean,"
            " %s::integer, %s::boolean, %s::boolean)"
        )
        first = [*self.names, self.holder, span(self.seconds), span(portion)]
        return sql, [*first, self.metadata, self.shared, self.slots, self.reclaim, self.session]

    def portion(self, remains: float, smallest: float) -> float:
        """How long the next one waits, in seconds. A session lease waits on the connection that keeps the others, the
        smallest ttl of which is that."""
        longest = min(PORTION, smallest / 3) if self.session else PORTION
        return max(0.0, min(remains, longest))


# As text, whatever the role's IntervalStyle.
_SPAN = "%s::text::interval"
# Below the role's timeouts, whatever these are.
_PORTION = (
    f"least({_SPAN}, nullif(current_setting('statement_timeout'), '0')::interval / 2,"
    " nullif(current_setting('lock_timeout'), '0')::interval / 2)"
)


def span(seconds: float) -> str:
    return f"{round(seconds * 1_000_000)} microseconds"


def keep(prefix: str, names: list[str], tokens: list[int]) -> Call:
    sql = (
        "SELECT outcome, extract(epoch FROM remaining)::float8, extract(epoch FROM again_in)::float8, code"
        f" FROM {prefix}lease_keep(%s::text[], %s::bigint[])"
    )
    return sql, [names, tokens]


def release(prefix: str, names: tuple[str, ...], token: int) -> Call:
    """Within a transaction of the work."""
    if len(names) > 1:
        return f"SELECT {prefix}lease_release_all(%s::text[], %s::bigint)", [list(names), token]
    return f"SELECT {prefix}lease_release(%s::text, %s::bigint)", [*names, token]


def release_aside(prefix: str, pairs: list[tuple[str, int]], lock_limit: float) -> Call:
    """In a transaction of its own, which waits no longer than that for the lock of somebody's open transaction."""
    sql = (
        f"SELECT {prefix}lease_release(x.name, x.token) FROM set_config('lock_timeout', %s, true),"
        " unnest(%s::text[], %s::bigint[]) AS x(name, token)"
    )
    return sql, [str(max(10, round(lock_limit * 1000))), [name for name, _ in pairs], [token for _, token in pairs]]


def holder_of(prefix: str, names: tuple[str, ...]) -> Call:
    sql = (
        f"SELECT i.holder, extract(epoch FROM i.remaining)::float8 FROM unnest(%s::text[]) AS n(name),"
        f" {prefix}lease_info(n.name) AS i WHERE i.state IN ('held', 'uncommitted')"
        " ORDER BY i.remaining DESC NULLS LAST LIMIT 1"
    )
    return sql, [list(names)]


def claim(prefix: str, names: tuple[str, ...], n: int, holder: str, ttl: timedelta) -> Call:
    sql = f"SELECT name, token FROM {prefix}lease_acquire_any(%s::text[], %s::integer, %s::text, {_SPAN})"
    return sql, [list(names), n, holder, span(ttl.total_seconds())]


def unique_holder() -> str:
    return f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"


def acquire(
    names: str | Sequence[str],
    ttl: timedelta,
    wait: timedelta,
    holder: str | None,
    reclaim: bool,
    session: bool,
    shared: bool,
    slots: int,
    metadata: Any,
) -> Asked:
    """What was asked for, or a TypeError or ValueError that names what is wrong."""
    all_names = list_of_names(names)
    for what, flag in {"reclaim": reclaim, "session": session, "shared": shared}.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{what} is True or False, and not {flag!r}")
    if not isinstance(slots, int) or isinstance(slots, bool):
        raise TypeError(f"slots is an int, and not {slots!r}")
    if len(all_names) > 1 and (shared or slots != 1 or reclaim):
        raise ValueError("several names at once are exclusive: no shared, slots or reclaim")
    if reclaim and holder is None:
        raise ValueError("reclaim takes a holder: whose lease is it?")
    if time_of("wait", wait) < timedelta(0):
        raise ValueError(f"wait is not negative: {wait!r}")
    texts = text_of("holder", holder) or unique_holder(), json_of(metadata)
    return Asked(all_names, ttl_of(ttl), wait.total_seconds(), *texts, shared, slots, reclaim, session)


def list_of_names(names: str | Sequence[str]) -> tuple[str, ...]:
    given: list[object] = list(names) if isinstance(names, (list, tuple)) else [names]
    if not given:
        raise ValueError("a lease needs a name")
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"the name of a lease is a str, and not {name!r}")
    return tuple(map(str, given))


def text_of(what: str, text: str | None) -> str | None:
    if text is not None and not isinstance(text, str):
        raise TypeError(f"{what} is a str, and not {text!r}")
    return text


def json_of(metadata: Any) -> str | None:
    try:
        return None if metadata is None else json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metadata has no JSON: {error}") from None


def time_of(what: str, time: timedelta) -> timedelta:
    if not isinstance(time, timedelta):
        raise TypeError(f"{what} is a timedelta, for a bare number has no unit: not {time!r}")
    return time


def ttl_of(ttl: timedelta) -> timedelta:
    if time_of("ttl", ttl) < SHORTEST_TTL:
        raise ValueError(f"ttl is {SHORTEST_TTL.total_seconds()} s or more, for it is renewed meanwhile: not {ttl!r}")
    return ttl


def token_of(token: int) -> int:
    if not isinstance(token, int) or isinstance(token, bool):
        raise TypeError(f"a token is an int, and not {token!r}")
    return token
