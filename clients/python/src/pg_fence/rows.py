"""Leases in rows: how those of a table are kept, in one statement, and what becomes of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.adapt import PyFormat, Transformer
from psycopg.sql import Identifier

from .asked import Call, checked
from .errors import NotGranted, session_ended, sqlstate_of

#: Sends a call, and returns its rows.
Ask = Callable[[Call], list[tuple[Any, ...]]]
#: A key's values as PostgreSQL writes them, the token, and the ttl in seconds.
Given = tuple[tuple[str, ...], int, float]
#: The outcome, how many seconds remain, and in how many to ask again, where that is known.
RowAnswer = tuple[str, float | None, float | None]

_TYPES = """SELECT attname, format_type(atttypid, -1) FROM pg_attribute
    WHERE attrelid = %s::text::regclass AND attname = ANY (%s::text[]) AND attnum > 0 AND NOT attisdropped"""
#: One that is locked is passed over: nothing waits, and no row holds up another. One that is ours no more is not touched, for
#: the trigger would refuse it, and all others with it. (A join of `mine` and `kept`, of which the planner expects a row each,
#: would compare each with each.) {present} is nothing, or the setting by which a `managed` table is shown
#: the token.
_KEEP = """WITH given AS MATERIALIZED (SELECT g.*{present} FROM unnest({types}, %s::bigint[], %s::float8[])
    WITH ORDINALITY AS g({names}, token, ttl, n)),
mine AS MATERIALIZED (SELECT g.*, r.{deadline} AS deadline FROM {table} AS r JOIN given AS g ON {key} AND r.{fence} = g.token
    FOR NO KEY UPDATE OF r SKIP LOCKED),
kept AS (UPDATE {table} AS r SET {deadline} = clock_timestamp() + g.ttl * interval '1 second', {fence} = g.token
    FROM mine AS g WHERE {key} AND g.deadline > clock_timestamp() RETURNING g.n, r.{deadline} AS deadline)
SELECT n, extract(epoch FROM deadline - clock_timestamp())::float8 FROM kept
UNION ALL SELECT n, NULL FROM mine WHERE (deadline > clock_timestamp()) IS NOT TRUE"""
#: Of rows that were passed over: how much is left of those that are ours. It asks for no lock.
_LOOK = """SELECT g.n, extract(epoch FROM r.{deadline} - clock_timestamp())::float8
    FROM unnest({types}, %s::bigint[], %s::float8[]) WITH ORDINALITY AS g({names}, token, ttl, n)
    JOIN {table} AS r ON {key} AND r.{fence} = g.token AND r.{deadline} IS NOT NULL"""
_PRESENT = ", set_config('pg_fence.token', g.token::text, true)"


@dataclass(frozen=True)
class Table:
    """A table whose rows are leases: the names of it, of its key's columns, and of the columns of fence and deadline."""

    names: tuple[str, ...]
    key: tuple[str, ...]
    fence: str
    deadline: str


@dataclass(frozen=True)
class Row:
    table: Table
    values: tuple[str, ...]

    @property
    def name(self) -> str:
        key = ", ".join(f"{column}={value}" for column, value in zip(self.table.key, self.values, strict=True))
        return f"{'.'.join(self.table.names)} {key}"


def row_of(table: str | Sequence[str], key: Mapping[str, Any], fence: str, deadline: str) -> Row:
    names = tuple(table.split(".")) if isinstance(table, str) else tuple(table)
    if not key:
        raise ValueError("the key of a row has a column at least")
    for what, name in [("a table", "".join(names)), *(("a column", name) for name in (*key, fence, deadline))]:
        if not checked(what, name, str):
            raise ValueError(f"{what} has a name")
    values = tuple(_as_text(column, value) for column, value in key.items())
    return Row(Table(names, tuple(key), fence, deadline), values)


