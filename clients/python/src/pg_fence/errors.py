"""The types of refusals and losses, and how an error of a driver or an ORM is turned into one."""

import json
import re
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from .statements import quoted


class FenceError(Exception):
    """The base class of this package's errors. Raised itself if the server has not answered in time,
    if no connection was available in time, and if the fence is closed. `in_doubt`: the server may
    have carried out the request."""

    def __init__(self, message: str, in_doubt: bool = False):
        super().__init__(message)
        self.in_doubt = in_doubt

    def __reduce__(self) -> Any:
        # Pickle would call the class with the message alone, and a pool of processes would hang.
        return Exception.__new__, (type(self), *self.args), self.__dict__


class LeaseTaken(FenceError):
    """Another holder has the lease: `holder`, for at most `remaining` unless it is renewed. The wait
    would end with `waits_for`: its `ttl`, the `commit` of its acquire, or, as its ttl is over, the
    end of a transaction that guards it (`guard`). Each is None if it is not visible."""

    def __init__(
        self,
        names: Sequence[str],
        holder: str | None = None,
        remaining: timedelta | None = None,
        waits_for: str | None = None,
    ):
        by = f" by {holder}" if holder else ""
        until = f", for {remaining} at the most unless it is renewed" if remaining else ""
        if waits_for == "commit":
            until = ", whose acquire is not committed yet"
        elif waits_for == "guard":
            until = ", until a transaction ends that guards it: its ttl is over"
        super().__init__(f"the lease {', '.join(names)} is taken{by}{until}")
        self.names, self.holder = tuple(names), holder or None
        self.remaining, self.waits_for = remaining, waits_for


class LeaseLost(FenceError):
    """The lease is lost, and another holder may have it: stop, and report no failure of the work.

    `reason` is `deadline` (it could not be renewed in time), `gone` (the server says so), `refused`
    (the server will never renew it), `session` (the connection of a session lease has ended),
    `at_most` (its longest time is over), `heartbeat` (the heartbeat has failed) or `released` (by
    its holder). `in_doubt`: a commit was under way, and may have succeeded."""

    def __init__(self, reason: str, names: Sequence[str], in_doubt: bool = False, advice: str = ""):
        remedy = f": it is another role's; {_ANOTHER_ROLE}" if advice else ""
        super().__init__(f"the lease {', '.join(names)} is lost ({reason}){remedy}", in_doubt)
        self.reason, self.names = reason, tuple(names)


class Refused(FenceError):
    """The server refused a write, a guard or a call; `detail` is its DETAIL as a dict."""

    def __init__(self, message: str, sqlstate: str, detail: dict[str, Any], hint: str | None):
        super().__init__(message if hint is None else f"{message} ({hint})")
        self.sqlstate, self.detail, self.hint = sqlstate, detail, hint


class TransactionLost(FenceError):
    """The session ended during the transaction, or the work swallowed an error that rolled it back,
    or ended the transaction itself. Nothing was committed, unless `in_doubt`. The lease may still be
    held."""


class NotInstalled(FenceError):
    """The extension is not in this database, or in a schema that is not on the `search_path`."""


class NotGranted(FenceError):
    """The role may not use this lease."""


#: The remedy if the login role changes while a lease is held.
_ANOTHER_ROLE = (
    "a lease is used by the role that acquired it, and by its members: where login roles change,"
    " let all of them act as one role (options=-c role=…, or SET ROLE)"
)
#: The messages, without an SQLSTATE, of a connection that no retry can open: those of the server in
#: English, and those of libpq.
_NEVER_OPENS = re.compile(
    r'authentication failed for user|no password supplied|role "[^"]*" (does not exist|is not perm)'
    r'|database "[^"]*" (does not exist|is not currently)|permission denied for database'
    r"|pg_hba\.conf|unrecognized configuration parameter|does not support SSL,"
    r"|(bad|client|root|server) certificate|certificate (authority|file|verify failed)"
)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error and those that it wraps: in `orig` of SQLAlchemy, as a cause of Django. An
    error that the program has raised from one of this package is the program's own."""
    seen: list[BaseException] = []
    while error is not None and error not in seen and not (seen and isinstance(error, FenceError)):
        seen.append(error)
        yield error
        inner = getattr(error, "orig", None)
        error = inner if isinstance(inner, BaseException) else error.__cause__


