"""Leases of a query's rows: those that are free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self

from psycopg.types.json import Jsonb

from . import telemetry
from .connection import in_thread, now
from .keeper import Keeper
from .lease import Lease


class Claimed(list[Lease]):
    """Leases that were claimed, in the order of the query. As a block (`with`, `async with`) it releases those that are
    still held at its end."""

    def release(self) -> None:
        """Gives back those that are still held."""
        for lease in self:
            lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await in_thread(self.release)


def claim(
    keeper: Keeper,
    make: Callable[[str], Lease],
    query: str,
    parameters: Sequence[Any],
    n: int,
    ttl: timedelta,
    holder: str,
    metadata: Any,
) -> Claimed:
    """One statement, on a connection of its own, which may take a third of the ttl."""
    # A row is tried when the one before it was, and none after the last that is wanted.
    sql = (
        f"SELECT t.token, c.* FROM ({query}) AS c(pg_fence_name), "
        f"LATERAL {keeper.prefix}lease_acquire(c.pg_fence_name::text, %s, %s, metadata => %s) AS t(token)"
        " WHERE t.token IS NOT NULL LIMIT %s"
    )
    json = None if metadata is None else Jsonb(metadata)
    limit = ttl.total_seconds() / 3
    own = keeper.connection(limit)
    with telemetry.span("claim", ()):
        before = now()
        try:
            rows = own.rows(limit, limit, sql, [*parameters, holder, ttl, json, n])
        finally:
            own.close()
            keeper.settle()
    claimed = Claimed()
    for token, *row in rows:
        lease = make(row[0])
        lease.row = tuple(row)
        lease._is_granted(before, token)
        lease._answer()
        claimed.append(lease)
    return claimed