def _as_text(column: str, value: Any) -> str:
    """As PostgreSQL reads it, for the client does not know the column's type."""
    if value is None:
        raise ValueError(f"the key's column {column} has a value: not None")
    try:
        data = Transformer().get_dumper(value, PyFormat.TEXT).dump(value)
    except psycopg.Error as error:
        raise TypeError(f"the key's column {column}: {error}") from error
    return bytes(data or b"").decode()


class Statements:
    """Those that keep the rows of one table."""

    def __init__(self, table: Table, types: Mapping[str, str]):
        self._parts = {
            "table": _quoted(*table.names),
            "fence": _quoted(table.fence),
            "deadline": _quoted(table.deadline),
            "names": ", ".join(f"k{n}" for n in range(len(table.key))),
            # A column that is not there is the statement's error.
            "types": ", ".join(f"%s::text[]::{_escaped(types.get(column, 'text'))}[]" for column in table.key),
            "key": " AND ".join(f"r.{_quoted(column)} = g.k{n}" for n, column in enumerate(table.key)),
        }
        #: Its fence is `managed`: the token is shown by a setting, so a statement is for one row.
        self._is_managed = False

    def keep(self, given: Sequence[Given], ask: Ask) -> tuple[list[RowAnswer], Exception | None]:
        """Renews those that can be renewed at once, and says what became of each; and an error that one of them met, if one
        did. An error of the statement itself is raised."""
        if self._is_managed and len(given) > 1:
            return self._in_parts(given, 1, ask)
        try:
            return self._keep(given, ask), None
        except Exception as error:
            state = sqlstate_of(error)
            if state == "PF006" and not self._is_managed:
                # It did not see the token in the column.
                self._is_managed = True
                return self.keep(given, ask)
            if not state.startswith(("PF", "22", "23", "40", "55P03", "P0")) or isinstance(error, NotGranted) or session_ended(error):
                raise
            if len(given) > 1:
                # One of them spoils the others: one that was over when the trigger saw it, or that another trigger refuses.
                return self._in_parts(given, (len(given) + 1) // 2, ask)
            return ([("lost", None, None)], None) if state in {"PF001", "PF004"} else ([("later", None, None)], error)

    def _in_parts(self, given: Sequence[Given], size: int, ask: Ask) -> tuple[list[RowAnswer], Exception | None]:
        answers, failed = [], None
        for at in range(0, len(given), size):
            some, error = self.keep(given[at : at + size], ask)
            answers, failed = answers + some, error or failed
        return answers, failed

    def _keep(self, given: Sequence[Given], ask: Ask) -> list[RowAnswer]:
        sql = _KEEP.format(present=_PRESENT if self._is_managed else "", **self._parts)
        # What was locked but not renewed was over. One that is over since it was renewed comes twice.
        answers: dict[int, RowAnswer] = {}
        for n, left in ask((sql, _columns(given))):
            answers.setdefault(n, ("lost", None, None) if left is None else ("kept", left, given[n - 1][2] / 3))
        passed = [n for n in range(1, len(given) + 1) if n not in answers]
        ours = dict(ask((_LOOK.format(**self._parts), _columns([given[n - 1] for n in passed])))) if passed else {}
        answers |= {n: ("locked", max(0.0, ours[at]), None) for at, n in enumerate(passed, 1) if at in ours}
        return [answers.get(n, ("lost", None, None)) for n in range(1, len(given) + 1)]


def statements_of(table: Table, ask: Ask) -> Statements:
    relation = Identifier(*table.names).as_string(None)
    return Statements(table, dict(ask((_TYPES, [relation, list(table.key)]))))


def _columns(given: Sequence[Given]) -> list[Any]:
    keys, tokens, ttls = zip(*given, strict=True)
    return [*map(list, zip(*keys, strict=True)), list(tokens), list(ttls)]


def _quoted(*names: str) -> str:
    return _escaped(Identifier(*names).as_string(None))


def _escaped(name: str) -> str:
    """In a statement with parameters, for psycopg."""
    return name.replace("%", "%%")
