"""The statements that are sent, with their arguments. {0} is the extension's schema, if one is given;
spans of time are texts that every IntervalStyle reads alike."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg.adapt import PyFormat, Transformer
from psycopg.sql import Identifier

from .lease_state import Call

Statement = tuple[str, list[Any]]

_TAKEN = """ AS granted LEFT JOIN LATERAL (
        SELECT i.holder, extract(epoch FROM i.remaining)::float8, i.state
        FROM unnest(%s::text[]) AS n(name), {0}lease_info(n.name) AS i
        WHERE granted IS NULL
            AND (i.state IN ('held', 'uncommitted') OR cardinality(i.blocking_pids) > 0)
        ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true"""
#: A wait is below the role's timeouts, whatever these are.
_ACQUIRE = f"""SELECT granted, taken.* FROM {{0}}lease_acquire(
        %s::text, %s::text, %s::text::interval,
        least(%s::text::interval,
            nullif(current_setting('statement_timeout'), '0')::interval / 2,
            nullif(current_setting('lock_timeout'), '0')::interval / 2),
        %s::text::jsonb, %s::boolean, %s::integer, %s::boolean, %s::boolean){_TAKEN}"""
_ACQUIRE_ALL = f"""SELECT granted, taken.* FROM {{0}}lease_acquire_all(
        %s::text[], %s::text, %s::text::interval, %s::text::jsonb, %s::boolean){_TAKEN}"""
_KEEP = """SELECT outcome, extract(epoch FROM remaining)::float8,
        extract(epoch FROM again_in)::float8, code
    FROM {0}lease_keep(%s::text[], %s::bigint[])"""
_PAIRS = "unnest(%s::text[], %s::bigint[]) AS x(name, token)"
#: For no longer than that does it wait for the lock of somebody's open transaction.
_RELEASE = f"""SELECT {{0}}lease_release(x.name, x.token)
    FROM set_config('lock_timeout', %s::text, true), {_PAIRS}"""
#: What a holder has of these names.
_UNDO = """SELECT count({0}lease_release(n.name, i.first_token))
    FROM set_config('lock_timeout', %s::text, true), unnest(%s::text[]) AS n(name),
        {0}lease_info(n.name) AS i
    WHERE i.holder = %s::text AND i.state = 'held'"""
#: In the same order everywhere, so that no two transactions wait for each other.
_GUARD = f"""SELECT count({{0}}lease_guard(x.name, x.token))
    FROM (SELECT x.* FROM {_PAIRS} ORDER BY x.name COLLATE "C") AS x"""
#: Each transaction makes the number known, and whose it is.
_GUARD_ADOPTED = f"""SELECT count({{0}}lease_guard(x.name,
        (SELECT {{0}}lease_adopt(x.name, x.token, %s::text)))) FROM {_PAIRS}"""
#: Returns a name under which there is nothing to be released.
_LAST = f"""SELECT min(x.name) FILTER (WHERE {{0}}lease_release(x.name, x.token) IS NULL)
    FROM {_PAIRS}"""
TOKEN = "SELECT current_setting('pg_fence.token', true)"


def span(ms: int) -> str:
    return f"{ms} milliseconds"


def acquire(
    call: Call, ttl: int, metadata: str | None, slots: int, flags: Sequence[bool]
) -> Statement:
    """One try, or a portion of a wait. The flags are `shared` and `session`."""
    shared, session = flags
    if len(call.names) != 1:
        asked = [call.names, call.holder, span(ttl), metadata, session]
        return _ACQUIRE_ALL, [*asked, call.names]
    first = [call.names[0], call.holder, span(ttl), span(call.wait), metadata]
    return _ACQUIRE, [*first, shared, slots, call.reclaim, session, call.names]


def keep(call: Call) -> Statement:
    return _KEEP, [call.names, call.tokens]


def release(call: Call) -> Statement:
    return _RELEASE, [_lock_timeout(call), call.names, call.tokens]


def undo(call: Call) -> Statement:
    return _UNDO, [_lock_timeout(call), call.names, call.holder]


def _lock_timeout(call: Call) -> str:
    return str(max(10, call.limit // 4))


def guard(names: Sequence[str], tokens: Sequence[int], adopted_by: str | None = None) -> Statement:
    pairs = [list(names), list(tokens)]
    return (_GUARD, pairs) if adopted_by is None else (_GUARD_ADOPTED, [adopted_by, *pairs])


def last(names: Sequence[str], tokens: Sequence[int]) -> Statement:
    return _LAST, [list(names), list(tokens)]


# Leases in rows.

#: One that is locked is passed over: nothing waits, and no row holds up another. One that is ours no
#: more is not touched, for the trigger would refuse it, and all others with it. (The planner expects
#: one row of `mine` and of `kept`: a join of the two would compare each with each.) What was locked
#: and not renewed was over. {present} is nothing, or the setting that shows a `managed` table the
#: token.
_KEEP_ROWS = """WITH given AS MATERIALIZED (
        SELECT g.*{present} FROM unnest({types}, %s::bigint[], %s::float8[])
            WITH ORDINALITY AS g({names}, token, ttl, n)),
    mine AS MATERIALIZED (
        SELECT g.*, r.{deadline} AS deadline FROM {table} AS r JOIN given AS g ON {key}
        FOR NO KEY UPDATE OF r SKIP LOCKED),
    kept AS (
        UPDATE {table} AS r
        SET {deadline} = clock_timestamp() + g.ttl * interval '1 millisecond', {fence} = g.token
        FROM mine AS g WHERE {key} AND g.deadline > clock_timestamp()
        RETURNING g.n, r.{deadline} AS deadline)
    SELECT n, extract(epoch FROM deadline - clock_timestamp())::float8 FROM kept
    UNION ALL SELECT n, NULL FROM mine WHERE (deadline > clock_timestamp()) IS NOT TRUE"""
_PRESENT = ", set_config('pg_fence.token', g.token::text, true)"
#: It asks for no lock.
_LOOK_AT_ROWS = """SELECT g.n, r.{deadline} IS NULL
    FROM unnest({types}, %s::bigint[], %s::float8[]) WITH ORDINALITY AS g({names}, token, ttl, n)
    JOIN {table} AS r ON {key}"""
#: Shows the token, so that what follows in the transaction is its holder's. {ends} is nothing, or what
#: gives the row up.
_TOUCH_ROW = f"""WITH given AS MATERIALIZED (
        SELECT g.*{_PRESENT} FROM unnest({{types}}, %s::bigint[]) AS g({{names}}, token)),
    touched AS (
        UPDATE {{table}} AS r SET {{fence}} = g.token{{ends}} FROM given AS g
        WHERE {{key}} AND r.{{deadline}} IS NOT NULL RETURNING 1)
    SELECT count(*) FROM touched"""
_RELEASE_ROWS = """WITH given AS MATERIALIZED (
        SELECT g.*{present} FROM unnest({types}, %s::bigint[]) WITH ORDINALITY AS g({names}, token, n)),
    given_up AS (
        UPDATE {table} AS r SET {fence} = g.token, {deadline} = NULL
        FROM given AS g, set_config('lock_timeout', %s::text, true)
        WHERE {key} AND r.{deadline} IS NOT NULL RETURNING g.n)
    SELECT (SELECT u.n FROM given_up AS u WHERE u.n = given.n) FROM given ORDER BY n"""
_DESCRIBE = """SELECT
    ARRAY(SELECT ARRAY[attname, format_type(atttypid, -1)] FROM pg_attribute
        WHERE attrelid = c.oid AND attname = ANY (%s::text[]) AND attnum > 0 AND NOT attisdropped),
    ARRAY(SELECT t.tgargs FROM pg_trigger AS t
        JOIN pg_proc AS p ON p.oid = t.tgfoid AND p.proname = 'fenced' WHERE t.tgrelid = c.oid)
    FROM pg_class AS c WHERE c.oid = %s::text::regclass"""


class RowTable(NamedTuple):
    """A table whose rows are leases: the parts of its name, and the names of its columns."""

    names: tuple[str, ...]
    key: tuple[str, ...]
    fence: str
    deadline: str

    def named(self, key: str) -> str:
        """The name of a row, for people."""
        columns = zip(self.key, json.loads(key), strict=True)
        return f"{'.'.join(self.names)} " + ", ".join(f"{name}={value}" for name, value in columns)

    def describe(self) -> Statement:
        return _DESCRIBE, [list(self.key), Identifier(*self.names).as_string(None)]


class RowStatements:
    """Those of one table, as it was found."""

    def __init__(self, table: RowTable, columns: Sequence[Sequence[str]], fences: Sequence[bytes]):
        arguments = [fence.split(b"\0") for fence in fences]
        #: The token is shown by a setting, so a statement is for one row.
        self.is_managed = [table.fence.encode(), b"managed"] in [some[:2] for some in arguments]
        types = {str(name): type for name, type in columns}
        equal = [f"r.{_quoted(column)} = g.k{n}" for n, column in enumerate(table.key)]
        # A column that is not there is the statement's error.
        of_type = [types.get(column, "text").replace("%", "%%") for column in table.key]
        self._parts = {
            "present": _PRESENT if self.is_managed else "",
            "table": _quoted(*table.names),
            "fence": _quoted(table.fence),
            "deadline": _quoted(table.deadline),
            "names": ", ".join(f"k{n}" for n in range(len(table.key))),
            "types": ", ".join(f"%s::text[]::{type}[]" for type in of_type),
            "key": " AND ".join([*equal, f"r.{_quoted(table.fence)} = g.token"]),
        }

    def keep(self, call: Call) -> Statement:
        return _KEEP_ROWS.format(**self._parts), self._rows(call)

    def look(self, call: Call) -> Statement:
        return _LOOK_AT_ROWS.format(**self._parts), self._rows(call)

    def touch(self, key: str, token: int, gives_up: bool) -> Statement:
        """The guard of a row, or its last write: the number of rows that it has written."""
        ends = f", {self._parts['deadline']} = NULL" if gives_up else ""
        return _TOUCH_ROW.format(ends=ends, **self._parts), _pairs([key], [token])

    def release(self, call: Call) -> Statement:
        rows = _pairs(call.names, call.tokens)
        return _RELEASE_ROWS.format(**self._parts), [*rows, _lock_timeout(call)]

    def _rows(self, call: Call) -> list[Any]:
        ttls = [float(lease.ttl) for lease in call.leases]
        return [*_pairs(call.names, call.tokens), ttls]


def _pairs(keys: Sequence[str], tokens: Sequence[int]) -> list[Any]:
    columns = zip(*map(json.loads, keys), strict=True)
    return [*map(list, columns), list(tokens)]


def row_key(key: Mapping[str, Any]) -> str:
    """The values of a key, as PostgreSQL reads them, for the columns' types are not known here."""
    return json.dumps([_as_text(column, value) for column, value in key.items()])


def _as_text(column: str, value: Any) -> str:
    if value is None:
        raise ValueError(f"the key's column {column} has a value: not None")
    try:
        data = Transformer().get_dumper(value, PyFormat.TEXT).dump(value)
    except psycopg.Error as error:
        raise TypeError(f"the key's column {column}: {error}") from error
    return bytes(data or b"").decode()


def _quoted(*names: str) -> str:
    """In a statement with parameters, for psycopg."""
    return Identifier(*names).as_string(None).replace("%", "%%")
