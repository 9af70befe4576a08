"""The statements of the client, with their arguments. {0} stands for the extension's schema. Spans of
time are sent as texts that every IntervalStyle reads alike."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import psycopg
from psycopg.adapt import PyFormat, Transformer
from psycopg.sql import Identifier

from .lease_state import Call, LeaseState, Release, Undo

Statement = tuple[str, list[Any]]

_TAKEN = """ AS granted LEFT JOIN LATERAL (
        SELECT i.holder, extract(epoch FROM i.remaining)::float8, i.state
        FROM unnest(%s::text[]) AS n(name), {0}lease_info(n.name) AS i
        WHERE granted IS NULL
            AND (i.state IN ('held', 'uncommitted') OR cardinality(i.blocking_pids) > 0)
        ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true"""
#: The wait is at most half of the role's timeouts, so that these do not end it.
_ACQUIRE = f"""SELECT granted, taken.* FROM {{0}}lease_acquire(
        %s::text, %s::text, %s::text::interval,
        least(%s::text::interval,
            nullif(current_setting('statement_timeout'), '0')::interval / 2,
            nullif(current_setting('lock_timeout'), '0')::interval / 2),
        %s::text::jsonb, %s::boolean, %s::integer, %s::boolean, %s::boolean){_TAKEN}"""
_ACQUIRE_ALL = f"""SELECT granted, taken.* FROM {{0}}lease_acquire_all(
        %s::text[], %s::text, %s::text::interval, %s::text::jsonb, %s::boolean){_TAKEN}"""
_OUTCOMES = """SELECT outcome, extract(epoch FROM remaining)::float8,
    extract(epoch FROM again_in)::float8, code FROM {0}"""
#: Binary (%b), because psycopg writes long arrays twice as fast that way.
_KEEP = f"{_OUTCOMES}lease_keep(%b::text[], %b::bigint[])"
_KEEP_ROWS = f"""{_OUTCOMES}lease_keep_rows(%s::text::regclass, %s::text[]::name[],
    %s::text[]::jsonb[], %s::bigint[], %s::text[]::interval[], %s::text, %s::text)"""
#: Bounds the wait for a lock that an open transaction holds.
_LOCK_TIMEOUT = "set_config('lock_timeout', %s::text, true)"
_PAIRS = "unnest(%s::text[], %s::bigint[]) AS x(name, token)"
_RELEASE = f"SELECT {{0}}lease_release(x.name, x.token) FROM {_LOCK_TIMEOUT}, {_PAIRS}"
#: Releases those of the names that the holder has.
_UNDO = f"""SELECT count({{0}}lease_release(n.name, i.first_token))
    FROM {_LOCK_TIMEOUT}, unnest(%s::text[]) AS n(name), {{0}}lease_info(n.name) AS i
    WHERE i.holder = %s::text AND i.state = 'held'"""
#: Sorted, so that two transactions cannot deadlock.
_GUARD = f"""SELECT count({{0}}lease_guard(x.name, x.token))
    FROM (SELECT x.* FROM {_PAIRS} ORDER BY x.name COLLATE "C") AS x"""
#: Each transaction registers the number and its holder.
_GUARD_ADOPTED = f"""SELECT count({{0}}lease_guard(x.name,
        (SELECT {{0}}lease_adopt(x.name, x.token, %s::text)))) FROM {_PAIRS}"""
#: Returns the number of the first pair that could not be released, counted from 1, or NULL. (For
#: SQL_ASCII psycopg returns texts as bytes.)
RELEASE_IN_GUARD = """SELECT min(x.at) FILTER (WHERE {0}lease_release(x.name, x.token) IS NULL)
    FROM unnest(%s::text[], %s::bigint[]) WITH ORDINALITY AS x(name, token, at)"""


def quoted(*names: str) -> str:
    """Returns a name, or the parts of one, as an SQL identifier."""
    return Identifier(*names).as_string(None)


def span(ms: int) -> str:
    return f"{ms} milliseconds"


def of_call(call: Call) -> Statement:
    """Returns the statement of a call. An acquire is one attempt, or one portion of a wait."""
    pairs, timeout = [call.names, call.tokens], str(max(10, call.limit // 4))
    match call.sender:
        case LeaseState() as of if len(call.names) == 1:
            first = [call.names[0], call.holder, span(of.ttl), span(call.wait), of.metadata]
            flags = [of.shared, of.slots, call.reclaim, of.session]
            return _ACQUIRE, [*first, *flags, call.names]
        case LeaseState() as of:
            arguments = [call.names, call.holder, span(of.ttl), of.metadata, of.session]
            return _ACQUIRE_ALL, [*arguments, call.names]
        case Undo():
            return _UNDO, [timeout, call.names, call.holder]
        case Release() if call.table:
            sql, arguments = call.table.statement(_RELEASE_ROWS, *pairs)
            return f"{sql} FROM {_LOCK_TIMEOUT}", [*arguments, timeout]
        case Release():
            return _RELEASE, [timeout, *pairs]
        case None if call.table:
            ttls = [span(lease.ttl) for lease in call.leases]
            return call.table.statement(_KEEP_ROWS, *pairs, ttls)
        case None:
            return _KEEP, pairs


def answer(call: Call, rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Returns the rows of a call as the arguments of LeaseStates.answered."""
    match call.sender:
        case LeaseState():
            ((token, holder, left, state),) = rows
            if token is not None:
                return ([((), token)],)
            return [], {"holder": holder, "remaining": max(0, _ms(left) or 0), "state": state}
        case None:
            return (
                [(outcome, _ms(left), _ms(again), code) for outcome, left, again, code in rows],
            )
        case _:
            return ([first for (first,) in rows],)


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1000)


