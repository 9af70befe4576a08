"""Connections whose every transaction presents a token, for code that knows nothing of fences."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .guarded import kind_of
from .holding import Holding


def options(lease: Holding | int) -> str:
    """For `psycopg.connect(…, options=…)`, `PGOPTIONS` or a connection string: all transactions of that connection
    present the token, whatever runs on it. Not through a pooler. Raises LeaseLost."""
    return f"-c pg_fence.token={_token(lease)}"


def _token(lease: Holding | int) -> int:
    if isinstance(lease, int):
        return lease
    lease.refuse_if_over()
    assert lease.token is not None
    return lease.token


@contextlib.contextmanager
def attach(to: Any, lease: Holding) -> Iterator[Any]:
    """While this block runs, all transactions of an SQLAlchemy engine (also async), or of a Django connection, present
    the lease's token; none begins, and on a Django connection no statement runs, once the lease is known to be lost."""
    engine = getattr(to, "sync_engine", to)
    modules = [kind.__module__ for kind in type(engine).__mro__]
    if any(module.startswith("sqlalchemy.engine") for module in modules) and hasattr(engine, "dispose"):
        attached = _to_engine(engine, lease)
    elif any(module.startswith("django.") for module in modules) and hasattr(engine, "execute_wrapper"):
        attached = _to_django(engine, lease)
    else:
        raise TypeError(f"this takes an engine of SQLAlchemy or a connection of Django, and no {kind_of(to)}")
    with attached:
        yield to


@contextlib.contextmanager
def _to_engine(engine: Any, lease: Holding) -> Iterator[None]:
    from sqlalchemy import event, text

    def begin(connection: Any) -> None:
        connection.execute(text("SELECT set_config('pg_fence.token', :token, true)"), {"token": str(_token(lease))})

    event.listen(engine, "begin", begin)
    try:
        yield
    finally:
        event.remove(engine, "begin", begin)


@contextlib.contextmanager
def _to_django(connection: Any, lease: Holding) -> Iterator[None]:
    #: The driver's connection that has the setting: it goes with a session that has ended, and is to be set again.
    has_it: Any = None

    def present(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal has_it
        token = _token(lease)
        if has_it is not connection.connection:
            _set(connection, str(token))
            has_it = connection.connection
        return execute(sql, params, many, context)

    with connection.execute_wrapper(present):
        try:
            yield
        finally:
            if has_it is not None and has_it is connection.connection:
                _set(connection, "")


def _set(connection: Any, token: str) -> None:
    """For the session: Django's transactions begin where nobody sees it."""
    with connection.connection.cursor() as cursor:
        cursor.execute("SELECT set_config('pg_fence.token', %s, false)", [token])