def sqlstate_of(error: BaseException) -> str:
    """Returns the SQLSTATE of the first error in the chain that has one, or an empty text."""
    states = (
        getattr(one, "sqlstate", None) or getattr(one, "pgcode", None) for one in _chain(error)
    )
    return next((state for state in states if isinstance(state, str)), "")


def code_of(error: BaseException) -> str:
    """Returns the SQLSTATE; without one `ended`, if the error means that a database session has ended
    or could not be opened, or else an empty text."""
    return sqlstate_of(error) or ("ended" if any(map(_is_broken, _chain(error))) else "")


def is_fatal(error: BaseException) -> bool:
    """True if the severity of the server's error is FATAL or PANIC."""
    # psycopg has it in `diag`. Some poolers have only the one in the server's language.
    diags: list[Any] = [getattr(one, "diag", one) for one in _chain(error)]
    names = ("severity_nonlocalized", "severity_en", "severity")
    return any(getattr(of, name, None) in {"FATAL", "PANIC"} for of in diags for name in names)


def is_of_driver(error: BaseException) -> bool:
    """True if a driver or an ORM has raised the error, or one that it wraps."""
    packages = ("psycopg", "asyncpg", "sqlalchemy", "django")
    return any(type(one).__module__.startswith(packages) for one in _chain(error))


def never_opens(error: BaseException) -> bool:
    """True if psycopg's error means, for each host, that no retry can open the connection."""
    first, *tries = str(error).split("\n- host: ")
    is_psycopgs = type(error).__module__.startswith("psycopg")
    return is_psycopgs and all(map(_NEVER_OPENS.search, tries or [first]))


def _is_broken(error: BaseException) -> bool:
    """True if an error without an SQLSTATE is a driver's, for a session that has ended. asyncpg does
    not wrap an OSError, so its traceback tells whether asyncpg has raised it."""
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        return any(frame.f_globals.get("__name__", "").startswith("asyncpg.") for frame in frames)
    if not type(error).__module__.startswith(("psycopg", "asyncpg")):
        return False
    name = type(error).__name__
    if name == "InterfaceError":
        # asyncpg and psycopg also raise it for wrong arguments and closed cursors and pools.
        return "connection is closed" in str(error)
    # asyncpg raises InternalError and InternalClientError if the end comes at an unexpected moment.
    broken = {"OperationalError", "ConnectionTimeout", "InternalError", "InternalClientError"}
    return name in broken and not never_opens(error)


def typed(
    error: Exception, kind: str, role: str | None = None, of_table: bool = False
) -> Exception:
    """Returns the error as the type `kind` of those that the server causes, or the error itself if
    that is empty. `of_table`: the statement was about rows of a table."""
    if kind == "NotInstalled":
        where = "CREATE EXTENSION pg_fence, or name the schema that it is in, Fence(…, schema=…)"
        missing = "pg_fence is not installed in this database, or not on the search_path"
        return NotInstalled(f"{missing}: {where} ({error})")
    if kind == "NotGranted":
        role = role or "…"
        level = ", 'adopter'" if "lease_adopt" in str(error) else ""
        # The server reads the text as an identifier.
        granted = role if re.fullmatch("[a-z0-9_…]*", role) else quoted(role).replace("'", "''")
        remedy = f"an administrator grants it: SELECT fence_grant('{granted}'{level})"
        remedy = _ANOTHER_ROLE if "was granted to another role" in str(error) else remedy
        remedy = "for rows of a table it needs SELECT and UPDATE" if of_table else remedy
        return NotGranted(f"the role {role} may not use the lease: {error}; {remedy}")
    return refusal(error) if kind == "Refused" else error


def refusal(error: Exception) -> Refused:
    """Returns the error of the server as Refused."""
    # psycopg has the DETAIL and the HINT in `diag`, asyncpg in the error itself.
    has = (one for one in _chain(error) if hasattr(one, "diag") or hasattr(one, "hint"))
    one: Any = next(has, error)
    diag = getattr(one, "diag", None)
    message, detail, hint = (
        (diag.message_primary, diag.message_detail, diag.message_hint)
        if diag
        else (one, getattr(one, "detail", None), getattr(one, "hint", None))
    )
    try:
        parsed = json.loads(str(detail))
    except ValueError:
        # PostgreSQL's own errors have a plain text as DETAIL.
        parsed = None
    parsed = parsed if isinstance(parsed, dict) else {}
    return Refused(str(message), sqlstate_of(error), parsed, hint)
