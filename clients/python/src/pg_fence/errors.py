"""What can be refused or told, as types, and how they are found in what a driver or an ORM raised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any


class FenceError(Exception):
    """The base of all. By itself: the server has not answered in time, or the fence cannot work."""


class LeaseTaken(FenceError):
    """Somebody else has the lease, and kept it for as long as we waited: `holder`, for `remaining` at the most. Both
    are None where that cannot be seen."""

    def __init__(self, names: tuple[str, ...], holder: str | None = None, remaining: timedelta | None = None):
        by = "" if holder is None else f" by {holder}"
        span = "" if remaining is None else f", for {remaining} at the most unless it is renewed"
        super().__init__(f"the lease {', '.join(names)} is taken{by}{span}")
        self.names, self.holder, self.remaining = names, holder, remaining


class LeaseLost(FenceError):
    """The lease is ours no more: stop, and report no failure of the work. Somebody else may have it by now.

    `reason` is `deadline` (it could not be renewed in time), `gone` (the server says so), `refused` (the server will
    never renew it), `session` (the connection of a session lease has ended), `keeper` (what kept it has died) or
    `released` (by its holder). `in_doubt`: it met a commit, which may have landed.
    """

    in_doubt = False

    def __init__(self, reason: str, names: tuple[str, ...]):
        super().__init__(f"the lease {', '.join(names)} is lost ({reason})")
        self.reason, self.names = reason, names


class Refused(FenceError):
    """The server refused a write, a guard or a call; `detail` is its DETAIL as a dict."""

    def __init__(self, message: str, sqlstate: str, detail: dict[str, Any], hint: str | None):
        super().__init__(message if hint is None else f"{message} ({hint})")
        self.sqlstate, self.detail, self.hint = sqlstate, detail, hint


class TransactionLost(FenceError):
    """The session ended under the transaction, or the work swallowed the error that undid it, or ended it by itself.
    Nothing of it has landed, unless `in_doubt`. The lease may be held still."""

    def __init__(self, message: str, in_doubt: bool = False):
        super().__init__(message)
        self.in_doubt = in_doubt


class NotInstalled(FenceError):
    """The extension is not in this database, or in a schema that is not on the `search_path`."""


class NotGranted(FenceError):
    """The role may not use this lease."""


#: The session, and with it the transaction, has ended: idle in transaction, transaction_timeout, terminated, crashed,
#: idle. And all of class 08.
_ENDED = ("08", "25P03", "25P04", "57P01", "57P02", "57P03", "57P05")


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it wraps: SQLAlchemy keeps the driver's in `orig`, Django in `__cause__`."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        inner = getattr(error, "orig", None)
        error = inner if isinstance(inner, BaseException) else error.__cause__


def sqlstate_of(error: BaseException) -> str | None:
    """That of the server, however deep it is wrapped."""
    for one in chain(error):
        state = getattr(one, "sqlstate", None) or getattr(one, "pgcode", None)
        if isinstance(state, str):
            return state
    return None


def session_ended(error: BaseException) -> bool:
    """Whether the error says that a session has ended, or could not be had."""
    state = sqlstate_of(error)
    if state is not None:
        return state.startswith(_ENDED)
    return any(isinstance(one, ConnectionError) or _is_broken(one) for one in chain(error))


def _is_broken(error: BaseException) -> bool:
    """Drivers raise one of these without an SQLSTATE when the connection is gone."""
    of_driver = type(error).__module__.partition(".")[0] in {"psycopg", "psycopg2", "asyncpg"}
    return of_driver and type(error).__name__ in {"OperationalError", "InterfaceError", "ConnectionTimeout"}


def refused(error: BaseException) -> Refused | None:
    """The refusal of the fence in it, if there is one: PF001 to PF005."""
    state = sqlstate_of(error) or ""
    return _refusal(error, state) if state.startswith("PF") else None


def told_by_call(error: Exception, role: str | None) -> Exception:
    """What an error of one of our own statements means."""
    state = sqlstate_of(error) or ""
    if isinstance(error, FenceError) or not state:
        return error
    if state in {"42883", "3F000"}:
        return NotInstalled(
            "pg_fence is not installed in this database, or not on the search_path: CREATE EXTENSION pg_fence, or name "
            f"the schema that it is in, Fence(…, schema=…) ({_message(error)})"
        )
    if state == "42501":
        who = "the role" if role is None else f"the role {role}"
        grant = "fence_grant(…)" if role is None else f"SELECT fence_grant('{role}')"
        return NotGranted(f"{who} may not use the lease: {_message(error)}. An administrator grants it: {grant}")
    if state.startswith(("PF", "22", "55", "0A", "53")) and state != "55P03":
        return _refusal(error, state)
    return error


def _refusal(error: BaseException, state: str) -> Refused:
    one = next((one for one in chain(error) if getattr(one, "diag", None) or getattr(one, "hint", None)), error)
    diag = getattr(one, "diag", None)
    detail = getattr(diag, "message_detail", None) or getattr(one, "detail", None)
    hint = getattr(diag, "message_hint", None) or getattr(one, "hint", None)
    try:
        parsed = json.loads(detail or "")
    except (ValueError, TypeError):
        parsed = None
    return Refused(_message(error), state, parsed if isinstance(parsed, dict) else {}, hint)


def _message(error: BaseException) -> str:
    for one in chain(error):
        if message := getattr(getattr(one, "diag", None), "message_primary", None):
            return str(message)
    return str(list(chain(error))[-1])