def guard(pairs: list[Any], adopted_by: str | None) -> Statement:
    return (_GUARD_ADOPTED, [adopted_by, *pairs]) if adopted_by else (_GUARD, pairs)


def _setting(is_inner: bool) -> str:
    return f"'pg_fence_client.{'savepoint' if is_inner else 'transaction'}'"


def with_setting(statement: Statement, is_inner: bool) -> Statement:
    """Adds to a guard's statement a setting that ends with its transaction. The session may have the
    token before and after that. An inner guard has another setting, as the work may have begun the
    transaction of that guard itself."""
    return f"{statement[0]}, set_config({_setting(is_inner)}, 'on', true)", statement[1]


def is_open(is_inner: bool) -> Statement:
    """Returns the statement whose value is true while the transaction is the guard's."""
    return f"SELECT current_setting({_setting(is_inner)}, true) = 'on'", []


# Leases in rows.

_GUARD_ROW = """SELECT * FROM {0}lease_guard_row(%s::text::regclass, %s::text[]::name[],
    %s::text::jsonb, %s::bigint, %s::text, %s::text)"""
_RELEASE_ROWS = """SELECT {0}lease_release_rows(%s::text::regclass, %s::text[]::name[],
    %s::text[]::jsonb[], %s::bigint[], %s::text, %s::text)"""


class RowTable(NamedTuple):
    """A table whose rows are leases: the parts of its name, and the names of its columns."""

    names: tuple[str, ...]
    key: tuple[str, ...]
    fence: str
    deadline: str

    def named(self, key: str) -> str:
        """Returns the name of a row for messages."""
        columns = zip(self.key, json.loads(key), strict=True)
        return f"{'.'.join(self.names)} " + ", ".join(f"{name}={value}" for name, value in columns)

    def statement(self, sql: str, *arguments: Any) -> Statement:
        relation = quoted(*self.names)
        return sql, [relation, list(self.key), *arguments, self.fence, self.deadline]


def guard_row(lease: LeaseState) -> Statement:
    """Returns the statement that locks the row and presents its token. Its value is NULL if the
    lease is lost."""
    return lease.table.statement(_GUARD_ROW, lease.names[0], lease.token)


def release_row(lease: LeaseState) -> Statement:
    """Returns the statement that releases the row. Its value is NULL if the work has done so."""
    return lease.table.statement(_RELEASE_ROWS, list(lease.names), [lease.token])


def row_key(key: Mapping[str, Any]) -> str:
    """Returns the values of a key as a JSON array of texts, which the server reads as the types of
    the columns. Raises ValueError for None, TypeError for a value that psycopg cannot send."""
    return as_json([_as_text(column, value) for column, value in key.items()])


def as_json(value: Any) -> str:
    """Returns the value as JSON without escapes, which a database in SQL_ASCII refuses."""
    return json.dumps(value, ensure_ascii=False)


def _as_text(column: str, value: Any) -> str:
    if value is None:
        raise ValueError(f"the key's column {column} has a value: not None")
    if isinstance(value, (bytes, bytearray, memoryview)):
        # Without a connection psycopg's dumper doubles the quotes in it.
        return "\\x" + bytes(value).hex()
    try:
        data = Transformer().get_dumper(value, PyFormat.TEXT).dump(value)
    except psycopg.Error as error:
        raise TypeError(f"the key's column {column}: {error}") from error
    return bytes(data or b"").decode()
