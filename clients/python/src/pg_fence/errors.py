"""What can be refused or told, as types, and how to find it in what a driver or an ORM raised."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any


class FenceError(Exception):
    """Everything that pg_fence and its client refuse or tell."""

    sqlstate: str | None = None

    def __init__(self, message: str, *, detail: str | None = None, hint: str | None = None):
        super().__init__(message)
        self.hint = hint
        self.detail: dict[str, Any] = {}
        #: Whether it was the commit that failed: then the transaction may have landed all the same.
        self.in_doubt = False
        with contextlib.suppress(ValueError, TypeError):
            self.detail = dict(json.loads(detail or ""))


class StaleToken(FenceError):
    """PF001: the row has seen the same or a greater token. The lease is lost: stop."""
    sqlstate = "PF001"


class NoToken(FenceError):
    """PF002: the write presented no token. It ran outside of `guard` and `present`."""
    sqlstate = "PF002"


class NeverIssued(FenceError):
    """PF003: this database never issued that token."""
    sqlstate = "PF003"


class NotSpeaking(FenceError):
    """PF004: the token does not speak for the lease."""
    sqlstate = "PF004"


class CannotBeFenced(FenceError):
    """PF005: a statement that cannot be fenced (TRUNCATE)."""
    sqlstate = "PF005"


class TransactionLost(FenceError):
    """The session has ended under the transaction. The lease may well be held still."""


class NotInstalled(FenceError):
    """42883, 3F000: the extension is not in this database, or in a schema that is not on the `search_path`: name it,
    `Fence(…, schema=…)`."""


class AcquireTimeout(FenceError, TimeoutError):
    """The server has not answered an acquire in time. A grant that it made all the same ends at its ttl."""


class LeaseTaken(FenceError):
    """Somebody else has the lease, and kept it for as long as we waited."""


class LeaseLost(FenceError):
    """The lease is ours no more: stop, and report no failure of the work. Somebody else may have it by now.

    `reason` is `deadline` (it could not be renewed in time), `gone` (the server says so), `denied` (the server
    will not renew it, and trying again will not help), `session` (the session that it was bound to has ended) or
    `released` (by its holder).
    """

    def __init__(self, reason: str, names: tuple[str, ...], cause: BaseException | None = None):
        super().__init__(f"the lease {', '.join(names)} is lost ({reason})")
        self.reason = reason
        self.names = names
        self.__cause__ = cause


_BY_SQLSTATE: dict[str, type[FenceError]] = {
    "PF001": StaleToken, "PF002": NoToken, "PF003": NeverIssued, "PF004": NotSpeaking, "PF005": CannotBeFenced,
}
#: The session, and with it the transaction, has ended: idle_in_transaction_session_timeout, transaction_timeout,
#: terminated, crashed, idle_session_timeout. And all of class 08.
_ENDED = {"25P03", "25P04", "57P01", "57P02", "57P05"}


def classify(error: BaseException) -> FenceError | None:
    """The typed error in what a driver or an ORM raised, however deep it is wrapped. None: it is no business of
    pg_fence."""
    for one in _chain(error):
        if isinstance(one, FenceError):
            return one
        state = _sqlstate(one)
        if state in _BY_SQLSTATE:
            diag = getattr(one, "diag", None)
            return _BY_SQLSTATE[state](
                getattr(diag, "message_primary", None) or str(one),
                detail=getattr(diag, "message_detail", None) or getattr(one, "detail", None),
                hint=getattr(diag, "message_hint", None) or getattr(one, "hint", None),
            )
        if state in _ENDED or (state or "").startswith("08") or _is_broken_connection(one, state):
            lost = TransactionLost(f"the session ended under the transaction: {one}".strip())
            lost.sqlstate = state
            return lost
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it wraps: SQLAlchemy keeps the driver's in `orig`, Django in `__cause__`."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        inner = getattr(error, "orig", None)
        error = inner if isinstance(inner, BaseException) else error.__cause__


def sqlstate_of(error: BaseException) -> str | None:
    """That of the server, however deep it is wrapped."""
    return next(filter(None, map(_sqlstate, _chain(error))), None)


def _sqlstate(error: BaseException) -> str | None:
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return state if isinstance(state, str) else None


def _is_broken_connection(error: BaseException, state: str | None) -> bool:
    """Drivers raise one of these without an SQLSTATE when the connection is gone."""
    module = type(error).__module__.partition(".")[0]
    names = {"OperationalError", "InterfaceError"}
    return state is None and module in {"psycopg", "psycopg2", "asyncpg"} and type(error).__name__ in names


def not_installed(error: BaseException) -> NotInstalled | None:
    """What a call of ours that the database does not know means."""
    state = sqlstate_of(error)
    if state not in {"42883", "3F000"}:
        return None
    told = NotInstalled(
        "pg_fence is not installed in this database, or not on the search_path: CREATE EXTENSION pg_fence, or name the "
        f"schema that it is in, Fence(…, schema=…) ({error})".strip()
    )
    told.sqlstate = state
    return told


def concerns_all(error: BaseException) -> bool:
    """Whether a statement for several leases failed for all of them, and not because of one, or because they are many
    (53200, the table of locks): read-only, out of something, shutting down, not installed."""
    state = sqlstate_of(error) or ""
    if isinstance(error, NotInstalled):
        return True
    return state != "53200" and (state[:2] in {"08", "25", "53", "58"} or state[:3] == "57P")


def is_permanent(error: BaseException) -> bool:
    """Whether a heartbeat that failed so will fail again, so that there is nothing to wait for."""
    state = sqlstate_of(error)
    return state is not None and (state[:2] in {"22", "28", "3D", "3F", "42"} or state in {"0A000", "55000"})
